"""How a chunk of tokens is done at once without an exponential that could overflow: which log decays lie between them.

Between tokens j <= i of a chunk lie the decays of (j, i], or if they are deferred those of [j, i). With a decay for
every channel, exp(sum) of all pairs would be C x C x D numbers; as a product exp(sum to i) * exp(-sum to j) it would
overflow. So pairs are sorted by level: level s holds those that a multiple of s, odd times, first comes between. There
it is the product of two factors, from j to that boundary and from the boundary to i, neither of them above 1:

    weight_ij = x_i x_j,   x = exp(reach_s @ decays)

with a matrix of zeros and ones that says, for every token, which decays lie between it and the boundary of its block
of 2 s tokens. What is left are pairs inside blocks of `NEAR` tokens. Those are relative to the middle of their block:
one factor may be above 1, but at most exp(4 * 15), for decays are cut off at exp(-15) there: 3e-7 against what the
token gives itself, which is exact. All sums are products with such matrices, of numbers of one sign: nothing cancels.
"""

from functools import cache
from typing import NamedTuple

import numpy as np

NEAR = 8
# exp(-15) is near the rounding of float32; exp(4 * 15) is far from the end of its range
NEAR_DECAY = -15.0
# exp(-100) is zero in float32, and a sum over a chunk stays exact to 1e-3
LEAST_DECAY = -100.0


class Level(NamedTuple):
    """The pairs (i, j) of one level, and how each token reaches the boundary of its block."""

    pairs: np.ndarray
    reach: np.ndarray


def levels(chunk: int, deferred: bool) -> list[Level]:
    """From the widest to that of blocks of 2 * NEAR tokens."""
    sorted_levels, half = [], chunk // 2
    while half >= NEAR:
        sorted_levels.append(_level(chunk, half, deferred))
        half //= 2
    return sorted_levels


@cache
def _level(chunk: int, half: int, deferred: bool) -> Level:
    token = np.arange(chunk)
    row, column = token[:, None], token[None, :]
    same_block = row // (2 * half) == column // (2 * half)
    second_half = (token // half) % 2 == 1
    pairs = same_block & second_half[:, None] & ~second_half[None, :]
    # decays of (row, boundary) for a token before it, [boundary, row] after it; deferred: [row, ...) and [..., row)
    before = column >= row if deferred else column > row
    after = column < row if deferred else column <= row
    reach = same_block & np.where(second_half[:, None], second_half[None, :] & after, ~second_half[None, :] & before)
    return Level(pairs, reach)


@cache
def near(chunk: int, deferred: bool) -> Level:
    """The pairs inside blocks of NEAR tokens, none of a token with itself; `reach` is -1 before the middle."""
    token = np.arange(chunk)
    row, column = token[:, None], token[None, :]
    size = min(NEAR, chunk)
    same_block = row // size == column // size
    middle = token // size * size + size // 2
    before = (column >= row if deferred else column > row) & (column < middle[:, None])
    after = (column < row if deferred else column <= row) & (column >= middle[:, None])
    reach = same_block & after, same_block & before
    return Level(same_block & (column < row), reach[0].astype(np.int8) - reach[1].astype(np.int8))


@cache
def ends(chunk: int, deferred: bool) -> tuple[np.ndarray, np.ndarray]:
    """Which decays lie between the beginning of a chunk and each token, and between each token and its end."""
    row, column = np.arange(chunk)[:, None], np.arange(chunk)[None, :]
    return (column < row, column >= row) if deferred else (column <= row, column > row)
