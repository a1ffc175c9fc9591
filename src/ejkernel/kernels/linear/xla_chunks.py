"""Chunks of linear attention in jax.numpy: tiles are (B, H, chunk, channels) and (B, H, chunk), float32."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.linear import chunks
from ejkernel.ops.operation import Arrays

product = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def in_groups(x: Any, group: int) -> jax.Array:
    """(B or 1, rows, ...) to (groups, group, B or 1, ...), with chunks of no tokens at the end."""
    x = jnp.moveaxis(jnp.asarray(x), 1, 0)
    x = jnp.pad(x, ((0, -x.shape[0] % group), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(x.shape[0] // group, group, *x.shape[1:])


def chunk_of(T: int, sequences: int) -> int:
    """Tokens of a chunk: no more than packed sequences have, since it belongs to one."""
    return min(64, power_of_two(max(1, min(T, max(8, T // max(1, sequences))))))


def hidden_zeros(state: jax.Array) -> jax.Array:
    """The state, hidden from the compiler, which may know that it is zero.

    XLA for CPUs leaves a product with such zeros unwritten (jaxlib 0.10.2 seldom, 0.12.0.1 often) and goes on with
    whatever lies there.
    """
    return lax.optimization_barrier(state)


def started(starts: jax.Array | None, state: jax.Array, first: jax.Array, sequence: jax.Array) -> jax.Array:
    """The state before a chunk (B, H, A, C): where it is the `first` of its sequence, that of `starts` (B, N, ...).

    `starts` are those of packed sequences; None: there is one sequence, whose state is carried in.
    """
    if starts is None:
        return state
    sequence, first = (jnp.broadcast_to(x, state.shape[:1]) for x in (sequence, first))
    beginning = jax.vmap(lambda row, i: row[i])(starts, sequence)
    return jnp.where(first.reshape(-1, *(1,) * (state.ndim - 1)), beginning, state)


def decayed(y: jax.Array, x: Arrays, name: str, reach: np.ndarray, transposed: bool = False) -> jax.Array:
    """y times the decays that each row reaches over; those of whole heads are among the inner ones.

    Rows are the second last axis of y, or with `transposed` one row is all of it: channels are the second last axis.
    """
    if name in x:
        total = product("rl,bhlc->bhrc", reach, x[name])
        y = y * jnp.exp(total.mT if transposed else total)
    if name == "inner" and "g" in x:
        y = y * jnp.exp(product("rl,bhl->bhr", reach, x["g"]))[..., None]
    return y


def pair_scores(x: Arrays, deferred: bool) -> jax.Array:
    """(B, H, chunk, chunk): a_i . b_j, decayed from j to i by inner and head decays, for j before i; zero elsewhere."""
    chunk = x["a"].shape[2]
    lower = np.tri(chunk, k=-1, dtype=bool)
    if "inner" not in x:
        scores = jnp.where(lower, product("bhia,bhja->bhij", x["a"], x["b"]), 0)
    else:
        scores = jnp.zeros((*x["a"].shape[:3], chunk), jnp.float32)
        for level, p, q in level_factors(x["inner"], deferred):
            scores = jnp.where(level.pairs, product("bhia,bhja->bhij", x["a"] * p, x["b"] * q), scores)
    if "g" in x:
        to_start, to_end = (m.astype(np.float32) for m in chunks.ends(chunk, deferred))
        # decays between j and i, which are those after j up to i: sums of them alone, so that nothing cancels
        between = product("il,bhlj->bhij", to_start, x["g"][..., None] * to_end.T)
        scores = jnp.where(lower, scores * jnp.exp(jnp.where(lower, between, 0)), 0)
    return scores


def from_earlier(x: Arrays, scores: jax.Array, deferred: bool) -> jax.Array:
    """What the tokens of a chunk get from those before them in it."""
    if "outer" not in x:
        return product("bhij,bhjc->bhic", scores, x["c"])
    out = jnp.zeros(x["c"].shape, jnp.float32)
    for level, p, q in level_factors(x["outer"], deferred):
        out += p * product("bhij,bhjc->bhic", jnp.where(level.pairs, scores, 0), x["c"] * q)
    return out


def level_factors(gates: jax.Array, deferred: bool) -> list[tuple[chunks.Level, jax.Array, jax.Array]]:
    """Of every level, what its pairs are weighed with: that of i and that of j, per channel."""
    chunk, factors = gates.shape[2], []
    for level in chunks.levels(chunk, deferred):
        factor = jnp.exp(product("rl,bhlc->bhrc", level.reach.astype(np.float32), gates))
        factors.append((level, factor, factor))
    level = chunks.near(chunk, deferred)
    total = product("rl,bhlc->bhrc", level.reach.astype(np.float32), jnp.maximum(gates, chunks.NEAR_DECAY))
    return [*factors, (level, jnp.exp(total), jnp.exp(-total))]
