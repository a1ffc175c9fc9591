"""The inverse of I + L, where L is strictly lower triangular: by substitution in blocks, which products merge.

Never as a product of powers of L: with keys that repeat, 64 tokens of beta near 1, these pass 1e16 where no entry of
the inverse passes 2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.linear.xla_chunks import product

BLOCK = 16


@jax.custom_jvp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + L)^-1 of strictly lower triangular matrices (..., C, C), float32; C is a power of two."""
    C = lower.shape[-1]
    size = min(C, BLOCK)
    inverse = _substituted(lower, size)
    while size < C:
        # [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]
        block = np.arange(C) // size
        below = (block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1)
        merged = product("...ij,...jk->...ik", jnp.where(below, lower, 0), inverse)
        inverse = inverse - product("...ij,...jk->...ik", inverse, merged)
        size *= 2
    return inverse


@unit_lower_inverse.defjvp
def _tangent(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(*primals)
    return inverse, -product("...ij,...jk,...kl->...il", inverse, jnp.tril(tangents[0], -1), inverse)


def _substituted(lower: jax.Array, size: int) -> jax.Array:
    """The inverses of the blocks on the diagonal, in place, row by row; zero elsewhere."""
    C = lower.shape[-1]
    blocks = jnp.stack([lower[..., i : i + size, i : i + size] for i in range(0, C, size)], -3)

    def with_row(i: int, inverse: jax.Array) -> jax.Array:
        return inverse.at[..., i, :].add(-product("...j,...jk->...k", blocks[..., i, :], inverse))

    # as an array of each matrix, not a constant: a loop under shard_map wants what varies to begin so
    identity = jnp.eye(size, dtype=jnp.float32) + jnp.zeros_like(blocks)
    inverse = lax.fori_loop(1, size, with_row, identity)
    whole = jnp.zeros(lower.shape, jnp.float32)
    for n, i in enumerate(range(0, C, size)):
        whole = whole.at[..., i : i + size, i : i + size].set(inverse[..., n, :, :])
    return whole
