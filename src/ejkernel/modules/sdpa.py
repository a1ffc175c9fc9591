"""jax.nn's attention under this library's masks, platforms and errors."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.common.batch import shards
from ejkernel.kernels.softmax.operations import SCALED_DOT_PRODUCT_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise, finish, initial_bias
from ejkernel.ops import run
from ejkernel.types import MaskInfo


def scaled_dot_product_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    cum_seqlens_q: Int[Array, " N1"] | None = None,
    cum_seqlens_k: Int[Array, " N1"] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    init_bias: Callable[[], jax.Array] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    alibi_slopes: Float[Array, "..."] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array:
    """Scaled dot-product attention: cuDNN through `jax.nn` on NVIDIA GPUs where it applies, our kernels elsewhere.

    Args:
        query: `(B, T, H, D)`, or packed tokens `(N_tokens, H, D)` with `cum_seqlens_q`; leading dimensions as in
            `flash_attention`.
        key: `(B, S, Hkv, D)`.
        value: `(B, S, Hkv, Dv)`.
        bias: broadcasts to `(B, H, T, S)`; has a gradient.
        cum_seqlens_q: `(N + 1,)` cumulative lengths of packed sequences.
        cum_seqlens_k: the same for keys; by default that of the queries.
        mask_info: see `ejkernel.types.MaskInfo`.
        init_bias: a function that makes the bias when neither `bias` nor `mask_info` is given.
        softmax_scale: default `D ** -0.5`. A traced one is multiplied into the queries.
        causal: query `i` sees keys up to `i + S - T`.
        sliding_window: `w` for `(w, w)`, or `(left, right)`.
        mask_fn, score_fn, alibi_slopes: as in `flash_attention`.
        platform: as in `flash_attention`; so are `cfg`, `mesh`, `in_specs`, `out_specs`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import scaled_dot_product_attention
    >>> q = jnp.ones((1, 32, 4, 16))
    >>> scaled_dot_product_attention(q, q, q, causal=True).shape
    (1, 32, 4, 16)
    """
    call = canonicalise(
        query,
        key,
        value,
        initial_bias(bias, init_bias, mask_info),
        cum_seqlens_q,
        cum_seqlens_k,
        mask_info=mask_info,
        softmax_scale=softmax_scale,
        causal=causal,
        sliding_window=sliding_window,
        mask_fn=mask_fn,
        score_fn=score_fn,
        alibi_slopes=alibi_slopes,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    outputs = run(SCALED_DOT_PRODUCT_ATTENTION, call, platform=platform, cfg=cfg, shards=split)
    return finish(call, outputs, query.shape)
