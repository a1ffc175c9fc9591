"""The backward kernels: dk and dv by keys, dq by queries, or by keys as partial sums; no atomics.

Each runs twice, as the forward does.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E, has_nan
from ejkernel.kernels.native_sparse.triton.tiles import (
    entries_at,
    entry_rows,
    entry_sees,
    head_of,
    item_keys,
    listed_keys,
    load_matrix_rows,
    partial_rows,
    query_rows,
    store_matrix_rows,
    tile_keys,
    tile_rows,
    weighted_sum,
)


@triton.jit
def dq_kernel(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_limits, p_number, p_list, p_members, p_flags, p_old_dq,
    T, S, scale,
    p_dq, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    i_row = i_bh * tl.num_programs(0) + i_t
    if C.GUARD:
        if tl.load(p_flags + i_row) == 0:
            return
    _, _, m_row, o_row, b_limit = query_rows(p_limits, i_t, i_b, i_hk, T, S, C)
    p_list += i_row.to(tl.int64) * C.ENTRIES
    p_members += i_row.to(tl.int64) * C.ENTRIES
    n_blocks = tl.load(p_number + i_row)
    b_q = load_matrix_rows(p_q, o_row, m_row, C.D, C.BD)
    b_do = load_matrix_rows(p_dout, o_row, m_row, C.DV, C.BDV)
    b_lse = tl.load(p_lse + o_row, mask=m_row, other=float("inf"))
    b_delta = tl.load(p_delta + o_row, mask=m_row, other=0.0)
    b_dq = tl.full([C.BQ * C.GP, C.BD], 0.0, tl.float32)
    o_head = i_b.to(tl.int64) * S * C.HK + i_hk
    for n in range(tl.cdiv(n_blocks * C.BS, C.BK)):
        o_k, m_k, m_seen = listed_keys(p_list, p_members, n, n_blocks, b_limit, S, C)
        o_key = o_head + o_k.to(tl.int64) * C.HK
        b_k = load_matrix_rows(p_k, o_key, m_k, C.D, C.BD)
        b_v = load_matrix_rows(p_v, o_key, m_k, C.DV, C.BDV)
        # (R, BK)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=C.PRECISION)
        b_p = tl.exp2(b_s * (scale * LOG2_E) - b_lse[:, None])
        b_ds = tl.where(m_seen, b_p * (b_dp - b_delta[:, None]), 0.0)
        b_dq = weighted_sum(b_ds, b_k, m_seen, b_dq, C)
    store_matrix_rows(p_dq, b_dq * scale, o_row, m_row, C.D, C.BD)
    if not C.GUARD:
        tl.store(p_bad + i_row + tl.arange(0, 1), has_nan(b_dq))


@triton.jit
def dkv_kernel(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_starts, p_limits, p_indices, p_order, p_items,
    p_flags, p_old_dk, p_old_dv, p_old_dq,
    T, S, N, scale,
    p_dk, p_dv, p_dq, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    """What a stretch of the queries that selected a tile of keys adds to dk and dv: one partial sum for each item.

    By keys (C.DQ_PARTIALS) it is also what each of their blocks adds to dq.
    """
    i_item, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    i_row = i_bh * tl.num_programs(0) + i_item
    if C.GUARD:
        if tl.load(p_flags + i_row) == 0:
            return
    i_first, i_last, o_k, m_k, b_k, b_v = item_keys(p_k, p_v, p_starts, p_items, i_row, i_b, i_hk, S, N, C)
    b_dk = tl.full([C.BK, C.BD], 0.0, tl.float32)
    b_dv = tl.full([C.BK, C.BDV], 0.0, tl.float32)
    o_h, m_h = head_of(i_hk, C)
    b_bad = tl.full([1], 0, tl.int32)
    p_order += i_bh.to(tl.int64) * T * C.K
    o_next = entries_at(p_order, i_first, i_last, m_h, C)
    for i_entry in range(i_first, i_last, C.BQ):
        # a step ahead: queries are loaded while those before them are multiplied
        o_entry, o_next = o_next, entries_at(p_order, i_entry + C.BQ, i_last, m_h, C)
        o_t, m_row, b_from, b_limit = entry_sees(p_indices, p_starts, p_limits, o_entry, i_b, i_hk, T, N, C)
        o_row = (i_b.to(tl.int64) * T + o_t) * C.H + o_h
        b_q = load_matrix_rows(p_q, o_row, m_row, C.D, C.BD)
        b_do = load_matrix_rows(p_dout, o_row, m_row, C.DV, C.BDV)
        # (BK, R): transposed, so that the weights are the left operand of both products below
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=C.PRECISION)
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=C.PRECISION)
        b_lse = tl.load(p_lse + o_row, mask=m_row, other=float("inf"))
        b_delta = tl.load(p_delta + o_row, mask=m_row, other=0.0)
        m_seen = m_k[:, None] & (o_k[:, None] < b_limit[None, :]) & (o_k[:, None] >= b_from[None, :])
        b_p = tl.where(m_seen, tl.exp2(b_s * (scale * LOG2_E) - b_lse[None, :]), 0.0)
        b_ds = tl.where(m_seen, b_p * (b_dp - b_delta[None, :]), 0.0)
        b_dv = weighted_sum(b_p, b_do, m_seen, b_dv, C)
        b_dk = weighted_sum(b_ds, b_q, m_seen, b_dk, C)
        if C.DQ_PARTIALS:
            # (R, BD)
            b_zero = tl.full([C.BQ * C.GP, C.BD], 0.0, tl.float32)
            b_dq = weighted_sum(tl.trans(b_ds), b_k, tl.trans(m_seen), b_zero, C)
            store_matrix_rows(p_dq, b_dq, entry_rows(o_entry, i_bh, T, C), m_row, C.D, C.BD)
            b_bad = tl.maximum(b_bad, has_nan(b_dq))
    i_slot = tl.load(p_items + i_row.to(tl.int64) * 4 + 3)
    o_partial = (i_bh * tl.num_programs(0) + i_slot).to(tl.int64) * C.BK + tl.arange(0, C.BK)
    m_partial = tl.full([C.BK], 1, tl.int1)
    store_matrix_rows(p_dk, b_dk * scale, o_partial, m_partial, C.D, C.BD)
    store_matrix_rows(p_dv, b_dv, o_partial, m_partial, C.DV, C.BDV)
    if not C.GUARD:
        b_bad = tl.maximum(b_bad, tl.maximum(has_nan(b_dk), has_nan(b_dv)))
        tl.store(p_bad + i_row + tl.arange(0, 1), b_bad)


@triton.jit
def sum_kernel(
    p_partial_dk, p_partial_dv, p_starts, p_first_item, p_old_dk, p_old_dv, S, N, n_items, p_dk, p_dv, C: tl.constexpr
):
    """The sum of the partial sums of a tile of keys, in order."""
    i_tile, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    p_first_item += i_bh * (tl.num_programs(0) + 1) + i_tile
    i_first = tl.load(p_first_item)
    i_last = tl.load(p_first_item + 1)
    b_dk = tl.full([C.BK, C.BD], 0.0, tl.float32)
    b_dv = tl.full([C.BK, C.BDV], 0.0, tl.float32)
    m_partial = tl.full([C.BK], 1, tl.int1)
    for i_item in range(i_first, i_last):
        o_partial = (i_bh * n_items + i_item).to(tl.int64) * C.BK + tl.arange(0, C.BK)
        b_dk += load_matrix_rows(p_partial_dk, o_partial, m_partial, C.D, C.BD)
        b_dv += load_matrix_rows(p_partial_dv, o_partial, m_partial, C.DV, C.BDV)
    o_k, m_k = tile_keys(p_starts + i_b * N * C.STARTS_B, i_tile, N, S, C)
    o_key = (i_b.to(tl.int64) * S + o_k) * C.HK + i_hk
    store_matrix_rows(p_dk, b_dk, o_key, m_k, C.D, C.BD)
    store_matrix_rows(p_dv, b_dv, o_key, m_k, C.DV, C.BDV)


@triton.jit
def dq_sum_kernel(p_partial, p_indices, T, scale, p_dq, C: tl.constexpr):
    """The sum of what a query's blocks add to dq, in order; C.BQ queries to a program."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    o_t, _, m_row, o_out = tile_rows(i_t, i_b, i_hk, T, C)
    b_dq = tl.full([C.BQ * C.GP, C.BD], 0.0, tl.float32)
    for n in tl.range(C.K, loop_unroll_factor=4):
        o_row, m_partial = partial_rows(p_indices, o_t, m_row, n, i_b, i_hk, i_bh, T, C)
        b_dq += load_matrix_rows(p_partial, o_row, m_partial, C.D, C.BD).to(tl.float32)
    store_matrix_rows(p_dq, b_dq * scale, o_out, m_row, C.D, C.BD)
