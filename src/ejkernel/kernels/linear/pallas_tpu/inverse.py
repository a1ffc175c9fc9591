"""The inverse of I + L on a TPU, by substitution in blocks of 16, which products merge: `delta/inverse.py` says why."""

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common.tiles import matmul

_BITS = 4
_BLOCK = 1 << _BITS


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + L)^-1 of a strictly lower triangular tile (L, L)."""
    size = lower.shape[0]
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    diagonal = row >> _BITS == column >> _BITS
    entry, lane = (lax.broadcasted_iota(jnp.int32, (size, _BLOCK), axis) for axis in (0, 1))
    fold = (entry & (_BLOCK - 1) == lane).astype(jnp.float32)
    # the blocks on the diagonal, one below the other
    blocks = _product(jnp.where(diagonal, lower, 0.0), fold).reshape(size // _BLOCK, _BLOCK, _BLOCK)
    inverse = fold.reshape(blocks.shape)
    place = lax.broadcasted_iota(jnp.int32, (1, _BLOCK, 1), 1)
    for i in range(1, _BLOCK):
        weights = blocks[:, i : i + 1, :]
        known = sum(weights[:, :, j : j + 1] * inverse[:, j : j + 1, :] for j in range(i))
        inverse = jnp.where(place == i, inverse - known, inverse)
    whole = jnp.where(diagonal, matmul(inverse.reshape(size, _BLOCK), fold, (1, 1), lax.Precision.HIGHEST), 0.0)
    for bits in range(_BITS, size.bit_length() - 1):
        # [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]
        below = (row >> bits == (column >> bits) + 1) & ((row >> bits) & 1 == 1)
        whole = whole - _product(whole, _product(jnp.where(below, lower, 0.0), whole))
    return whole


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return matmul(x, y, (1, 0), lax.Precision.HIGHEST)
