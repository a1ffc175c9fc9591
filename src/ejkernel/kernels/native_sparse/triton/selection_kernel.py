"""The kernel that chooses blocks."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ejkernel.kernels.common.triton_tiles import LOG2_E
from ejkernel.kernels.native_sparse.triton.tiles import load_matrix_rows


@dataclass(frozen=True)
class Constants:
    """What a launch is compiled for, as the constexpr `C` of the kernel.

    Attributes:
        G, GP: query heads of a key head, and the power of two they are padded to.
        BD: head dim of a tile, a power of two.
        BQ, BN: queries and blocks of a tile.
        TILES: tiles of blocks whose weights are held at once.
        CHOSEN, BEST: blocks that a query chooses, and the power of two they are padded to.
        FIRST_B, OWN_BLOCK_B: whether these differ between batches.
    """

    H: int
    HK: int
    G: int
    GP: int
    D: int
    BD: int
    BQ: int
    BN: int
    TILES: int
    CHOSEN: int
    BEST: int
    FIRST_B: bool
    OWN_BLOCK_B: bool
    PRECISION: str


@triton.jit
def select_kernel(
    p_q, p_k, p_lse, p_first, p_own_block, T, N, scale,
    p_best,
    C: tl.constexpr,
):  # fmt: skip
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // C.HK, i_bh % C.HK
    o_q = i_t * C.BQ + tl.arange(0, C.BQ)
    b_first = tl.load(p_first + i_b * T * C.FIRST_B + o_q, mask=o_q < T, other=0)
    b_own_block = tl.load(p_own_block + i_b * T * C.OWN_BLOCK_B + o_q, mask=o_q < T, other=-1)
    o_t = i_t * C.BQ + tl.arange(0, C.BQ * C.GP) // C.GP
    o_g = tl.arange(0, C.BQ * C.GP) % C.GP
    o_h = i_hk * C.G + o_g
    m_row = (o_t < T) & (o_g < C.G)
    # (BQ * GP, BD)
    b_q = load_matrix_rows(p_q, (i_b.to(tl.int64) * T + o_t) * C.H + o_h, m_row, C.D, C.BD)
    b_lse = tl.load(p_lse + (i_b * C.H + o_h).to(tl.int64) * T + o_t, mask=m_row, other=float("inf")) * LOG2_E
    # (BQ, BEST): the best so far, the best first
    o_c = tl.arange(0, C.BEST)
    b_weight = tl.full([C.BQ, C.BEST], -1.0, tl.float32)
    b_best = tl.full([C.BQ, C.BEST], -1, tl.int32)
    FAR: tl.constexpr = 2147483647
    m_some = b_own_block >= 3
    i_from = tl.min(tl.where(m_some, b_first + 1, FAR), 0)
    i_to = tl.max(tl.where(m_some, b_first + b_own_block - 1, 0), 0)
    for i_chunk in range(i_from, i_to, C.TILES * C.BN):
        # (BQ, TILES, BN): the weights of as many blocks as registers hold
        b_all = tl.full([C.BQ, C.TILES, C.BN], -1.0, tl.float32)
        o_tile = tl.arange(0, C.TILES)
        for n in range(tl.cdiv(tl.minimum(i_to - i_chunk, C.TILES * C.BN), C.BN)):
            o_n = i_chunk + n * C.BN + tl.arange(0, C.BN)
            b_k = load_matrix_rows(p_k, (i_b.to(tl.int64) * N + o_n) * C.HK + i_hk, o_n < N, C.D, C.BD)
            # (BQ * GP, BN)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=C.PRECISION) * (scale * LOG2_E)
            b_p = tl.where(m_row[:, None], tl.exp2(b_s - b_lse[:, None]), 0.0)
            # (BQ, BN)
            b_w = tl.sum(tl.reshape(b_p, [C.BQ, C.GP, C.BN]), 1)
            # a nan is as large as can be, and shows in what it is selected for
            b_w = tl.where(b_w != b_w, float("inf"), b_w)
            b_block = o_n[None, :] - b_first[:, None]
            b_w = tl.where((b_block >= 1) & (b_block <= b_own_block[:, None] - 2), b_w, -1.0)
            b_all = tl.where((o_tile == n)[None, :, None], b_w[:, None, :], b_all)
        o_all = i_chunk + (o_tile * C.BN)[None, :, None] + tl.arange(0, C.BN)[None, None, :]
        b_old_weight, b_old_best = b_weight, b_best
        for c in range(C.CHOSEN):
            b_top = tl.maximum(tl.max(tl.max(b_all, 2), 1), tl.max(b_old_weight, 1))
            # the lower block wins a tie
            b_new = tl.min(tl.min(tl.where(b_all == b_top[:, None, None], o_all, FAR), 2), 1)
            b_old = tl.min(tl.where(b_old_weight == b_top[:, None], b_old_best, FAR), 1)
            b_at = tl.minimum(b_new, b_old)
            b_all = tl.where(o_all == b_at[:, None, None], -1.0, b_all)
            b_old_weight = tl.where(b_old_best == b_at[:, None], -1.0, b_old_weight)
            b_weight = tl.where((o_c == c)[None, :], b_top[:, None], b_weight)
            b_best = tl.where((o_c == c)[None, :], b_at[:, None], b_best)
    b_selected = tl.where(b_weight >= 0.0, b_best - b_first[:, None], -1)
    p_tile = p_best + ((i_b.to(tl.int64) * T + o_q) * C.HK + i_hk)[:, None] * C.CHOSEN + o_c[None, :]
    tl.store(p_tile, b_selected, mask=(o_q < T)[:, None] & (o_c < C.CHOSEN)[None, :])
