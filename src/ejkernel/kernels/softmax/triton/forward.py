"""The forward kernel: one program owns a block of query rows of one head and visits its scheduled key blocks.

It runs twice, the second time nan-safe (C.GUARD): see `kernels/common/triton_launch.py`.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import (
    LN_2,
    LOG2_E,
    block_counts,
    dropout_keep,
    guarded_dot,
    has_nan,
    load_rows,
    online_softmax,
    schedule_row,
    softmax_result,
    store_rows,
)
from ejkernel.kernels.softmax.triton.tiles import (
    capped_logits,
    finished_logits,
    head_options,
    head_rows,
    head_start,
    listed_keys,
    load_keys,
    tile_counts,
    visible,
    widened,
)


@triton.jit
def forward_kernel(
    p_q, p_k, p_v, p_bias, p_sinks, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_mask, p_pattern,
    p_ints, p_floats, p_seeds,
    p_rows, p_index, p_flags, p_old_out, p_old_lse, p_old_total, p_old_argmax,
    T, S, s_rows_b, s_rows_h, s_pattern_b, s_pattern_h,
    s_ints_b, s_ints_h, s_floats_b, s_floats_h, scale, soft_cap, keep_scale, threshold,
    p_out, p_lse, p_total, p_argmax, p_bad,
    C: tl.constexpr,
):  # fmt: skip
    # the last rows see most under a causal mask: longest work first
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
    p_k = head_rows(p_k, i_b, i_hk, S, C.HK, C.D, C.HEADS_FIRST)
    p_v = head_rows(p_v, i_b, i_hk, S, C.HK, C.DV, C.HEADS_FIRST)
    p_out = head_rows(p_out, i_b, i_h, T, C.H, C.DV, C.HEADS_FIRST)
    options = head_options(
        p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats, i_b, i_h, T, S,
        s_pattern_b, s_pattern_h, s_ints_b, s_ints_h, s_floats_b, s_floats_h, C,
    )  # fmt: skip
    i_list = i_b * s_rows_b + i_h * s_rows_h + i_row
    p_row, p_list = schedule_row(p_rows, p_index, i_list, tl.cdiv(S, C.LISTED), C.LISTS)
    n_free, n_listed = block_counts(p_row, C.LISTS)
    n_unmasked, n_all = tile_counts(n_free, n_listed, C)

    o_q = i_q + tl.arange(0, C.BQ)
    # (BQ, BD)
    b_q = widened(load_rows(p_q, i_q, T, C.Q_ROW, C.BQ, C.D, C.BD, C.TAIL_Q), C)
    # (BQ,) running maximum, in units of log2 unless there is a bias, and running sum
    b_max = tl.full([C.BQ], float("-inf"), tl.float32)
    b_sum = tl.full([C.BQ], 0.0, tl.float32)
    if C.SINKS:
        sink = tl.load(head_start(p_sinks, i_b, i_h, T, S, C.H, C.SINKS))
        if not C.BIAS:
            sink *= LOG2_E
        b_max = tl.full([C.BQ], 0.0, tl.float32) + sink
        b_sum += tl.where(sink > float("-inf"), 1.0, 0.0)
    b_best = tl.full([C.BQ], float("-inf"), tl.float32)
    b_arg = tl.full([C.BQ], -1, tl.int32)
    # (BQ, BDV)
    b_out = tl.full([C.BQ, C.BDV], 0.0, tl.float32)
    seed = tl.load(p_seeds + i_bh) if C.DROPOUT else tl.full([], 0, tl.uint32)

    for MASKED in tl.static_range(2):
        for n in range(n_unmasked if MASKED else 0, n_all if MASKED else n_unmasked):
            i_k, o_k = listed_keys(p_row, p_list, n, n_listed, S, C)
            # (BK, BD)
            b_k = widened(load_keys(p_k, i_k, o_k, S, C.K_ROW, C.D, C.BD, MASKED, C), C)
            # (BQ, BK)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION)
            unit = scale * LOG2_E
            if not C.PLAIN:
                b_s = capped_logits(b_s * scale, o_q[:, None], o_k[None, :], options, T, S, soft_cap, C)
                b_s = finished_logits(b_s, o_q[:, None], o_k[None, :], options, T, S, C)
                unit = LOG2_E
            if MASKED:
                m_seen = visible(o_q[:, None], o_k[None, :], options, T, S, C)
                b_s = tl.where(m_seen, b_s, float("-inf"))
            b_tile = tl.max(b_s, 1)
            if not C.BIAS:
                # unit is positive: the maximum may be scaled instead of every logit
                b_tile *= unit
            if C.ARGMAX:
                b_arg = tl.where(b_tile > b_best, i_k + tl.argmax(b_s, 1), b_arg)
                b_best = tl.maximum(b_best, b_tile)
            # a bias or a score function may hide all of a row too
            EMPTY: tl.constexpr = MASKED or C.BIAS or C.SCORE_RULE is not None
            b_max, b_base, b_shrink = online_softmax(b_max, b_tile, EMPTY, C.BIAS)
            if C.BIAS:
                # subtracted first: a product may be out of range, and its rounding is large where it is
                b_x = (b_s - b_base[:, None]) * LOG2_E
            else:
                b_x = b_s * unit - b_base[:, None]
            b_p = tl.exp2(b_x)
            b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
            b_out *= b_shrink[:, None]
            if C.DROPOUT:
                m_keep = dropout_keep(seed, o_q[:, None], o_k[None, :], threshold)
                b_p = tl.where(m_keep, b_p * keep_scale, 0.0)
            # (BK, BDV)
            b_v = widened(load_keys(p_v, i_k, o_k, S, C.V_ROW, C.DV, C.BDV, MASKED, C), C)
            if MASKED and C.GUARD:
                PRECISION: tl.constexpr = C.PRECISION
                b_out = guarded_dot(b_p.to(b_v.dtype), b_v, m_seen, b_out, PRECISION)
            else:
                b_out = tl.dot(b_p.to(b_v.dtype), b_v, b_out, input_precision=C.PRECISION)

    b_total, b_lse = softmax_result(b_max, b_sum, C.BIAS)
    if not C.BIAS:
        b_lse *= LN_2
    b_out /= b_total[:, None]
    store_rows(p_out, b_out, i_q, T, C.O_ROW, C.BQ, C.DV, C.BDV)
    o_row = i_bh.to(tl.int64) * T + o_q
    tl.store(p_lse + o_row, b_lse, mask=o_q < T)
    if C.ARGMAX:
        tl.store(p_total + o_row, b_sum, mask=o_q < T)
        tl.store(p_argmax + o_row, b_arg, mask=o_q < T)
    if not C.GUARD:
        tl.store(p_bad + i_bh * n_rows + i_row + tl.arange(0, 1), has_nan(b_out))
