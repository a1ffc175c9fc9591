"""Which query sees which key, pair by pair: the one place that says what a mask means.

The reference, the tiles of XLA and TPU kernels and `MaskInfo` all ask here. The arrays only need to broadcast against
each other, queries along one axis and keys along another.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp

Band = tuple[int | None, int | None]  # (lo, hi) keeps `lo <= key position - query position <= hi`; None is unbounded


class Tokens(NamedTuple):
    """Queries, or keys."""

    position: Any  # what band and chunk compare: by plain index with the ends aligned, or explicit
    segment: Any = None  # equal ids see each other, a negative one nobody; None: all are one


def visible(
    queries: Tokens,
    keys: Tokens,
    band: Band = (None, None),
    chunk: int | None = None,
    *,
    pairs: Any = True,
    also: Iterable[Any] = (),
    divide: Callable[[Any, int], Any] = jnp.floor_divide,
) -> Any:
    """The pairs that every rule shows.

    Args:
        pairs: those that there are; True where the rules give the shape.
        also: what else must hold of a pair: a dense mask, the cells of a pattern.
        divide: floor division of positions by the chunk, for compilers with a slow one.
    """
    seen = pairs
    lo, hi = band
    # added to one side first: that side has fewer numbers than there are pairs
    if lo is not None:
        seen &= keys.position >= queries.position + lo
    if hi is not None:
        seen &= keys.position <= queries.position + hi
    if chunk is not None:
        seen &= divide(queries.position, chunk) == divide(keys.position, chunk)
    if queries.segment is not None:
        seen &= (queries.segment == keys.segment) & (queries.segment >= 0)
    for rule in also:
        seen &= rule
    return seen


def pattern_cells(blocks: Any, queries: Any, keys: Any, block: tuple[int, int], row: tuple[Any, ...] = (...,)) -> Any:
    """The entries of `blocks` (..., nq, nk) for query and key indices that broadcast against each other.

    `row` indexes the leading dimensions, by default all of them.
    """
    height, width = block
    return blocks[(*row, queries // height, keys // width)]
