"""Parts of one softmax, computed apart and put together: what splits, sinks and shared prefixes have in common."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.tiles import MASKED, Online


def merge(parts: Online) -> Online:
    """One running softmax of several along the leading axis; a part that saw nothing weighs nothing."""
    top = parts.top.max(0)
    base = jnp.where(top == MASKED, 0.0, top)
    weights = jnp.exp(parts.top - base[None])
    return Online(top, (parts.total * weights).sum(0), (parts.out * weights[..., None]).sum(0))


def finished_part(out: jax.Array, lse: jax.Array) -> Online:
    """Normalised rows and their lse as a part: rows with lse -inf are empty."""
    none = jnp.isneginf(lse)
    top = jnp.where(none, MASKED, lse)
    return Online(top, (~none).astype(jnp.float32), jnp.where(none[..., None], 0.0, out.astype(jnp.float32)))


def with_sinks(state: Online, sinks: jax.Array) -> Online:
    """A running softmax that its sinks, logits without a value, have joined."""
    top = jnp.maximum(state.top, sinks)
    base = jnp.where(top == MASKED, 0.0, top)
    shrink = jnp.exp(state.top - base)
    return Online(top, state.total * shrink + jnp.exp(sinks - base), state.out * shrink[..., None])
