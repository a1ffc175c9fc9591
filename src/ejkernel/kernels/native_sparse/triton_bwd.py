"""The backward kernels: dq by queries, dk and dv by keys; no atomics. Each runs twice, as the forward does."""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E, has_nan
from ejkernel.kernels.native_sparse.triton_tiles import (
    entries_at,
    head_of,
    item_keys,
    listed_keys,
    load_tile,
    query_rows,
    seen_by,
    store_tile,
    tile_keys,
    weighted_sum,
)


@triton.jit
def dq_kernel(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_starts, p_limits, p_number, p_list, p_members, p_flags, p_old_dq,
    T, S, N, scale,
    p_dq, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    i_row = i_bh * tl.num_programs(0) + i_t
    if C.GUARD:
        if tl.load(p_flags + i_row) == 0:
            return
    o_t, o_h, m_row, o_row, b_limit = query_rows(p_limits, i_t, i_b, i_hk, T, C)
    p_starts += i_b * N * C.STARTS_B
    p_list += i_row.to(tl.int64) * C.ENTRIES
    p_members += i_row.to(tl.int64) * C.ENTRIES
    n_blocks = tl.load(p_number + i_row)
    b_q = load_tile(p_q, o_row, m_row, C.D, C.BD)
    b_do = load_tile(p_dout, o_row, m_row, C.DV, C.BDV)
    o_term = (i_b * C.H + o_h).to(tl.int64) * T + o_t
    b_lse = tl.load(p_lse + o_term, mask=m_row, other=float("inf"))
    b_delta = tl.load(p_delta + o_term, mask=m_row, other=0.0)
    b_dq = tl.full([C.BQ * C.GP, C.BD], 0.0, tl.float32)
    o_head = i_b.to(tl.int64) * S * C.HK + i_hk
    for n in range(tl.cdiv(n_blocks * C.BS, C.BK)):
        o_k, m_k, b_members = listed_keys(p_list, p_members, p_starts, n, n_blocks, S, C)
        o_key = o_head + o_k.to(tl.int64) * C.HK
        b_k = load_tile(p_k, o_key, m_k, C.D, C.BD)
        b_v = load_tile(p_v, o_key, m_k, C.DV, C.BDV)
        # (R, BK)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=C.PRECISION)
        m_seen = seen_by(o_k, m_k, b_members, b_limit, C)
        b_p = tl.exp2(b_s * (scale * LOG2_E) - b_lse[:, None])
        b_ds = tl.where(m_seen, b_p * (b_dp - b_delta[:, None]), 0.0)
        b_dq = weighted_sum(b_ds, b_k, m_seen, b_dq, C)
    store_tile(p_dq, b_dq * scale, o_row, m_row, C.D, C.BD)
    if not C.GUARD:
        tl.store(p_bad + i_row + tl.arange(0, 1), has_nan(b_dq))


@triton.jit
def dkv_kernel(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_starts, p_limits, p_indices, p_order, p_items,
    p_flags, p_old_dk, p_old_dv,
    T, S, N, scale,
    p_dk, p_dv, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    """What a stretch of the queries that selected a tile of keys adds to dk and dv: one row of parts for each item."""
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
    for i_entry in range(i_first, i_last, C.BQ):
        _, o_t, b_from, b_limit, m_row = entries_at(
            p_order, p_indices, p_starts, p_limits, i_entry, i_last, i_b, i_hk, m_h, T, N, C
        )
        o_row = (i_b.to(tl.int64) * T + o_t) * C.H + o_h
        b_q = load_tile(p_q, o_row, m_row, C.D, C.BD)
        b_do = load_tile(p_dout, o_row, m_row, C.DV, C.BDV)
        # (BK, R): transposed, so that the weights are the left operand of both products below
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=C.PRECISION)
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=C.PRECISION)
        o_term = (i_b * C.H + o_h).to(tl.int64) * T + o_t
        b_lse = tl.load(p_lse + o_term, mask=m_row, other=float("inf"))
        b_delta = tl.load(p_delta + o_term, mask=m_row, other=0.0)
        m_seen = m_k[:, None] & (o_k[:, None] < b_limit[None, :]) & (o_k[:, None] >= b_from[None, :])
        b_p = tl.where(m_seen, tl.exp2(b_s * (scale * LOG2_E) - b_lse[None, :]), 0.0)
        b_ds = tl.where(m_seen, b_p * (b_dp - b_delta[None, :]), 0.0)
        b_dv = weighted_sum(b_p, b_do, m_seen, b_dv, C)
        b_dk = weighted_sum(b_ds, b_q, m_seen, b_dk, C)
    o_part = i_row.to(tl.int64) * C.BK + tl.arange(0, C.BK)
    m_part = tl.full([C.BK], 1, tl.int1)
    store_tile(p_dk, b_dk * scale, o_part, m_part, C.D, C.BD)
    store_tile(p_dv, b_dv, o_part, m_part, C.DV, C.BDV)
    if not C.GUARD:
        tl.store(p_bad + i_row + tl.arange(0, 1), tl.maximum(has_nan(b_dk), has_nan(b_dv)))


@triton.jit
def sum_kernel(
    p_part_dk, p_part_dv, p_starts, p_first_item, p_old_dk, p_old_dv, S, N, n_items, p_dk, p_dv, C: tl.constexpr
):
    """The parts of a tile of keys, in order."""
    i_tile, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    p_first_item += i_bh * (tl.num_programs(0) + 1) + i_tile
    i_first = tl.load(p_first_item)
    i_last = tl.load(p_first_item + 1)
    b_dk = tl.full([C.BK, C.BD], 0.0, tl.float32)
    b_dv = tl.full([C.BK, C.BDV], 0.0, tl.float32)
    m_part = tl.full([C.BK], 1, tl.int1)
    for i_item in range(i_first, i_last):
        o_part = (i_bh * n_items + i_item).to(tl.int64) * C.BK + tl.arange(0, C.BK)
        b_dk += load_tile(p_part_dk, o_part, m_part, C.D, C.BD)
        b_dv += load_tile(p_part_dv, o_part, m_part, C.DV, C.BDV)
    o_k, m_k = tile_keys(p_starts + i_b * N * C.STARTS_B, i_tile, N, S, C)
    o_key = (i_b.to(tl.int64) * S + o_k) * C.HK + i_hk
    store_tile(p_dk, b_dk, o_key, m_k, C.D, C.BD)
    store_tile(p_dv, b_dv, o_key, m_k, C.DV, C.BDV)
