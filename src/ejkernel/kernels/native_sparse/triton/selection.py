"""Choosing blocks in Triton: the weights of a tile of queries stay in registers, from which the best are taken."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.bridge import triton_call
from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.common.triton_tiles import LOG2_E
from ejkernel.kernels.native_sparse.selection import assembled
from ejkernel.kernels.native_sparse.triton.tiles import load_matrix_rows
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays

# that a warp holds at once: 32 in a thread
_WEIGHTS = 1024
# of a tile; more would have more best ones than registers hold
_MOST_QUERIES = 8


@dataclass(frozen=True)
class Config:
    """Rows of a tile (queries times the heads of a group), blocks of a tile, warps and pipeline stages."""

    rows: int = 64
    blocks: int = 64
    warps: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        config_ints(self, ("rows", "blocks"), 16, power_of_two=True)
        config_ints(self, ("stages",))
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps={self.warps} must be 1, 2, 4, 8 or 16")


def _group(call: Call) -> int:
    return call["query"].shape[2] // call["key"].shape[2]


def unsupported(call: Call) -> list[str]:
    D = call["query"].shape[3]
    limits = {
        f"head_dim {D}: at most 256": D > 256,
        f"{_group(call)} query heads to a key head: at most 128": _group(call) > 128,
        f"{call.spec.count} blocks for a query: at most 128": call.spec.count > 128,
        f"{call.target.arch}: needs sm_80 or newer": call.target.backend == "gpu" and call.target.capability < 80,
    }
    return [reason for reason, holds in limits.items() if holds]


def default_config(call: Call) -> Config:
    wide = call["query"].dtype == jnp.float32 or call["query"].shape[3] > 128
    return Config(rows=32 if wide else 64, stages=1 if wide else 2)


def search_space(call: Call) -> list[Config]:
    return [Config(r, b, w, s) for r in (16, 32, 64, 128) for b in (32, 64, 128) for w in (4, 8) for s in (1, 2, 3)]


@triton.jit
def select_kernel(
    p_q, p_k, p_lse, p_first, p_own_block, T, N, scale,
    p_best,
    H: tl.constexpr, HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BQ: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, CHOSEN: tl.constexpr, BEST: tl.constexpr,
    FIRST_B: tl.constexpr, OWN_BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_t, i_bh = tl.program_id(0), tl.program_id(1)
    i_b, i_hk = i_bh // HK, i_bh % HK
    o_q = i_t * BQ + tl.arange(0, BQ)
    b_first = tl.load(p_first + i_b * T * FIRST_B + o_q, mask=o_q < T, other=0)
    b_own_block = tl.load(p_own_block + i_b * T * OWN_BLOCK_B + o_q, mask=o_q < T, other=-1)
    o_t = i_t * BQ + tl.arange(0, BQ * GP) // GP
    o_g = tl.arange(0, BQ * GP) % GP
    o_h = i_hk * G + o_g
    m_row = (o_t < T) & (o_g < G)
    # (BQ * GP, BD)
    b_q = load_matrix_rows(p_q, (i_b.to(tl.int64) * T + o_t) * H + o_h, m_row, D, BD)
    b_lse = tl.load(p_lse + (i_b * H + o_h).to(tl.int64) * T + o_t, mask=m_row, other=float("inf")) * LOG2_E
    # (BQ, BEST): the best so far, the best first
    o_c = tl.arange(0, BEST)
    b_weight = tl.full([BQ, BEST], -1.0, tl.float32)
    b_best = tl.full([BQ, BEST], -1, tl.int32)
    FAR: tl.constexpr = 2147483647
    m_some = b_own_block >= 3
    i_from = tl.min(tl.where(m_some, b_first + 1, FAR), 0)
    i_to = tl.max(tl.where(m_some, b_first + b_own_block - 1, 0), 0)
    for i_piece in range(i_from, i_to, TILES * BN):
        # (BQ, TILES, BN): the weights of as many blocks as registers hold
        b_all = tl.full([BQ, TILES, BN], -1.0, tl.float32)
        o_tile = tl.arange(0, TILES)
        for n in range(tl.cdiv(tl.minimum(i_to - i_piece, TILES * BN), BN)):
            o_n = i_piece + n * BN + tl.arange(0, BN)
            b_k = load_matrix_rows(p_k, (i_b.to(tl.int64) * N + o_n) * HK + i_hk, o_n < N, D, BD)
            # (BQ * GP, BN)
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * (scale * LOG2_E)
            b_p = tl.where(m_row[:, None], tl.exp2(b_s - b_lse[:, None]), 0.0)
            # (BQ, BN)
            b_w = tl.sum(tl.reshape(b_p, [BQ, GP, BN]), 1)
            # a nan is as large as can be, and shows in what it is selected for
            b_w = tl.where(b_w != b_w, float("inf"), b_w)
            b_block = o_n[None, :] - b_first[:, None]
            b_w = tl.where((b_block >= 1) & (b_block <= b_own_block[:, None] - 2), b_w, -1.0)
            b_all = tl.where((o_tile == n)[None, :, None], b_w[:, None, :], b_all)
        o_all = i_piece + (o_tile * BN)[None, :, None] + tl.arange(0, BN)[None, None, :]
        b_old_weight, b_old_best = b_weight, b_best
        for c in range(CHOSEN):
            b_top = tl.maximum(tl.max(tl.max(b_all, 2), 1), tl.max(b_old_weight, 1))
            # the lower block wins a tie
            b_new = tl.min(tl.min(tl.where(b_all == b_top[:, None, None], o_all, FAR), 2), 1)
            b_old = tl.min(tl.where(b_old_weight == b_top[:, None], b_old_best, FAR), 1)
            b_at = tl.minimum(b_new, b_old)
            b_all = tl.where(o_all == b_at[:, None, None], -1.0, b_all)
            b_old_weight = tl.where(b_old_best == b_at[:, None], -1.0, b_old_weight)
            b_weight = tl.where((o_c == c)[None, :], b_top[:, None], b_weight)
            b_best = tl.where((o_c == c)[None, :], b_at[:, None], b_best)
    b_found = tl.where(b_weight >= 0.0, b_best - b_first[:, None], -1)
    p_tile = p_best + ((i_b.to(tl.int64) * T + o_q) * HK + i_hk)[:, None] * CHOSEN + o_c[None, :]
    tl.store(p_tile, b_found, mask=(o_q < T)[:, None] & (o_c < CHOSEN)[None, :])


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    B, T, H, D = call["query"].shape
    N, Hkv = call["key"].shape[1:3]
    chosen = call.spec.chosen
    if chosen == 0:
        return {"indices": assembled(call, jnp.zeros((B, T, Hkv, 0), jnp.int32))}, {}
    queries = max(1, min(_MOST_QUERIES, config.rows // power_of_two(_group(call))))
    heads = max(power_of_two(_group(call)), 16 // queries)
    piece = max(config.blocks, min(power_of_two(N), _WEIGHTS * config.warps // queries))
    best = triton_call(
        select_kernel,
        call["query"],
        call["key"],
        call["lse"],
        call["first_row"],
        call["own_block"],
        T,
        N,
        call.spec.scale,
        out_shape=jax.ShapeDtypeStruct((B, T, Hkv, chosen), jnp.int32),
        grid=(-(-T // queries), B * Hkv),
        num_warps=config.warps,
        num_stages=config.stages,
        H=H,
        HK=Hkv,
        G=_group(call),
        GP=heads,
        D=D,
        BD=power_of_two(D, 16),
        BQ=queries,
        BN=config.blocks,
        TILES=piece // config.blocks,
        CHOSEN=chosen,
        BEST=power_of_two(chosen, 2),
        FIRST_B=call["first_row"].shape[0] > 1,
        OWN_BLOCK_B=call["own_block"].shape[0] > 1,
        PRECISION="tf32x3" if call["query"].dtype == jnp.float32 else "tf32",
    )
    return {"indices": assembled(call, best)}, {}


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward)
