"""The canonical call of choosing blocks: what there is to choose from, and what is always taken."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.native_sparse.block_table import BlockTable
from ejkernel.ops import Call, Dims

ARRAYS = {
    "query": Dims("B T H D", broadcasts=False),
    # one row for each block of the table
    "key": Dims("B N Hkv D", broadcasts=False),
    "lse": Dims("B H T", broadcasts=False),
    "first_row": Dims("B T"),
    "own_block": Dims("B T"),
}

OUTPUTS = {"indices": "B T Hkv K"}

# the first block, a query's own and the one before
ALWAYS = 3


@dataclass(frozen=True)
class Spec:
    """Static facts: how logits are scaled, and how many blocks a query takes."""

    scale: float
    count: int

    @property
    def chosen(self) -> int:
        """How many of them it chooses."""
        return max(0, self.count - ALWAYS)


def selection_call(
    query: jax.Array, compressed_key: jax.Array, lse: jax.Array, table: BlockTable, *, scale: float, count: int
) -> Call:
    """The call whose arrays are checked: queries (B, T, H, D), a key (B, N, Hkv, D) for each block, lse (B, H, T)."""
    arrays = {"query": query, "key": compressed_key, "lse": lse}
    arrays |= {"first_row": table.first_row, "own_block": table.own_block}
    return Call(Spec(scale, count), {name: jax.lax.stop_gradient(x) for name, x in arrays.items()})


def free_blocks(first: jax.Array, own_block: jax.Array, N: int) -> jax.Array:
    """(B|1, T, N): the rows of the table that a query chooses among, those between the ones it always takes."""
    block = jnp.arange(N, dtype=jnp.int32) - first[..., None]
    return (block >= 1) & (block <= own_block[..., None] - 2)


def assembled(call: Call, best: Any) -> jax.Array:
    """(B, T, Hkv, count) from the best (B, T, Hkv, any), both counted from the sequence's first; -1 fills up.

    First come the first block, the query's own and the one before: as many of them as there are.
    """
    own_block = call["own_block"]
    always = [
        jnp.where(own_block >= n, block, -1)
        for n, block in enumerate((jnp.zeros_like(own_block), own_block, own_block - 1))
    ]
    taken = jnp.stack(always, -1)[:, :, None]
    count, chosen = call.spec.count, best[..., : call.spec.chosen]
    taken = jnp.broadcast_to(taken, (*chosen.shape[:3], ALWAYS))
    blocks = jnp.concatenate([taken, chosen.astype(jnp.int32)], -1)
    missing = max(0, count - blocks.shape[-1])
    return jnp.pad(blocks, [(0, 0)] * 3 + [(0, missing)], constant_values=-1)[..., :count]
