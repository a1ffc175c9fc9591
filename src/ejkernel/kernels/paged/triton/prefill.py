"""Many query rows per sequence: one program owns a tile of them, all of one sequence and one key head.

Which one, it finds itself: the tiles of sequence n start at tile `query_start[n] * G // BR + n`, which leaves every
sequence enough, so a search in `query_start` is all the schedule there is. What follows the last sequence counts as one
more, whose rows are set to zero.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E
from ejkernel.kernels.paged.triton.tiles import (
    key_span,
    load_queries,
    query_edge,
    query_span,
    store_finished,
    visible_blocks,
    walk,
)


@triton.jit
def tile_owner(p_query_start, i_tile, n_sequences, T, G: tl.constexpr, BR: tl.constexpr, STEPS: tl.constexpr):
    """The last sequence whose tiles start at or before a tile (n_sequences: what follows them), and that start."""
    i_n = n_sequences * 0
    for step in tl.static_range(STEPS):
        i_try = i_n + (1 << (STEPS - 1 - step))
        i_start = query_edge(p_query_start, tl.minimum(i_try, n_sequences), T) * G // BR + i_try
        i_n = tl.where((i_try <= n_sequences) & (i_start <= i_tile), i_try, i_n)
    return i_n, query_edge(p_query_start, i_n, T) * G // BR + i_n


@triton.jit
def prefill_kernel(
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
    T,
    N,
    P,
    W,
    S,
    H,
    n_tiles,
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
    STEPS: tl.constexpr,
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
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sequences of at most MOST_TOKENS queries are left to decode_kernel."""
    i = tl.program_id(0)
    i_h = i % HKV
    # the last tiles of a sequence see the most keys: they start first
    i_tile = n_tiles - 1 - (i // HKV) % n_tiles
    i_b = i // HKV // n_tiles
    p_query_start += i_b * s_query_start
    o_r = tl.arange(0, BR)
    if TOKENS is None:
        n_sequences = N
        if COUNTED:
            n_sequences = tl.minimum(tl.maximum(tl.load(p_num_seqs + i_b * s_num_seqs), 0), N)
        i_n, i_start = tile_owner(p_query_start, i_tile, n_sequences, T, G, BR, STEPS)
        o_rows = (i_tile - i_start) * BR + o_r
        if i_n == n_sequences:
            i_end = query_edge(p_query_start, i_n, T)
            nothing = tl.zeros([BR], tl.float32)
            store_finished(
                nothing, nothing, tl.zeros([BR, BDV], tl.float32), p_out, p_lse, p_top, 1.0, i_end + o_rows // G,
                i_h * G + o_rows % G, o_rows < (T - i_end) * G, i_b, T, H, DV, BDV,
            )  # fmt: skip
            return
        i_first_token, n_tokens = query_span(p_query_start, i_n, T, TOKENS)
        if ((i_tile - i_start) * BR >= n_tokens * G) | (n_tokens <= MOST_TOKENS):
            return
        i_row = (i_tile - i_start) * BR
    else:
        i_n = i_tile // tl.cdiv(TOKENS * G, BR)
        i_first_token, n_tokens = query_span(p_query_start, i_n, T, TOKENS)
        i_row = i_tile % tl.cdiv(TOKENS * G, BR) * BR
        o_rows = i_row + o_r

    low, length = key_span(p_lens + i_b * s_lens, p_starts + i_b * s_starts, i_n, S, STARTS)
    i_token = i_row // G
    n_here = tl.minimum((i_row + BR - 1) // G, n_tokens - 1) - i_token + 1
    low, high, i_first, i_last, i_full, i_full_last = visible_blocks(
        length - n_tokens + i_token, n_here, low, length, BK, WINDOW, CAUSAL
    )
    m_r = o_rows < n_tokens * G
    o_token, o_head = i_first_token + o_rows // G, i_h * G + o_rows % G
    b_top = tl.full([BR], float("-inf"), tl.float32)
    b_sum = tl.zeros([BR], tl.float32)
    if SINKS:
        b_top = tl.load(p_sinks + i_b * s_sinks + o_head, mask=m_r, other=0.0) * LOG2_E
        b_sum = tl.where(b_top == float("-inf"), 0.0, 1.0)
    if K_SCALED:
        scale *= tl.load(p_k_scale + i_b * s_k_scale + i_h)
    o_row = (i_b.to(tl.int64) * T + o_token) * H + o_head
    # (BR, BD) twice, (BR,); not in pairs: wgmma takes float16 from shared memory anyway, and products would be halved
    b_q, b_q_odd, b_scale = load_queries(p_q, o_row, m_r, scale, D, BD, NARROW, PAIRED=False)
    b_top, b_sum, b_out = walk(
        b_q, b_q_odd, length - n_tokens + o_rows // G, b_top, b_sum,
        p_k + (i_b.to(tl.int64) * s_k * K_TOKEN + i_h * K_HEAD),
        p_v + (i_b.to(tl.int64) * s_v * V_TOKEN + i_h * V_HEAD + V_FIRST),
        p_table + i_b.to(tl.int64) * s_table + i_n.to(tl.int64) * W, i_n, P,
        low, high, i_first, i_last, i_full, i_full_last, b_scale, soft_cap,
        L, K_TOKEN, V_TOKEN, D, DV, BD, BDV, BR, BK, WINDOW, CAUSAL, True, CAPPED, TABLE, GROUPS=1,
        PAIRED=False, PTX=False, PRECISION=PRECISION,
    )  # fmt: skip
    v_scale = 1.0
    if V_SCALED:
        v_scale = tl.load(p_v_scale + i_b * s_v_scale + i_h)
    store_finished(b_top, b_sum, b_out, p_out, p_lse, p_top, v_scale, o_token, o_head, m_r, i_b, T, H, DV, BDV)
