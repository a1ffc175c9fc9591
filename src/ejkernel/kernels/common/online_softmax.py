"""The online softmax of rows in jax.numpy: tile by tile, and merged from results computed independently."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# a hidden logit, below every finite one whatever a bias is; exponentials of a row of nothing else: see `_base`
MASKED = -float("inf")


class OnlineSoftmax(NamedTuple):
    """The state of rows (...)."""

    running_max: jax.Array  # (...) largest logit so far
    running_sum: jax.Array  # (...) sum of exponentials against it
    out: jax.Array  # (..., Dv) weighted values against it


def nothing_seen(rows: tuple[int, ...], Dv: int) -> OnlineSoftmax:
    return OnlineSoftmax(jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows), jnp.zeros((*rows, Dv)))


def _base(running_max: jax.Array) -> jax.Array:
    """What exponentials are taken against; where nothing is seen yet 0: -inf - 0, not -inf - -inf."""
    return jnp.where(running_max == MASKED, 0.0, running_max)


def online_step(
    state: OnlineSoftmax, logits: jax.Array, exp: Callable[[jax.Array], jax.Array] = jnp.exp
) -> tuple[OnlineSoftmax, jax.Array]:
    """Absorb a tile of logits (..., S), hidden ones being MASKED: the rescaled state and the tile's weights."""
    new_max = jnp.maximum(state.running_max, logits.max(-1))
    base = _base(new_max)
    weights = exp(logits - base[..., None])
    decay = jnp.exp(state.running_max - base)
    return OnlineSoftmax(new_max, state.running_sum * decay + weights.sum(-1), state.out * decay[..., None]), weights


def with_sinks(state: OnlineSoftmax, sinks: jax.Array) -> OnlineSoftmax:
    """The state that sinks, logits without a value, have joined."""
    new_max = jnp.maximum(state.running_max, sinks)
    base = _base(new_max)
    decay = jnp.exp(state.running_max - base)
    return OnlineSoftmax(new_max, state.running_sum * decay + jnp.exp(sinks - base), state.out * decay[..., None])


def online_finish(state: OnlineSoftmax) -> tuple[jax.Array, jax.Array]:
    """Normalised rows and their lse; a row that saw nothing is zero with lse -inf."""
    some = state.running_sum != 0.0  # a sum of nan is not nothing: it must show
    total = jnp.where(some, state.running_sum, 1.0)
    return state.out / total[..., None], jnp.where(some, state.running_max + jnp.log(total), -jnp.inf)


def merge(states: OnlineSoftmax) -> OnlineSoftmax:
    """One state of several along the leading axis; one that saw nothing weighs nothing."""
    new_max = states.running_max.max(0)
    weights = jnp.exp(states.running_max - _base(new_max)[None])
    return OnlineSoftmax(new_max, (states.running_sum * weights).sum(0), (states.out * weights[..., None]).sum(0))


def state_of(out: jax.Array, lse: jax.Array) -> OnlineSoftmax:
    """The state of rows that are normalised; those with lse -inf saw nothing."""
    none = jnp.isneginf(lse)
    return OnlineSoftmax(lse, (~none).astype(jnp.float32), jnp.where(none[..., None], 0.0, out.astype(jnp.float32)))
