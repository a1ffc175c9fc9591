"""The block schedule of calls with segments and positions, or with a mask function, in two launches.

It is what `plan` of `schedule.py` defines. The first launch finds what tokens each block holds, or with a function what
every pair of blocks shows; the second looks at the blocks of the other side for each row of the schedule. A row's list
has nothing behind its number: nobody reads there.
"""

import triton
import triton.language as tl

from ejkernel.kernels.softmax.triton.tiles import floor_div, head_options, head_start, visible

# of a block, over its tokens that are no padding: smallest and largest segment, the same of positions; is none padding?
EXTENTS = tl.constexpr(5)

_FAR = tl.constexpr(2**30)


@triton.jit
def extents_kernel(
    p_q_seg, p_k_seg, p_q_pos, p_k_pos,
    T, S,
    p_extents,
    C: tl.constexpr, NQ: tl.constexpr, NK: tl.constexpr,
):  # fmt: skip
    """(B, EXTENTS, blocks of queries, then of keys): a program has NQ of the ones, or NK of the others."""
    i_program = tl.program_id(0)
    i_b = tl.program_id(1)
    n_q, n_k = tl.cdiv(T, C.BQ), tl.cdiv(S, C.BK)
    n_programs_q = tl.cdiv(n_q, NQ)
    p_extents += i_b.to(tl.int64) * EXTENTS * (n_q + n_k)
    if i_program < n_programs_q:
        p_seg = head_start(p_q_seg, i_b, 0, T, S, 1, C.Q_SEGMENTS)
        p_pos = head_start(p_q_pos, i_b, 0, T, S, 1, C.Q_POSITIONS)
        store_extents(p_seg, p_pos, i_program * NQ, T, p_extents, n_q, n_q + n_k, NQ, C.BQ)
    else:
        i_program -= n_programs_q
        p_seg = head_start(p_k_seg, i_b, 0, T, S, 1, C.K_SEGMENTS)
        p_pos = head_start(p_k_pos, i_b, 0, T, S, 1, C.K_POSITIONS)
        store_extents(p_seg, p_pos, i_program * NK, S, p_extents + n_q, n_k, n_q + n_k, NK, C.BK)


@triton.jit
def store_extents(p_seg, p_pos, i_first, length, p_extents, n_blocks, stride, N: tl.constexpr, BLOCK: tl.constexpr):
    """Of N blocks from i_first on."""
    o_block = i_first + tl.arange(0, N)
    # (N, BLOCK)
    o_token = o_block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    b_seg = tl.load(p_seg + o_token, mask=o_token < length, other=-1)
    b_pos = tl.load(p_pos + o_token, mask=o_token < length, other=0)
    m_real = b_seg >= 0
    m_block = o_block < n_blocks
    p_block = p_extents + o_block
    tl.store(p_block, tl.min(tl.where(m_real, b_seg, _FAR), 1), mask=m_block)
    tl.store(p_block + stride, tl.max(tl.where(m_real, b_seg, -_FAR), 1), mask=m_block)
    tl.store(p_block + 2 * stride, tl.min(tl.where(m_real, b_pos, _FAR), 1), mask=m_block)
    tl.store(p_block + 3 * stride, tl.max(tl.where(m_real, b_pos, -_FAR), 1), mask=m_block)
    tl.store(p_block + 4 * stride, tl.min(m_real.to(tl.int32), 1), mask=m_block)


# of a pair of blocks: no pair of theirs is visible, some are, all are
_SOME = tl.constexpr(1)
_ALL = tl.constexpr(2)


