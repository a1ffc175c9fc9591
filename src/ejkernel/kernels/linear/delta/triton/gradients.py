"""The gradients of a chunk's tokens, all chunks side by side, from the states before them and the gradients after."""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import load_tile, store_tile
from ejkernel.kernels.linear.delta.triton.tiles import (
    chunk_coordinates,
    level_factors,
    load_channel_decays,
    to_end_power,
    to_start_power,
)
from ejkernel.kernels.linear.triton.tiles import chunk_decays, decay_power, decays_between, wide_dot


@triton.jit
def delta_gradients_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_gk,
    p_beta,
    p_erase,
    p_write,
    p_dout,
    p_written,
    p_drest,
    p_states,
    p_dstates,
    p_chunks,
    T,
    scale,
    p_dq,
    p_dk,
    p_dv,
    p_dg,
    p_dgk,
    p_dbeta,
    p_derase,
    p_dwrite,
    C: tl.constexpr,
):
    narrow: tl.constexpr = p_q.dtype.element_ty
    EXACT: tl.constexpr = narrow == tl.float32
    LEVELS: tl.constexpr = C.LEVELS
    i_b, i_h, i_s, i_r, i_start, n = chunk_coordinates(p_chunks, T, C)
    o_i = tl.arange(0, C.CHUNK)
    m_i = o_i < n
    o_token = i_b * T + i_start + o_i
    o_q = o_token * C.HK + i_h // (C.H // C.HK)
    o_v = o_token * C.H + i_h
    i_first = i_s * C.BK
    o_k = i_first + tl.arange(0, C.BK)
    # what is a sum over channels of keys is one of each split: (B, T, H, SPLITS)
    o_split = o_v * C.SPLITS + i_s
    i_chunk = (i_b * C.ROWS + i_r) * C.H + i_h
    p_states += i_chunk * C.K * C.V
    p_dstates += i_chunk * C.K * C.V
    b_beta = tl.full([C.CHUNK], 1.0, tl.float32)
    if C.HAS_BETA:
        b_beta = tl.load(p_beta + o_v, mask=m_i, other=0.0).to(tl.float32)

    # of scores (CHUNK, CHUNK), of what meets the state (CHUNK, BK), and of the state's own decay
    b_ds = tl.full([C.CHUNK, C.CHUNK], 0.0, tl.float32)
    b_dl = tl.full([C.CHUNK, C.CHUNK], 0.0, tl.float32)
    b_dq = tl.full([C.CHUNK, C.BK], 0.0, tl.float32)
    b_dp = tl.full([C.CHUNK, C.BK], 0.0, tl.float32)
    b_dk = tl.full([C.CHUNK, C.BK], 0.0, tl.float32)
    b_kept = tl.full([C.BK], 0.0, tl.float32)
    b_dbeta = tl.full([C.CHUNK], 0.0, tl.float32)
    for i_v in range(0, C.V, C.BV):
        o_c = i_v + tl.arange(0, C.BV)
        o_state = o_k[:, None] * C.V + o_c[None, :]
        m_state = (o_k < C.K)[:, None] & (o_c < C.V)[None, :]
        b_h = tl.load(p_states + o_state, mask=m_state, other=0.0)
        b_dh = tl.load(p_dstates + o_state, mask=m_state, other=0.0)
        b_do = load_tile(p_dout, o_v * C.V, m_i, C.V, C.BV, i_v)
        b_d = load_tile(p_written, o_v * C.V, m_i, C.V, C.BV, i_v)
        b_dr = load_tile(p_drest, o_v * C.V, m_i, C.V, C.BV, i_v)
        b_ds = wide_dot(b_do, tl.trans(b_d), b_ds, narrow, C)
        b_dl = wide_dot(b_dr, tl.trans(b_d), b_dl, narrow, C)
        b_dq = wide_dot(b_do, tl.trans(b_h), b_dq, narrow, C)
        b_dp = wide_dot(b_dr, tl.trans(b_h), b_dp, narrow, C)
        b_dk = wide_dot(b_d, tl.trans(b_dh), b_dk, narrow, C)
        b_kept += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), 1)
        if i_s == 0:
            b_v = load_tile(p_v, o_v * C.V, m_i, C.V, C.BV, i_v).to(tl.float32)
            b_rest = b_dr.to(tl.float32)
            if C.HAS_WRITE:
                b_w = load_tile(p_write, o_v * C.V, m_i, C.V, C.BV, i_v).to(tl.float32)
                store_tile(p_dv, b_rest * b_w, o_v * C.V, m_i, C.V, C.BV, i_v)
                store_tile(p_dwrite, b_rest * b_v, o_v * C.V, m_i, C.V, C.BV, i_v)
            else:
                store_tile(p_dv, b_rest * b_beta[:, None], o_v * C.V, m_i, C.V, C.BV, i_v)
                b_dbeta += tl.sum(b_rest * b_v, 1)
    b_ds = tl.where(o_i[:, None] >= o_i[None, :], b_ds * scale, 0.0)
    b_dl = tl.where(o_i[:, None] > o_i[None, :], -b_dl, 0.0)
    b_dq *= scale
    b_dp = -b_dp

    b_q = load_tile(p_q, o_q * C.K, m_i, C.K, C.BK, i_first)
    b_k = load_tile(p_k, o_q * C.K, m_i, C.K, C.BK, i_first)
    b_p = b_k.to(tl.float32)
    if C.HAS_ERASE:
        b_p = load_tile(p_erase, o_v * C.K, m_i, C.K, C.BK, i_first).to(tl.float32)
    else:
        b_p *= b_beta[:, None]
    b_diagonal = tl.sum(tl.where(o_i[:, None] == o_i[None, :], b_ds, 0.0), 1)
    b_ds = tl.where(o_i[:, None] > o_i[None, :], b_ds, 0.0)
    if C.HAS_G:
        b_upto, b_upto_rest, b_all, b_all_rest, unit = chunk_decays(p_g + o_v, 0.0, 0.0, 0.0, m_i, EXACT, C)
        b_between = decays_between(b_upto, b_upto_rest, unit, EXACT, C)
        b_ds = tl.where(o_i[:, None] > o_i[None, :], b_ds * b_between, 0.0)
        b_dl = tl.where(o_i[:, None] > o_i[None, :], b_dl * b_between, 0.0)
        b_upto_power = decay_power(b_upto, b_upto_rest, unit, EXACT, C)[:, None]
        b_dq *= b_upto_power
        b_dp *= b_upto_power
        b_dk *= decay_power(b_all - b_upto, b_all_rest - b_upto_rest, unit, EXACT, C)[:, None]
        b_kept *= decay_power(b_all, b_all_rest, unit, EXACT, C)
    if C.HAS_GK:
        b_gates = load_channel_decays(p_gk, o_v, m_i, i_first, C.BK, C)
        b_start = to_start_power(b_gates, C.TERMS)
        b_dq *= b_start
        b_dp *= b_start
        b_dk *= to_end_power(b_gates, C.TERMS)
        b_kept *= tl.sum(tl.where(o_i[:, None] == C.CHUNK - 1, b_start, 0.0), 0)
    # (BK): what the last token's decay gets from all that reaches the end of the chunk
    b_last = b_kept + tl.sum(b_k * b_dk, 0)
    if C.HAS_GK:
        for level in tl.static_range(LEVELS):
            m_pairs, b_x, b_y = level_factors(b_gates, C.CHUNK // 2 ** (level + 1), C.TERMS)
            b_pairs = tl.where(m_pairs, b_ds, 0.0)
            b_pairs_l = tl.where(m_pairs, b_dl, 0.0)
            b_key = b_k * b_y
            b_dq += b_x * wide_dot(b_pairs, b_key, None, narrow, C)
            b_dp += b_x * wide_dot(b_pairs_l, b_key, None, narrow, C)
            b_sum = wide_dot(tl.trans(b_pairs), b_q * b_x, None, narrow, C)
            b_dk += b_y * wide_dot(tl.trans(b_pairs_l), b_p * b_x, b_sum, narrow, C)
    else:
        b_dq = wide_dot(b_ds, b_k, b_dq, narrow, C)
        b_dp = wide_dot(b_dl, b_k, b_dp, narrow, C)
        b_dk = wide_dot(tl.trans(b_ds), b_q, b_dk, narrow, C)
        b_dk = wide_dot(tl.trans(b_dl), b_p, b_dk, narrow, C)
    if C.HAS_G or C.HAS_GK:
        # what a token gives itself is not decayed, and left out
        b_dgates = b_q * b_dq + b_p * b_dp - b_k * b_dk
        b_dgates += tl.where((o_i == n - 1)[:, None], b_last[None, :], 0.0)
        if C.HAS_G:
            tl.store(p_dg + o_split, tl.cumsum(tl.sum(b_dgates, 1), 0, reverse=True), mask=m_i)
        if C.HAS_GK:
            store_tile(p_dgk, tl.cumsum(b_dgates, 0, reverse=True), o_v * C.K, m_i, C.K, C.BK, i_first)
    b_dq += b_diagonal[:, None] * b_k
    b_dk += b_diagonal[:, None] * b_q
    if C.HAS_ERASE:
        store_tile(p_derase, b_dp, o_v * C.K, m_i, C.K, C.BK, i_first)
    else:
        b_dbeta += tl.sum(b_dp * b_k, 1)
        b_dk += b_dp * b_beta[:, None]
    if C.HAS_BETA:
        tl.store(p_dbeta + o_split, b_dbeta, mask=m_i)
    store_tile(p_dq, b_dq, o_v * C.K, m_i, C.K, C.BK, i_first)
    store_tile(p_dk, b_dk, o_v * C.K, m_i, C.K, C.BK, i_first)
