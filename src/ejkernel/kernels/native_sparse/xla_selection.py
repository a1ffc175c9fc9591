"""Choosing blocks in XLA: the weights of a few queries at a time, and their top k."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.kernels.native_sparse.rows import over_chunks
from ejkernel.kernels.native_sparse.selection import assembled, free_blocks
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays


@dataclass(frozen=True)
class Config:
    """Queries at a time."""

    block_q: int = 128

    def __post_init__(self) -> None:
        config_ints(self, ("block_q",))


def unsupported(call: Call) -> list[str]:
    return []


def default_config(call: Call) -> Config:
    """As many queries as keep the weights of their heads near 16 MB."""
    B, _, H, _ = call["query"].shape
    return Config(max(1, min(256, 2**22 // max(1, B * H * call["key"].shape[1]))))


def search_space(call: Call) -> list[Config]:
    return [Config(block_q) for block_q in (16, 64, 128, 256, 512)]


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    B, T, H, D = call["query"].shape
    N, Hkv = call["key"].shape[1:3]
    chosen = min(call.spec.chosen, N)
    if chosen == 0:
        return {"indices": assembled(call, jnp.zeros((B, T, Hkv, 0), jnp.int32))}, {}
    key = call["key"]

    def best(rows: Arrays) -> jax.Array:
        query = rows["query"].reshape(B, -1, Hkv, H // Hkv, D)
        logits = jnp.einsum("bthgd,bnhd->bthgn", query, key, precision="highest", preferred_element_type=jnp.float32)
        free = free_blocks(rows["first_row"], rows["own_block"], N)[:, :, None]
        lse = rows["lse"].reshape(B, -1, Hkv, H // Hkv, 1)
        weights = jnp.exp(jnp.where(free[..., None, :], call.spec.scale * logits - lse, -jnp.inf))
        weight, row = jax.lax.top_k(jnp.where(free, weights.sum(3), -1.0), chosen)
        return jnp.where(weight >= 0, row - rows["first_row"][..., None, None], -1)

    rows = {
        "query": call["query"],
        "lse": call["lse"].swapaxes(1, 2),
        "first_row": call["first_row"],
        "own_block": call["own_block"],
    }
    return {"indices": assembled(call, over_chunks(best, rows, min(config.block_q, T), {"own_block": -1}))}, {}


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward)
