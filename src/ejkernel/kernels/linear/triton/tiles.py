"""Tiles of linear attention in Triton: tokens in the order of a scan, and the decays between them."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E, load_tile
from ejkernel.kernels.linear.chunks import LEAST_DECAY, NEAR_DECAY

_NEAR_DECAY = tl.constexpr(NEAR_DECAY)
_LEAST_DECAY = tl.constexpr(LEAST_DECAY)
# decays as integers of 2**-16 each: their sums are exact in 32 bits for a chunk of 128 tokens
_UNITS = tl.constexpr(2.0**16)
_TF32_BITS = tl.constexpr(-(1 << 13))
_HALF_TF32_BIT = tl.constexpr((1 << 12) - 1)


@dataclass(frozen=True)
class Constants:
    """What a launch is compiled for, as the one constexpr `C` of every kernel and of what they call.

    Attributes:
        A, C: channels of a and b, and of c and the output: the state is (A, C).
        BA, BC: those of a tile, powers of two.
        CHUNK: tokens of a tile.
        SEGMENTS, SLOTS, PACKED: `rows` and `slots` of Segments, and whether there is its table.
        TABLE_BATCHED: whether every row of the batch has a table.
        MAX_CHUNKS: the most chunks of a row of the batch, however short they are.
        SEQUENCES: packed ones, or 1.
        HAS_G, ..., HAS_START: which decays there are, and whether there is a state to start from.
        DESCENDING, ..., WITH_STATE: of the scan.
        WITH_STRICT: whether the output of strictly earlier tokens is wanted, without what a token gives itself.
        WITH_TOTALS: whether the sums of all decays of a segment are wanted.
        STAGES: of the loop over chunks.
        TRANSPOSED: whether the state is kept as (C, A).
        PRECISION: of products of float32.
        TERMS: how many numbers of 8 bits of fraction a decay is summed as.
        LEAST: tokens that can be done at once whatever the decays are.
        WITH_SCALED: whether decays themselves, or what they multiply, are wanted.
        HAS_X, HAS_Y, PER_CHANNEL, HAS_SUMS_START: what the kernels of gates.py say.
    """

    H: int
    A: int = 1
    C: int = 1
    BA: int = 1
    BC: int = 1
    CHUNK: int = 1
    SEGMENTS: int = 1
    SLOTS: int = 1
    MAX_CHUNKS: int = 1
    SEQUENCES: int = 1
    PACKED: bool = False
    TABLE_BATCHED: bool = False
    HAS_G: bool = False
    HAS_GAMMA: bool = False
    GAMMA_BATCHED: bool = False
    HAS_INNER: bool = False
    HAS_OUTER: bool = False
    HAS_START: bool = False
    DESCENDING: bool = False
    DEFERRED: bool = False
    TANGENT: bool = False
    WITH_OUT: bool = False
    WITH_STATE: bool = False
    WITH_STRICT: bool = False
    WITH_TOTALS: bool = False
    STAGES: int = 1
    TRANSPOSED: bool = False
    PRECISION: str = "tf32"
    TERMS: int = 1
    LEAST: int = 1
    WITH_SCALED: bool = False
    HAS_X: bool = False
    HAS_Y: bool = False
    PER_CHANNEL: bool = False
    HAS_SUMS_START: bool = False

    @property
    def BLOCKS(self) -> int:
        """Programs side by side for the channels of c."""
        return -(-self.C // self.BC)

    @property
    def DIRECTION(self) -> int:
        return -1 if self.DESCENDING else 1

    @property
    def HAS_HEAD(self) -> bool:
        return self.HAS_G or self.HAS_GAMMA

    @property
    def HAS_CHANNELS(self) -> bool:
        return self.HAS_INNER or self.HAS_OUTER


@triton.jit
def program_coordinates(p_segments, T, segment, C: tl.constexpr):
    """Of a program: batch, head and block of channels; its segment's first token, length, slot of states, sequence."""
    i = tl.program_id(0)
    i_c = i % C.BLOCKS
    i_h = (i // C.BLOCKS) % C.H
    i_r = (i // (C.BLOCKS * C.H)) % C.SEGMENTS
    i_b = (i // (C.BLOCKS * C.H * C.SEGMENTS)).to(tl.int64)
    if C.PACKED:
        p_segment = p_segments + (i_b * C.TABLE_BATCHED * C.SEGMENTS + i_r) * 4
        i_start = tl.load(p_segment)
        i_end = tl.load(p_segment + 1)
        # of padding it is -1
        i_slot = tl.load(p_segment + 2)
        i_n = tl.load(p_segment + 3)
    else:
        i_start = i_r * segment
        i_end = tl.minimum(i_start + segment, T)
        i_slot = i_r
        i_n = 0
    return i_b, i_h, i_c, i_start, i_end - i_start, i_slot, i_n


@triton.jit
def state_offsets(i_first, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """Offsets and mask of a tile (BA, BC) of a state (A, C), or of its transpose (BC, BA)."""
    o_a = along(tl.arange(0, C.BA), TRANSPOSED)
    o_c = along(i_first + tl.arange(0, C.BC), not TRANSPOSED)
    return o_a * C.C + o_c, (o_a < C.A) & (o_c < C.C)


@triton.jit
def along(b_x, SECOND: tl.constexpr):
    """A vector along the first dimension of a tile, or the second."""
    return b_x[None, :] if SECOND else b_x[:, None]


@triton.jit
def chunk_decays(p_g, b_gamma, b_count, n_count, m_l, EXACT: tl.constexpr, C: tl.constexpr):
    """A head's log decays between the beginning of a chunk and each token (R,), and all of them, in powers of two.

    As integers, remainders, and the unit of the integers, whose differences are exact: of a decay that all tokens share
    they count tokens, `b_count` up to each and `n_count` in all; else, if EXACT, they are a decay's fixed-point part.
    """
    if not C.HAS_G:
        if C.DEFERRED:
            b_count = tl.maximum(b_count - 1.0, 0.0)
        return b_count, 0.0, n_count, 0.0, tl.maximum(b_gamma, _LEAST_DECAY) * LOG2_E
    else:
        b_g = tl.load(p_g, mask=m_l, other=0.0).to(tl.float32)
        if C.HAS_GAMMA:
            # padding does not decay the state
            b_g += tl.where(m_l, b_gamma, 0.0)
        b_g = tl.maximum(b_g, _LEAST_DECAY) * LOG2_E
        b_whole = b_g
        if EXACT:
            b_whole = tl.floor(b_g * _UNITS).to(tl.int32)
            b_g -= b_whole.to(tl.float32) / _UNITS
        b_upto, b_upto_remainder = tl.cumsum(b_whole, 0), tl.cumsum(b_g, 0)
        if C.DEFERRED:
            b_upto, b_upto_remainder = b_upto - b_whole, b_upto_remainder - b_g
        return b_upto, b_upto_remainder, tl.sum(b_whole, 0), tl.sum(b_g, 0), 1.0 / _UNITS


@triton.jit
def decay_exponent(b_whole, b_remainder, unit, EXACT: tl.constexpr, C: tl.constexpr):
    """The logarithm of a decay, to the base of two."""
    if not C.HAS_G:
        return b_whole * unit
    elif EXACT:
        return b_whole.to(tl.float32) * unit + b_remainder
    else:
        return b_remainder


@triton.jit
def decay_power(b_whole, b_remainder, unit, EXACT: tl.constexpr, C: tl.constexpr):
    return tl.exp2(decay_exponent(b_whole, b_remainder, unit, EXACT, C))


@triton.jit
def decays_between(b_upto, b_remainder, unit, EXACT: tl.constexpr, C: tl.constexpr):
    """(R, R): the decay from each token j to each i."""
    if C.HAS_G:
        b_remainder = b_remainder[:, None] - b_remainder[None, :]
    return decay_power(b_upto[:, None] - b_upto[None, :], b_remainder, unit, EXACT, C)


@triton.jit
def decayed_states(b_h, b_tangent, b_decay, C: tl.constexpr):
    """A state and, where there is one, its tangent."""
    if C.TANGENT:
        b_tangent = b_tangent * b_decay
    return b_h * b_decay, b_tangent


@triton.jit
def load_gates(p, o_row, m_row, D: tl.constexpr, BD: tl.constexpr, i_first):
    """Log decays of every channel, cut off where four of them would pass the range of float32: see chunks.py."""
    b_gates = load_tile(p, o_row, m_row, D, BD, i_first)
    return tl.where(b_gates > _NEAR_DECAY, b_gates, tl.full(b_gates.shape, _NEAR_DECAY, b_gates.dtype))


@triton.jit
def matrix_sums(b_matrix, b_gates, TERMS: tl.constexpr):
    """(R, BC): a matrix of small integers times gates, as exact as float32: wide gates as sums of bfloat16."""
    if TERMS == 1:
        return tl.dot(b_matrix.to(b_gates.dtype), b_gates)
    else:
        b_matrix = b_matrix.to(tl.bfloat16)
        b_term = b_gates.to(tl.bfloat16)
        b_sum = tl.dot(b_matrix, b_term)
        for _ in tl.static_range(TERMS - 1):
            b_gates = b_gates - b_term.to(tl.float32)
            b_term = b_gates.to(tl.bfloat16)
            b_sum = tl.dot(b_matrix, b_term, b_sum)
        return b_sum


@triton.jit
def middle_sums(b_gates, n_chunk, TERMS: tl.constexpr):
    """(R, BC): the log decays, in powers of two, from the middle of a chunk of `n_chunk` tokens to each."""
    ROWS: tl.constexpr = b_gates.shape[0]
    o_r = tl.arange(0, ROWS)[:, None]
    o_l = tl.arange(0, ROWS)[None, :]
    i_middle = n_chunk // 2
    m_after = (o_l <= o_r) & (o_l >= i_middle)
    m_before = (o_l > o_r) & (o_l < i_middle)
    b_reach = tl.where(m_after, 1.0, 0.0) - tl.where(m_before, 1.0, 0.0)
    return matrix_sums(b_reach, b_gates, TERMS) * LOG2_E


@triton.jit
def wide_dot(b_x, b_y, b_sum, narrow: tl.constexpr, C: tl.constexpr):
    """b_sum + a product of factors rounded to a dtype, except that float16 may not hold them."""
    if narrow == tl.float16:
        b_x, b_y = rounded_factor(b_x, narrow), rounded_factor(b_y, narrow)
        return tl.dot(b_x, b_y, b_sum, input_precision="tf32")
    else:
        return tl.dot(b_x.to(narrow), b_y.to(narrow), b_sum, input_precision=C.PRECISION)


@triton.jit
def rounded_factor(b_x, narrow: tl.constexpr):
    """A factor as wide_dot multiplies it, so that what rounding loses is known and can be added.

    For float16 that is tf32, with 10 bits of a fraction: to the nearest, ties to even. A GPU itself may cut off the
    other bits, by which all products would be too small.
    """
    if narrow == tl.float16:
        b_x = b_x.to(tl.float32)
        b_word = b_x.to(tl.int32, bitcast=True)
        b_word = (b_word + (((b_word >> 13) & 1) + _HALF_TF32_BIT)) & _TF32_BITS
        return tl.where(b_x == b_x, b_word.to(tl.float32, bitcast=True), b_x)  # a nan may have every bit set
    else:
        return b_x.to(narrow)


@triton.jit
def state_dot(b_a, b_h, b_sum, narrow: tl.constexpr, C: tl.constexpr):
    """b_sum + a h."""
    return wide_dot(b_a, tl.trans(b_h) if C.TRANSPOSED else b_h, b_sum, narrow, C)


@triton.jit
def outer_dot(b_b, b_c, b_h, narrow: tl.constexpr, C: tl.constexpr):
    """h + b^T c."""
    if C.TRANSPOSED:
        b_b, b_c = b_c, b_b
    return wide_dot(tl.trans(b_b), b_c, b_h, narrow, C)
