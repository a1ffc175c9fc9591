"""What chunks of the delta rule need whatever the state is, all of them side by side: scores and inverses.

With decays of channels also queries, erase keys and keys as they meet the state: decayed from the beginning of the
chunk on, or to its end.
"""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import load_tile, store_tile
from ejkernel.kernels.linear.delta.triton.tiles import (
    chunk_coordinates,
    level_factors,
    load_channel_decays,
    to_end_power,
    to_start_power,
    unit_lower_inverse,
)
from ejkernel.kernels.linear.triton.tiles import chunk_decays, decay_power, decays_between, wide_dot


@triton.jit
def delta_prepare_kernel(
    p_q,
    p_k,
    p_g,
    p_gk,
    p_beta,
    p_erase,
    p_chunks,
    T,
    p_inverse,
    p_scores,
    p_reading,
    p_erasing,
    p_writing,
    p_keep,
    C: tl.constexpr,
):
    narrow: tl.constexpr = p_q.dtype.element_ty
    EXACT: tl.constexpr = narrow == tl.float32
    LEVELS: tl.constexpr = C.LEVELS
    i_b, i_h, _, i_r, i_start, n = chunk_coordinates(p_chunks, T, C)
    o_i = tl.arange(0, C.CHUNK)
    m_i = o_i < n
    o_token = i_b * T + i_start + o_i
    o_q = o_token * C.HK + i_h // (C.H // C.HK)
    o_v = o_token * C.H + i_h
    b_beta = tl.full([C.CHUNK], 1.0, tl.float32)
    if C.HAS_BETA:
        b_beta = tl.load(p_beta + o_v, mask=m_i, other=0.0).to(tl.float32)
    b_upto_power = tl.full([C.CHUNK], 1.0, tl.float32)
    b_end_power = tl.full([C.CHUNK], 1.0, tl.float32)
    if C.HAS_G:
        b_upto, b_upto_rest, b_all, b_all_rest, unit = chunk_decays(p_g + o_v, 0.0, 0.0, 0.0, m_i, EXACT, C)
        b_upto_power = decay_power(b_upto, b_upto_rest, unit, EXACT, C)
        b_end_power = decay_power(b_all - b_upto, b_all_rest - b_upto_rest, unit, EXACT, C)
    # (CHUNK, CHUNK): products of earlier keys with erase keys, and with queries
    b_l = tl.full([C.CHUNK, C.CHUNK], 0.0, tl.float32)
    b_s = tl.full([C.CHUNK, C.CHUNK], 0.0, tl.float32)
    b_diagonal = tl.full([C.CHUNK], 0.0, tl.float32)
    for i_k in range(0, C.K, C.BK):
        b_q = load_tile(p_q, o_q * C.K, m_i, C.K, C.BK, i_k)
        b_k = load_tile(p_k, o_q * C.K, m_i, C.K, C.BK, i_k)
        b_p = b_k
        if C.HAS_ERASE:
            b_p = load_tile(p_erase, o_v * C.K, m_i, C.K, C.BK, i_k)
        if C.HAS_GK:
            b_gates = load_channel_decays(p_gk, o_v, m_i, i_k, C.BK, C)
            b_start = to_start_power(b_gates, C.TERMS)
            b_end = to_end_power(b_gates, C.TERMS)
            b_decayed = b_p * b_start * b_upto_power[:, None]
            if not C.HAS_ERASE:
                b_decayed *= b_beta[:, None]
            store_tile(p_erasing, b_decayed, o_v * C.K, m_i, C.K, C.BK, i_k)
            store_tile(p_reading, b_q * b_start * b_upto_power[:, None], o_v * C.K, m_i, C.K, C.BK, i_k)
            store_tile(p_writing, b_k * b_end * b_end_power[:, None], o_v * C.K, m_i, C.K, C.BK, i_k)
            o_k = i_k + tl.arange(0, C.BK)
            b_keep = tl.sum(tl.where(o_i[:, None] == C.CHUNK - 1, b_start * b_upto_power[:, None], 0.0), 0)
            tl.store(p_keep + ((i_b * C.ROWS + i_r) * C.H + i_h) * C.K + o_k, b_keep, mask=o_k < C.K)
            b_diagonal += tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32), 1)
            for level in tl.static_range(LEVELS):
                m_pairs, b_x, b_y = level_factors(b_gates, C.CHUNK // 2 ** (level + 1), C.TERMS)
                b_key = tl.trans(b_k * b_y)
                b_s += tl.where(m_pairs, wide_dot(b_q * b_x, b_key, None, narrow, C), 0.0)
                b_l += tl.where(m_pairs, wide_dot(b_p * b_x, b_key, None, narrow, C), 0.0)
        else:
            b_s = wide_dot(b_q, tl.trans(b_k), b_s, narrow, C)
            b_l = wide_dot(b_p, tl.trans(b_k), b_l, narrow, C)
    if not C.HAS_ERASE:
        b_l *= b_beta[:, None]
    if C.HAS_GK:
        b_s += tl.where(o_i[:, None] == o_i[None, :], b_diagonal[:, None], 0.0)
    if C.HAS_G:
        b_between = decays_between(b_upto, b_upto_rest, unit, EXACT, C)
        b_s *= b_between
        b_l *= b_between
    # above the diagonal it could be infinite
    b_s = tl.where(o_i[:, None] >= o_i[None, :], b_s, 0.0)
    b_l = tl.where(o_i[:, None] > o_i[None, :], b_l, 0.0)
    store_tile(p_scores, b_s, o_v * C.CHUNK, m_i, C.CHUNK, C.CHUNK)
    store_tile(p_inverse, unit_lower_inverse(b_l, C), o_v * C.CHUNK, m_i, C.CHUNK, C.CHUNK)
