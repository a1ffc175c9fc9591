"""Attention that also returns its weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels.common.batch import unfolded
from ejkernel.kernels.softmax.operations import ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise, initial_bias
from ejkernel.kernels.softmax.weights import with_weights
from ejkernel.types import MaskInfo


def attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    dropout_rng: int | jax.Array | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    init_bias: Callable[[], jax.Array] | None = None,
    deterministic: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dtype: Any = None,
    softmax_dtype: Any = jnp.float32,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention by its definition, with the matrix of weights: for looking, not for speed.

    Args:
        query: `(B, T, H, D)`; leading dimensions as in `flash_attention`.
        key: `(B, S, Hkv, D)`.
        value: `(B, S, Hkv, Dv)`.
        bias: broadcasts to `(B, H, T, S)`.
        dropout_rng: a PRNG key or an int; needed when dropout is on.
        softmax_aux: sink logits `(H,)`, `(H, n)`, or `(1, n)` that all heads share.
        mask_info: see `ejkernel.types.MaskInfo`.
        init_bias: a function that makes the bias when neither `bias` nor `mask_info` is given.
        deterministic: True switches dropout off.
        softmax_scale: default `D ** -0.5`. A traced one is multiplied into the queries.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        dtype: of the matmuls and the results; by default that of the query.
        softmax_dtype: the logits are rounded to it before the softmax.
        dropout_prob: chance that a weight is dropped.
        causal: query `i` sees keys up to `i + S - T`.
        sliding_window: `w` for `(w, w)`, or `(left, right)`.

    Returns:
        `(out, weights)`: `(B, T, H, Dv)` and `(B, H, T, S)` (after dropout).

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import attention
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> out, weights = attention(q, q, q, causal=True)
    >>> weights[0, 0, 1]
    Array([0.5, 0.5, 0. , 0. ], dtype=float32)
    """
    call = canonicalise(
        query,
        key,
        value,
        initial_bias(bias, init_bias, mask_info),
        softmax_aux=softmax_aux,
        mask_info=mask_info,
        softmax_scale=softmax_scale,
        dropout_prob=0.0 if deterministic else dropout_prob,
        dropout_seed=dropout_rng,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        logits_dtype=softmax_dtype,
        names={"dropout_seed": "dropout_rng", "logits_dtype": "softmax_dtype"},
    )
    out, weights = with_weights(ATTENTION, call, dtype)
    return unfolded(out, query.shape[:-3]), unfolded(weights, query.shape[:-3])
