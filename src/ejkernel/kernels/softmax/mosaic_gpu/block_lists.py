"""Blocks that a Mosaic GPU kernel visits by a list: pieces of 64, of which several are brought together in one block.

A pattern whose cells are multiples of 64 shows all or nothing of 64 rows by 64 columns. A tile has one or two such
halves of rows, one in each compute warpgroup, so who sees a piece are two bits, which travel with it. Other masks hide
elements of a piece as they do those of a block.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.softmax import schedule
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call

PIECE = 64


class Piece(NamedTuple):
    """Columns of a block that lie side by side: the first, and in bit n whether half n of the rows sees any of them."""

    start: Any
    halves: Any = None


def tile_sizes(side: schedule.Side, rows: int, block: int) -> tuple[int, int]:
    """Queries and keys of a tile."""
    return (rows, block) if side == "q" else (block, rows)


def entries(call: Call, side: schedule.Side, rows: int, parts: int, *, alike: bool = False) -> dict[str, jax.Array]:
    """The lists of a call whose tiles have so many rows and whose blocks are `parts` pieces.

    `bounds` int32 (B|1, H|1, n, 4) are those of ranges, counted in blocks: the unmasked ones come first. `entries`
    int32 (B|1, H|1, n, m) are first columns, with the bits of a piece in their lowest. What fills up the last block is
    shown to nobody; a block in which unmasked pieces meet others is a masked one.

    With `alike` (side "k") a tile's halves are not neighbours but visit about as much, the longest first, and `rows`
    int32 (B|1, Hkv|1, n, halves) has their numbers.
    """
    halves = rows // PIECE
    some, every = schedule.maps(call, PIECE, PIECE, side)
    missing = ((0, 0), (0, 0), (0, -some.shape[2] % halves), (0, 0))
    # what no query reads needs no mask; keys beyond the last do
    some, every = jnp.pad(some, missing), jnp.pad(every, missing, constant_values=side == "q")
    found = {}
    if alike:
        order = _longest_first(some, dimensions(call).G)
        found["rows"] = order.reshape(*order.shape[:2], -1, halves)
        order = jnp.repeat(order, some.shape[1] // order.shape[1], axis=1)[..., None]
        some, every = (jnp.take_along_axis(x, order, axis=2) for x in (some, every))
    some, every = (x.reshape(*x.shape[:2], -1, halves, x.shape[3]) for x in (some, every))
    number, index = schedule.compact(some.any(3), every.all(3))
    bits = sum(some[:, :, :, n].astype(jnp.int32) << n for n in range(halves))
    listed = index * PIECE + jnp.take_along_axis(bits, index, axis=-1)
    none = jnp.zeros_like(number[..., 0])
    bounds = jnp.stack([none, none, number[..., 0] // parts, -(-number[..., 1] // parts)], axis=-1)
    filled = jnp.pad(listed, ((0, 0), (0, 0), (0, 0), (0, -listed.shape[3] % parts)))
    return found | {"bounds": bounds, "entries": filled}


def _longest_first(some: jax.Array, G: int) -> jax.Array:
    """The order of key pieces by how many pieces of queries visit them, in all heads of a group: (B|1, Hkv|1, n)."""
    B, H, n, _ = some.shape
    visits = some.sum(-1, dtype=jnp.int32)
    visits = visits if H == 1 else visits.reshape(B, H // G, G, n).sum(2, dtype=jnp.int32)
    return jnp.argsort(-visits, axis=-1, stable=True).astype(jnp.int32)
