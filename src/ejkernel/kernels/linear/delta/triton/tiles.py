"""Tiles of the delta rule in Triton: chunks of tokens, the decays inside them, and the inverse of what they erase."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E, load_tile
from ejkernel.kernels.linear.chunks import LEAST_DECAY, NEAR, NEAR_DECAY
from ejkernel.kernels.linear.triton.tiles import matrix_sums

_NEAR = tl.constexpr(NEAR)
_NEAR_DECAY = tl.constexpr(NEAR_DECAY)
_LEAST_DECAY = tl.constexpr(LEAST_DECAY)
# rows done one by one before products merge blocks
_BLOCK = tl.constexpr(16)


@dataclass(frozen=True)
class Constants:
    """What a launch is compiled for, as the one constexpr `C` of every kernel and of what they call.

    Attributes:
        H, HK: heads of values, and of queries and keys.
        K, V: channels of keys and of values: the state is (K, V).
        BK, BV: those of a tile, powers of two.
        CHUNK: tokens of a tile.
        ROWS: chunks of a row of the batch.
        SPLITS: programs of a chunk, which share its channels of keys.
        SEQUENCES: packed ones, or 1.
        PACKED, TABLE_BATCHED: whether sequences are packed, and whether every row of the batch is otherwise.
        HAS_G, ..., HAS_START, HAS_DSTATE: which arrays there are.
        WITH_OUT, ..., WITH_DSTART: which results are wanted.
        STAGES: of the loop over chunks.
        PRECISION: of products of float32.
        TERMS: how many numbers of 8 bits of fraction a decay is summed as.
    """

    H: int
    HK: int
    K: int
    V: int
    BK: int
    BV: int
    CHUNK: int
    ROWS: int
    SPLITS: int = 1
    SEQUENCES: int = 1
    PACKED: bool = False
    TABLE_BATCHED: bool = False
    HAS_G: bool = False
    HAS_GK: bool = False
    HAS_BETA: bool = False
    HAS_ERASE: bool = False
    HAS_WRITE: bool = False
    HAS_START: bool = False
    HAS_DSTATE: bool = False
    WITH_OUT: bool = False
    WITH_STATE: bool = False
    WITH_STATES: bool = False
    WITH_DSTART: bool = False
    STAGES: int = 1
    PRECISION: str = "tf32"
    TERMS: int = 1
    # of linear attention, whose decays of heads these are
    HAS_GAMMA: bool = False
    DEFERRED: bool = False

    @property
    def BLOCKS(self) -> int:
        """Programs side by side for the channels of values."""
        return -(-self.V // self.BV)

    @property
    def MERGES(self) -> int:
        """How often blocks of an inverse are merged by two."""
        return (self.CHUNK // 16).bit_length() - 1

    @property
    def LEVELS(self) -> int:
        """Of pairs with decays of channels (`linear/chunks.py`), the closest too."""
        return (self.CHUNK // NEAR).bit_length()


@triton.jit
def chunk_coordinates(p_chunks, T, C: tl.constexpr):
    """Of a program of a chunk: batch, head, which split it is, the chunk; its first token, and how many it has."""
    i = tl.program_id(0)
    i_s = i % C.SPLITS
    i_h = (i // C.SPLITS) % C.H
    i_r = (i // (C.SPLITS * C.H)) % C.ROWS
    i_b = (i // (C.SPLITS * C.H * C.ROWS)).to(tl.int64)
    if C.PACKED:
        p_chunk = p_chunks + (i_b * C.TABLE_BATCHED * C.ROWS + i_r) * 2
        i_start = tl.load(p_chunk)
        i_end = tl.load(p_chunk + 1)
    else:
        i_start = i_r * C.CHUNK
        i_end = tl.minimum(i_start + C.CHUNK, T)
    return i_b, i_h, i_s, i_r, i_start, i_end - i_start


@triton.jit
def sequence_coordinates(p_sequences, T, C: tl.constexpr):
    """Of a program of one sequence: batch, head, block of channels; its number, first token, length, first chunk."""
    i = tl.program_id(0)
    i_v = i % C.BLOCKS
    i_h = (i // C.BLOCKS) % C.H
    i_n = (i // (C.BLOCKS * C.H)) % C.SEQUENCES
    i_b = (i // (C.BLOCKS * C.H * C.SEQUENCES)).to(tl.int64)
    if C.PACKED:
        p_sequence = p_sequences + (i_b * C.TABLE_BATCHED * C.SEQUENCES + i_n) * 3
        i_start = tl.load(p_sequence)
        i_end = tl.load(p_sequence + 1)
        i_row = tl.load(p_sequence + 2)
    else:
        i_start = 0
        i_end = T
        i_row = 0
    return i_b, i_h, i_v, i_n, i_start, i_end - i_start, i_row


@triton.jit
def unit_lower_inverse(b_l, C: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular (CHUNK, CHUNK): by rows in blocks of 16, which products merge."""
    BLOCKS: tl.constexpr = C.CHUNK // _BLOCK
    MERGES: tl.constexpr = C.MERGES
    o_n = tl.arange(0, BLOCKS)
    o_r = tl.arange(0, _BLOCK)
    m_diagonal = (o_n[:, None] == o_n[None, :])[:, None, :, None]
    # (BLOCKS, 16, 16)
    b_blocks = tl.sum(tl.where(m_diagonal, tl.reshape(b_l, (BLOCKS, _BLOCK, BLOCKS, _BLOCK)), 0.0), 2)
    b_x = tl.where((o_r[:, None] == o_r[None, :])[None], 1.0, tl.full((BLOCKS, _BLOCK, _BLOCK), 0.0, tl.float32))
    for r in range(1, _BLOCK):
        m_row = (o_r == r)[None, :, None]
        b_row = tl.sum(tl.where(m_row, b_blocks, 0.0), 1)
        b_known = tl.sum(b_row[:, :, None] * b_x, 1)
        b_x = tl.where(m_row, b_x - b_known[:, None, :], b_x)
    b_x = tl.reshape(tl.where(m_diagonal, b_x[:, :, None, :], 0.0), (C.CHUNK, C.CHUNK))
    o_i = tl.arange(0, C.CHUNK)
    for level in tl.static_range(MERGES):
        # [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]
        o_block = o_i // (_BLOCK * 2**level)
        m_below = (o_block[:, None] == o_block[None, :] + 1) & (o_block % 2 == 1)[:, None]
        b_y = tl.dot(tl.where(m_below, b_l, 0.0), b_x, input_precision=C.PRECISION)
        b_x -= tl.dot(b_x, b_y, input_precision=C.PRECISION)
    return b_x


