"""The states of the delta rule from chunk to chunk, and the gradients of states back again."""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E, load_tile, store_tile
from ejkernel.kernels.linear.delta.triton.tiles import sequence_coordinates
from ejkernel.kernels.linear.triton.tiles import chunk_decays, decay_power, wide_dot


@triton.jit
def delta_forward_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_erase,
    p_write,
    p_start,
    p_keep,
    p_inverse,
    p_scores,
    p_sequences,
    T,
    scale,
    p_out,
    p_state,
    p_states,
    p_written,
    C: tl.constexpr,
):
    """A program has BV channels of values of one sequence: their state (BK, BV) stays in registers, in float32.

    With decays of channels queries, keys and erase keys come decayed, one of each head of values.
    """
    narrow: tl.constexpr = p_v.dtype.element_ty
    EXACT: tl.constexpr = narrow == tl.float32
    i_b, i_h, i_v, i_n, i_start, n, i_row = sequence_coordinates(p_sequences, T, C)
    i_first = i_v * C.BV
    o_i = tl.arange(0, C.CHUNK)
    o_k = tl.arange(0, C.BK)
    o_c = i_first + tl.arange(0, C.BV)
    o_state = o_k[:, None] * C.V + o_c[None, :]
    m_state = (o_k < C.K)[:, None] & (o_c < C.V)[None, :]
    i_state = ((i_b * C.SEQUENCES + i_n) * C.H + i_h) * C.K * C.V
    # [BK, BV]
    b_h = tl.full([C.BK, C.BV], 0.0, tl.float32)
    if C.HAS_START:
        b_h = tl.load(p_start + i_state + o_state, mask=m_state, other=0.0)
    for i in tl.range(0, n, C.CHUNK, num_stages=C.STAGES):
        m_i = i + o_i < n
        o_token = i_b * T + i_start + i + o_i
        o_v = o_token * C.H + i_h
        o_q = o_v if C.HAS_GK else o_token * C.HK + i_h // (C.H // C.HK)
        i_chunk = (i_b * C.ROWS + i_row + i // C.CHUNK) * C.H + i_h
        b_k = load_tile(p_k, o_q * C.K, m_i, C.K, C.BK)
        b_p = b_k
        if C.HAS_ERASE or C.HAS_GK:
            b_p = load_tile(p_erase, o_v * C.K, m_i, C.K, C.BK)
        b_v = load_tile(p_v, o_v * C.V, m_i, C.V, C.BV, i_first)
        b_inverse = load_tile(p_inverse, o_v * C.CHUNK, m_i, C.CHUNK, C.CHUNK)
        b_erased = wide_dot(b_p, b_h, None, narrow, C)
        if C.HAS_BETA:
            b_beta = tl.load(p_beta + o_v, mask=m_i, other=0.0).to(tl.float32)
            if not C.HAS_ERASE and not C.HAS_GK:
                b_erased *= b_beta[:, None]
        if C.HAS_G:
            b_upto, b_upto_rest, b_all, b_all_rest, unit = chunk_decays(p_g + o_v, 0.0, 0.0, 0.0, m_i, EXACT, C)
            b_upto_power = decay_power(b_upto, b_upto_rest, unit, EXACT, C)
            b_erased *= b_upto_power[:, None]
        b_d = b_v.to(tl.float32)
        if C.HAS_WRITE:
            b_d *= load_tile(p_write, o_v * C.V, m_i, C.V, C.BV, i_first).to(tl.float32)
        elif C.HAS_BETA:
            b_d *= b_beta[:, None]
        # what is written, once the state and the tokens before in the chunk are erased: [CHUNK, BV]
        b_d = wide_dot(b_inverse, b_d - b_erased, None, narrow, C)
        if C.WITH_STATES:
            store_tile(p_written, b_d, o_v * C.V, m_i, C.V, C.BV, i_first)
            tl.store(p_states + i_chunk * C.K * C.V + o_state, b_h.to(p_states.dtype.element_ty), mask=m_state)
        if C.WITH_OUT:
            b_q = load_tile(p_q, o_q * C.K, m_i, C.K, C.BK)
            b_scores = load_tile(p_scores, o_v * C.CHUNK, m_i, C.CHUNK, C.CHUNK)
            b_o = wide_dot(b_q, b_h, None, narrow, C)
            if C.HAS_G:
                b_o *= b_upto_power[:, None]
            b_o = wide_dot(b_scores, b_d, b_o, narrow, C)
            store_tile(p_out, b_o * scale, o_v * C.V, m_i, C.V, C.BV, i_first)
        if C.HAS_GK:
            b_keep = tl.load(p_keep + i_chunk * C.K + o_k, mask=o_k < C.K, other=0.0)
            b_h *= b_keep[:, None]
        elif C.HAS_G:
            b_h *= decay_power(b_all, b_all_rest, unit, EXACT, C)
            b_d *= decay_power(b_all - b_upto, b_all_rest - b_upto_rest, unit, EXACT, C)[:, None]
        b_h = wide_dot(tl.trans(b_k), b_d, b_h, narrow, C)
    if C.WITH_STATE:
        tl.store(p_state + i_state + o_state, b_h, mask=m_state)


@triton.jit
def delta_backward_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_erase,
    p_dout,
    p_dstate,
    p_keep,
    p_inverse,
    p_scores,
    p_sequences,
    T,
    scale,
    p_drest,
    p_dstates,
    p_dstart,
    C: tl.constexpr,
):
    """The gradients of states, from the last chunk to the first, and those of what is left to write (`p_drest`)."""
    narrow: tl.constexpr = p_dout.dtype.element_ty
    EXACT: tl.constexpr = narrow == tl.float32
    i_b, i_h, i_v, i_n, i_start, n, i_row = sequence_coordinates(p_sequences, T, C)
    i_first = i_v * C.BV
    o_i = tl.arange(0, C.CHUNK)
    o_k = tl.arange(0, C.BK)
    o_c = i_first + tl.arange(0, C.BV)
    o_state = o_k[:, None] * C.V + o_c[None, :]
    m_state = (o_k < C.K)[:, None] & (o_c < C.V)[None, :]
    i_state = ((i_b * C.SEQUENCES + i_n) * C.H + i_h) * C.K * C.V
    # [BK, BV]
    b_dh = tl.full([C.BK, C.BV], 0.0, tl.float32)
    if C.HAS_DSTATE:
        b_dh = tl.load(p_dstate + i_state + o_state, mask=m_state, other=0.0)
    n_chunks = tl.cdiv(n, C.CHUNK)
    for i_back in tl.range(0, n_chunks, num_stages=C.STAGES):
        i = n_chunks - 1 - i_back
        m_i = i * C.CHUNK + o_i < n
        o_token = i_b * T + i_start + i * C.CHUNK + o_i
        o_v = o_token * C.H + i_h
        o_q = o_v if C.HAS_GK else o_token * C.HK + i_h // (C.H // C.HK)
        i_chunk = (i_b * C.ROWS + i_row + i) * C.H + i_h
        b_q = load_tile(p_q, o_q * C.K, m_i, C.K, C.BK)
        b_k = load_tile(p_k, o_q * C.K, m_i, C.K, C.BK)
        b_p = b_k
        if C.HAS_ERASE or C.HAS_GK:
            b_p = load_tile(p_erase, o_v * C.K, m_i, C.K, C.BK)
        b_do = load_tile(p_dout, o_v * C.V, m_i, C.V, C.BV, i_first)
        b_inverse = load_tile(p_inverse, o_v * C.CHUNK, m_i, C.CHUNK, C.CHUNK)
        b_scores = load_tile(p_scores, o_v * C.CHUNK, m_i, C.CHUNK, C.CHUNK)
        tl.store(p_dstates + i_chunk * C.K * C.V + o_state, b_dh.to(p_dstates.dtype.element_ty), mask=m_state)
        b_dd = wide_dot(b_k, b_dh, None, narrow, C)
        if C.HAS_G:
            b_upto, b_upto_rest, b_all, b_all_rest, unit = chunk_decays(p_g + o_v, 0.0, 0.0, 0.0, m_i, EXACT, C)
            b_upto_power = decay_power(b_upto, b_upto_rest, unit, EXACT, C)
            b_dd *= decay_power(b_all - b_upto, b_all_rest - b_upto_rest, unit, EXACT, C)[:, None]
        b_do = b_do.to(tl.float32) * scale
        b_dd = wide_dot(tl.trans(b_scores), b_do, b_dd, narrow, C)
        b_dr = wide_dot(tl.trans(b_inverse), b_dd, None, narrow, C)
        store_tile(p_drest, b_dr, o_v * C.V, m_i, C.V, C.BV, i_first)
        if C.HAS_GK:
            b_keep = tl.load(p_keep + i_chunk * C.K + o_k, mask=o_k < C.K, other=0.0)
            b_dh *= b_keep[:, None]
        else:
            if C.HAS_G:
                b_dh *= decay_power(b_all, b_all_rest, unit, EXACT, C)
                b_do *= b_upto_power[:, None]
                b_dr *= b_upto_power[:, None]
            if C.HAS_BETA and not C.HAS_ERASE:
                b_dr *= tl.load(p_beta + o_v, mask=m_i, other=0.0).to(tl.float32)[:, None]
        b_dh = wide_dot(tl.trans(b_q), b_do, b_dh, narrow, C)
        b_dh = wide_dot(tl.trans(b_p), -b_dr, b_dh, narrow, C)
    if C.WITH_DSTART:
        tl.store(p_dstart + i_state + o_state, b_dh, mask=m_state)


