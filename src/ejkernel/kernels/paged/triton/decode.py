"""Few query rows per sequence: one program attends to a split of a sequence's keys for all query heads of one key head.

The splits are of the real length, which only the device knows. More than one leave their running softmax in memory,
and a second kernel merges them.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E
from ejkernel.kernels.paged.triton.tiles import (
    key_span,
    key_window,
    load_queries,
    loop_over_keys,
    query_span,
    sink_softmax,
    store_outputs,
    value_scale,
    visible_blocks,
)


@triton.jit
def decode_kernel(
    p_q, p_k, p_v, p_table, p_lens, p_query_start, p_num_seqs, p_starts, p_window, p_sinks, p_k_scale, p_v_scale,
    p_ints, p_floats,
    p_old_out, p_old_lse, p_old_max,
    T, N, P, W, S, H, scale, soft_cap,
    s_k, s_v, s_table, s_lens, s_query_start, s_num_seqs, s_starts, s_window, s_sinks, s_k_scale, s_v_scale,
    s_ints, s_floats,
    p_out, p_lse, p_max,
    C: tl.constexpr,
):  # fmt: skip
    """With C.SPLITS > 1 the outputs are of splits: p_out (B, N, HK, SPLITS, rows, DV), p_lse the sums, p_max."""
    # heads next to each other: their rows are neighbours in memory
    i = tl.program_id(0)
    i_h = i % C.HK
    i_s = (i // C.HK) % C.SPLITS
    i_n = (i // (C.HK * C.SPLITS)) % N
    i_b = i // (C.HK * C.SPLITS) // N
    if C.COUNTED:
        if i_n >= tl.load(p_num_seqs + i_b * s_num_seqs):
            return
    i_first_token, n_tokens = query_span(p_query_start + i_b * s_query_start, i_n, T, C)
    if C.TOKENS is None:
        if (n_tokens == 0) | (n_tokens > C.DECODE_TOKENS):
            return
    low, length = key_span(p_lens + i_b * s_lens, p_starts + i_b * s_starts, i_n, S, C)
    position = length - n_tokens
    window = key_window(p_window, i_b, s_window, C)
    low, high, i_first, i_last, i_full, i_full_last = visible_blocks(position, n_tokens, low, length, window, C)
    # this program's split of the blocks
    n_split = tl.maximum(tl.cdiv(i_last - i_first, C.SPLITS), C.LEAST)
    i_begin = tl.minimum(i_first + i_s * n_split, i_last)
    i_end = tl.minimum(i_begin + n_split, i_last)
    i_full = tl.minimum(tl.maximum(i_full, i_begin), i_end)
    i_full_last = tl.minimum(tl.maximum(i_full_last, i_full), i_end)

    o_r = tl.arange(0, C.BR)
    m_r = o_r < n_tokens * C.G
    o_token, o_head = i_first_token + o_r // C.G, i_h * C.G + o_r % C.G
    b_max, b_sum = sink_softmax(p_sinks + i_b * s_sinks, o_head, m_r, C)
    if C.K_SCALED:
        scale *= tl.load(p_k_scale + i_b * s_k_scale + i_h)
    o_row = (i_b.to(tl.int64) * T + o_token) * H + o_head
    # (BR, BD) twice, (BR,)
    b_q, b_q_odd, b_scale = load_queries(p_q, o_row, m_r, scale, C)
    b_max, b_sum, b_out = loop_over_keys(
        b_q, b_q_odd, position + o_r // C.G, b_max, b_sum,
        p_k + (i_b.to(tl.int64) * s_k * C.K_TOKEN + i_h * C.K_HEAD),
        p_v + (i_b.to(tl.int64) * s_v * C.V_TOKEN + i_h * C.V_HEAD + C.V_FIRST),
        p_table + i_b.to(tl.int64) * s_table + i_n.to(tl.int64) * W, i_n, P,
        low, high, i_begin, i_end, i_full, i_full_last, b_scale, soft_cap, window,
        p_ints + i_b.to(tl.int64) * s_ints, p_floats + i_b.to(tl.int64) * s_floats, o_token * H + o_head, T * H, C,
    )  # fmt: skip

    if C.SPLITS == 1:
        v_scale = value_scale(p_v_scale + i_b * s_v_scale, i_h, C)
        store_outputs(b_max, b_sum, b_out, p_out, p_lse, p_max, v_scale, o_token, o_head, m_r, i_b, T, H, C)
    else:
        o_split = ((i_b.to(tl.int64) * N + i_n) * C.HK + i_h) * C.SPLITS + i_s
        o_dv = tl.arange(0, C.BDV)
        o_rows = o_split * C.DECODE_ROWS + o_r
        tl.store(p_lse + o_rows, b_sum, mask=m_r)
        if i_end > i_begin:
            tl.store(p_max + o_rows, b_max, mask=m_r)
            m_out = m_r[:, None] & (o_dv < C.DV)[None, :]
            tl.store(p_out + o_rows[:, None] * C.DV + o_dv[None, :], b_out, mask=m_out)


@triton.jit
def merge_kernel(
    p_splits, p_sums, p_maxima, p_query_start, p_num_seqs, p_sinks, p_v_scale, p_old_out, p_old_lse, p_old_max,
    T, N, H, s_query_start, s_num_seqs, s_sinks, s_v_scale,
    p_out, p_lse, p_max,
    C: tl.constexpr,
):  # fmt: skip
    """One program per row: the splits of its softmax, weighed by their maxima; one with sum 0 was never written."""
    i = tl.program_id(0)
    i_r = i % C.DECODE_ROWS
    i_h = (i // C.DECODE_ROWS) % C.HK
    i_n = (i // (C.DECODE_ROWS * C.HK)) % N
    i_b = i // (C.DECODE_ROWS * C.HK) // N
    if C.COUNTED:
        if i_n >= tl.load(p_num_seqs + i_b * s_num_seqs):
            return
    i_first_token, n_tokens = query_span(p_query_start + i_b * s_query_start, i_n, T, C)
    if (i_r >= n_tokens * C.G) | (n_tokens > C.DECODE_TOKENS):
        return
    o_first = ((i_b.to(tl.int64) * N + i_n) * C.HK + i_h) * C.SPLITS * C.DECODE_ROWS + i_r
    # (BS,)
    o_s = tl.arange(0, C.BS)
    b_sums = tl.load(p_sums + o_first + o_s * C.DECODE_ROWS, mask=o_s < C.SPLITS, other=0.0)
    b_maxima = tl.load(p_maxima + o_first + o_s * C.DECODE_ROWS, mask=b_sums != 0.0, other=float("-inf"))
    row_max = tl.max(b_maxima, 0)
    if C.SINKS:
        sink = tl.load(p_sinks + i_b * s_sinks + i_h * C.G + i_r % C.G) * LOG2_E
        row_max = tl.maximum(row_max, sink)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    total = tl.sum(b_sums * tl.exp2(b_maxima - base), 0)
    if C.SINKS:
        total += tl.exp2(sink - base)
    o_c, o_d = tl.arange(0, C.CHUNK), tl.arange(0, C.BDV)
    # (BDV,)
    b_out = tl.full([C.BDV], 0.0, tl.float32)
    for i_s in range(0, C.SPLITS, C.CHUNK):
        o_rows = o_first + (i_s + o_c) * C.DECODE_ROWS
        m_rows = tl.load(p_sums + o_rows, mask=i_s + o_c < C.SPLITS, other=0.0) != 0.0
        b_w = tl.exp2(tl.load(p_maxima + o_rows, mask=m_rows, other=float("-inf")) - base)
        # (CHUNK, BDV)
        m_tile = m_rows[:, None] & (o_d < C.DV)[None, :]
        b_splits = tl.load(p_splits + o_rows[:, None] * C.DV + o_d[None, :], mask=m_tile, other=0.0)
        b_out += tl.sum(b_splits * b_w[:, None], 0)
    v_scale = value_scale(p_v_scale + i_b * s_v_scale, i_h, C)
    o_one = tl.zeros([1], tl.int32)
    store_outputs(
        o_one + row_max, o_one + total, b_out[None, :], p_out, p_lse, p_max, v_scale,
        o_one + i_first_token + i_r // C.G, o_one + i_h * C.G + i_r % C.G, o_one == 0, i_b, T, H, C,
    )  # fmt: skip
