"""Choosing blocks in Triton: the weights of a tile of queries stay in registers, from which the best are taken."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.common.triton_launch import TritonLaunch
from ejkernel.kernels.native_sparse.selection import assembled
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


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    from ejkernel.kernels.native_sparse.triton.selection_kernel import Constants, select_kernel

    B, T, H, D = call["query"].shape
    N, Hkv = call["key"].shape[1:3]
    chosen = call.spec.chosen
    if chosen == 0:
        return {"indices": assembled(call, jnp.zeros((B, T, Hkv, 0), jnp.int32))}, {}
    queries = max(1, min(_MOST_QUERIES, config.rows // power_of_two(_group(call))))
    heads = max(power_of_two(_group(call)), 16 // queries)
    held = max(config.blocks, min(power_of_two(N), _WEIGHTS * config.warps // queries))
    constants = Constants(
        H=H,
        HK=Hkv,
        G=_group(call),
        GP=heads,
        D=D,
        BD=power_of_two(D, 16),
        BQ=queries,
        BN=config.blocks,
        TILES=held // config.blocks,
        CHOSEN=chosen,
        BEST=power_of_two(chosen, 2),
        FIRST_B=call["first_row"].shape[0] > 1,
        OWN_BLOCK_B=call["own_block"].shape[0] > 1,
        PRECISION="tf32x3" if call["query"].dtype == jnp.float32 else "tf32",
    )
    names = {"p_q": "query", "p_k": "key", "p_lse": "lse", "p_first": "first_row", "p_own_block": "own_block"}
    values = {parameter: call[name] for parameter, name in names.items()}
    values |= {"T": T, "N": N, "scale": call.spec.scale}
    launch = TritonLaunch(values, constants, (-(-T // queries), B * Hkv), config.warps, config.stages)
    best = launch.run(select_kernel, jax.ShapeDtypeStruct((B, T, Hkv, chosen), jnp.int32))
    return {"indices": assembled(call, best)}, {}


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward)