@triton.jit
def delta_token_kernel(
    p_q, p_k, p_v, p_g, p_gk, p_beta, p_erase, p_write, p_start, p_sequences, T, scale, p_out, p_state, C: tl.constexpr
):
    """Token by token, for a few of them: the states are read and written once."""
    i_b, i_h, i_v, i_n, i_start, n, _ = sequence_coordinates(p_sequences, T, C)
    o_k = tl.arange(0, C.BK)
    o_c = i_v * C.BV + tl.arange(0, C.BV)
    m_k = o_k < C.K
    m_v = o_c < C.V
    o_state = ((i_b * C.SEQUENCES + i_n) * C.H + i_h) * C.K * C.V + o_k[:, None] * C.V + o_c[None, :]
    m_state = m_k[:, None] & m_v[None, :]
    # [BK, BV]
    b_h = tl.full([C.BK, C.BV], 0.0, tl.float32)
    if C.HAS_START:
        b_h = tl.load(p_start + o_state, mask=m_state, other=0.0)
    for i in range(n):
        i_token = i_b * T + i_start + i
        i_q = i_token * C.HK + i_h // (C.H // C.HK)
        i_t = i_token * C.H + i_h
        # [BK], [BK], [BV]
        b_q = tl.load(p_q + i_q * C.K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(p_k + i_q * C.K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(p_v + i_t * C.V + o_c, mask=m_v, other=0.0).to(tl.float32)
        b_beta = 1.0
        if C.HAS_BETA:
            b_beta = tl.load(p_beta + i_t).to(tl.float32)
        b_p = b_k * b_beta
        if C.HAS_ERASE:
            b_p = tl.load(p_erase + i_t * C.K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_w = b_beta
        if C.HAS_WRITE:
            b_w = tl.load(p_write + i_t * C.V + o_c, mask=m_v, other=0.0).to(tl.float32)
        if C.HAS_G:
            b_h *= tl.exp2(tl.load(p_g + i_t).to(tl.float32) * LOG2_E)
        if C.HAS_GK:
            b_gk = tl.load(p_gk + i_t * C.K + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_h *= tl.exp2(b_gk * LOG2_E)[:, None]
        b_d = b_w * b_v - tl.sum(b_p[:, None] * b_h, 0)
        b_h += b_k[:, None] * b_d[None, :]
        if C.WITH_OUT:
            b_o = tl.sum(b_q[:, None] * b_h, 0) * scale
            tl.store(p_out + i_t * C.V + o_c, b_o.to(p_out.dtype.element_ty), mask=m_v)
    if C.WITH_STATE:
        tl.store(p_state + o_state, b_h, mask=m_state)
