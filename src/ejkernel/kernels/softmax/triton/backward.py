"""The backward kernels: dq owned by query blocks, dk and dv by key blocks, dbias by its own tiles; no atomics.

Like the forward, dq and dk/dv run twice, the second time nan-safe (C.GUARD).
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import (
    LOG2_E,
    block_at,
    block_counts,
    dropout_keep,
    guarded_dot,
    has_nan,
    load_rows,
    schedule_row,
    store_rows,
)
from ejkernel.kernels.softmax.triton.tiles import (
    AXIS_H,
    AXIS_S,
    AXIS_T,
    capped_logits,
    finished_logits,
    head_options,
    head_rows,
    listed_keys,
    load_keys,
    store_keys,
    tile_counts,
    visible,
)


@triton.jit
def tile_gradient(
    b_s, b_dp, b_lse, b_delta, o_q, o_k, seed, options, T, S, scale, soft_cap, keep_scale, threshold,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """From q.k and dout.v of a tile, in either orientation: the kept weights, ds, and which pairs are visible.

    b_lse is in units of log2 unless there is a bias, +inf for a row that saw nothing. ds is the gradient of the logits
    before score function and soft cap; in a launch for an operand of a score function, by that operand.
    """
    unit = scale * LOG2_E
    if not C.PLAIN:
        b_capped = capped_logits(b_s * scale, o_q, o_k, options, T, S, soft_cap, C)
        b_s = finished_logits(b_capped, o_q, o_k, options, T, S, C)
        unit = LOG2_E
    if C.BIAS:
        # as in the forward; no weight is above 1, also where lse is rounded by more than that
        b_x = tl.minimum((b_s - b_lse) * LOG2_E, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        b_x = b_s * unit - b_lse
    b_p = tl.exp2(b_x)
    b_kept = b_p
    if C.DROPOUT:
        m_keep = dropout_keep(seed, o_q, o_k, threshold)
        b_kept = tl.where(m_keep, b_p * keep_scale, 0.0)
        b_dp = tl.where(m_keep, b_dp * keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta)
    if C.OPERAND_SLOPE is not None:
        b_ds *= C.OPERAND_SLOPE.call(o_q, o_k, b_capped, options[7], options[8], T, S)
    else:
        if C.SCORE_SLOPE is not None:
            b_ds *= C.SCORE_SLOPE.call(o_q, o_k, b_capped, options[7], options[8], T, S)
        if C.CAPPED:
            b_ds *= 1.0 - (b_capped / soft_cap) * (b_capped / soft_cap)
    m_seen = (o_q < T) & (o_k < S)
    if MASKED:
        m_seen = visible(o_q, o_k, options, T, S, C)
        b_kept = tl.where(m_seen, b_kept, 0.0)
        b_ds = tl.where(m_seen, b_ds, 0.0)
    return b_kept, b_ds, m_seen


@triton.jit
def padded(n, BLOCK: tl.constexpr):
    """n rounded up to a multiple of BLOCK, in a form from which Triton knows that it is one."""
    return tl.cdiv(n, BLOCK) * BLOCK


@triton.jit
def weighted_sum(b_w, b_rows, m_seen, b_acc, MASKED: tl.constexpr, C: tl.constexpr):
    """b_acc + b_w @ b_rows; guarded where hidden rows may be nan."""
    PRECISION: tl.constexpr = C.PRECISION
    if MASKED and C.GUARD:
        return guarded_dot(b_w.to(b_rows.dtype), b_rows, m_seen, b_acc, PRECISION)
    else:
        return tl.dot(b_w.to(b_rows.dtype), b_rows, b_acc, input_precision=PRECISION)


@triton.jit
def load_query_block(p_q, p_dout, i_b, i_h, i_q, T, C: tl.constexpr):
    """Queries and dout of a block, (BQ, BD) and (BQ, BDV)."""
    p_q = head_rows(p_q, i_b, i_h, T, C.H, C.D, C.HEADS_FIRST)
    p_dout = head_rows(p_dout, i_b, i_h, T, C.H, C.DV, C.HEADS_FIRST)
    b_q = load_rows(p_q, i_q, T, C.Q_ROW, C.BQ, C.D, C.BD, True)
    return b_q, load_rows(p_dout, i_q, T, C.O_ROW, C.BQ, C.DV, C.BDV, True)


@triton.jit
def load_key_block(p_k, p_v, i_b, i_hk, i_k, S, C: tl.constexpr):
    """Keys and values of a block, (BK, BD) and (BK, BDV)."""
    p_k = head_rows(p_k, i_b, i_hk, S, C.HK, C.D, C.HEADS_FIRST)
    p_v = head_rows(p_v, i_b, i_hk, S, C.HK, C.DV, C.HEADS_FIRST)
    b_k = load_rows(p_k, i_k, S, C.K_ROW, C.BK, C.D, C.BD, True)
    return b_k, load_rows(p_v, i_k, S, C.V_ROW, C.BK, C.DV, C.BDV, True)


@triton.jit
def dq_kernel(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_bias, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_mask, p_pattern,
    p_ints, p_floats, p_seeds,
    p_rows, p_index, p_flags, p_old_dq,
    T, S, s_rows_b, s_rows_h, s_pattern_b, s_pattern_h,
    s_ints_b, s_ints_h, s_floats_b, s_floats_h, scale, soft_cap, keep_scale, threshold,
    p_dq, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    n_rows = tl.num_programs(0)
    i_row = n_rows - 1 - tl.program_id(0)
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // C.H, i_bh % C.H
    i_hk = i_h // C.G
    i_q = i_row * C.BQ
    if C.GUARD:
        if tl.load(p_flags + i_bh * tl.cdiv(T, C.FLAG_ROWS) + i_q // C.FLAG_ROWS) == 0:
            return
    p_q = head_rows(p_q, i_b, i_h, T, C.H, C.D, C.HEADS_FIRST)
    p_dq = head_rows(p_dq, i_b, i_h, T, C.H, C.D, C.HEADS_FIRST)
    p_dout = head_rows(p_dout, i_b, i_h, T, C.H, C.DV, C.HEADS_FIRST)
    p_k = head_rows(p_k, i_b, i_hk, S, C.HK, C.D, C.HEADS_FIRST)
    p_v = head_rows(p_v, i_b, i_hk, S, C.HK, C.DV, C.HEADS_FIRST)
    options = head_options(
        p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats, i_b, i_h, T, S,
        s_pattern_b, s_pattern_h, s_ints_b, s_ints_h, s_floats_b, s_floats_h, C,
    )  # fmt: skip
    i_list = i_b * s_rows_b + i_h * s_rows_h + i_row
    p_row, p_list = schedule_row(p_rows, p_index, i_list, tl.cdiv(S, C.LISTED), C.LISTS)
    n_free, n_listed = block_counts(p_row, C.LISTS)
    n_unmasked, n_all = tile_counts(n_free, n_listed, C)
    seed = tl.load(p_seeds + i_bh) if C.DROPOUT else tl.full([], 0, tl.uint32)

    o_q = i_q + tl.arange(0, C.BQ)
    o_row = i_bh.to(tl.int64) * padded(T, C.ROW_BLOCK) + o_q
    b_lse = tl.load(p_lse + o_row)
    b_delta = tl.load(p_delta + o_row)
    # (BQ, BD) and (BQ, BDV)
    b_q = load_rows(p_q, i_q, T, C.Q_ROW, C.BQ, C.D, C.BD, True)
    b_do = load_rows(p_dout, i_q, T, C.O_ROW, C.BQ, C.DV, C.BDV, True)
    b_dq = tl.full([C.BQ, C.BD], 0.0, tl.float32)
    for MASKED in tl.static_range(2):
        for n in range(n_unmasked if MASKED else 0, n_all if MASKED else n_unmasked):
            i_k, o_k = listed_keys(p_row, p_list, n, n_listed, S, C)
            b_k = load_keys(p_k, i_k, o_k, S, C.K_ROW, C.D, C.BD, MASKED, C)
            b_v = load_keys(p_v, i_k, o_k, S, C.V_ROW, C.DV, C.BDV, MASKED, C)
            # (BQ, BK)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=C.PRECISION)
            _, b_ds, m_seen = tile_gradient(
                b_s, b_dp, b_lse[:, None], b_delta[:, None], o_q[:, None], o_k[None, :], seed, options, T, S,
                scale, soft_cap, keep_scale, threshold, MASKED, C,
            )  # fmt: skip
            b_dq = weighted_sum(b_ds, b_k, m_seen, b_dq, MASKED, C)
    store_rows(p_dq, b_dq * scale, i_q, T, C.Q_ROW, C.BQ, C.D, C.BD)
    if not C.GUARD:
        tl.store(p_bad + i_bh * n_rows + i_row + tl.arange(0, 1), has_nan(b_dq))


@triton.jit
def dkv_kernel(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_bias, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_mask, p_pattern,
    p_ints, p_floats, p_seeds,
    p_rows, p_index, p_order, p_flags, p_old_dk, p_old_dv,
    T, S, s_rows_b, s_rows_h, s_order_b, s_order_h, s_pattern_b, s_pattern_h,
    s_ints_b, s_ints_h, s_floats_b, s_floats_h, scale, soft_cap, keep_scale, threshold,
    p_dk, p_dv, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0)
    i_b, i_hk = tl.program_id(1) // C.HK, tl.program_id(1) % C.HK
    # where the keys of this program lie: one run, or sub-blocks in an order in which like ones are together
    o_mark = i_row * C.SUB_BLOCKS + tl.arange(0, C.SUB_BLOCKS)
    i_k = i_row * C.BK
    o_k = i_k + tl.arange(0, C.BK)
    if C.SUB_BLOCK is not None:
        p_order += i_b * s_order_b + i_hk * s_order_h
        i_k = tl.load(p_order + i_row * C.SUB_BLOCKS) * C.SUB_BLOCK
        o_k = tl.load(p_order + o_k // C.SUB_BLOCK) * C.SUB_BLOCK + o_k % C.SUB_BLOCK
        o_mark = tl.load(p_order + o_mark)
    if C.GUARD:
        if tl.load(p_flags + tl.program_id(1) * tl.cdiv(S, C.FLAG_ROWS) + i_k // C.FLAG_ROWS) == 0:
            return
    p_k = head_rows(p_k, i_b, i_hk, S, C.HK, C.D, C.HEADS_FIRST)
    p_v = head_rows(p_v, i_b, i_hk, S, C.HK, C.DV, C.HEADS_FIRST)
    p_dk = head_rows(p_dk, i_b, i_hk, S, C.HK, C.D, C.HEADS_FIRST)
    p_dv = head_rows(p_dv, i_b, i_hk, S, C.HK, C.DV, C.HEADS_FIRST)
    # (BK, BD) and (BK, BDV)
    b_k = load_keys(p_k, i_k, o_k, S, C.K_ROW, C.D, C.BD, True, C)
    b_v = load_keys(p_v, i_k, o_k, S, C.V_ROW, C.DV, C.BDV, True, C)
    b_dk = tl.full([C.BK, C.BD], 0.0, tl.float32)
    b_dv = tl.full([C.BK, C.BDV], 0.0, tl.float32)
    # the query heads of this key head, one after the other
    for g in range(C.G):
        i_h = i_hk * C.G + g
        i_bh = i_b * C.H + i_h
        p_qh = head_rows(p_q, i_b, i_h, T, C.H, C.D, C.HEADS_FIRST)
        p_doh = head_rows(p_dout, i_b, i_h, T, C.H, C.DV, C.HEADS_FIRST)
        o_head = i_bh.to(tl.int64) * padded(T, C.ROW_BLOCK)
        options = head_options(
            p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats, i_b, i_h, T, S,
            s_pattern_b, s_pattern_h, s_ints_b, s_ints_h, s_floats_b, s_floats_h, C,
        )  # fmt: skip
        p_row, p_list = schedule_row(
            p_rows, p_index, i_b * s_rows_b + i_h * s_rows_h + i_row, tl.cdiv(T, C.BQ), C.LISTS
        )
        n_unmasked, n_all = block_counts(p_row, C.LISTS)
        seed = tl.load(p_seeds + i_bh) if C.DROPOUT else tl.full([], 0, tl.uint32)
        for MASKED in tl.static_range(2):
            for n in range(n_unmasked if MASKED else 0, n_all if MASKED else n_unmasked):
                i_q = block_at(p_row, p_list, n, C.LISTS) * C.BQ
                o_q = i_q + tl.arange(0, C.BQ)
                b_q = load_rows(p_qh, i_q, T, C.Q_ROW, C.BQ, C.D, C.BD, MASKED)
                b_do = load_rows(p_doh, i_q, T, C.O_ROW, C.BQ, C.DV, C.BDV, MASKED)
                # (BK, BQ): transposed, so that the weights are the left operand of both products below
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision=C.PRECISION)
                b_dp = b_s  # without KEY, ds is not used
                if C.KEY:
                    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=C.PRECISION)
                # after the products, during which they would take registers
                b_lse = tl.load(p_lse + o_head + o_q)
                b_delta = tl.load(p_delta + o_head + o_q)
                b_kept, b_ds, m_seen = tile_gradient(
                    b_s, b_dp, b_lse[None, :], b_delta[None, :], o_q[None, :], o_k[:, None], seed, options, T, S,
                    scale, soft_cap, keep_scale, threshold, MASKED, C,
                )  # fmt: skip
                if C.VALUE:
                    b_dv = weighted_sum(b_kept, b_do, m_seen, b_dv, MASKED, C)
                if C.KEY:
                    b_dk = weighted_sum(b_ds, b_q, m_seen, b_dk, MASKED, C)
    if C.KEY:
        store_keys(p_dk, b_dk * scale, i_k, o_k, S, C.K_ROW, C.D, C.BD, C)
    if C.VALUE:
        store_keys(p_dv, b_dv, i_k, o_k, S, C.V_ROW, C.DV, C.BDV, C)
    if not C.GUARD:
        n_sub_blocks = tl.cdiv(S, C.LISTED)
        b_bad = tl.broadcast_to(tl.maximum(has_nan(b_dk), has_nan(b_dv)), [C.SUB_BLOCKS])
        tl.store(p_bad + tl.program_id(1) * n_sub_blocks + o_mark, b_bad, mask=o_mark < n_sub_blocks)


@triton.jit
def dbias_kernel(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_bias, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_mask, p_pattern,
    p_ints, p_floats, p_seeds,
    T, S, B, s_pattern_b, s_pattern_h,
    s_ints_b, s_ints_h, s_floats_b, s_floats_h, scale, soft_cap, keep_scale, threshold,
    p_dbias,
    C: tl.constexpr,
):  # fmt: skip
    # the tile of the bias this program owns; along an axis that broadcasts, it sums over the whole of it
    # heads come first in the grid, whose other axes are short; in time, the tiles of a head follow each other
    n_tiles_q, n_tiles_k = tl.num_programs(1), tl.num_programs(2)
    i_all = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + n_tiles_q * tl.program_id(2))
    i_tile_q, i_tile_k = i_all % n_tiles_q, i_all // n_tiles_q % n_tiles_k
    i_matrix = i_all // (n_tiles_q * n_tiles_k)
    i_bb, i_bh = i_matrix, 0
    if C.BIAS & AXIS_H:
        i_bb, i_bh = i_matrix // C.H, i_matrix % C.H
    # from the grid, not from the axes: known when compiling, the loop would keep every pointer in registers
    n_h = 1 if C.BIAS & AXIS_H else C.H
    n_b = B * C.H // (tl.num_programs(0) * n_h)
    n_q = tl.cdiv(T, C.BQ) // n_tiles_q
    n_k = tl.cdiv(S, C.BK) // n_tiles_k
    n_all = n_b * n_h * n_q * n_k
    if C.BIAS & AXIS_T and C.BIAS & AXIS_S and not C.Q_POSITIONS:
        # a tile of which the band hides all is 0
        i_ahead = i_tile_k * C.BK - i_tile_q * C.BQ - (S - T)
        if C.LO is not None:
            n_all = tl.where(i_ahead + C.BK - 1 >= C.LO, n_all, 0)
        if C.HI is not None:
            n_all = tl.where(i_ahead - C.BQ + 1 <= C.HI, n_all, 0)
    b_sum = tl.full([C.BQ, C.BK], 0.0, tl.float32)
    for n in range(n_all):
        i_k = (i_tile_k + n % n_k) * C.BK
        i_q = (i_tile_q + n // n_k % n_q) * C.BQ
        i_h = i_bh + n // (n_k * n_q) % n_h
        i_b = i_bb + n // (n_k * n_q * n_h)
        o_q, o_k = i_q + tl.arange(0, C.BQ), i_k + tl.arange(0, C.BK)
        o_row = (i_b * C.H + i_h).to(tl.int64) * padded(T, C.ROW_BLOCK) + o_q
        b_lse = tl.load(p_lse + o_row)
        b_delta = tl.load(p_delta + o_row)
        b_q, b_do = load_query_block(p_q, p_dout, i_b, i_h, i_q, T, C)
        b_k, b_v = load_key_block(p_k, p_v, i_b, i_h // C.G, i_k, S, C)
        options = head_options(
            p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats, i_b, i_h, T, S,
            s_pattern_b, s_pattern_h, s_ints_b, s_ints_h, s_floats_b, s_floats_h, C,
        )  # fmt: skip
        seed = tl.load(p_seeds + i_b * C.H + i_h) if C.DROPOUT else tl.full([], 0, tl.uint32)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=C.PRECISION)
        _, b_ds, _m = tile_gradient(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], o_q[:, None], o_k[None, :], seed, options, T, S,
            scale, soft_cap, keep_scale, threshold, True, C,
        )  # fmt: skip
        b_sum += b_ds
    # (1, 1), (1, BK), (BQ, 1) or (BQ, BK) of it are the bias's own
    o_t, o_s = i_tile_q * C.BQ + tl.arange(0, C.BQ), i_tile_k * C.BK + tl.arange(0, C.BK)
    p_dbias += i_matrix.to(tl.int64) * (T if C.BIAS & AXIS_T else 1) * (S if C.BIAS & AXIS_S else 1)
    if C.BIAS & AXIS_T and C.BIAS & AXIS_S:
        p_tile = p_dbias + o_t.to(tl.int64)[:, None] * S + o_s[None, :]
        tl.store(p_tile, b_sum, mask=(o_t < T)[:, None] & (o_s < S)[None, :])
    elif C.BIAS & AXIS_T:
        tl.store(p_dbias + o_t, tl.sum(b_sum, 1), mask=o_t < T)
    elif C.BIAS & AXIS_S:
        tl.store(p_dbias + o_s, tl.sum(b_sum, 0), mask=o_s < S)
    else:
        tl.store(p_dbias + tl.arange(0, 1), tl.sum(tl.sum(b_sum, 1, keep_dims=True), 0))


@triton.jit
def operand_kernel(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_bias, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_mask, p_pattern,
    p_ints, p_floats, p_seeds,
    p_rows, p_index,
    T, S, s_rows_b, s_rows_h, s_pattern_b, s_pattern_h,
    s_ints_b, s_ints_h, s_floats_b, s_floats_h, scale, soft_cap, keep_scale, threshold,
    p_doperand,
    C: tl.constexpr,
):  # fmt: skip
    """The gradient of what a score function reads for each query, summed over keys; OF_KEYS, the other way round."""
    i_row, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_bh // C.H, i_bh % C.H
    i_hk = i_h // C.G
    options = head_options(
        p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats, i_b, i_h, T, S,
        s_pattern_b, s_pattern_h, s_ints_b, s_ints_h, s_floats_b, s_floats_h, C,
    )  # fmt: skip
    n_blocks = tl.cdiv(T, C.BQ) if C.OF_KEYS else tl.cdiv(S, C.BK)
    p_row, p_list = schedule_row(p_rows, p_index, i_b * s_rows_b + i_h * s_rows_h + i_row, n_blocks, C.LISTS)
    _n, n_all = block_counts(p_row, C.LISTS)
    seed = tl.load(p_seeds + i_bh) if C.DROPOUT else tl.full([], 0, tl.uint32)
    p_lse += i_bh.to(tl.int64) * padded(T, C.ROW_BLOCK)
    p_delta += i_bh.to(tl.int64) * padded(T, C.ROW_BLOCK)
    # this program's own block stays, and blocks of the other side pass
    i_q, i_k = i_row * C.BQ, i_row * C.BK
    if C.OF_KEYS:
        b_k, b_v = load_key_block(p_k, p_v, i_b, i_hk, i_k, S, C)
    else:
        b_q, b_do = load_query_block(p_q, p_dout, i_b, i_h, i_q, T, C)
        b_lse, b_delta = load_row_sums(p_lse, p_delta, i_q, C)
    OWN: tl.constexpr = C.BK if C.OF_KEYS else C.BQ
    # (OWN,)
    b_sum = tl.full([OWN], 0.0, tl.float32)
    for n in range(n_all):
        i_other = block_at(p_row, p_list, n, C.LISTS)
        if C.OF_KEYS:
            i_q = i_other * C.BQ
            b_q, b_do = load_query_block(p_q, p_dout, i_b, i_h, i_q, T, C)
            b_lse, b_delta = load_row_sums(p_lse, p_delta, i_q, C)
        else:
            i_k = i_other * C.BK
            b_k, b_v = load_key_block(p_k, p_v, i_b, i_hk, i_k, S, C)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=C.PRECISION)
        o_q, o_k = i_q + tl.arange(0, C.BQ), i_k + tl.arange(0, C.BK)
        _, b_ds, _m = tile_gradient(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], o_q[:, None], o_k[None, :], seed, options, T, S,
            scale, soft_cap, keep_scale, threshold, True, C,
        )  # fmt: skip
        b_sum += tl.sum(b_ds, 0 if C.OF_KEYS else 1)
    n_own = S if C.OF_KEYS else T
    o_own = i_row * OWN + tl.arange(0, OWN)
    tl.store(p_doperand + i_bh.to(tl.int64) * n_own + o_own, b_sum, mask=o_own < n_own)


@triton.jit
def load_row_sums(p_lse, p_delta, i_q, C: tl.constexpr):
    """(BQ,) of lse and delta of a head."""
    o_q = i_q + tl.arange(0, C.BQ)
    return tl.load(p_lse + o_q), tl.load(p_delta + o_q)


@triton.jit
def row_terms_kernel(
    p_out, p_dout, p_lse, p_dlse, T,
    p_rows_lse, p_rows_delta,
    C: tl.constexpr, DLSE: tl.constexpr,
):  # fmt: skip
    """lse in a kernel's units and delta, as read above; +inf where nothing is seen, +inf and 0 past the end.

    For `ejkernel.torch`: under JAX, XLA makes these.
    """
    i_q = tl.program_id(0) * C.BQ
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // C.H, i_bh % C.H
    o_q = i_q + tl.arange(0, C.BQ)
    b_out = load_rows(head_rows(p_out, i_b, i_h, T, C.H, C.DV, C.HEADS_FIRST), i_q, T, C.O_ROW, C.BQ, C.DV, C.BDV, True)
    b_do = load_rows(head_rows(p_dout, i_b, i_h, T, C.H, C.DV, C.HEADS_FIRST), i_q, T, C.O_ROW, C.BQ, C.DV, C.BDV, True)
    b_delta = tl.sum(b_out.to(tl.float32) * b_do.to(tl.float32), 1)
    b_lse = tl.load(p_lse + i_bh.to(tl.int64) * T + o_q, mask=o_q < T, other=float("-inf"))
    if DLSE:
        b_delta -= tl.load(p_dlse + i_bh.to(tl.int64) * T + o_q, mask=o_q < T, other=0.0)
    n_padded = padded(T, C.ROW_BLOCK)
    o_row = i_bh.to(tl.int64) * n_padded + o_q
    b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse if C.BIAS else b_lse * LOG2_E)
    tl.store(p_rows_lse + o_row, b_lse, mask=o_q < n_padded)
    tl.store(p_rows_delta + o_row, b_delta, mask=o_q < n_padded)
