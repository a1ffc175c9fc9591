"""Blocks that a Mosaic GPU kernel visits by a list: sub-blocks of 64, of which several make up one block.

A pattern whose cells are multiples of 64 shows all or nothing of 64 rows by 64 columns. A tile has one or two such
halves of rows, one in each consumer warpgroup, so two bits say who sees a sub-block, and travel with it. Other masks
hide elements of a sub-block as they do those of a block.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.softmax import schedule
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call

SUB_BLOCK = 64


class SubBlock(NamedTuple):
    """Columns of a block that lie side by side: the first, and in bit n whether half n of the rows sees any of them."""

    start: Any
    halves: Any = None


def tile_sizes(side: schedule.Side, rows: int, block: int) -> tuple[int, int]:
    """Queries and keys of a tile."""
    return (rows, block) if side == "q" else (block, rows)


def block_lists(
    call: Call, side: schedule.Side, rows: int, per_block: int, *, longest_first: bool = False
) -> dict[str, jax.Array]:
    """The lists of a call whose tiles have so many rows and whose blocks have `per_block` sub-blocks.

    `bounds` int32 (B|1, H|1, n, 4) are those of ranges, counted in blocks: the unmasked ones come first. `entries`
    int32 (B|1, H|1, n, m) are first columns, with the bits of a sub-block in their lowest. What fills up the last block
    is shown to nobody; a block in which unmasked sub-blocks meet others is a masked one.

    With `longest_first` (side "k") a tile's halves are not neighbours but visit about as much, the longest first, and
    `rows` int32 (B|1, Hkv|1, n, halves) has their numbers.
    """
    halves = rows // SUB_BLOCK
    some, every = schedule.maps(call, SUB_BLOCK, SUB_BLOCK, side)
    missing = ((0, 0), (0, 0), (0, -some.shape[2] % halves), (0, 0))
    # what no query reads needs no mask; keys beyond the last do
    some, every = jnp.pad(some, missing), jnp.pad(every, missing, constant_values=side == "q")
    lists = {}
    if longest_first:
        order = _longest_first_order(some, dimensions(call).G)
        lists["rows"] = order.reshape(*order.shape[:2], -1, halves)
        order = jnp.repeat(order, some.shape[1] // order.shape[1], axis=1)[..., None]
        some, every = (jnp.take_along_axis(x, order, axis=2) for x in (some, every))
    some, every = (x.reshape(*x.shape[:2], -1, halves, x.shape[3]) for x in (some, every))
    number, index = schedule.compact(some.any(3), every.all(3))
    bits = sum(some[:, :, :, n].astype(jnp.int32) << n for n in range(halves))
    entries = index * SUB_BLOCK + jnp.take_along_axis(bits, index, axis=-1)
    none = jnp.zeros_like(number[..., 0])
    bounds = jnp.stack([none, none, number[..., 0] // per_block, -(-number[..., 1] // per_block)], axis=-1)
    filled = jnp.pad(entries, ((0, 0), (0, 0), (0, 0), (0, -entries.shape[3] % per_block)))
    return lists | {"bounds": bounds, "entries": filled}


def _longest_first_order(some: jax.Array, G: int) -> jax.Array:
    """The order of sub-blocks of keys by how many of queries visit them, in all heads of a group: (B|1, Hkv|1, n)."""
    B, H, n, _ = some.shape
    visits = some.sum(-1, dtype=jnp.int32)
    visits = visits if H == 1 else visits.reshape(B, H // G, G, n).sum(2, dtype=jnp.int32)
    return jnp.argsort(-visits, axis=-1, stable=True).astype(jnp.int32)
