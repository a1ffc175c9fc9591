"""Dropout bits from a counter: the same on every platform, for they depend on (seed, batch, head, query, key) only.

The counter of a pair is `seed + query * STEP_QUERY + key * STEP_KEY`. Tokens that begin elsewhere, as on a device that
holds a shard of a sequence, so only change the seed (`moved`). With these multipliers no two pairs within 60000 queries
and keys of each other have the same counter.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STEP_BATCH = np.uint32(0x9E3779B1)
STEP_HEAD = np.uint32(0x85EBCA77)
STEP_QUERY = np.uint32(0x06B69AB5)
STEP_KEY = np.uint32(0xA703CAEF)
MIX_1 = np.uint32(0x7FEB352D)
MIX_2 = np.uint32(0x846CA68B)


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit flips each output bit about half the time."""
    x = x ^ (x >> 16)
    x = x * MIX_1
    x = x ^ (x >> 15)
    x = x * MIX_2
    return x ^ (x >> 16)


@partial(jax.jit, static_argnums=(1, 2))
def head_seeds(seed: jax.Array, B: int, H: int) -> jax.Array:
    """A seed (B, H) for every batch row and head: it folds under vmap and splits over a mesh like any array."""
    rows = mix(mix(seed.astype(jnp.uint32)) + jnp.arange(B, dtype=jnp.uint32) * STEP_BATCH)
    return mix(rows[:, None] + jnp.arange(H, dtype=jnp.uint32)[None] * STEP_HEAD)


def threshold(probability: float) -> np.uint32:
    """Bits below this are dropped."""
    return np.uint32(min(round(probability * 2**32), 2**32 - 1))


def keep(seed: Any, query: jax.Array, key: jax.Array, probability: float) -> jax.Array:
    """Which pairs stay: query indices (T, 1) and key indices (1, S) give bool (T, S)."""
    return mix(moved(seed, query, key)) >= threshold(probability)


def moved(seed: Any, query: Any, key: Any) -> jax.Array:
    """The seed of pairs that are counted from this query and this key on."""
    return seed + query.astype(jnp.uint32) * STEP_QUERY + key.astype(jnp.uint32) * STEP_KEY
