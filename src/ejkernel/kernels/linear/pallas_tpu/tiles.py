"""One chunk of a scan on a TPU: tiles are (tokens, channels), and what belongs to a token alone is a column.

The zeros and ones of `chunks` come as one array, reversed for a scan that descends: so no token is ever moved.
Sums of log decays are products of the matrix unit with those. It multiplies bfloat16, so a float32 gate goes in as
three terms of that dtype, which add up to it exactly. Decays of a whole head need no such product: between two tokens
lie as many as their distance.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.common.pallas_tpu import transposed
from ejkernel.kernels.common.tiles import matmul
from ejkernel.kernels.linear import chunks
from ejkernel.kernels.linear.pallas_tpu.inverse import unit_lower_inverse

# rows of a product of which one is wanted: a tile of bfloat16 has so many
ROWS = 16
_FLOAT32_TERMS = 3
_HIGH_BITS = -65536


@dataclass(frozen=True)
class Chunk:
    """What is static about the chunks of a scan.

    Attributes:
        size: tokens of a chunk.
        deferred, descending, scale: of the scan.
        by_channel: whether there are decays of channels.
        split: whether what is computed of bfloat16 inputs is multiplied as two terms of that dtype, not rounded to one.
        terms: of how many bfloat16 numbers each of the gates is the sum, by name.
    """

    size: int
    deferred: bool
    descending: bool
    scale: float
    by_channel: bool
    split: bool
    terms: dict[str, int]

    @cached_property
    def matrices(self) -> dict[str, np.ndarray]:
        """Zeros and ones (size, size) by name, in the order of the tokens in memory."""
        to_start, to_end = chunks.ends(self.size, self.deferred)
        matrices = {"to_start": to_start, "to_end": to_end, "until": chunks.ends(self.size, deferred=False)[0]}
        matrices["before"] = np.tri(self.size, k=-1, dtype=bool)
        if self.by_channel:
            levels = [*chunks.levels(self.size, self.deferred), chunks.near(self.size, self.deferred)]
            for n, level in enumerate(levels):
                matrices[f"pairs {n}"], matrices[f"reach {n}"] = level
        return {name: m[::-1, ::-1] if self.descending else m for name, m in matrices.items()}

    @property
    def levels(self) -> int:
        """How many there are, from the widest to the nearest; none where no channel decays."""
        return sum(name.startswith("pairs") for name in self.matrices)


def bfloat16_terms(dtype: Any) -> int:
    """How many bfloat16 numbers add up to one of a dtype."""
    return 1 if dtype == jnp.bfloat16 else _FLOAT32_TERMS


class Heads(NamedTuple):
    """Sums of the log decays of whole heads, or how many there are."""

    between: jax.Array  # (L, L)
    to_start: jax.Array  # (L, 1)
    to_end: jax.Array  # (L, 1)
    total: jax.Array  # (1, 1)


@dataclass(frozen=True, eq=False)
class Tile:
    """A chunk inside the kernel.

    Attributes:
        arrays: a, b (L, A), c (L, C); `g` (1, L) and `inner`, `outer` in float32, each where the scan has it.
        matrices: a ref to those of `chunk`, stacked.
        tokens: how many there are.
        gamma: the log decay of every token of this head, a scalar; None if there is none.
    """

    chunk: Chunk
    arrays: dict[str, jax.Array]
    matrices: Any
    tokens: Any
    gamma: Any

    # Sums --------------------------------------------------------------------------------------------------------

    def matrix(self, name: str, level: Any = 0) -> jax.Array:
        """The matrix of that name, or of one that is given for level 0 that of another level."""
        return self.matrices[list(self.chunk.matrices).index(name) + 2 * level]

    def sums(self, matrix: str, gate: str) -> jax.Array:
        """The log decays (L, channels) that each token reaches over."""
        return added(self.matrix(matrix), self.arrays[gate], (1, 0), self.chunk.terms[gate])

    @cached_property
    def heads(self) -> Heads | None:
        sums = []
        if "g" in self.arrays:
            sums.append(self._of_tokens(self.arrays["g"]))
        if self.gamma is not None:
            sums.append(Heads(*(n * self.gamma for n in self._counts)))
        return Heads(*map(sum, zip(*sums, strict=True))) if sums else None  # pyright: ignore

    def _of_tokens(self, g: jax.Array) -> Heads:
        to_start, to_end = (self.matrix(name).astype(jnp.float32) * g for name in ("to_start", "to_end"))
        # those up to i which are after j: sums of them alone, so that nothing cancels
        between = added(self.matrix("to_end"), to_start, (1, 1), self.chunk.terms["g"], matrix_last=True)
        return Heads(between, *(x.sum(1, keepdims=True) for x in (to_start, to_end, g)))

    @cached_property
    def _counts(self) -> Heads:
        """How many decays lie between tokens, and before and after each; of padding, only between two of it."""
        L, itself = self.chunk.size, 0 if self.chunk.deferred else 1
        row, column = (lax.broadcasted_iota(jnp.int32, (L, L), axis) for axis in (0, 1))
        token = lax.broadcasted_iota(jnp.int32, (L, 1), 0)
        done = self.tokens - 1 - token if self.chunk.descending else token
        all_tokens = jnp.full((1, 1), self.tokens, jnp.int32)
        counts = (jnp.abs(row - column), done + itself, self.tokens - done - itself, all_tokens)
        return Heads(*(jnp.maximum(n, 0).astype(jnp.float32) for n in counts))

    # What is multiplied ------------------------------------------------------------------------------------------

    def operand(self, x: jax.Array) -> jax.Array:
        """float32 x as `dot` takes it."""
        return x if self.chunk.split else x.astype(self.arrays["c"].dtype)

    def dot(self, x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
        if not self.chunk.split:
            return matmul(x, y, contract, lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)
        # what is left out is the product of both low terms
        (high, *low), (other_high, *other_low) = _high_and_low(x), _high_and_low(y)
        pairs = [(high, other_high), *((term, other_high) for term in low), *((high, term) for term in other_low)]
        return sum(matmul(*pair, contract) for pair in pairs)  # pyright: ignore

    def _weighed(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        return self.operand(x.astype(jnp.float32) * factor)

    # A chunk -----------------------------------------------------------------------------------------------------

    def written(self, state: jax.Array) -> jax.Array:
        """(L, C): what the tokens write once each has erased what its key held, of the state and of those before it."""
        erase = replace(self, arrays=self.arrays | {"a": self.arrays["erase"]})
        held = self.dot(erase._decayed(erase.arrays["a"], "to_start", "inner", heads=True), self.operand(state), (1, 0))
        lower, left = erase._scores(), self.arrays["c"].astype(jnp.float32) - held
        if self.chunk.descending:  # the order of the scan is the other way
            inverse = transposed(unit_lower_inverse(transposed(lower)))
        else:
            inverse = unit_lower_inverse(lower)
        return self.dot(self.operand(inverse), self.operand(left), (1, 0))

    def out(self, state: jax.Array, tangent: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """What the tokens get from those before them, and from themselves: (L, C) each.

        With the tangent of the state, that of the output: what a token gives itself has not been decayed.
        """
        a, b, c = (self.arrays[name] for name in "abc")
        decayed, scores = self._decayed(a, "to_start", "inner"), self._scores()
        before = self.dot(decayed, self.operand(state), (1, 0))
        if tangent is not None:
            before = before * self._counts.to_start + self.dot(decayed, self.operand(tangent), (1, 0))
            scores = scores * self._counts.between
        if (total := self._total("to_start", "outer", heads=True)) is not None:
            before = before * jnp.exp(total)
        others = before + self._inside(scores)
        if tangent is not None:
            return self.chunk.scale * others, jnp.zeros_like(others)
        diagonal = (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(1, keepdims=True) * c.astype(jnp.float32)
        return self.chunk.scale * others, self.chunk.scale * diagonal

    def next_tangent(self, state: jax.Array, tangent: jax.Array) -> jax.Array:
        """(A, C), from both before the chunk."""
        older = self.arrays["b"].astype(jnp.float32) * self._counts.to_end
        tile = replace(self, arrays=self.arrays | {"b": self.operand(older)})
        return tile.next_state(tangent + self._counts.total * state)

    def next_state(self, state: jax.Array) -> jax.Array:
        """(A, C), from that before the chunk."""
        b = self._decayed(self.arrays["b"], "to_end", "inner", heads=True)
        c = self._decayed(self.arrays["c"], "to_end", "outer")
        if "outer" in self.arrays:
            state = state * jnp.exp(self.arrays["outer"].sum(0, keepdims=True))
        if self.heads is not None:
            state = state * jnp.exp(self.heads.total)
        if "inner" in self.arrays:
            # a sum over tokens for each row of the state, in all of its lanes
            ones = jnp.ones((self.chunk.size, state.shape[1]), jnp.bfloat16)
            state = state * jnp.exp(
                added(ones, self.arrays["inner"], (0, 0), self.chunk.terms["inner"], matrix_last=True)
            )
        return state + self.dot(b, c, (0, 0))

    def _decayed(self, x: jax.Array, matrix: str, gate: str, heads: bool = False) -> jax.Array:
        """x (L, channels) times the decays of its tokens, to be multiplied."""
        total = self._total(matrix, gate, heads)
        return x if total is None else self._weighed(x, jnp.exp(total))

    def _total(self, matrix: str, gate: str, heads: bool) -> jax.Array | None:
        """The log decays (L, channels or 1) that each token reaches over: of a gate, and with `heads` of the head."""
        total = self.sums(matrix, gate) if gate in self.arrays else None
        if heads and self.heads is not None:
            column = getattr(self.heads, matrix)
            total = column if total is None else total + column
        return total

    def _scores(self) -> jax.Array:
        """(L, L): a_i . b_j, decayed from j to i by inner and head decays, for j before i; zero elsewhere."""
        a, b = self.arrays["a"], self.arrays["b"]
        if "inner" in self.arrays:

            def add(level: jax.Array, scores: jax.Array) -> jax.Array:
                p, q = self._factors("inner", level)
                products = self.dot(self._weighed(a, p), self._weighed(b, q), (1, 1))
                return jnp.where(self._pairs("pairs 0", level), products, scores)

            scores = self._over_levels(add, (self.chunk.size, self.chunk.size))
        else:
            scores = jnp.where(self._pairs("before"), self.dot(a, b, (1, 1)), 0.0)
        return scores if self.heads is None else scores * jnp.exp(self.heads.between)

    def _inside(self, scores: jax.Array) -> jax.Array:
        """(L, C): what the tokens get from those before them in the chunk."""
        c = self.arrays["c"]
        if "outer" not in self.arrays:
            return self.dot(self.operand(scores), c, (1, 0))

        def add(level: jax.Array, out: jax.Array) -> jax.Array:
            p, q = self._factors("outer", level)
            of_level = jnp.where(self._pairs("pairs 0", level), scores, 0.0)
            return out + p * self.dot(self.operand(of_level), self._weighed(c, q), (1, 0))

        return self._over_levels(add, c.shape)

    def _over_levels(self, add: Callable[[jax.Array, jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """What every level adds to zeros. A loop, not unrolled: its iterations would all hold memory at once."""

        def step(_: Any, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            level, x = carried  # counted here: with 64 bits on, the loop's own index is of two widths in Mosaic
            return level + 1, add(level, x)

        return lax.fori_loop(0, self.chunk.levels, step, (jnp.int32(0), jnp.zeros(shape, jnp.float32)))[1]

    def _factors(self, gate: str, level: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the pairs of a level are weighed with: that of i and that of j, per channel."""
        nearest = level == self.chunk.levels - 1
        least, sign = (
            jnp.where(nearest, *map(np.float32, pair))
            for pair in ((chunks.NEAR_DECAY, chunks.LEAST_DECAY), (-1.0, 1.0))
        )
        gates = jnp.maximum(self.arrays[gate], least)
        total = added(self.matrix("reach 0", level), gates, (1, 0), self.chunk.terms[gate])
        return jnp.exp(total), jnp.exp(total * sign)

    def _pairs(self, name: str, level: Any = 0) -> jax.Array:
        return self.matrix(name, level).astype(jnp.float32) > 0.0

    # Products ----------------------------------------------------------------------------------------------------

    def running(self, x: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sums of x (L, C) along the scan, and the last of them (1, C), as `before` is."""
        return added(self.matrix("until"), x, (1, 0)) + before, x.sum(0, keepdims=True) + before

    def running_lanes(self, x: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sums of x (ROWS, L), all rows the same, along the scan, and the last of them (1, 1), as `before` is."""
        return added(self.matrix("until"), x, (1, 1), matrix_last=True) + before, x[:1].sum(1, keepdims=True) + before


def added(
    matrix: jax.Array,
    x: jax.Array,
    contract: tuple[int, int],
    terms: int = _FLOAT32_TERMS,
    matrix_last: bool = False,
) -> jax.Array:
    """The product of float32 x with a matrix of zeros and ones: nothing is rounded but the sums."""
    total = None
    for n in range(terms):
        # what bfloat16 holds of it; cut off, not rounded: a compiler may take out a pair of conversions
        term = x if n == terms - 1 else _high(x)
        x = x - term
        operands = (term.astype(jnp.bfloat16), matrix) if matrix_last else (matrix, term.astype(jnp.bfloat16))
        product = matmul(*operands, contract)
        total = product if total is None else total + product
    return total  # pyright: ignore


def row_sums(x: jax.Array) -> jax.Array:
    """The sums of the rows of x (L, C) as lanes: (ROWS, L), all rows the same."""
    return added(jnp.ones((ROWS, x.shape[1]), jnp.bfloat16), x, (1, 1))


def _high_and_low(x: jax.Array) -> list[jax.Array]:
    """bfloat16 x, or what bfloat16 holds of float32 x, and of what that leaves."""
    if x.dtype == jnp.bfloat16:
        return [x]
    high = _high(x)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]


def _high(x: jax.Array) -> jax.Array:
    word = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_HIGH_BITS)
    return lax.bitcast_convert_type(word, jnp.float32)
