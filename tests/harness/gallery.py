"""Masks and scores as people write them: FlexAttention's examples, and what its users ask for.

Each is a function of the sizes of a call that gives the mask or score function, whose arrays are drawn anew.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Sizes(NamedTuple):
    B: int = 2
    H: int = 4
    T: int = 48
    S: int = 48


def _documents(sizes: Sizes, length: int) -> jax.Array:
    ends = np.sort(np.random.default_rng(3).integers(1, length, (sizes.B, 3)), axis=1)
    return jnp.asarray((np.arange(length) >= ends[:, :, None]).sum(1), jnp.int32)


def _prefix(sizes: Sizes) -> Callable[..., Any]:
    lengths = jnp.arange(sizes.B) * 7 + 5
    return lambda b, h, i, j: (j <= i) | (j < lengths[b])


def _documents_causal(sizes: Sizes) -> Callable[..., Any]:
    ids = _documents(sizes, max(sizes.T, sizes.S))
    return lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (j <= i)


def _documents_prefix(sizes: Sizes) -> Callable[..., Any]:
    ids = _documents(sizes, max(sizes.T, sizes.S))
    starts = jnp.argmax(ids[:, None] == jnp.arange(4)[:, None], axis=-1)  # (B, documents)

    def mask(b, h, i, j):
        document = ids[b, i]
        return (document == ids[b, j]) & ((j <= i) | (j - starts[b, document] < 4))

    return mask


def _natten(sizes: Sizes) -> Callable[..., Any]:
    width, kernel = 8, 3

    def mask(b, h, i, j):
        near_x = jnp.abs(i // width - j // width) <= kernel // 2
        return near_x & (jnp.abs(i % width - j % width) <= kernel // 2)

    return mask


def _tree(sizes: Sizes) -> Callable[..., Any]:
    ends = jnp.minimum(jnp.arange(sizes.S) * 2 + 6, sizes.T)
    return lambda b, h, i, j: (j <= i) & (i < ends[j])


def _images(sizes: Sizes) -> Callable[..., Any]:
    image = jnp.asarray(np.arange(max(sizes.T, sizes.S)) // 5 % 3 * (np.arange(max(sizes.T, sizes.S)) // 15 + 1))
    return lambda b, h, i, j: (j <= i) | ((image[i] == image[j]) & (image[i] > 0))


def _paged(sizes: Sizes) -> Callable[..., Any]:
    logical = jnp.asarray(np.random.default_rng(1).permutation(sizes.S))
    return lambda b, h, i, j: logical[j] <= i


def _jagged(sizes: Sizes) -> Callable[..., Any]:
    lengths = jnp.array([sizes.S, sizes.S // 2, 1, 7])[: sizes.B]
    return lambda b, h, i, j: (j < lengths[b]) & (i < lengths[b])


def _by_head(sizes: Sizes) -> Callable[..., Any]:
    windows = 2 ** jnp.arange(sizes.H)
    return lambda b, h, i, j: (j <= i) & (i - j < windows[h])


def _matrix(sizes: Sizes) -> Callable[..., Any]:
    matrix = jnp.asarray(np.random.default_rng(2).random((sizes.H, sizes.T, sizes.S)) < 0.4)
    return lambda b, h, i, j: matrix[h, i, j]


def _blocks(sizes: Sizes) -> Callable[..., Any]:
    blocks = jnp.asarray(np.random.default_rng(4).random((-(-sizes.T // 8), -(-sizes.S // 8))) < 0.5)
    return lambda b, h, i, j: blocks[i // 8, j // 8] & (j <= i)


MASKS: dict[str, Callable[[Sizes], Callable[..., Any]]] = {
    "causal": lambda sizes: lambda b, h, i, j: j <= i,
    "window": lambda sizes: lambda b, h, i, j: (j <= i) & (i - j < 9),
    "prefix": _prefix,
    "documents": _documents_causal,
    "documents-prefix": _documents_prefix,
    "dilated": lambda sizes: lambda b, h, i, j: (j <= i) & ((i - j) % 3 == 0) & (i - j <= 24),
    "natten": _natten,
    "tree": _tree,
    "images": _images,
    "paged": _paged,
    "jagged": _jagged,
    "window-by-head": _by_head,
    "matrix": _matrix,
    "blocks": _blocks,
    "divisions": lambda sizes: lambda b, h, i, j: ((i - 9) // -3 + j // (i - 5) < 4) & ((i - j) % -5 > -3),
    "wraps-around": lambda sizes: lambda b, h, i, j: (i * 214748364 + j >= 0) | (i * 214748364 < 0),
    "nothing": lambda sizes: lambda b, h, i, j: j < 0,
    "everything": lambda sizes: lambda b, h, i, j: j >= 0,
    "global-and-local": lambda sizes: lambda b, h, i, j: (jnp.abs(i - j) < 5) | (j < 3) | (i % 16 == 0),
}


def _with_sentinels(sizes: Sizes) -> Callable[..., Any]:
    starts = jnp.zeros(sizes.T, jnp.int32).at[: sizes.T // 2].set(-(2**31)).at[-5:].set(2**31 - 1)
    return lambda b, h, i, j: j - starts[i] < 10


def _with_nan(sizes: Sizes) -> Callable[..., Any]:
    x = jnp.arange(float(max(sizes.T, sizes.S))).at[5].set(jnp.nan)
    return lambda b, h, i, j: x[i] * 0 + x[i] + j * 0.0 <= jnp.inf


def _with_infinity(sizes: Sizes) -> Callable[..., Any]:
    x = jnp.arange(float(max(sizes.T, sizes.S))).at[5].set(jnp.inf)
    return lambda b, h, i, j: jnp.isfinite(x[i] + j.astype(jnp.float32))


# numbers that wrap around or are nan, in ways that bounds of blocks must know
HOSTILE: dict[str, Callable[[Sizes], Callable[..., Any]]] = {
    "xor": lambda sizes: lambda b, h, i, j: ((i ^ j) + 1) < 5,
    "xor-less-and": lambda sizes: lambda b, h, i, j: -((i ^ j) - (i & j)) < -3,
    "shifts": lambda sizes: lambda b, h, i, j: ((i << 1) - (j << 1)) * 3 > 7,
    "mod-by-index": lambda sizes: lambda b, h, i, j: (i % (j + 1)) + 1 < 5,
    "by-zero": lambda sizes: lambda b, h, i, j: jax.lax.div(i, i - i) + j < 20,
    "hash": lambda sizes: lambda b, h, i, j: (i * 40503 * 65537 + j * 69069 * 1237) > 0,
    "sentinels": _with_sentinels,
    "root": lambda sizes: lambda b, h, i, j: jnp.sqrt((i - j).astype(jnp.float32)) < 5.0,
    "logarithm": lambda sizes: lambda b, h, i, j: jnp.log((i - j).astype(jnp.float32)) < 3.0,
    "quotient": lambda sizes: lambda b, h, i, j: jnp.tanh((i * 1.0) / (j * 1.0)) < 0.9,
    "pole": lambda sizes: lambda b, h, i, j: (i - j) / (j - 5.0) < 2.0,
    "nan": _with_nan,
    "infinity": _with_infinity,
}


def _alibi(sizes: Sizes) -> Callable[..., Any]:
    slopes = 2.0 ** (-8.0 * (jnp.arange(sizes.H) + 1) / sizes.H)
    return lambda score, b, h, i, j: score - slopes[h] * jnp.abs(i - j)


def _relative(sizes: Sizes) -> Callable[..., Any]:
    reach = 12
    table = jax.random.normal(jax.random.key(5), (2 * reach + 1, sizes.H))
    return lambda score, b, h, i, j: score + table[jnp.clip(j - i, -reach, reach) + reach, h]


def _forgetting(sizes: Sizes) -> Callable[..., Any]:
    gates = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(6), (sizes.B, sizes.H, max(sizes.T, sizes.S))))
    total = jnp.cumsum(gates, -1)
    return lambda score, b, h, i, j: score + total[b, h, i] - total[b, h, j]


def _temperature(sizes: Sizes) -> Callable[..., Any]:
    temperature = jnp.linspace(0.5, 2.0, sizes.H)
    return lambda score, b, h, i, j: score / temperature[h]


def _matrix_bias(sizes: Sizes) -> Callable[..., Any]:
    bias = jax.random.normal(jax.random.key(7), (sizes.T, sizes.S))
    return lambda score, b, h, i, j: score + bias[i, j]


SCORES: dict[str, Callable[[Sizes], Callable[..., Any]]] = {
    "identity": lambda sizes: lambda score, b, h, i, j: score,
    "soft-cap": lambda sizes: lambda score, b, h, i, j: 5.0 * jnp.tanh(score / 5.0),
    "alibi": _alibi,
    "alibi-arithmetic": lambda sizes: lambda score, b, h, i, j: score - 2.0 ** (-(h + 1.0)) * (i - j),
    "halved-by-head": lambda sizes: lambda score, b, h, i, j: score * 2.0**-h,
    "distance": lambda sizes: lambda score, b, h, i, j: score + (j - i) * 0.125,
    "relative": _relative,
    "forgetting": _forgetting,
    "temperature": _temperature,
    "matrix-bias": _matrix_bias,
    "log-distance": lambda sizes: lambda score, b, h, i, j: score - jnp.log1p(jnp.abs(i - j) * 1.0),
    "gated": lambda sizes: lambda score, b, h, i, j: jnp.where(i > j + 3, score * jax.nn.sigmoid(score), score),
}


def values(function: Callable[..., Any], sizes: Sizes, *score: Any) -> jax.Array:
    """The function at every (b, h, i, j): (B, H, T, S)."""
    for axis in (3, 2, 1, 0):
        mapped = [0 if n == axis else None for n in range(4)]
        function = jax.vmap(function, in_axes=(*[0] * len(score), *mapped))
    return function(*score, *(jnp.arange(n, dtype=jnp.int32) for n in sizes))
