"""Many query rows per sequence: one program owns a tile of them, all of one sequence and one key head.

Which one, it finds itself: the tiles of sequence n start at tile `query_start[n] * G // BR + n`, which leaves every
sequence enough, so a search in `query_start` is all the schedule there is. What follows the last sequence counts as one
more, whose rows are set to zero.
"""

import triton
import triton.language as tl

from ejkernel.kernels.paged.triton.tiles import (
    key_span,
    key_window,
    load_queries,
    loop_over_keys,
    query_edge,
    query_span,
    sink_softmax,
    store_outputs,
    value_scale,
    visible_blocks,
)


@triton.jit
def tile_owner(p_query_start, i_tile, n_sequences, T, C: tl.constexpr):
    """The last sequence whose tiles start at or before a tile (n_sequences: what follows them), and that start."""
    STEPS: tl.constexpr = C.SEARCH
    i_n = n_sequences * 0
    for step in tl.static_range(STEPS):
        i_try = i_n + (1 << (STEPS - 1 - step))
        i_start = query_edge(p_query_start, tl.minimum(i_try, n_sequences), T) * C.G // C.BR + i_try
        i_n = tl.where((i_try <= n_sequences) & (i_start <= i_tile), i_try, i_n)
    return i_n, query_edge(p_query_start, i_n, T) * C.G // C.BR + i_n


@triton.jit
def prefill_kernel(
    p_q, p_k, p_v, p_table, p_lens, p_query_start, p_num_seqs, p_starts, p_window, p_sinks, p_k_scale, p_v_scale,
    p_ints, p_floats,
    T, N, P, W, S, H, n_tiles, scale, soft_cap,
    s_k, s_v, s_table, s_lens, s_query_start, s_num_seqs, s_starts, s_window, s_sinks, s_k_scale, s_v_scale,
    s_ints, s_floats,
    p_out, p_lse, p_max,
    C: tl.constexpr,
):  # fmt: skip
    """Sequences of at most C.DECODE_TOKENS queries are left to decode_kernel."""
    i = tl.program_id(0)
    i_h = i % C.HK
    # the last tiles of a sequence see the most keys: they start first
    i_tile = n_tiles - 1 - (i // C.HK) % n_tiles
    i_b = i // C.HK // n_tiles
    p_query_start += i_b * s_query_start
    o_r = tl.arange(0, C.BR)
    if C.TOKENS is None:
        n_sequences = N
        if C.COUNTED:
            n_sequences = tl.minimum(tl.maximum(tl.load(p_num_seqs + i_b * s_num_seqs), 0), N)
        i_n, i_start = tile_owner(p_query_start, i_tile, n_sequences, T, C)
        o_rows = (i_tile - i_start) * C.BR + o_r
        if i_n == n_sequences:
            i_end = query_edge(p_query_start, i_n, T)
            b_zero = tl.full([C.BR], 0.0, tl.float32)
            store_outputs(
                b_zero, b_zero, tl.full([C.BR, C.BDV], 0.0, tl.float32), p_out, p_lse, p_max, 1.0,
                i_end + o_rows // C.G, i_h * C.G + o_rows % C.G, o_rows < (T - i_end) * C.G, i_b, T, H, C,
            )  # fmt: skip
            return
        i_first_token, n_tokens = query_span(p_query_start, i_n, T, C)
        if ((i_tile - i_start) * C.BR >= n_tokens * C.G) | (n_tokens <= C.DECODE_TOKENS):
            return
        i_row = (i_tile - i_start) * C.BR
    else:
        i_n = i_tile // tl.cdiv(C.TOKENS * C.G, C.BR)
        i_first_token, n_tokens = query_span(p_query_start, i_n, T, C)
        i_row = i_tile % tl.cdiv(C.TOKENS * C.G, C.BR) * C.BR
        o_rows = i_row + o_r

    low, length = key_span(p_lens + i_b * s_lens, p_starts + i_b * s_starts, i_n, S, C)
    i_token = i_row // C.G
    n_tile_tokens = tl.minimum((i_row + C.BR - 1) // C.G, n_tokens - 1) - i_token + 1
    window = key_window(p_window, i_b, s_window, C)
    low, high, i_first, i_last, i_full, i_full_last = visible_blocks(
        length - n_tokens + i_token, n_tile_tokens, low, length, window, C
    )
    m_r = o_rows < n_tokens * C.G
    o_token, o_head = i_first_token + o_rows // C.G, i_h * C.G + o_rows % C.G
    b_max, b_sum = sink_softmax(p_sinks + i_b * s_sinks, o_head, m_r, C)
    if C.K_SCALED:
        scale *= tl.load(p_k_scale + i_b * s_k_scale + i_h)
    o_row = (i_b.to(tl.int64) * T + o_token) * H + o_head
    # (BR, BD) twice, (BR,)
    b_q, b_q_odd, b_scale = load_queries(p_q, o_row, m_r, scale, C)
    b_max, b_sum, b_out = loop_over_keys(
        b_q, b_q_odd, length - n_tokens + o_rows // C.G, b_max, b_sum,
        p_k + (i_b.to(tl.int64) * s_k * C.K_TOKEN + i_h * C.K_HEAD),
        p_v + (i_b.to(tl.int64) * s_v * C.V_TOKEN + i_h * C.V_HEAD + C.V_FIRST),
        p_table + i_b.to(tl.int64) * s_table + i_n.to(tl.int64) * W, i_n, P,
        low, high, i_first, i_last, i_full, i_full_last, b_scale, soft_cap, window,
        p_ints + i_b.to(tl.int64) * s_ints, p_floats + i_b.to(tl.int64) * s_floats, o_token * H + o_head, T * H, C,
    )  # fmt: skip
    v_scale = value_scale(p_v_scale + i_b * s_v_scale, i_h, C)
    store_outputs(b_max, b_sum, b_out, p_out, p_lse, p_max, v_scale, o_token, o_head, m_r, i_b, T, H, C)
