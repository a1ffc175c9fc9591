"""The definition: row r of the result is the float32 mean of the tokens between its bounds."""

import jax
import jax.numpy as jnp

from ejkernel.kernels.pooling.spec import row_bounds
from ejkernel.ops import Call


def mean_pooling(call: Call) -> jax.Array:
    """(B, rows, H, D) float32; a row of no tokens is zero. Differentiable in `call["x"]`."""
    x, bounds = call["x"].astype(jnp.float32), row_bounds(call)
    token = jnp.arange(x.shape[1])
    # (B, rows, T): which tokens a row averages
    member = (bounds[..., :1] <= token) & (token < bounds[..., 1:])
    # selected, not multiplied by zero: NaN of another row must not reach this one
    total = jnp.where(member[..., None, None], x[:, None], 0).sum(2)
    return total / jnp.maximum(member.sum(-1), 1)[..., None, None]
