"""Memory-efficient exact attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels.common.batch import shards
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise, finish
from ejkernel.ops import run
from ejkernel.types import MaskInfo


def flash_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    cum_seqlens_q: Int[Array, " N1"] | None = None,
    cum_seqlens_k: Int[Array, " N1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    return_lse: bool = False,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    alibi_slopes: Float[Array, "..."] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact softmax attention that never forms the matrix of logits.

    The logits are `scale * q.k`, plus bias, through the soft cap, ALiBi and the score function, then masked; sinks join
    the denominator once.
    A row with nothing to attend to gives zeros, `lse = -inf` and zero gradients.

    Args:
        query: `(B, T, H, D)`, or packed tokens `(N_tokens, H, D)` with `cum_seqlens_q`. float32, bfloat16, float16.
            `(T, H, D)` is one sequence; more leading dimensions are batch too, and come back. An empty batch gives
            empty arrays.
        key: `(B, S, Hkv, D)`; `Hkv` divides `H`.
        value: `(B, S, Hkv, Dv)`.
        bias: added to the scaled logits; broadcasts to `(B, H, T, S)`; has a gradient.
        cum_seqlens_q: `(N + 1,)` cumulative lengths of packed sequences; tokens past the last are padding.
        cum_seqlens_k: the same for keys; by default that of the queries.
        softmax_aux: sink logits `(H,)`, `(H, n)`, or `(1, n)` that all heads share; have a gradient.
        mask_info: segments, lengths, patterns, dense masks, explicit positions: see `ejkernel.types.MaskInfo`.
        softmax_scale: default `D ** -0.5`. A traced one is multiplied into the queries.
        dropout_prob: chance that a weight is dropped; needs `dropout_seed`.
        dropout_seed: an int, an integer scalar (may be traced) or a PRNG key.
        causal: query `i` sees keys up to `i + S - T`.
        sliding_window: `w` for `(w, w)`, or `(left, right)`: keys within that distance of the aligned position.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        normalize_output: False leaves the output undivided by the softmax sum of logits minus their row maximum.
        precision: of the matmuls on float32 inputs, as in `jax.lax.dot_general`, the same for both
            operands; None is close to float32 everywhere.
        logits_dtype: the logits are rounded to it (None: float32) before the softmax, which is float32 always.
        return_lse: also return the log-sum-exp of the logits, `(B, H, T)` float32; `(H, T)` for a query `(T, H, D)`.
        mask_fn: `(b, h, i, j) -> bool`, traced on int32 scalars (batch, query head, query, key): what a query sees, of
            what the rest of the mask shows. Blocks that it hides are not visited. It may index arrays that it closes
            over. With `cum_seqlens_q`, i and j count inside each sequence; else they are plain indices.
        score_fn: `(score, b, h, i, j) -> score`, likewise: what is done to a logit, after bias and soft cap. Arrays of
            floats that it closes over have gradients.
        alibi_slopes: `(H,)` or `(B, H)`: `-slope * |distance|` is added to the capped logits; has a gradient.
        platform: None or "auto", "xla", "triton", "pallas", "cudnn", "cute".
        cfg: the platform's `Config`, or a dict of its fields.
        mesh: devices to split the call over, with `in_specs`; alone, the device it is compiled for.
        in_specs: one `PartitionSpec` each for query, key, value (and bias, ...), or a dict by name.
        out_specs: that of the output; by default that of the query.

    Returns:
        `(B, T, H, Dv)` in the query's dtype, or `(out, lse)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import flash_attention
    >>> q = jnp.ones((2, 128, 8, 64))
    >>> k = v = jnp.ones((2, 128, 2, 64))
    >>> flash_attention(q, k, v, causal=True, sliding_window=32).shape
    (2, 128, 8, 64)
    """
    call = canonicalise(
        query,
        key,
        value,
        bias,
        cum_seqlens_q,
        cum_seqlens_k,
        softmax_aux,
        mask_info=mask_info,
        softmax_scale=softmax_scale,
        dropout_prob=dropout_prob,
        dropout_seed=dropout_seed,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        normalize_output=normalize_output,
        precision=precision,
        logits_dtype=logits_dtype,
        return_lse=return_lse,
        mask_fn=mask_fn,
        score_fn=score_fn,
        alibi_slopes=alibi_slopes,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    outputs = run(FLASH_ATTENTION, call, platform=platform, cfg=cfg, shards=split)
    return finish(call, outputs, query.shape, softmax_aux)
