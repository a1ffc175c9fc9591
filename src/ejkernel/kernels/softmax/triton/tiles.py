"""What one tile of softmax attention is in Triton: its logits and its mask, in either orientation."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_rules import DeviceFunction
from ejkernel.kernels.common.triton_tiles import (
    block_at,
    load_rows,
    load_tile,
    store_rows,
    store_tile,
    tanh,
)

# which axes an array (B, H, T, S) has, bit by bit; along the others it broadcasts. 0: there is no array
AXIS_B = tl.constexpr(1)
AXIS_H = tl.constexpr(2)
AXIS_T = tl.constexpr(4)
AXIS_S = tl.constexpr(8)
PRESENT = tl.constexpr(16)


@dataclass(frozen=True)
class Constants:
    """What a launch is compiled for, as the one constexpr `C` of every kernel and of what they call.

    Attributes:
        BQ, BK: queries and keys of a tile.
        BD, BDV: its head dims, powers of two.
        LO, HI, CHUNK: the band and the chunk length, or None.
        LOGITS: the dtype that logits are rounded to, or None.
        PLAIN: whether a logit is q.k times a positive scale and nothing else.
        Q_SEGMENTS, ..., BIAS, SINKS: the axes of these arrays.
        LISTS: whether the schedule is made of lists.
        TAIL_Q: whether the last block of queries is cut off.
        GUARD: whether this is the nan-safe launch, over the blocks of FLAG_ROWS queries or keys that a fast one marked.
        ROW_BLOCK: what lse and delta are padded to a multiple of.
        KEY, VALUE: whether the launch is to give dk, and dv.
        PATTERN_ROWS, PATTERN_COLUMNS: of a pattern that is looked up by position; None: by index, and it fits T and S.
        SUB_BLOCK: how many keys lie together where a tile's keys come in sub-blocks; None: they are one run.
        HEADS_FIRST: whether q, k, v, out and their gradients are (B, H, length, D) in memory, not (B, length, H, D).
        WIDE: what 8-bit inputs are computed in, or None.
        MASK_RULE, SCORE_RULE, SCORE_SLOPE: mask and score functions and the latter's derivative, or None.
        OPERAND_SLOPE: in a launch for an operand of the score function, the derivative by it.
        OF_KEYS: whether that operand has a number for each key, not for each query.
    """

    H: int
    HK: int
    G: int
    D: int
    DV: int
    BD: int
    BDV: int
    BQ: int
    BK: int
    LO: int | None
    HI: int | None
    CHUNK: int | None
    Q_SEGMENTS: int
    K_SEGMENTS: int
    Q_POSITIONS: int
    K_POSITIONS: int
    MASK: int
    PATTERN_Q: int | None
    PATTERN_K: int | None
    BIAS: int
    SINKS: int
    CAPPED: bool
    LOGITS: tl.dtype | None
    PLAIN: bool
    DROPOUT: bool
    ARGMAX: bool
    LISTS: bool
    TAIL_Q: bool
    PRECISION: str
    GUARD: bool = False
    FLAG_ROWS: int = 1
    ROW_BLOCK: int = 1
    KEY: bool = True
    VALUE: bool = True
    PATTERN_ROWS: int | None = None
    PATTERN_COLUMNS: int | None = None
    SUB_BLOCK: int | None = None
    HEADS_FIRST: bool = False
    WIDE: tl.dtype | None = None
    MASK_RULE: DeviceFunction | None = None
    SCORE_RULE: DeviceFunction | None = None
    SCORE_SLOPE: DeviceFunction | None = None
    OPERAND_SLOPE: DeviceFunction | None = None
    OF_KEYS: bool = False

    # keys of a block of the schedule, and how many such a tile has
    @property
    def LISTED(self) -> int:
        return self.SUB_BLOCK or self.BK

    @property
    def SUB_BLOCKS(self) -> int:
        return self.BK // self.LISTED

    # how far apart the rows of a head are in q, k, v and out
    @property
    def Q_ROW(self) -> int:
        return self.D if self.HEADS_FIRST else self.H * self.D

    @property
    def K_ROW(self) -> int:
        return self.D if self.HEADS_FIRST else self.HK * self.D

    @property
    def V_ROW(self) -> int:
        return self.DV if self.HEADS_FIRST else self.HK * self.DV

    @property
    def O_ROW(self) -> int:
        return self.DV if self.HEADS_FIRST else self.H * self.DV


@triton.jit
def head_rows(p, i_b, i_h, n, H: tl.constexpr, D: tl.constexpr, HEADS_FIRST: tl.constexpr = False):
    """Where the rows of one head start in an array (B, n, H, D), or (B, H, n, D)."""
    if HEADS_FIRST:
        return p + (i_b.to(tl.int64) * H + i_h) * n * D
    else:
        return p + (i_b.to(tl.int64) * n * H + i_h) * D


@triton.jit
def widened(b_x, C: tl.constexpr):
    """A tile of 8-bit numbers as those it is computed in: every one of theirs is one of these."""
    if C.WIDE is not None:
        return b_x.to(C.WIDE)
    else:
        return b_x


@triton.jit
def tile_counts(n_unmasked, n_all, C: tl.constexpr):
    """Blocks of a list, without a mask and in all, as tiles: what is left over of the former goes to the latter."""
    if C.SUB_BLOCK is None:
        return n_unmasked, n_all
    else:
        return n_unmasked // C.SUB_BLOCKS, tl.cdiv(n_all, C.SUB_BLOCKS)


@triton.jit
def listed_keys(p_row, p_list, n, n_listed, S, C: tl.constexpr):
    """The first key of the n-th tile of a row, if they are one run, and all of them; past the end of a list, past S."""
    o = tl.arange(0, C.BK)
    if C.SUB_BLOCK is None:
        i_k = block_at(p_row, p_list, n, C.LISTS) * C.BK
        return i_k, i_k + o
    else:
        o_sub_block = n * C.SUB_BLOCKS + o // C.SUB_BLOCK
        o_first = tl.load(p_list + o_sub_block, mask=o_sub_block < n_listed, other=0) * C.SUB_BLOCK
        return n * 0, tl.where(o_sub_block < n_listed, o_first + o % C.SUB_BLOCK, S)


@triton.jit
def load_keys(p, i_k, o_k, S, stride, D: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr):
    """Rows o_k, which start at i_k if they are one run; zeros past S and past D."""
    if C.SUB_BLOCK is None:
        return load_rows(p, i_k, S, stride, C.BK, D, BD, TAIL)
    else:
        return load_tile(p, o_k.to(tl.int64) * stride, o_k < S, D, BD)


@triton.jit
def store_keys(p, b_x, i_k, o_k, S, stride, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr):
    """The reverse of load_keys."""
    if C.SUB_BLOCK is None:
        store_rows(p, b_x, i_k, S, stride, C.BK, D, BD)
    else:
        store_tile(p, b_x, o_k.to(tl.int64) * stride, o_k < S, D, BD)


@triton.jit
def head_start(p, i_b, i_h, T, S, H, AXES: tl.constexpr):
    """Where one (batch, head) starts in an array (B, H, T, S) that may lack any axis."""
    i_first = i_b.to(tl.int64) * 0
    if AXES & AXIS_B:
        i_first += i_b
    if AXES & AXIS_H:
        i_first = i_first * H + i_h
    if AXES & AXIS_T:
        i_first *= T
    if AXES & AXIS_S:
        i_first *= S
    return p + i_first


@triton.jit
def tile_of(p, o_q, o_k, S, AXES: tl.constexpr):
    """Pointers to the elements of a tile, for query and key indices that broadcast against each other."""
    o_tile = (o_q + o_k) * 0
    if AXES & AXIS_S:
        o_tile += o_k
    if AXES & AXIS_T:
        return p + o_q.to(tl.int64) * (S if AXES & AXIS_S else 1) + o_tile
    else:
        return p + o_tile


@triton.jit
def floor_div(x, N: tl.constexpr):
    """Division that rounds down, as Triton's does not: positions before the first key are negative."""
    return tl.where(x >= 0, x, x - (N - 1)) // N


