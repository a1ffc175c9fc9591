"""What the Triton kernels of selected blocks share: rows of queries and heads, and tiles of keys."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LN_2, LOG2_E, guarded_dot, load_tile, softmax_result, store_tile


@dataclass(frozen=True)
class Constants:
    """What a launch is compiled for, as the one constexpr `C` of every kernel and of what they call.

    Attributes:
        G, GP: query heads of a key head, and the power of two they are padded to.
        BD, BDV: head dims of a tile, powers of two.
        K, KP: blocks that a query selects, and the power of two they are padded to.
        BS: keys of a block.
        BQ: queries of a tile, each with its GP heads.
        BK: keys of a tile.
        ENTRIES: room in a row of the lists of blocks.
        MEMBERS: whether queries of a tile share a list, and bits say who has which block.
        DQ_PARTIALS: whether dq is summed from what each of a query's blocks adds to it.
        SINKS, SINKS_B: whether there are sinks, and one for each batch.
        STARTS_B, LIMITS_B: whether these differ between batches.
        GUARD: whether this is the nan-safe launch, over the programs that a fast one marked.
    """

    H: int
    HK: int
    G: int
    GP: int
    D: int
    DV: int
    BD: int
    BDV: int
    K: int
    KP: int
    BS: int
    BQ: int
    BK: int
    PRECISION: str
    STARTS_B: bool
    LIMITS_B: bool
    ENTRIES: int = 1
    MEMBERS: bool = False
    DQ_PARTIALS: bool = False
    SINKS: bool = False
    SINKS_B: bool = False
    GUARD: bool = False


@triton.jit
def load_matrix_rows(p, o_row, m_row, D: tl.constexpr, BD: tl.constexpr):
    """Rows (R, BD) of a matrix of D columns, by their numbers; zeros where m_row is not set, and past D."""
    return load_tile(p, o_row.to(tl.int64) * D, m_row, D, BD)


@triton.jit
def store_matrix_rows(p, b_x, o_row, m_row, D: tl.constexpr, BD: tl.constexpr):
    """The reverse of load_matrix_rows."""
    store_tile(p, b_x, o_row.to(tl.int64) * D, m_row, D, BD)


@triton.jit
def head_of(i_hk, C: tl.constexpr):
    """(BQ * GP,): the query head of each row, and whether there is one."""
    o_g = tl.arange(0, C.BQ * C.GP) % C.GP
    return i_hk * C.G + o_g, o_g < C.G


@triton.jit
def tile_rows(i_t, i_b, i_hk, T, C: tl.constexpr):
    """Of a tile's queries and heads, (BQ * GP,) each: query, head, which exist, row."""
    o_t = i_t * C.BQ + tl.arange(0, C.BQ * C.GP) // C.GP
    o_h, m_h = head_of(i_hk, C)
    return o_t, o_h, m_h & (o_t < T), (i_b.to(tl.int64) * T + o_t) * C.H + o_h


@triton.jit
def query_rows(p_limits, i_t, i_b, i_hk, T, S, C: tl.constexpr):
    """The same, and the key behind the last that each sees."""
    o_t, o_h, m_row, o_row = tile_rows(i_t, i_b, i_hk, T, C)
    b_limit = tl.load(p_limits + i_b * T * C.LIMITS_B + o_t, mask=m_row, other=0)
    return o_t, o_h, m_row, o_row, tl.minimum(b_limit, S)


@triton.jit
def partial_rows(p_indices, o_t, m_row, n, i_b, i_hk, i_bh, T, C: tl.constexpr):
    """Rows of the partial results of each query's n-th block, and which exist: none is written for an index of -1."""
    o_index = ((i_b.to(tl.int64) * T + o_t) * C.HK + i_hk) * C.K + n
    m_partial = m_row & (tl.load(p_indices + o_index, mask=m_row, other=-1) >= 0)
    return entry_rows(o_t * C.K + n, i_bh, T, C), m_partial


