"""The backward kernels: dq owned by query blocks, dk and dv by key blocks, dbias by its own tiles; no atomics.

Like the forward, dq and dk/dv run twice: fast, then with care (GUARD) over the blocks in which a nan turned up.
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
from ejkernel.kernels.softmax.triton_tiles import finished_logits, head_pointers, visible


@triton.jit
def tile_gradient(
    b_s,
    b_dp,
    b_lse,
    b_delta,
    o_q,
    o_k,
    seed,
    p_bias,
    p_q_seg,
    p_k_seg,
    p_q_pos,
    p_k_pos,
    p_mask,
    p_pattern,
    T,
    S,
    scale,
    soft_cap,
    keep_scale,
    threshold,
    s_bias_t,
    s_bias_s,
    s_mask_t,
    s_mask_s,
    s_pattern,
    MASKED: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    MASK: tl.constexpr,
    PATTERN_Q: tl.constexpr,
    PATTERN_K: tl.constexpr,
    BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    LOGITS: tl.constexpr,
    PLAIN: tl.constexpr,
    DROPOUT: tl.constexpr,
):
    """From q.k and dout.v of a tile, in either orientation: the kept weights, ds, and which pairs are visible.

    b_lse is in units of log2, +inf for a row that saw nothing. ds is the gradient of the logits before the soft cap.
    """
    unit = scale * LOG2_E
    if not PLAIN:
        b_s = finished_logits(
            b_s * scale, o_q, o_k, p_bias, T, S, s_bias_t, s_bias_s, soft_cap, BIAS, CAPPED, LOGITS
        )  # fmt: skip
        unit = LOG2_E
    b_x = b_s * unit - b_lse
    if BIAS:
        # as in the forward: no weight is above 1
        b_x = tl.minimum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    b_p = tl.exp2(b_x)
    b_kept = b_p
    if DROPOUT:
        m_keep = dropout_keep(seed, o_q, o_k, threshold)
        b_kept = tl.where(m_keep, b_p * keep_scale, 0.0)
        b_dp = tl.where(m_keep, b_dp * keep_scale, 0.0)
    b_ds = b_p * (b_dp - b_delta)
    if CAPPED:
        b_ds *= 1.0 - (b_s / soft_cap) * (b_s / soft_cap)
    m_seen = (o_q < T) & (o_k < S)
    if MASKED:
        m_seen = visible(
            o_q, o_k, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_mask, p_pattern, T, S, s_mask_t, s_mask_s, s_pattern,
            LO, HI, CHUNK, SEGMENTS, POSITIONS, MASK, PATTERN_Q, PATTERN_K,
        )  # fmt: skip
        b_kept = tl.where(m_seen, b_kept, 0.0)
        b_ds = tl.where(m_seen, b_ds, 0.0)
    return b_kept, b_ds, m_seen


@triton.jit
def weighted_sum(b_w, b_rows, m_seen, b_acc, GUARD: tl.constexpr, PRECISION: tl.constexpr):
    """b_acc + b_w @ b_rows; guarded where hidden rows may be nan."""
    if GUARD:
        return guarded_dot(b_w.to(b_rows.dtype), b_rows, m_seen, b_acc, PRECISION)
    else:
        return tl.dot(b_w.to(b_rows.dtype), b_rows, b_acc, input_precision=PRECISION)


@triton.jit
def dq_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    p_bias,
    p_q_seg,
    p_k_seg,
    p_q_pos,
    p_k_pos,
    p_mask,
    p_pattern,
    p_seeds,
    p_rows,
    p_index,
    p_flags,
    p_old_dq,
    T,
    S,
    s_row,
    scale,
    soft_cap,
    keep_scale,
    threshold,
    s_bias_b,
    s_bias_h,
    s_bias_t,
    s_bias_s,
    s_q_seg,
    s_k_seg,
    s_q_pos,
    s_k_pos,
    s_mask_b,
    s_mask_h,
    s_mask_t,
    s_mask_s,
    s_pattern_b,
    s_pattern_h,
    s_pattern,
    s_rows_b,
    s_rows_h,
    s_index,
    n_flags,
    flag_rows,
    n_rows,
    p_dq,
    p_bad,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    MASK: tl.constexpr,
    PATTERN_Q: tl.constexpr,
    PATTERN_K: tl.constexpr,
    BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    LOGITS: tl.constexpr,
    PLAIN: tl.constexpr,
    DROPOUT: tl.constexpr,
    LISTS: tl.constexpr,
    GUARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_row = n_rows - 1 - tl.program_id(0)
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // H, i_bh % H
    i_hk, Hk = i_h // G, H // G
    i_q = i_row * BQ
    if GUARD:
        if tl.load(p_flags + i_bh * n_flags + i_q // flag_rows) == 0:
            return
    p_q += (i_b.to(tl.int64) * T * H + i_h) * D
    p_dq += (i_b.to(tl.int64) * T * H + i_h) * D
    p_dout += (i_b.to(tl.int64) * T * H + i_h) * DV
    p_k += (i_b.to(tl.int64) * S * Hk + i_hk) * D
    p_v += (i_b.to(tl.int64) * S * Hk + i_hk) * DV
    p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos = head_pointers(
        p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, i_b, i_h, s_bias_b, s_bias_h,
        s_mask_b, s_mask_h, s_pattern_b, s_pattern_h, s_q_seg, s_k_seg, s_q_pos, s_k_pos,
    )  # fmt: skip
    p_row, p_list = schedule_row(p_rows, p_index, i_b * s_rows_b + i_h * s_rows_h + i_row, s_index, LISTS)
    n_unmasked, n_all = block_counts(p_row, LISTS)
    seed = tl.load(p_seeds + i_bh) if DROPOUT else tl.full([], 0, tl.uint32)

    o_q = i_q + tl.arange(0, BQ)
    o_row = i_bh.to(tl.int64) * s_row + o_q
    b_lse = tl.load(p_lse + o_row)
    b_delta = tl.load(p_delta + o_row)
    # (BQ, BD) and (BQ, BDV)
    b_q = load_rows(p_q, i_q, T, H * D, BQ, D, BD, True)
    b_do = load_rows(p_dout, i_q, T, H * DV, BQ, DV, BDV, True)
    b_dq = tl.zeros([BQ, BD], tl.float32)
    for MASKED in tl.static_range(2):
        n_first = 0
        n_last = n_unmasked
        if MASKED:
            n_first = n_unmasked
            n_last = n_all
        for n in range(n_first, n_last):
            i_k = block_at(p_row, p_list, n, LISTS) * BK
            o_k = i_k + tl.arange(0, BK)
            b_k = load_rows(p_k, i_k, S, Hk * D, BK, D, BD, MASKED)
            b_v = load_rows(p_v, i_k, S, Hk * DV, BK, DV, BDV, MASKED)
            # (BQ, BK)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            _, b_ds, m_seen = tile_gradient(
                b_s, b_dp, b_lse[:, None], b_delta[:, None], o_q[:, None], o_k[None, :], seed, p_bias, p_q_seg,
                p_k_seg, p_q_pos, p_k_pos, p_mask, p_pattern, T, S, scale, soft_cap, keep_scale, threshold,
                s_bias_t, s_bias_s, s_mask_t, s_mask_s, s_pattern, MASKED, LO, HI, CHUNK, SEGMENTS, POSITIONS, MASK,
                PATTERN_Q, PATTERN_K, BIAS, CAPPED, LOGITS, PLAIN, DROPOUT,
            )  # fmt: skip
            b_dq = weighted_sum(b_ds, b_k, m_seen, b_dq, MASKED and GUARD, PRECISION)
    store_rows(p_dq, b_dq * scale, i_q, T, H * D, BQ, D, BD)
    if not GUARD:
        tl.store(p_bad + i_bh * n_rows + i_row + tl.arange(0, 1), has_nan(b_dq))


@triton.jit
def dkv_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    p_bias,
    p_q_seg,
    p_k_seg,
    p_q_pos,
    p_k_pos,
    p_mask,
    p_pattern,
    p_seeds,
    p_rows,
    p_index,
    p_flags,
    p_old_dk,
    p_old_dv,
    T,
    S,
    s_row,
    scale,
    soft_cap,
    keep_scale,
    threshold,
    s_bias_b,
    s_bias_h,
    s_bias_t,
    s_bias_s,
    s_q_seg,
    s_k_seg,
    s_q_pos,
    s_k_pos,
    s_mask_b,
    s_mask_h,
    s_mask_t,
    s_mask_s,
    s_pattern_b,
    s_pattern_h,
    s_pattern,
    s_rows_b,
    s_rows_h,
    s_index,
    n_flags,
    flag_rows,
    n_rows,
    p_dk,
    p_dv,
    p_bad,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    MASK: tl.constexpr,
    PATTERN_Q: tl.constexpr,
    PATTERN_K: tl.constexpr,
    BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    LOGITS: tl.constexpr,
    PLAIN: tl.constexpr,
    DROPOUT: tl.constexpr,
    LISTS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    GUARD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_row = tl.program_id(0)
    Hk = H // G
    i_b, i_hk = tl.program_id(1) // Hk, tl.program_id(1) % Hk
    i_k = i_row * BK
    if GUARD:
        if tl.load(p_flags + tl.program_id(1) * n_flags + i_k // flag_rows) == 0:
            return
    p_k += (i_b.to(tl.int64) * S * Hk + i_hk) * D
    p_v += (i_b.to(tl.int64) * S * Hk + i_hk) * DV
    p_dk += (i_b.to(tl.int64) * S * Hk + i_hk) * D
    p_dv += (i_b.to(tl.int64) * S * Hk + i_hk) * DV
    o_k = i_k + tl.arange(0, BK)
    # (BK, BD) and (BK, BDV)
    b_k = load_rows(p_k, i_k, S, Hk * D, BK, D, BD, True)
    b_v = load_rows(p_v, i_k, S, Hk * DV, BK, DV, BDV, True)
    b_dk = tl.zeros([BK, BD], tl.float32)
    b_dv = tl.zeros([BK, BDV], tl.float32)
    # the query heads of this key head, one after the other
    for g in range(G):
        i_h = i_hk * G + g
        i_bh = i_b * H + i_h
        p_qh = p_q + (i_b.to(tl.int64) * T * H + i_h) * D
        p_doh = p_dout + (i_b.to(tl.int64) * T * H + i_h) * DV
        o_head = i_bh.to(tl.int64) * (s_row // 16 * 16)  # it is a multiple of 16; now Triton knows
        p_bias_h, p_mask_h, p_pattern_h, p_q_seg_h, p_k_seg_h, p_q_pos_h, p_k_pos_h = head_pointers(
            p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, i_b, i_h, s_bias_b, s_bias_h,
            s_mask_b, s_mask_h, s_pattern_b, s_pattern_h, s_q_seg, s_k_seg, s_q_pos, s_k_pos,
        )  # fmt: skip
        p_row, p_list = schedule_row(p_rows, p_index, i_b * s_rows_b + i_h * s_rows_h + i_row, s_index, LISTS)
        n_unmasked, n_all = block_counts(p_row, LISTS)
        seed = tl.load(p_seeds + i_bh) if DROPOUT else tl.full([], 0, tl.uint32)
        for MASKED in tl.static_range(2):
            n_first = 0
            n_last = n_unmasked
            if MASKED:
                n_first = n_unmasked
                n_last = n_all
            for n in range(n_first, n_last):
                i_q = block_at(p_row, p_list, n, LISTS) * BQ
                o_q = i_q + tl.arange(0, BQ)
                b_q = load_rows(p_qh, i_q, T, H * D, BQ, D, BD, MASKED)
                b_do = load_rows(p_doh, i_q, T, H * DV, BQ, DV, BDV, MASKED)
                # (BK, BQ): transposed, so that the weights are the left operand of both products below
                b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
                b_dp = b_s  # without KEY, ds is not used
                if KEY:
                    b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
                # after the products, during which they would take registers
                b_lse = tl.load(p_lse + o_head + o_q)
                b_delta = tl.load(p_delta + o_head + o_q)
                b_kept, b_ds, m_seen = tile_gradient(
                    b_s, b_dp, b_lse[None, :], b_delta[None, :], o_q[None, :], o_k[:, None], seed, p_bias_h,
                    p_q_seg_h, p_k_seg_h, p_q_pos_h, p_k_pos_h, p_mask_h, p_pattern_h, T, S, scale, soft_cap,
                    keep_scale, threshold, s_bias_t, s_bias_s, s_mask_t, s_mask_s, s_pattern, MASKED, LO, HI, CHUNK,
                    SEGMENTS, POSITIONS, MASK, PATTERN_Q, PATTERN_K, BIAS, CAPPED, LOGITS, PLAIN, DROPOUT,
                )  # fmt: skip
                if VALUE:
                    b_dv = weighted_sum(b_kept, b_do, m_seen, b_dv, MASKED and GUARD, PRECISION)
                if KEY:
                    b_dk = weighted_sum(b_ds, b_q, m_seen, b_dk, MASKED and GUARD, PRECISION)
    if KEY:
        store_rows(p_dk, b_dk * scale, i_k, S, Hk * D, BK, D, BD)
    if VALUE:
        store_rows(p_dv, b_dv, i_k, S, Hk * DV, BK, DV, BDV)
    if not GUARD:
        o_bad = tl.program_id(1) * n_rows + i_row + tl.arange(0, 1)
        tl.store(p_bad + o_bad, tl.maximum(has_nan(b_dk), has_nan(b_dv)))


@triton.jit
def dbias_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    p_bias,
    p_q_seg,
    p_k_seg,
    p_q_pos,
    p_k_pos,
    p_mask,
    p_pattern,
    p_seeds,
    T,
    S,
    s_row,
    scale,
    soft_cap,
    keep_scale,
    threshold,
    s_bias_b,
    s_bias_h,
    s_bias_t,
    s_bias_s,
    s_q_seg,
    s_k_seg,
    s_q_pos,
    s_k_pos,
    s_mask_b,
    s_mask_h,
    s_mask_t,
    s_mask_s,
    s_pattern_b,
    s_pattern_h,
    s_pattern,
    B,
    n_bias_b,
    n_bias_h,
    n_bias_t,
    n_bias_s,
    p_dbias,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    LO: tl.constexpr,
    HI: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    MASK: tl.constexpr,
    PATTERN_Q: tl.constexpr,
    PATTERN_K: tl.constexpr,
    BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    LOGITS: tl.constexpr,
    PLAIN: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # the tile of the bias this program owns; along an axis that broadcasts, it sums over the whole of it
    i_bb, i_bh = tl.program_id(2) // n_bias_h, tl.program_id(2) % n_bias_h
    i_tile_q, i_tile_k = tl.program_id(0), tl.program_id(1)
    n_q = tl.cdiv(T, BQ) if n_bias_t == 1 else 1
    n_k = tl.cdiv(S, BK) if n_bias_s == 1 else 1
    n_b = B if n_bias_b == 1 else 1
    n_h = H if n_bias_h == 1 else 1
    Hk = H // G
    b_sum = tl.zeros([BQ, BK], tl.float32)
    for n in range(n_b * n_h * n_q * n_k):
        i_k = (i_tile_k + n % n_k) * BK
        i_q = (i_tile_q + n // n_k % n_q) * BQ
        i_h = i_bh + n // (n_k * n_q) % n_h
        i_b = i_bb + n // (n_k * n_q * n_h)
        o_q, o_k = i_q + tl.arange(0, BQ), i_k + tl.arange(0, BK)
        o_row = (i_b * H + i_h).to(tl.int64) * s_row + o_q
        b_lse = tl.load(p_lse + o_row)
        b_delta = tl.load(p_delta + o_row)
        b_q = load_rows(p_q + (i_b.to(tl.int64) * T * H + i_h) * D, i_q, T, H * D, BQ, D, BD, True)
        b_do = load_rows(p_dout + (i_b.to(tl.int64) * T * H + i_h) * DV, i_q, T, H * DV, BQ, DV, BDV, True)
        b_k = load_rows(p_k + (i_b.to(tl.int64) * S * Hk + i_h // G) * D, i_k, S, Hk * D, BK, D, BD, True)
        b_v = load_rows(p_v + (i_b.to(tl.int64) * S * Hk + i_h // G) * DV, i_k, S, Hk * DV, BK, DV, BDV, True)
        p_bias_h, p_mask_h, p_pattern_h, p_q_seg_h, p_k_seg_h, p_q_pos_h, p_k_pos_h = head_pointers(
            p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, i_b, i_h, s_bias_b, s_bias_h,
            s_mask_b, s_mask_h, s_pattern_b, s_pattern_h, s_q_seg, s_k_seg, s_q_pos, s_k_pos,
        )  # fmt: skip
        seed = tl.load(p_seeds + i_b * H + i_h) if DROPOUT else tl.full([], 0, tl.uint32)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        _, b_ds, _m = tile_gradient(
            b_s, b_dp, b_lse[:, None], b_delta[:, None], o_q[:, None], o_k[None, :], seed, p_bias_h, p_q_seg_h,
            p_k_seg_h, p_q_pos_h, p_k_pos_h, p_mask_h, p_pattern_h, T, S, scale, soft_cap, keep_scale, threshold,
            s_bias_t, s_bias_s, s_mask_t, s_mask_s, s_pattern, True, LO, HI, CHUNK, SEGMENTS, POSITIONS, MASK,
            PATTERN_Q, PATTERN_K, BIAS, CAPPED, LOGITS, PLAIN, DROPOUT,
        )  # fmt: skip
        b_sum += b_ds
    # (1, 1), (1, BK), (BQ, 1) or (BQ, BK) of it are the bias's own
    o_t, o_s = i_tile_q * BQ + tl.arange(0, BQ), i_tile_k * BK + tl.arange(0, BK)
    p_dbias += tl.program_id(2).to(tl.int64) * n_bias_t * n_bias_s
    if n_bias_t == 1 and n_bias_s == 1:
        tl.store(p_dbias + tl.arange(0, 1), tl.sum(tl.sum(b_sum, 1, keep_dims=True), 0))
    elif n_bias_t == 1:
        tl.store(p_dbias + o_s, tl.sum(b_sum, 0), mask=o_s < S)
    elif n_bias_s == 1:
        tl.store(p_dbias + o_t, tl.sum(b_sum, 1), mask=o_t < T)
    else:
        p_tile = p_dbias + o_t.to(tl.int64)[:, None] * n_bias_s + o_s[None, :]
        tl.store(p_tile, b_sum, mask=(o_t < T)[:, None] & (o_s < S)[None, :])
