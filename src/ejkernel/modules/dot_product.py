"""jax.nn's attention, word for word, on this library's kernels."""

from typing import Any, Literal

import jax
from jax.typing import ArrayLike

from ejkernel.kernels.softmax.dot_product import Arguments, Dropout, dot_product


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool | None = None,
    dtype: Any = None,
    precision: Any = None,
    module: None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax.nn.dot_product_attention`: its signature and its meaning, on the kernels of `flash_attention`.

    It differs in two things. A row that sees no key gives zeros and a residual of -inf (jax.nn: the mean of all values,
    hidden ones too), and what is hidden never reaches a result, be it NaN. And it is exact attention in O(T) memory:
    causality, windows, lengths and masks of keys make no matrix of T x S.

    It is also an `attention_fn` of Flax's `MultiHeadAttention`, in NNX and in Linen, as it stands. The arguments from
    `broadcast_dropout` on are Flax's.

    Args:
        query: `(B, T, N, H)` or `(T, N, H)`; more leading dimensions are batch too. float32, bfloat16, float16;
            float64 is computed in float32, as jax.nn's softmax is.
        key: `(B, S, K, H)`; `K` divides `N`.
        value: like the key; its last dimension may differ.
        bias: added to the scaled logits; broadcasts to `(B, N, T, S)`; has a gradient.
        mask: bool, True where a key is seen; broadcasts likewise.
        scale: of the logits; default `H ** -0.5`. A traced one multiplies the queries.
        is_causal: query `i` sees keys up to `i`: the starts are aligned, not the ends as in `flash_attention`.
        query_seq_lengths: `(B,)` integers; queries past them give zeros.
        key_value_seq_lengths: `(B,)` integers; keys past them are hidden.
        local_window_size: `w` for `(w, w)`, or `(left, right)`: query `i` sees keys `i - left` to `i + right`.
        implementation: None takes the best platform; "xla" and "cudnn" are those platforms. What the platform "cudnn"
            refuses on a GPU (a bias, lengths, a mask) is left to jax.nn's own call of cuDNN, and to its promises.
        return_residual: also return the log-sum-exp, `(B, T, N)` in the query's dtype and without a gradient.
        platform: as in `flash_attention`, instead of `implementation`; so is `cfg`.
        broadcast_dropout: the same pairs are dropped in every row and head.
        dropout_rng: a PRNG key; needed when dropout is on. The bits are this library's, not Flax's.
        dropout_rate: chance that a weight is dropped.
        deterministic: True switches dropout off.
        dtype: query, key and value are cast to it first.
        precision: of the matmuls on float32 inputs; None is close to float32 everywhere.
        module: must be None: there are no weights to sow. `ejkernel.modules.attention` returns them.

    Returns:
        `(B, T, N, H)` in the query's dtype, or `(out, residual)`.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.modules import dot_product_attention
    >>> q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 12, 2, 16))
    >>> out, residual = dot_product_attention(q, k, k, is_causal=True, return_residual=True)
    >>> out.shape, residual.shape
    ((2, 8, 4, 16), (2, 8, 4))
    >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, k, is_causal=True)))
    True
    """
    if module is not None:
        raise ValueError("module must be None: the weights, which it would sow, are never formed; see attention()")
    arguments = Arguments(
        query,
        key,
        value,
        bias,
        mask,
        scale,
        is_causal,
        query_seq_lengths,
        key_value_seq_lengths,
        local_window_size,
        return_residual,
    )
    dropout = Dropout(dropout_rng, dropout_rate, broadcast_dropout, deterministic)
    return dot_product(arguments, dropout, dtype, precision, implementation, platform, cfg)