@triton.jit
def maps_kernel(
    p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats,
    T, S, s_pattern_b, s_pattern_h, s_ints_b, s_ints_h, s_floats_b, s_floats_h,
    p_maps,
    C: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """(B|1, HEADS, blocks of queries, blocks of keys), by looking at every pair: tables and all are one to it."""
    i_k, i_q, i_bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    options = head_options(
        p_mask, p_mask, p_pattern, p_q_seg, p_k_seg, p_q_pos, p_k_pos, p_ints, p_floats, i_b, i_h, T, S,
        s_pattern_b, s_pattern_h, s_ints_b, s_ints_h, s_floats_b, s_floats_h, C,
    )  # fmt: skip
    o_q, o_k = i_q * C.BQ + tl.arange(0, C.BQ), i_k * C.BK + tl.arange(0, C.BK)
    m_seen = visible(o_q[:, None], o_k[None, :], options, T, S, C)
    n_seen = tl.sum(tl.sum(m_seen.to(tl.int32), 1), 0)
    b_map = (n_seen > 0).to(tl.int32) + (n_seen == C.BQ * C.BK).to(tl.int32)
    tl.store(p_maps + (i_bh.to(tl.int64) * tl.num_programs(1) + i_q) * tl.num_programs(0) + i_k, b_map)


@triton.jit
def rows_kernel(
    p_extents, p_maps, p_sums,
    T, S,
    p_rows, p_index,
    C: tl.constexpr, HEADS: tl.constexpr, PATTERNS: tl.constexpr, BY_KEYS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One row of the schedule, of a block of queries or of keys; N blocks of the other side at a time.

    `p_sums` (PATTERNS, PATTERN_ROWS + 1, PATTERN_COLUMNS + 1) counts a pattern's cells above and left of each corner.
    """
    i_row = tl.program_id(0)
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // HEADS, i_bh % HEADS
    n_q, n_k = tl.cdiv(T, C.BQ), tl.cdiv(S, C.BK)
    n_others = n_q if BY_KEYS else n_k
    p_extents += i_b.to(tl.int64) * EXTENTS * (n_q + n_k)
    p_maps += i_bh.to(tl.int64) * n_q * n_k
    if C.PATTERN_ROWS is not None:
        p_sums += (i_h * PATTERNS // HEADS).to(tl.int64) * (C.PATTERN_ROWS + 1) * (C.PATTERN_COLUMNS + 1)
    i_list = i_bh.to(tl.int64) * tl.num_programs(0) + i_row
    o_row = i_row + tl.arange(0, 1)
    o_step = tl.arange(0, N)
    if C.LISTS:
        p_list = p_index + i_list * n_others
        # (N,)
        b_covered = tl.full([N], 0, tl.int32)
        b_seen = tl.full([N], 0, tl.int32)
        for i in range(0, n_others, N):
            m_seen, m_covered = block_maps(p_extents, p_maps, p_sums, o_row, i + o_step, n_q, n_k, BY_KEYS, C)
            b_covered += m_covered.to(tl.int32)
            b_seen += m_seen.to(tl.int32)
        n_covered = tl.sum(b_covered, 0)
        tl.store(p_rows + i_list * 2, n_covered)
        tl.store(p_rows + i_list * 2 + 1, tl.sum(b_seen, 0))
        n_unmasked, n_masked = n_covered * 0, n_covered
        for i in range(0, n_others, N):
            m_seen, m_covered = block_maps(p_extents, p_maps, p_sums, o_row, i + o_step, n_q, n_k, BY_KEYS, C)
            b_covered = m_covered.to(tl.int32)
            b_masked = m_seen.to(tl.int32) - b_covered
            # where each stands in the list
            o_unmasked = n_unmasked + tl.cumsum(b_covered, 0) - 1
            o_masked = n_masked + tl.cumsum(b_masked, 0) - 1
            tl.store(p_list + tl.where(m_covered, o_unmasked, o_masked), i + o_step, mask=m_seen)
            n_unmasked += tl.sum(b_covered, 0)
            n_masked += tl.sum(b_masked, 0)
    else:
        i_lo, i_hi, i_full, i_end = n_others, n_others * 0, n_others, n_others
        for i in range(0, n_others, N):
            o = i + o_step
            m_seen, m_covered = block_maps(p_extents, p_maps, p_sums, o_row, o, n_q, n_k, BY_KEYS, C)
            i_lo = tl.minimum(i_lo, tl.min(tl.where(m_seen, o, n_others), 0))
            i_hi = tl.maximum(i_hi, tl.max(tl.where(m_seen, o + 1, 0), 0))
            # the first run of those that need no mask
            i_full = tl.minimum(i_full, tl.min(tl.where(m_covered, o, n_others), 0))
            i_end = tl.minimum(i_end, tl.min(tl.where(m_covered | (o < i_full), n_others, o), 0))
        i_hi = tl.maximum(i_hi, i_lo)
        i_full = tl.minimum(i_full, i_hi)
        p_row = p_rows + i_list * 4
        tl.store(p_row, i_lo)
        tl.store(p_row + 1, i_full)
        tl.store(p_row + 2, tl.minimum(i_end, i_hi))
        tl.store(p_row + 3, i_hi)


@triton.jit
def block_maps(p_extents, p_maps, p_sums, o_row, o_other, n_q, n_k, BY_KEYS: tl.constexpr, C: tl.constexpr):
    """Whether some pair of two blocks is visible, and whether all are, for indices that broadcast."""
    if BY_KEYS:
        o_q, o_k = o_other, o_row
    else:
        o_q, o_k = o_row, o_other
    if C.MASK_RULE is not None:
        b_map = tl.load(p_maps + o_q.to(tl.int64) * n_k + o_k, mask=(o_q < n_q) & (o_k < n_k), other=0)
        return b_map >= _SOME, b_map >= _ALL
    q_seg_low, q_seg_high, q_low, q_high, q_full = load_extents(p_extents, o_q, n_q, n_q + n_k)
    k_seg_low, k_seg_high, k_low, k_high, k_full = load_extents(p_extents + n_q, o_k, n_k, n_q + n_k)
    # low is above high where all is padding, and past the end: such blocks meet no other
    m_seen = (q_seg_low <= k_seg_high) & (k_seg_low <= q_seg_high)
    # that they are one segment, and below one chunk, follows where they meet
    m_covered = (q_seg_low == q_seg_high) & (k_seg_low == k_seg_high) & (q_full & k_full != 0)
    if C.LO is not None:
        m_seen &= k_high - q_low >= C.LO
        m_covered &= k_low - q_high >= C.LO
    if C.HI is not None:
        m_seen &= k_low - q_high <= C.HI
        m_covered &= k_high - q_low <= C.HI
    if C.CHUNK is not None:
        q_first, q_last = floor_div(q_low, C.CHUNK), floor_div(q_high, C.CHUNK)
        k_first, k_last = floor_div(k_low, C.CHUNK), floor_div(k_high, C.CHUNK)
        m_seen &= (q_first <= k_last) & (k_first <= q_last)
        m_covered &= (q_first == q_last) & (k_first == k_last)
    if C.PATTERN_ROWS is not None:
        i_top, i_bottom = cell_range(q_low, q_high, C.PATTERN_Q, C.PATTERN_ROWS)
        i_left, i_right = cell_range(k_low, k_high, C.PATTERN_K, C.PATTERN_COLUMNS)
        p_top = p_sums + i_top.to(tl.int64) * (C.PATTERN_COLUMNS + 1)
        p_bottom = p_sums + i_bottom.to(tl.int64) * (C.PATTERN_COLUMNS + 1)
        n_cells = tl.load(p_bottom + i_right) - tl.load(p_top + i_right) - tl.load(p_bottom + i_left)
        n_cells += tl.load(p_top + i_left)
        m_seen &= n_cells > 0
        m_covered &= n_cells == (i_bottom - i_top) * (i_right - i_left)
        m_covered &= (q_low >= 0) & (q_high < C.PATTERN_ROWS * C.PATTERN_Q)
        m_covered &= (k_low >= 0) & (k_high < C.PATTERN_COLUMNS * C.PATTERN_K)
    return m_seen, m_seen & m_covered


@triton.jit
def load_extents(p_extents, o_block, n_blocks, stride):
    """Of blocks; past the last, what padding has."""
    m_block = o_block < n_blocks
    p_block = p_extents + o_block
    seg_low = tl.load(p_block, mask=m_block, other=_FAR)
    seg_high = tl.load(p_block + stride, mask=m_block, other=-_FAR)
    low = tl.load(p_block + 2 * stride, mask=m_block, other=_FAR)
    high = tl.load(p_block + 3 * stride, mask=m_block, other=-_FAR)
    full = tl.load(p_block + 4 * stride, mask=m_block, other=0)
    return seg_low, seg_high, low, high, full


@triton.jit
def cell_range(low, high, SIZE: tl.constexpr, CELLS: tl.constexpr):
    """The cells that positions lie in: the first, and one past the last."""
    i_first = tl.minimum(tl.maximum(floor_div(low, SIZE), 0), CELLS)
    i_end = tl.minimum(tl.maximum(floor_div(high, SIZE) + 1, 0), CELLS)
    return i_first, i_end