@triton.jit
def head_options(
    p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats, i_b, i_h, T, S,
    s_pattern_b, s_pattern_h, s_ints_b, s_ints_h, s_floats_b, s_floats_h,
    C: tl.constexpr,
):  # fmt: skip
    """The arrays of one (batch, head) that logits and masks are made of, as the functions below take them."""
    p_bias = head_start(p_bias, i_b, i_h, T, S, C.H, C.BIAS)
    p_mask = head_start(p_mask, i_b, i_h, T, S, C.H, C.MASK)
    p_pattern += i_b.to(tl.int64) * s_pattern_b + i_h.to(tl.int64) * s_pattern_h
    p_q_seg = head_start(p_q_seg, i_b, i_h, T, S, C.H, C.Q_SEGMENTS)
    p_k_seg = head_start(p_k_seg, i_b, i_h, T, S, C.H, C.K_SEGMENTS)
    p_q_pos = head_start(p_q_pos, i_b, i_h, T, S, C.H, C.Q_POSITIONS)
    p_k_pos = head_start(p_k_pos, i_b, i_h, T, S, C.H, C.K_POSITIONS)
    p_ints += i_b.to(tl.int64) * s_ints_b + i_h.to(tl.int64) * s_ints_h
    p_floats += i_b.to(tl.int64) * s_floats_b + i_h.to(tl.int64) * s_floats_h
    return p_bias, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats


