"""Tiles of linear attention in Triton: tokens in the order of the walk, and the decays between them."""

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E
from ejkernel.kernels.linear.chunks import LEAST_DECAY, NEAR_DECAY

_NEAR_DECAY = tl.constexpr(NEAR_DECAY)
_LEAST_DECAY = tl.constexpr(LEAST_DECAY)
# sums of whole multiples of 2**-16 are exact in 32 bits, for the decays of a chunk of 128 tokens
_STEPS = tl.constexpr(2.0**16)
_TF32_BITS = tl.constexpr(-(1 << 13))


@triton.jit
def place(p_pieces, T, SEGMENT, ROWS, PIECES_BATCHED: tl.constexpr, PACKED: tl.constexpr, H, BLOCKS):
    """Of a program: batch, head and block of channels; its piece's first token, length, slot among states, sequence."""
    i = tl.program_id(0)
    i_c = i % BLOCKS
    i_h = (i // BLOCKS) % H
    i_r = (i // (BLOCKS * H)) % ROWS
    i_b = (i // (BLOCKS * H * ROWS)).to(tl.int64)
    if PACKED:
        p_piece = p_pieces + (i_b * PIECES_BATCHED * ROWS + i_r) * 4
        i_start = tl.load(p_piece)
        i_end = tl.load(p_piece + 1)
        # of padding it is -1
        i_slot = tl.load(p_piece + 2)
        i_n = tl.load(p_piece + 3)
    else:
        i_start = i_r * SEGMENT
        i_end = tl.minimum(i_start + SEGMENT, T)
        i_slot = i_r
        i_n = 0
    return i_b, i_h, i_c, i_start, i_end - i_start, i_slot, i_n


@triton.jit
def load_tile(p, o_t, m_t, C: tl.constexpr, BC: tl.constexpr, i_first):
    """(R, BC): channels i_first .. i_first + BC of C, of the tokens o_t (times heads) behind p; zeros for others."""
    o_c = i_first + tl.arange(0, BC)
    p_tile = p + (o_t[:, None] * C + o_c[None, :])
    if C % BC == 0:
        return tl.load(p_tile, mask=m_t[:, None], other=0.0)
    else:
        return tl.load(p_tile, mask=m_t[:, None] & (o_c < C)[None, :], other=0.0)


@triton.jit
def store_tile(p, b_x, o_t, m_t, C: tl.constexpr, BC: tl.constexpr, i_first):
    """The reverse of load_tile."""
    o_c = i_first + tl.arange(0, BC)
    p_tile = p + (o_t[:, None] * C + o_c[None, :])
    tl.store(p_tile, b_x.to(p.dtype.element_ty), mask=m_t[:, None] & (o_c < C)[None, :])


@triton.jit
def state_offsets(A: tl.constexpr, C: tl.constexpr, BA: tl.constexpr, BC: tl.constexpr, i_first, TURNED: tl.constexpr):
    """Offsets and mask of a tile (BA, BC) of a state (A, C), or (BC, BA) of it turned."""
    o_a = along(tl.arange(0, BA), TURNED)
    o_c = along(i_first + tl.arange(0, BC), not TURNED)
    return o_a * C + o_c, (o_a < A) & (o_c < C)


@triton.jit
def along(b_x, SECOND: tl.constexpr):
    """A vector along the first dimension of a tile, or the second."""
    return b_x[None, :] if SECOND else b_x[:, None]


@triton.jit
def chunk_decays(
    p_g,
    b_gamma,
    b_count,
    n_count,
    m_l,
    HAS_G: tl.constexpr,
    HAS_GAMMA: tl.constexpr,
    LATE: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A head's log decays between the beginning of a chunk and each token (R,), and all of them, in powers of two.

    As numbers of units, rests, and the unit. Differences of numbers are exact: of decays that all tokens share they are
    counts, `b_count` up to each token and `n_count` in all; else, if EXACT, whole multiples of a small power of two.
    """
    if not HAS_G:
        if LATE:
            b_count = tl.maximum(b_count - 1.0, 0.0)
        return b_count, 0.0, n_count, 0.0, tl.maximum(b_gamma, _LEAST_DECAY) * LOG2_E
    else:
        b_g = tl.load(p_g, mask=m_l, other=0.0).to(tl.float32)
        if HAS_GAMMA:
            # padding does not decay the state
            b_g += tl.where(m_l, b_gamma, 0.0)
        b_g = tl.maximum(b_g, _LEAST_DECAY) * LOG2_E
        b_whole = b_g
        if EXACT:
            b_whole = tl.floor(b_g * _STEPS).to(tl.int32)
            b_g -= b_whole.to(tl.float32) / _STEPS
        b_upto, b_upto_rest = tl.cumsum(b_whole, 0), tl.cumsum(b_g, 0)
        if LATE:
            b_upto, b_upto_rest = b_upto - b_whole, b_upto_rest - b_g
        return b_upto, b_upto_rest, tl.sum(b_whole, 0), tl.sum(b_g, 0), 1.0 / _STEPS


@triton.jit
def decay_exponent(b_whole, b_rest, unit, HAS_G: tl.constexpr, EXACT: tl.constexpr):
    """The logarithm of a decay, to the base of two."""
    if not HAS_G:
        return b_whole * unit
    elif EXACT:
        return b_whole.to(tl.float32) * unit + b_rest
    else:
        return b_rest


@triton.jit
def decay_power(b_whole, b_rest, unit, HAS_G: tl.constexpr, EXACT: tl.constexpr):
    return tl.exp2(decay_exponent(b_whole, b_rest, unit, HAS_G, EXACT))


@triton.jit
def decays_between(b_upto, b_rest, unit, HAS_G: tl.constexpr, EXACT: tl.constexpr):
    """(R, R): the decay from each token j to each i."""
    if HAS_G:
        b_rest = b_rest[:, None] - b_rest[None, :]
    return decay_power(b_upto[:, None] - b_upto[None, :], b_rest, unit, HAS_G, EXACT)


@triton.jit
def decayed_states(b_h, b_aged, b_decay, AGED: tl.constexpr):
    """A state and, where there is one, that of an aged walk."""
    if AGED:
        b_aged = b_aged * b_decay
    return b_h * b_decay, b_aged


@triton.jit
def load_gates(p, o_t, m_t, C: tl.constexpr, BC: tl.constexpr, i_first):
    """Log decays of every channel, cut off where four of them would pass the range of float32: see chunks.py."""
    b_gates = load_tile(p, o_t, m_t, C, BC, i_first)
    return tl.where(b_gates > _NEAR_DECAY, b_gates, tl.full(b_gates.shape, _NEAR_DECAY, b_gates.dtype))


@triton.jit
def _matrix_sums(b_matrix, b_gates, PARTS: tl.constexpr):
    """(R, BC): a matrix of small whole numbers times gates, as exact as float32: wide gates in parts of 8 bits."""
    if PARTS == 1:
        return tl.dot(b_matrix.to(b_gates.dtype), b_gates)
    else:
        b_matrix = b_matrix.to(tl.bfloat16)
        b_part = b_gates.to(tl.bfloat16)
        b_sum = tl.dot(b_matrix, b_part)
        for _ in tl.static_range(PARTS - 1):
            b_gates = b_gates - b_part.to(tl.float32)
            b_part = b_gates.to(tl.bfloat16)
            b_sum = tl.dot(b_matrix, b_part, b_sum)
        return b_sum


@triton.jit
def middle_sums(b_gates, step, PARTS: tl.constexpr):
    """(R, BC): the log decays, in powers of two, from the middle of a chunk of `step` tokens to each."""
    CHUNK: tl.constexpr = b_gates.shape[0]
    o_r = tl.arange(0, CHUNK)[:, None]
    o_l = tl.arange(0, CHUNK)[None, :]
    i_middle = step // 2
    m_behind = (o_l <= o_r) & (o_l >= i_middle)
    m_before = (o_l > o_r) & (o_l < i_middle)
    b_reach = tl.where(m_behind, 1.0, 0.0) - tl.where(m_before, 1.0, 0.0)
    return _matrix_sums(b_reach, b_gates, PARTS) * LOG2_E


@triton.jit
def wide_dot(b_x, b_y, b_sum, narrow: tl.constexpr, PRECISION: tl.constexpr):
    """b_sum + a product of factors rounded to a dtype, except that float16 may not hold them."""
    if narrow == tl.float16:
        return tl.dot(b_x.to(tl.float32), b_y.to(tl.float32), b_sum, input_precision="tf32")
    else:
        return tl.dot(b_x.to(narrow), b_y.to(narrow), b_sum, input_precision=PRECISION)


@triton.jit
def rounded_factor(b_x, narrow: tl.constexpr):
    """A float32 factor as wide_dot multiplies it, so that what rounding loses is known and can be added.

    For float16 that is tf32, with 10 bits of a fraction. GPUs may cut off the others or round: here they are cut off.
    """
    if narrow == tl.float16:
        return (b_x.to(tl.int32, bitcast=True) & _TF32_BITS).to(tl.float32, bitcast=True)
    else:
        return b_x.to(narrow)


@triton.jit
def state_dot(b_a, b_h, b_sum, TURNED: tl.constexpr, narrow: tl.constexpr, PRECISION: tl.constexpr):
    """b_sum + a h."""
    return wide_dot(b_a, tl.trans(b_h) if TURNED else b_h, b_sum, narrow, PRECISION)


@triton.jit
def outer_dot(b_b, b_c, b_h, TURNED: tl.constexpr, narrow: tl.constexpr, PRECISION: tl.constexpr):
    """h + b^T c."""
    if TURNED:
        b_b, b_c = b_c, b_b
    return wide_dot(tl.trans(b_b), b_c, b_h, narrow, PRECISION)
