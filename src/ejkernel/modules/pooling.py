"""The public `mean_pooling`."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.batch import unfolded
from ejkernel.kernels.pooling.operations import MEAN_POOLING
from ejkernel.kernels.pooling.spec import canonicalise, with_most_rows
from ejkernel.ops import run


def mean_pooling(
    x: jax.Array,
    cu_seqlens: jax.Array | None = None,
    *,
    chunk_size: int = 32,
    platform: str | None = None,
    cfg: Any = None,
) -> jax.Array:
    """Mean of every `chunk_size` tokens.

    The last chunk of a sequence averages the tokens it has. Sums are float32. Differentiable in `x`.

    Args:
        x: `(B, T, H, D)`, float32, bfloat16 or float16; with `cu_seqlens`, `(1, tokens, H, D)`. `(T, H, D)` is one
            sequence (or packed ones); more leading dimensions are batch too, and an empty batch gives an empty result.
        cu_seqlens: `(num_sequences + 1,)` integers rising from 0: where each packed sequence starts, and where the last
            one ends. Chunks never cross a sequence; tokens past the last entry are neither read nor given a gradient.
        chunk_size: tokens per chunk.
        platform: `None` or `"auto"`, `"xla"`, `"triton"`.
        cfg: the platform's `Config`, or a dict of its fields.

    Returns:
        `(B, ceil(T / chunk_size), H, D)` in the dtype of `x`, with its leading dimensions; with `cu_seqlens`, the
        sequences' chunks in order, `(1, rows, H, D)`. Inside jit, where the values of `cu_seqlens` are unknown, `rows`
        is the most there can be, `(tokens + num_sequences * (chunk_size - 1)) // chunk_size`, and rows past the last
        chunk are zero.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import mean_pooling
    >>> x = jnp.arange(5.0).reshape(1, 5, 1, 1)
    >>> mean_pooling(x, chunk_size=2).ravel().tolist()
    [0.5, 2.5, 4.0]
    >>> mean_pooling(x, jnp.array([0, 3, 5]), chunk_size=2).ravel().tolist()
    [0.5, 2.0, 3.5]
    """
    call = canonicalise(x, cu_seqlens, chunk_size=chunk_size)
    out = run(MEAN_POOLING, with_most_rows(call), platform=platform, cfg=cfg)["out"]
    if out.shape[1] > call.spec.rows:
        out = jax.lax.slice_in_dim(out, 0, call.spec.rows, axis=1)
    return unfolded(out, jnp.shape(x)[:-3])