@triton.jit
def visible(o_q, o_k, options, T, S, C: tl.constexpr):
    """Which pairs are visible, for query and key indices that broadcast against each other."""
    _, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats = options
    m_q, m_k = o_q < T, o_k < S
    m_seen = m_q & m_k
    if C.Q_POSITIONS:
        b_qp = tl.load(p_q_pos + o_q, mask=m_q, other=0)
        b_kp = tl.load(p_k_pos + o_k, mask=m_k, other=0)
    else:
        b_qp = o_q + (S - T)
        b_kp = o_k
    if C.LO is not None:
        m_seen &= b_kp - b_qp >= C.LO
    if C.HI is not None:
        m_seen &= b_kp - b_qp <= C.HI
    if C.CHUNK is not None:
        m_seen &= floor_div(b_qp, C.CHUNK) == floor_div(b_kp, C.CHUNK)
    if C.Q_SEGMENTS:
        b_qs = tl.load(p_q_seg + o_q, mask=m_q, other=-1)
        b_ks = tl.load(p_k_seg + o_k, mask=m_k, other=-2)
        m_seen &= (b_qs == b_ks) & (b_qs >= 0)
    if C.MASK:
        b_mask = tl.load(tile_of(p_mask, o_q, o_k, S, C.MASK), mask=m_q & m_k, other=0)
        m_seen &= b_mask != 0
    if C.MASK_RULE is not None:
        m_seen &= C.MASK_RULE.call(o_q, o_k, 0.0, p_ints, p_floats, T, S)
    if C.PATTERN_ROWS is not None:
        m_cells = m_seen & (b_qp >= 0) & (b_qp < C.PATTERN_ROWS * C.PATTERN_Q)
        m_cells &= (b_kp >= 0) & (b_kp < C.PATTERN_COLUMNS * C.PATTERN_K)
        p_cells = p_pattern + (b_qp // C.PATTERN_Q) * C.PATTERN_COLUMNS + b_kp // C.PATTERN_K
        m_seen = tl.load(p_cells, mask=m_cells, other=0) != 0
    elif C.PATTERN_Q is not None:
        p_cells = p_pattern + (o_q // C.PATTERN_Q) * tl.cdiv(S, C.PATTERN_K) + o_k // C.PATTERN_K
        m_seen = tl.load(p_cells, mask=m_seen, other=0) != 0
    return m_seen


@triton.jit
def capped_logits(b_s, o_q, o_k, options, T, S, soft_cap, C: tl.constexpr):
    """Scaled logits after bias and soft cap."""
    if C.BIAS:
        m_in = (o_q < T) & (o_k < S)
        b_s += tl.load(tile_of(options[0], o_q, o_k, S, C.BIAS), mask=m_in, other=0.0).to(tl.float32)
    if C.CAPPED:
        b_s = soft_cap * tanh(b_s / soft_cap)
    return b_s


@triton.jit
def finished_logits(b_s, o_q, o_k, options, T, S, C: tl.constexpr):
    """Capped logits after the score function and rounding."""
    if C.SCORE_RULE is not None:
        b_s = C.SCORE_RULE.call(o_q, o_k, b_s, options[7], options[8], T, S)
    if C.LOGITS is not None:
        b_s = b_s.to(C.LOGITS).to(tl.float32)
    return b_s