@triton.jit
def load_channel_decays(p_gk, o_row, m_row, i_first, BK: tl.constexpr, C: tl.constexpr):
    """Log decays of channels, cut off where nothing of a float32 is left."""
    b_gates = load_tile(p_gk, o_row * C.K, m_row, C.K, BK, i_first)
    return tl.where(b_gates > _LEAST_DECAY, b_gates, tl.full(b_gates.shape, _LEAST_DECAY, b_gates.dtype))


@triton.jit
def to_start_power(b_gates, TERMS: tl.constexpr):
    """(CHUNK, BK): the decays between the beginning of a chunk and each token."""
    R: tl.constexpr = b_gates.shape[0]
    o_r = tl.arange(0, R)
    b_reach = tl.where(o_r[None, :] <= o_r[:, None], 1.0, 0.0)
    return tl.exp2(matrix_sums(b_reach, b_gates, TERMS) * LOG2_E)


@triton.jit
def to_end_power(b_gates, TERMS: tl.constexpr):
    """(CHUNK, BK): the decays between each token and the end of its chunk."""
    R: tl.constexpr = b_gates.shape[0]
    o_r = tl.arange(0, R)
    b_reach = tl.where(o_r[None, :] > o_r[:, None], 1.0, 0.0)
    return tl.exp2(matrix_sums(b_reach, b_gates, TERMS) * LOG2_E)


@triton.jit
def level_factors(b_gates, HALF: tl.constexpr, TERMS: tl.constexpr):
    """Of the pairs of a level (`linear/chunks.py`): which they are, and the factors of queries and of keys.

    HALF is how many tokens half a block has; below NEAR it is the level of the closest pairs.
    """
    R: tl.constexpr = b_gates.shape[0]
    o_r = tl.arange(0, R)[:, None]
    o_c = tl.arange(0, R)[None, :]
    if HALF >= _NEAR:
        m_block = o_r // (2 * HALF) == o_c // (2 * HALF)
        m_row = (o_r // HALF) % 2 == 1
        m_column = (o_c // HALF) % 2 == 1
        m_reach = m_block & ((m_row & m_column & (o_c <= o_r)) | (~m_row & ~m_column & (o_c > o_r)))
        b_power = tl.exp2(matrix_sums(tl.where(m_reach, 1.0, 0.0), b_gates, TERMS) * LOG2_E)
        return m_block & m_row & ~m_column, b_power, b_power
    else:
        m_block = o_r // _NEAR == o_c // _NEAR
        o_middle = o_r // _NEAR * _NEAR + _NEAR // 2
        m_after = m_block & (o_c <= o_r) & (o_c >= o_middle)
        m_before = m_block & (o_c > o_r) & (o_c < o_middle)
        b_near = tl.where(b_gates > _NEAR_DECAY, b_gates, tl.full(b_gates.shape, _NEAR_DECAY, b_gates.dtype))
        b_sums = matrix_sums(tl.where(m_after, 1.0, 0.0) - tl.where(m_before, 1.0, 0.0), b_near, TERMS) * LOG2_E
        return m_block & (o_c < o_r), tl.exp2(b_sums), tl.exp2(-b_sums)
