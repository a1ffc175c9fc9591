"""Tiles of softmax attention in Triton: what the kernels of the families share."""

import triton
import triton.language as tl

from ejkernel.kernels.common.dropout import MIX_1, MIX_2, STEP_KEY, STEP_QUERY

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_MIX_1 = tl.constexpr(int(MIX_1))
_MIX_2 = tl.constexpr(int(MIX_2))
_STEP_QUERY = tl.constexpr(int(STEP_QUERY))
_STEP_KEY = tl.constexpr(int(STEP_KEY))


@triton.jit
def load_rows(p, i_first, n_rows, stride, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TAIL: tl.constexpr):
    """Rows i_first .. i_first + R of a matrix with a row stride, (R, BD); zeros past n_rows and past D."""
    o_r, o_d = tl.arange(0, R), tl.arange(0, BD)
    # the first row's offset may pass 2^31; those inside a tile cannot
    p_tile = p + i_first.to(tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    if TAIL and D != BD:
        return tl.load(p_tile, mask=(i_first + o_r < n_rows)[:, None] & (o_d < D)[None, :], other=0.0)
    elif TAIL:
        return tl.load(p_tile, mask=(i_first + o_r < n_rows)[:, None], other=0.0)
    elif D != BD:
        return tl.load(p_tile, mask=(o_d < D)[None, :], other=0.0)
    else:
        return tl.load(p_tile)


@triton.jit
def load_tile(p, o_row, m_row, D: tl.constexpr, BD: tl.constexpr, i_column=0):
    """Columns i_column .. i_column + BD of D, of rows that begin o_row elements behind p, (R, BD).

    Zeros past D and where m_row is not set.
    """
    o_d = i_column + tl.arange(0, BD)
    p_tile = p + (o_row[:, None] + o_d[None, :])
    if D % BD == 0:
        return tl.load(p_tile, mask=m_row[:, None], other=0.0)
    else:
        return tl.load(p_tile, mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def store_tile(p, b_x, o_row, m_row, D: tl.constexpr, BD: tl.constexpr, i_column=0):
    """The reverse of load_tile."""
    o_d = i_column + tl.arange(0, BD)
    p_tile = p + (o_row[:, None] + o_d[None, :])
    tl.store(p_tile, b_x.to(p.dtype.element_ty), mask=m_row[:, None] & (o_d < D)[None, :])


@triton.jit
def store_rows(p, b_x, i_first, n_rows, stride, R: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """The reverse of load_rows; nothing is written past n_rows or D."""
    o_r, o_d = tl.arange(0, R), tl.arange(0, BD)
    p_tile = p + i_first.to(tl.int64) * stride + (o_r[:, None] * stride + o_d[None, :])
    m_tile = (i_first + o_r < n_rows)[:, None] & (o_d < D)[None, :]
    tl.store(p_tile, b_x.to(p.dtype.element_ty), mask=m_tile)


@triton.jit
def tanh(x):
    # by exp2 of a negative number: never overflows
    b_e = tl.exp2(-2.0 * LOG2_E * tl.abs(x))
    b_t = (1.0 - b_e) / (1.0 + b_e)
    return tl.where(x < 0, -b_t, b_t)


@triton.jit
def mix(x):
    """The bijection of kernels/common/dropout.py, bit for bit."""
    x = x ^ (x >> 16)
    x = x * _MIX_1
    x = x ^ (x >> 15)
    x = x * _MIX_2
    return x ^ (x >> 16)


@triton.jit
def dropout_keep(seed, o_q, o_k, threshold):
    """Which pairs stay, for indices that broadcast against each other."""
    b_row = seed.to(tl.uint32) + o_q.to(tl.uint32) * _STEP_QUERY
    return mix(b_row + o_k.to(tl.uint32) * _STEP_KEY) >= threshold.to(tl.uint32)


@triton.jit
def guarded_dot(b_w, b_rows, m_seen, b_acc, PRECISION: tl.constexpr):
    """b_acc + b_w @ b_rows, where weights are zero outside m_seen and rows there may be nan or inf.

    0 * nan is nan, so a hidden row could leak: non-finite entries count as zero, then rows that do see one become nan.
    """
    # (K, D)
    b_finite = (b_rows - b_rows) == 0.0
    b_acc = tl.dot(b_w, tl.where(b_finite, b_rows, 0.0).to(b_rows.dtype), b_acc, input_precision=PRECISION)
    if tl.min(tl.min(b_finite.to(tl.int32), 1), 0) == 0:
        b_hits = tl.dot(m_seen.to(tl.float16), tl.where(b_finite, 0.0, 1.0).to(tl.float16))
        b_acc = tl.where(b_hits > 0.0, float("nan"), b_acc)
    return b_acc


@triton.jit
def online_softmax(b_max, b_tile_max, MAY_BE_EMPTY: tl.constexpr, NATURAL: tl.constexpr = False):
    """One update of the online softmax, from the running maxima of rows and those of a tile.

    Returns the new running maxima, what weights are taken against (`exp2(logits - base)`), and by how much the sums so
    far shrink. MAY_BE_EMPTY: a row may have seen nothing yet, and its base is 0: -inf - 0, not -inf - -inf. Logits are
    in units of log2, which are out of range for those below -2.36e38, or with NATURAL in natural units.
    """
    b_new = tl.maximum(b_max, b_tile_max)
    b_base = b_new
    if MAY_BE_EMPTY:
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    return b_new, b_base, tl.exp2((b_max - b_base) * LOG2_E if NATURAL else b_max - b_base)


@triton.jit
def softmax_result(b_max, b_sum, NATURAL: tl.constexpr = False):
    """What sums of weighted values are divided by, and the log-sum-exp in the maxima's units, -inf if nothing was seen.

    A sum of nan is not nothing: it must show.
    """
    m_some = b_sum != 0.0
    b_total = tl.where(m_some, b_sum, 1.0)
    b_log = tl.log2(b_total) * LN_2 if NATURAL else tl.log2(b_total)
    return b_total, tl.where(m_some, b_max + b_log, float("-inf"))


@triton.jit
def has_nan(b_x):
    """(1,): 1 where a tile holds a nan, else 0."""
    # through rank 2: Triton 3.6 cannot compile a reduction of rank 1 after a product for sm_100
    return tl.max(tl.max((b_x != b_x).to(tl.int32), 1, keep_dims=True), 0)


@triton.jit
def schedule_row(p_rows, p_index, i_row, n_blocks, LISTS: tl.constexpr):
    """Pointers to a row of the schedule: its counts or bounds, and its list of n_blocks."""
    if LISTS:
        return p_rows + i_row * 2, p_index + i_row.to(tl.int64) * n_blocks
    else:
        return p_rows + i_row * 4, p_index


@triton.jit
def block_at(p_row, p_index, n, LISTS: tl.constexpr):
    """The n-th block a row of the schedule visits: unmasked blocks first."""
    if LISTS:
        return tl.load(p_index + n)
    else:
        i_lo = tl.load(p_row)
        i_full = tl.load(p_row + 1)
        n_full = tl.load(p_row + 2) - i_full
        i_masked = i_lo + n - n_full
        i_after = tl.where(i_masked < i_full, i_masked, i_masked + n_full)
        return tl.where(n < n_full, i_full + n, i_after)


@triton.jit
def block_counts(p_row, LISTS: tl.constexpr):
    """How many blocks a row of the schedule visits without a mask, and in all."""
    if LISTS:
        return tl.load(p_row), tl.load(p_row + 1)
    else:
        return tl.load(p_row + 2) - tl.load(p_row + 1), tl.load(p_row + 3) - tl.load(p_row)
