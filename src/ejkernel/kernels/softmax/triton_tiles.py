"""What one tile of softmax attention is in Triton: its logits and its mask, in either orientation."""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import tanh


@triton.jit
def head_pointers(
    p_bias,
    p_mask,
    p_pattern,
    p_q_seg,
    p_k_seg,
    p_q_pos,
    p_k_pos,
    i_b,
    i_h,
    s_bias_b,
    s_bias_h,
    s_mask_b,
    s_mask_h,
    s_pattern_b,
    s_pattern_h,
    s_q_seg,
    s_k_seg,
    s_q_pos,
    s_k_pos,
):
    """The options of one (batch, head); a stride of 0 broadcasts."""
    i_b, i_h = i_b.to(tl.int64), i_h.to(tl.int64)
    return (
        p_bias + i_b * s_bias_b + i_h * s_bias_h,
        p_mask + i_b * s_mask_b + i_h * s_mask_h,
        p_pattern + i_b * s_pattern_b + i_h * s_pattern_h,
        p_q_seg + i_b * s_q_seg,
        p_k_seg + i_b * s_k_seg,
        p_q_pos + i_b * s_q_pos,
        p_k_pos + i_b * s_k_pos,
    )


@triton.jit
def visible(
    o_q,
    o_k,
    p_q_seg,
    p_k_seg,
    p_q_pos,
    p_k_pos,
    p_mask,
    p_pattern,
    T,
    S,
    s_mask_t,
    s_mask_s,
    s_pattern,
    LO: tl.constexpr,
    HI: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    POSITIONS: tl.constexpr,
    MASK: tl.constexpr,
    PATTERN_Q: tl.constexpr,
    PATTERN_K: tl.constexpr,
):
    """Which pairs are visible, for query and key indices that broadcast against each other."""
    m_q, m_k = o_q < T, o_k < S
    m_seen = m_q & m_k
    if POSITIONS:
        b_qp = tl.load(p_q_pos + o_q, mask=m_q, other=0)
        b_kp = tl.load(p_k_pos + o_k, mask=m_k, other=0)
    else:
        b_qp = o_q + (S - T)
        b_kp = o_k
    if LO is not None:
        m_seen &= b_kp - b_qp >= LO
    if HI is not None:
        m_seen &= b_kp - b_qp <= HI
    if CHUNK is not None:
        # floor division: positions before the first key are negative
        b_qc = tl.where(b_qp >= 0, b_qp, b_qp - (CHUNK - 1)) // CHUNK
        b_kc = tl.where(b_kp >= 0, b_kp, b_kp - (CHUNK - 1)) // CHUNK
        m_seen &= b_qc == b_kc
    if SEGMENTS:
        b_qs = tl.load(p_q_seg + o_q, mask=m_q, other=-1)
        b_ks = tl.load(p_k_seg + o_k, mask=m_k, other=-2)
        m_seen &= (b_qs == b_ks) & (b_qs >= 0)
    if MASK:
        b_mask = tl.load(p_mask + o_q.to(tl.int64) * s_mask_t + o_k * s_mask_s, mask=m_q & m_k, other=0)
        m_seen &= b_mask != 0
    if PATTERN_Q is not None:
        b_cells = tl.load(p_pattern + (o_q // PATTERN_Q) * s_pattern + o_k // PATTERN_K, mask=m_q & m_k, other=0)
        m_seen &= b_cells != 0
    return m_seen


@triton.jit
def finished_logits(
    b_s,
    o_q,
    o_k,
    p_bias,
    T,
    S,
    s_bias_t,
    s_bias_s,
    soft_cap,
    BIAS: tl.constexpr,
    CAPPED: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """Scaled logits after bias, soft cap and rounding; LOGITS is the dtype they are rounded to, or None."""
    if BIAS:
        m_in = (o_q < T) & (o_k < S)
        b_s += tl.load(p_bias + o_q.to(tl.int64) * s_bias_t + o_k * s_bias_s, mask=m_in, other=0.0).to(tl.float32)
    if CAPPED:
        b_s = soft_cap * tanh(b_s / soft_cap)
    if LOGITS is not None:
        b_s = b_s.to(LOGITS).to(tl.float32)
    return b_s
