"""The forward kernels: by queries, over the blocks of a tile of them; or by keys, with partial results that are merged.

Each runs twice, as in the softmax family: fast, and then nan-safe (C.GUARD) in the programs in which a nan turned up,
which may have leaked from a hidden value: 0 * nan is nan.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E, has_nan, online_softmax, softmax_result
from ejkernel.kernels.native_sparse.triton.tiles import (
    entries_at,
    entry_rows,
    entry_sees,
    first_softmax,
    head_of,
    item_keys,
    listed_keys,
    load_matrix_rows,
    partial_rows,
    query_rows,
    store_matrix_rows,
    store_outputs,
    tile_rows,
    weighted_sum,
)


@triton.jit
def forward_kernel(
    p_q, p_k, p_v, p_limits, p_sinks, p_number, p_list, p_members, p_flags, p_old_out, p_old_lse,
    T, S, scale,
    p_out, p_lse, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    i_row = i_bh * tl.num_programs(0) + i_t
    if C.GUARD:
        if tl.load(p_flags + i_row) == 0:
            return
    o_t, o_h, m_row, o_row, b_limit = query_rows(p_limits, i_t, i_b, i_hk, T, S, C)
    p_list += i_row.to(tl.int64) * C.ENTRIES
    p_members += i_row.to(tl.int64) * C.ENTRIES
    n_blocks = tl.load(p_number + i_row)
    # (R, BD)
    b_q = load_matrix_rows(p_q, o_row, m_row, C.D, C.BD)
    b_max, b_sum = first_softmax(p_sinks, i_b, o_h, m_row, C)
    # (R, BDV)
    b_out = tl.full([C.BQ * C.GP, C.BDV], 0.0, tl.float32)
    o_head = i_b.to(tl.int64) * S * C.HK + i_hk
    for n in range(tl.cdiv(n_blocks * C.BS, C.BK)):
        o_k, m_k, m_seen = listed_keys(p_list, p_members, n, n_blocks, b_limit, S, C)
        o_key = o_head + o_k.to(tl.int64) * C.HK
        # (BK, BD)
        b_k = load_matrix_rows(p_k, o_key, m_k, C.D, C.BD)
        # (R, BK)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION) * (scale * LOG2_E)
        b_s = tl.where(m_seen, b_s, float("-inf"))
        b_max, b_base, b_shrink = online_softmax(b_max, tl.max(b_s, 1), True)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        # (BK, BDV)
        b_v = load_matrix_rows(p_v, o_key, m_k, C.DV, C.BDV)
        b_out = weighted_sum(b_p, b_v, m_seen, b_out * b_shrink[:, None], C)
    b_out = store_outputs(p_out, p_lse, b_out, b_max, b_sum, o_row, m_row, i_b, o_h, o_t, T, C)
    if not C.GUARD:
        tl.store(p_bad + i_row + tl.arange(0, 1), has_nan(b_out))


@triton.jit
def partial_kernel(
    p_q, p_k, p_v, p_starts, p_limits, p_indices, p_order, p_items, p_flags, p_old_out, p_old_lse,
    T, S, N, scale,
    p_partial, p_lse, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    """An item's entries against its tile of keys: a partial result for each query and block."""
    i_item, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    i_row = i_bh * tl.num_programs(0) + i_item
    if C.GUARD:
        if tl.load(p_flags + i_row) == 0:
            return
    R: tl.constexpr = C.BQ * C.GP
    i_first, i_last, o_k, m_k, b_k, b_v = item_keys(p_k, p_v, p_starts, p_items, i_row, i_b, i_hk, S, N, C)
    o_h, m_h = head_of(i_hk, C)
    b_bad = tl.full([1], 0, tl.int32)
    p_order += i_bh.to(tl.int64) * T * C.K
    o_next = entries_at(p_order, i_first, i_last, m_h, C)
    for i_entry in range(i_first, i_last, C.BQ):
        # a step ahead: queries are loaded while those before them are multiplied
        o_entry, o_next = o_next, entries_at(p_order, i_entry + C.BQ, i_last, m_h, C)
        o_t, m_row, b_from, b_limit = entry_sees(p_indices, p_starts, p_limits, o_entry, i_b, i_hk, T, N, C)
        b_q = load_matrix_rows(p_q, (i_b.to(tl.int64) * T + o_t) * C.H + o_h, m_row, C.D, C.BD)
        # (R, BK)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION) * (scale * LOG2_E)
        m_seen = m_k[None, :] & (o_k[None, :] < b_limit[:, None]) & (o_k[None, :] >= b_from[:, None])
        b_s = tl.where(m_seen, b_s, float("-inf"))
        b_max = tl.max(b_s, 1)
        b_base = tl.where(b_max == float("-inf"), 0.0, b_max)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_sum = tl.sum(b_p, 1)
        b_total, b_lse = softmax_result(b_max, b_sum)
        b_out = weighted_sum(b_p, b_v, m_seen, tl.full([R, C.BDV], 0.0, tl.float32), C) / b_total[:, None]
        o_partial = entry_rows(o_entry, i_bh, T, C)
        store_matrix_rows(p_partial, b_out, o_partial, m_row, C.DV, C.BDV)
        tl.store(p_lse + o_partial, b_lse, mask=m_row)
        b_bad = tl.maximum(b_bad, has_nan(b_out))
    if not C.GUARD:
        tl.store(p_bad + i_row + tl.arange(0, 1), b_bad)


@triton.jit
def merge_kernel(p_partial, p_partial_lse, p_indices, p_sinks, T, p_out, p_lse, C: tl.constexpr):
    """The partial results of a query's blocks, and its sinks, merged; C.BQ queries to a program."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    o_t, o_h, m_row, o_out = tile_rows(i_t, i_b, i_hk, T, C)
    b_max, b_sum = first_softmax(p_sinks, i_b, o_h, m_row, C)
    b_out = tl.full([C.BQ * C.GP, C.BDV], 0.0, tl.float32)
    for n in tl.range(C.K, loop_unroll_factor=4):
        o_row, m_partial = partial_rows(p_indices, o_t, m_row, n, i_b, i_hk, i_bh, T, C)
        b_partial = tl.load(p_partial_lse + o_row, mask=m_partial, other=float("-inf"))
        b_max, b_base, b_shrink = online_softmax(b_max, b_partial, True)
        b_weight = tl.exp2(b_partial - b_base)
        b_sum = b_sum * b_shrink + b_weight
        b_x = load_matrix_rows(p_partial, o_row, m_partial, C.DV, C.BDV).to(tl.float32)
        b_out = b_out * b_shrink[:, None] + b_x * b_weight[:, None]
    store_outputs(p_out, p_lse, b_out, b_max, b_sum, o_out, m_row, i_b, o_h, o_t, T, C)