@triton.jit
def first_softmax(p_sinks, i_b, o_h, m_row, C: tl.constexpr):
    """(BQ * GP,) the running maximum, in units of log2, and the running sum before any key: those of the sinks."""
    b_max = tl.full([C.BQ * C.GP], float("-inf"), tl.float32)
    b_sum = tl.full([C.BQ * C.GP], 0.0, tl.float32)
    if C.SINKS:
        b_max = tl.load(p_sinks + i_b * C.H * C.SINKS_B + o_h, mask=m_row, other=float("-inf")) * LOG2_E
        b_sum += tl.where(b_max > float("-inf"), 1.0, 0.0)
    return b_max, b_sum


@triton.jit
def store_outputs(p_out, p_lse, b_out, b_max, b_sum, o_row, m_row, i_b, o_h, o_t, T, C: tl.constexpr):
    """Weighted values over their sum, and lse; zeros and -inf where nothing was seen. Returns what is stored."""
    b_total, b_lse = softmax_result(b_max, b_sum)
    b_out /= b_total[:, None]
    store_matrix_rows(p_out, b_out, o_row, m_row, C.DV, C.BDV)
    tl.store(p_lse + (i_b * C.H + o_h).to(tl.int64) * T + o_t, b_lse * LN_2, mask=m_row)
    return b_out


@triton.jit
def item_keys(p_k, p_v, p_starts, p_items, i_row, i_b, i_hk, S, N, C: tl.constexpr):
    """Of an item, its first and last entry, and the keys of its tile: numbers, which exist, rows of k and v."""
    p_items += i_row.to(tl.int64) * 4
    o_k, m_k = tile_keys(p_starts + i_b * N * C.STARTS_B, tl.load(p_items), N, S, C)
    o_key = (i_b.to(tl.int64) * S + o_k) * C.HK + i_hk
    # (BK, BD) and (BK, BDV)
    b_k = load_matrix_rows(p_k, o_key, m_k, C.D, C.BD)
    b_v = load_matrix_rows(p_v, o_key, m_k, C.DV, C.BDV)
    return tl.load(p_items + 1), tl.load(p_items + 2), o_k, m_k, b_k, b_v


@triton.jit
def listed_keys(p_list, p_members, n, n_blocks, b_limit, S, C: tl.constexpr):
    """The n-th tile of the keys in a list of blocks: numbers (BK,), which exist, and which each row sees, (rows, BK).

    The list has the first key of every block, -1 for none. b_limit (rows,) is 0 where there is no query.
    """
    o_member = tl.arange(0, C.BQ * C.GP) // C.GP
    if C.BS % C.BK == 0:
        # all in one block: who has it is a matter of rows
        i_entry = n * C.BK // C.BS
        i_first = tl.load(p_list + i_entry)
        o_k = i_first + n * C.BK % C.BS + tl.arange(0, C.BK)
        m_k = (i_first >= 0) & (o_k < S)
        b_end = tl.where(i_first >= 0, b_limit, 0)
        if C.MEMBERS:
            b_end = tl.where(((tl.load(p_members + i_entry) >> o_member) & 1) != 0, b_end, 0)
        m_seen = o_k[None, :] < b_end[:, None]
    else:
        o_c = n * C.BK + tl.arange(0, C.BK)
        o_entry = o_c // C.BS
        m_entry = o_entry < n_blocks
        b_first = tl.load(p_list + o_entry, mask=m_entry, other=-1)
        o_k = b_first + o_c % C.BS
        m_k = (b_first >= 0) & (o_k < S)
        m_seen = m_k[None, :] & (o_k[None, :] < b_limit[:, None])
        if C.MEMBERS:
            b_members = tl.load(p_members + o_entry, mask=m_entry, other=0)
            m_seen &= ((b_members[None, :] >> o_member[:, None]) & 1) != 0
    return o_k, m_k, m_seen


@triton.jit
def tile_keys(p_starts, i_tile, N, S, C: tl.constexpr):
    """The keys of a tile: several small blocks, up to where the next tile begins, or a sub-block of a large one."""
    SUB_BLOCKS: tl.constexpr = 1 if C.BS <= C.BK else tl.cdiv(C.BS, C.BK)
    BLOCKS: tl.constexpr = 1 if C.BS >= C.BK else C.BK // C.BS
    i_block = i_tile // SUB_BLOCKS * BLOCKS
    i_next = i_block + BLOCKS
    i_stop = tl.load(p_starts + tl.minimum(i_next, N - 1))
    i_stop = tl.where(i_next < N, i_stop, S)
    o_k = tl.load(p_starts + i_block) + i_tile % SUB_BLOCKS * C.BK + tl.arange(0, C.BK)
    return o_k, o_k < i_stop


