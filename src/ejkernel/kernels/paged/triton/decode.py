"""Few query rows per sequence: one program walks a share of a sequence's keys for all query heads of one key head.

The shares are of the real length, found on the device. More than one leave their running softmax in memory, and a
second kernel merges them.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E
from ejkernel.kernels.paged.triton.tiles import key_span, load_queries, query_span, store_finished, visible_blocks, walk


@triton.jit
def decode_kernel(
    p_q,
    p_k,
    p_v,
    p_table,
    p_lens,
    p_query_start,
    p_num_seqs,
    p_starts,
    p_sinks,
    p_k_scale,
    p_v_scale,
    p_old_out,
    p_old_lse,
    p_old_top,
    T,
    N,
    P,
    W,
    S,
    H,
    scale,
    soft_cap,
    s_k,
    s_v,
    s_table,
    s_lens,
    s_query_start,
    s_num_seqs,
    s_starts,
    s_sinks,
    s_k_scale,
    s_v_scale,
    p_out,
    p_lse,
    p_top,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    L: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    K_TOKEN: tl.constexpr,
    V_TOKEN: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
    V_FIRST: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    CAPPED: tl.constexpr,
    TABLE: tl.constexpr,
    COUNTED: tl.constexpr,
    STARTS: tl.constexpr,
    SINKS: tl.constexpr,
    K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr,
    GROUPS: tl.constexpr,
    NARROW: tl.constexpr,
    PAIRED: tl.constexpr,
    PTX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """With SPLITS > 1 the outputs are parts: p_out (B, N, HKV, SPLITS, R, DV), p_lse the sums, p_top the maxima."""
    # heads next to each other: their rows are neighbours in memory
    i = tl.program_id(0)
    i_h = i % HKV
    i_s = (i // HKV) % SPLITS
    i_n = (i // (HKV * SPLITS)) % N
    i_b = i // (HKV * SPLITS) // N
    if COUNTED:
        if i_n >= tl.load(p_num_seqs + i_b * s_num_seqs):
            return
    i_first_token, n_tokens = query_span(p_query_start + i_b * s_query_start, i_n, T, TOKENS)
    if TOKENS is None:
        if (n_tokens == 0) | (n_tokens > MOST_TOKENS):
            return
    low, length = key_span(p_lens + i_b * s_lens, p_starts + i_b * s_starts, i_n, S, STARTS)
    position = length - n_tokens
    low, high, i_first, i_last, i_full, i_full_last = visible_blocks(
        position, n_tokens, low, length, BK, WINDOW, CAUSAL
    )
    # this program's share of the blocks
    n_share = tl.maximum(tl.cdiv(i_last - i_first, SPLITS), LEAST)
    i_begin = tl.minimum(i_first + i_s * n_share, i_last)
    i_end = tl.minimum(i_begin + n_share, i_last)
    i_full = tl.minimum(tl.maximum(i_full, i_begin), i_end)
    i_full_last = tl.minimum(tl.maximum(i_full_last, i_full), i_end)

    o_r = tl.arange(0, BR)
    m_r = o_r < n_tokens * G
    o_token, o_head = i_first_token + o_r // G, i_h * G + o_r % G
    b_top = tl.full([BR], float("-inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    if SINKS and SPLITS == 1:
        b_top = tl.load(p_sinks + i_b * s_sinks + o_head, mask=m_r, other=0.0) * LOG2_E
        b_sum = tl.where(b_top == float("-inf"), 0.0, 1.0)
    if K_SCALED:
        scale *= tl.load(p_k_scale + i_b * s_k_scale + i_h)
    o_row = (i_b.to(tl.int64) * T + o_token) * H + o_head
    # (BR, BD) twice, (BR,)
    b_q, b_q_odd, b_scale = load_queries(p_q, o_row, m_r, scale, D, BD, NARROW, PAIRED)
    b_top, b_sum, b_out = walk(
        b_q, b_q_odd, position + o_r // G, b_top, b_sum,
        p_k + (i_b.to(tl.int64) * s_k * K_TOKEN + i_h * K_HEAD),
        p_v + (i_b.to(tl.int64) * s_v * V_TOKEN + i_h * V_HEAD + V_FIRST),
        p_table + i_b.to(tl.int64) * s_table + i_n.to(tl.int64) * W, i_n, P,
        low, high, i_begin, i_end, i_full, i_full_last, b_scale, soft_cap,
        L, K_TOKEN, V_TOKEN, D, DV, BD, BDV, BR, BK, WINDOW, CAUSAL, MOST_TOKENS > 1, CAPPED, TABLE, GROUPS, PAIRED,
        PTX, PRECISION,
    )  # fmt: skip

    if SPLITS == 1:
        v_scale = 1.0
        if V_SCALED:
            v_scale = tl.load(p_v_scale + i_b * s_v_scale + i_h)
        store_finished(
            b_top, b_sum, b_out, p_out, p_lse, p_top, v_scale, o_token, o_head, m_r, i_b, T, H, DV, BDV
        )  # fmt: skip
    else:
        R: tl.constexpr = MOST_TOKENS * G
        o_part = ((i_b.to(tl.int64) * N + i_n) * HKV + i_h) * SPLITS + i_s
        o_dv = tl.arange(0, BDV)
        o_rows = o_part * R + o_r
        tl.store(p_lse + o_rows, b_sum, mask=m_r)
        if i_end > i_begin:
            tl.store(p_top + o_rows, b_top, mask=m_r)
            m_out = m_r[:, None] & (o_dv < DV)[None, :]
            tl.store(p_out + o_rows[:, None] * DV + o_dv[None, :], b_out, mask=m_out)


@triton.jit
def merge_kernel(
    p_parts,
    p_sums,
    p_tops,
    p_query_start,
    p_num_seqs,
    p_sinks,
    p_v_scale,
    p_old_out,
    p_old_lse,
    p_old_top,
    T,
    N,
    H,
    s_query_start,
    s_num_seqs,
    s_sinks,
    s_v_scale,
    p_out,
    p_lse,
    p_top,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
    CHUNK: tl.constexpr,
    HKV: tl.constexpr,
    G: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    COUNTED: tl.constexpr,
    SINKS: tl.constexpr,
    V_SCALED: tl.constexpr,
):
    """One program per row: the parts of its softmax, weighed by their maxima; one with sum 0 was never written."""
    R: tl.constexpr = MOST_TOKENS * G
    i = tl.program_id(0)
    i_r = i % R
    i_h = (i // R) % HKV
    i_n = (i // (R * HKV)) % N
    i_b = i // (R * HKV) // N
    if COUNTED:
        if i_n >= tl.load(p_num_seqs + i_b * s_num_seqs):
            return
    i_first_token, n_tokens = query_span(p_query_start + i_b * s_query_start, i_n, T, TOKENS)
    if (i_r >= n_tokens * G) | (n_tokens > MOST_TOKENS):
        return
    o_first = ((i_b.to(tl.int64) * N + i_n) * HKV + i_h) * SPLITS * R + i_r
    # (BS,)
    o_s = tl.arange(0, BS)
    b_sums = tl.load(p_sums + o_first + o_s * R, mask=o_s < SPLITS, other=0.0)
    b_tops = tl.load(p_tops + o_first + o_s * R, mask=b_sums != 0.0, other=float("-inf"))
    top = tl.max(b_tops, 0)
    if SINKS:
        sink = tl.load(p_sinks + i_b * s_sinks + i_h * G + i_r % G) * LOG2_E
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(b_sums * tl.exp2(b_tops - base), 0)
    if SINKS:
        total += tl.exp2(sink - base)
    o_c, o_d = tl.arange(0, CHUNK), tl.arange(0, BDV)
    # (BDV,)
    b_out = tl.zeros([BDV], tl.float32)
    for i_s in range(0, SPLITS, CHUNK):
        o_rows = o_first + (i_s + o_c) * R
        m_rows = tl.load(p_sums + o_rows, mask=i_s + o_c < SPLITS, other=0.0) != 0.0
        b_w = tl.exp2(tl.load(p_tops + o_rows, mask=m_rows, other=float("-inf")) - base)
        # (CHUNK, BDV)
        m_tile = m_rows[:, None] & (o_d < DV)[None, :]
        b_parts = tl.load(p_parts + o_rows[:, None] * DV + o_d[None, :], mask=m_tile, other=0.0)
        b_out += tl.sum(b_parts * b_w[:, None], 0)
    v_scale = 1.0
    if V_SCALED:
        v_scale = tl.load(p_v_scale + i_b * s_v_scale + i_h)
    o_one = tl.zeros([1], tl.int32)
    store_finished(
        o_one + top, o_one + total, b_out[None, :], p_out, p_lse, p_top, v_scale, o_one + i_first_token + i_r // G,
        o_one + i_h * G + i_r % G, o_one == 0, i_b, T, H, DV, BDV,
    )  # fmt: skip
