"""Selections inverted: for each tile of keys, the entries (a query and one of its blocks) that chose it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.native_sparse.spec import dimensions
from ejkernel.ops import Call
from ejkernel.types.segments import searched


class Entries(NamedTuple):
    """All int32, for each batch and key head; M items, so that no program has many more entries than another.

    Attributes:
        order: the entries, counted through (T, K), by their tiles: (B, Hkv, T * K). Those of no block come last.
        items: a tile, the first and the last (exclusive) of its entries in `order`, and the item's number, by tiles:
            (B, Hkv, M, 4). They are in the order of their first queries: those of neighbouring items are in cache.
        first_item: the number of each tile's first item, and how many there are: (B, Hkv, tiles + 1).
    """

    order: jax.Array
    items: jax.Array
    first_item: jax.Array


class Tiling(NamedTuple):
    """Blocks as tiles of keys: several small blocks in one, or one large block in several sub-blocks."""

    blocks: int
    sub_blocks: int
    tiles: int


def tiling(N: int, block_size: int, block_k: int) -> Tiling:
    """N blocks as tiles of `block_k` keys."""
    blocks, sub_blocks = max(1, block_k // block_size), max(1, -(-block_size // block_k))
    return Tiling(blocks, sub_blocks, -(-N // blocks) * sub_blocks)


def entries(call: Call, block_k: int, segment: int) -> Entries:
    """The entries by tiles of `block_k` keys, in items of at most `segment` entries."""
    dims = dimensions(call)
    tiles = tiling(dims.N, call.spec.block_size, block_k)
    groups = tiles.tiles // tiles.sub_blocks
    indices = jnp.moveaxis(call["indices"], 2, 1).reshape(dims.B, dims.Hkv, dims.T * dims.K)
    group = jnp.where(indices >= 0, indices // tiles.blocks, groups)
    group, order = _sorted(group, groups)
    most = tiles.tiles + tiles.sub_blocks * (dims.T * dims.K // segment)

    def one(group: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
        bounds = searched(group, np.arange(groups + 1, dtype=np.int32), "left")
        first, last = (jnp.repeat(x, tiles.sub_blocks) for x in (bounds[:-1], bounds[1:]))
        items, first_item = _items(first, last, segment, most)
        empty = items[:, 1] == items[:, 2]
        entry = order[jnp.minimum(items[:, 1], order.shape[0] - 1)]
        return items[jnp.argsort(jnp.where(empty, dims.T * dims.K, entry))], first_item

    return Entries(order, *jax.vmap(jax.vmap(one))(group, order))


def _sorted(group: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Groups (B, Hkv, n) from 0 to `groups` in rising order, and where each was."""
    n = group.shape[2]
    number = jax.lax.broadcasted_iota(jnp.int32, group.shape, 2)
    if (groups + 1) * n > 2**31:
        group, number = jax.lax.sort((group, number), dimension=2, num_keys=1)
        return group, number
    # one array is sorted faster than two
    both = jnp.sort(group * n + number, axis=2)
    return both // n, both % n


def _items(begin: jax.Array, end: jax.Array, segment: int, most: int) -> tuple[jax.Array, jax.Array]:
    """Entries from `begin` to `end` (tiles,) in numbered stretches: (most, 4), and where those of each tile start."""
    counts = jnp.cumsum((end - begin + segment - 1) // segment, dtype=jnp.int32)
    first_item = jnp.concatenate([jnp.zeros(1, jnp.int32), counts])
    item = np.arange(most, dtype=np.int32)
    tile = jnp.minimum(searched(first_item, item) - 1, begin.shape[0] - 1)
    first = begin[tile] + (item - first_item[tile]) * segment
    # items behind the last have nothing to do
    last = jnp.maximum(jnp.minimum(first + segment, end[tile]), first)
    return jnp.stack([tile, first, last, jnp.asarray(item)], -1), first_item