@triton.jit
def entries_at(p_order, i_entry, i_last, m_h, C: tl.constexpr):
    """Rows of the next C.BQ entries of a tile, (R,), by their numbers in (T, K); -1 where there is none."""
    o_n = i_entry + tl.arange(0, C.BQ * C.GP) // C.GP
    return tl.load(p_order + o_n, mask=m_h & (o_n < i_last), other=-1)


@triton.jit
def entry_sees(p_indices, p_starts, p_limits, o_entry, i_b, i_hk, T, N, C: tl.constexpr):
    """Of entries, each one query's one block: queries, which exist, the first key and the one behind the last seen."""
    m_row = o_entry >= 0
    o_t = tl.maximum(o_entry, 0) // C.K
    b_limit = tl.load(p_limits + i_b * T * C.LIMITS_B + o_t, mask=m_row, other=0)
    b_from = tl.full([C.BQ * C.GP], 0, tl.int32)
    if C.BS < C.BK:
        # the tile holds other blocks too
        o_index = ((i_b.to(tl.int64) * T + o_t) * C.HK + i_hk) * C.K + o_entry % C.K
        i_block = tl.load(p_indices + o_index, mask=m_row, other=0)
        b_from = tl.load(p_starts + i_b * N * C.STARTS_B + i_block, mask=m_row, other=0)
        b_limit = tl.minimum(b_limit, b_from + C.BS)
    return o_t, m_row, b_from, b_limit


@triton.jit
def entry_rows(o_entry, i_bh, T, C: tl.constexpr):
    """Rows of the partial results of entries, which are in the order of the indices: (B, Hkv, T * K, G)."""
    return (i_bh.to(tl.int64) * T * C.K + o_entry) * C.G + tl.arange(0, C.BQ * C.GP) % C.GP


@triton.jit
def weighted_sum(b_w, b_rows, m_seen, b_acc, C: tl.constexpr):
    """b_acc + b_w @ b_rows; with C.GUARD hidden rows may be nan."""
    PRECISION: tl.constexpr = C.PRECISION
    if C.GUARD:
        return guarded_dot(b_w.to(b_rows.dtype), b_rows, m_seen, b_acc, PRECISION)
    else:
        return tl.dot(b_w.to(b_rows.dtype), b_rows, b_acc, input_precision=PRECISION)


@triton.jit
def union_kernel(p_indices, p_starts, T, N, p_number, p_list, p_members, C: tl.constexpr):
    """The first keys of the blocks that some query of a tile selected, rising, and a bit for each query that did."""
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    o_q, o_n = tl.arange(0, C.BQ), tl.arange(0, C.KP)
    o_t = i_t * C.BQ + o_q
    p_tile = p_indices + ((i_b.to(tl.int64) * T + o_t) * C.HK + i_hk)[:, None] * C.K + o_n[None, :]
    # (BQ, KP)
    b_block = tl.load(p_tile, mask=(o_t < T)[:, None] & (o_n < C.K)[None, :], other=-1)
    i_row = i_bh * tl.num_programs(0) + i_t
    p_list += i_row.to(tl.int64) * C.ENTRIES
    p_members += i_row.to(tl.int64) * C.ENTRIES
    p_starts += i_b * N * C.STARTS_B
    FAR: tl.constexpr = 2147483647
    i_next = tl.min(tl.min(tl.where(b_block >= 0, b_block, FAR), 1), 0)
    n = 0
    while i_next < FAR:
        b_has = tl.max((b_block == i_next).to(tl.int32), 1)
        tl.store(p_list + n, tl.load(p_starts + i_next))
        tl.store(p_members + n, tl.sum(b_has << o_q, 0))
        n += 1
        i_next = tl.min(tl.min(tl.where(b_block > i_next, b_block, FAR), 1), 0)
    tl.store(p_number + i_row, n)
