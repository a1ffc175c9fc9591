"""Operators over whole sequences."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.softmax.spec import initial_bias
from ejkernel.modules import attention, flash_attention, scaled_dot_product_attention
from ejkernel.operators.impl import AttentionImpl, AttentionOutput, mask_of
from ejkernel.operators.metadata import AttentionMetadata
from ejkernel.operators.registry import AttentionRegistry
from ejkernel.ops import use_config
from ejkernel.ops.target import target_of

InitBias = Callable[[], jax.Array]

PAGED = "pages are PagedAttn's"


@AttentionRegistry.register
class FlashAttn(AttentionImpl):
    """Exact attention that never forms its weights: `ejkernel.modules.flash_attention`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.operators import AttentionMetadata, FlashAttn
    >>> q = k = v = jnp.ones((2, 128, 8, 64))
    >>> FlashAttn(AttentionMetadata(softmax_scale=0.125))(q, k, v, causal=True).attention_outputs.shape
    (2, 128, 8, 64)
    """

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "flash_attn2"

    def forward_native(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any = None,
        bias: jax.Array | None = None,
        init_bias: InitBias | None = None,
        causal: bool = False,
        *,
        deterministic: bool = True,
        dropout_rng: Any = None,
        cache_view: Any = None,
        cache_metadata: Any = None,
        **ignore: Any,
    ) -> AttentionOutput:
        """Attention of q over k and v.

        Args:
            q: `(B, T, H, D)`.
            k: `(B, S, Hkv, D)`; `v` `(B, S, Hkv, Dv)`.
            mask: bool, true where a key is seen; broadcasts to `(B, H, T, S)`, and `(B, S)` says which keys are not
                padding. Or a `MaskInfo`. A bias replaces it.
            bias: added to the logits; broadcasts likewise; has a gradient.
            init_bias: makes the bias where neither it nor a mask is given.
            causal: query `i` sees keys up to `i + S - T`, with a `cache_view` those up to itself.
            deterministic: False drops weights, with the chance in the settings; needs `dropout_rng`.
            cache_view: the `TransformerCacheView` that k and v come from: only its valid tokens are seen, and the
                queries are its newest ones.
            cache_metadata: None; see `PagedAttn`.
            ignore: other keywords, which a warning names.
        """
        self.warn_of_ignored(ignore)
        self.refuse(PAGED, cache_metadata=cache_metadata)
        q, k, v = self.cast(q=q, k=k, v=v)
        dropout = self.dropout(deterministic)
        out = self.attend(
            q,
            k,
            v,
            bias=initial_bias(bias, init_bias, mask),
            mask_info=mask_of(q, k, mask if bias is None else None, cache_view),
            causal=causal,
            dropout_prob=dropout,
            dropout_seed=dropout_rng if dropout else None,
            logits_dtype=self.metadata.runtime_softmax_dtype,
            **self.shared_options(),
        )
        return AttentionOutput(attention_outputs=out)

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        """The function of `ejkernel.modules` that a call with these options is."""
        with _tiles(self.metadata, q):
            in_specs = self.metadata.specs(self.get_mode(q), q.shape, k.shape)
            return flash_attention(q, k, v, in_specs=in_specs, **options)


@AttentionRegistry.register
class SplashAttn(FlashAttn):
    """`FlashAttn`, causal by default. One query a row, any length and `causal=False` need no other operator."""

    @classmethod
    def get_impl_name(cls) -> str:
        return "splash"

    def forward_native(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any = None,
        causal: bool = True,
        cache_view: Any = None,
        *,
        bias: jax.Array | None = None,
        init_bias: InitBias | None = None,
        deterministic: bool = True,
        dropout_rng: Any = None,
        cache_metadata: Any = None,
        **ignore: Any,
    ) -> AttentionOutput:
        """As in `FlashAttn`; `causal` and `cache_view` may be given by position too."""
        dropout = {"deterministic": deterministic, "dropout_rng": dropout_rng}
        caches = {"cache_view": cache_view, "cache_metadata": cache_metadata}
        return super().forward_native(q, k, v, mask, bias, init_bias, causal, **dropout, **caches, **ignore)


@AttentionRegistry.register
class ScaledDotProductAttn(AttentionImpl):
    """`ejkernel.modules.scaled_dot_product_attention`: cuDNN on NVIDIA GPUs where it can."""

    @classmethod
    def get_impl_name(cls) -> tuple[str, ...]:
        return "sdpa", "cudnn", "cuda_flash_attn2"

    def forward_native(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any = None,
        bias: jax.Array | None = None,
        init_bias: InitBias | None = None,
        causal: bool = False,
        *,
        deterministic: bool = True,
        dropout_rng: Any = None,
        cache_view: Any = None,
        cache_metadata: Any = None,
        **ignore: Any,
    ) -> AttentionOutput:
        """As in `FlashAttn`, but without dropout; bias and mask both hold, and a bias switches `causal` off."""
        self.warn_of_ignored(ignore)
        self.refuse(PAGED, cache_metadata=cache_metadata)
        self.refuse_dropout(deterministic)
        self.refuse_softmax_dtype()
        q, k, v = self.cast(q=q, k=k, v=v)
        bias = initial_bias(bias, init_bias, mask)
        out = scaled_dot_product_attention(
            q,
            k,
            v,
            bias,
            mask_info=mask_of(q, k, mask, cache_view),
            causal=causal and bias is None,
            in_specs=self.metadata.specs(self.get_mode(q), q.shape, k.shape),
            **self.shared_options(),
        )
        return AttentionOutput(attention_outputs=out)


@AttentionRegistry.register
class VanillaAttn(AttentionImpl):
    """Attention by its definition, with its weights: `ejkernel.modules.attention`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.operators import AttentionMetadata, VanillaAttn
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> VanillaAttn(AttentionMetadata())(q, q, q).attention_weights[0, 0, 0].tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    @classmethod
    def get_impl_name(cls) -> str:
        return "vanilla"

    def forward_native(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: Any = None,
        bias: jax.Array | None = None,
        init_bias: InitBias | None = None,
        deterministic: bool = True,
        dropout_rng: Any = None,
        *,
        causal: bool = False,
        cache_view: Any = None,
        cache_metadata: Any = None,
        **ignore: Any,
    ) -> AttentionOutput:
        """As in `FlashAttn`; the output has the weights too."""
        self.warn_of_ignored(ignore)
        self.refuse(PAGED, cache_metadata=cache_metadata)
        if self.metadata.platform not in (None, "auto", "xla"):
            raise NotImplementedError(
                f"VanillaAttn is the definition, which XLA computes on every device; it has no platform "
                f"{self.metadata.platform!r}"
            )
        q, k, v = self.cast(q=q, k=k, v=v)
        out, weights = attention(
            q,
            k,
            v,
            initial_bias(bias, init_bias, mask),
            dropout_rng,
            mask_info=mask_of(q, k, mask if bias is None else None, cache_view),
            deterministic=deterministic,
            dropout_prob=self.metadata.dropout_prob,
            softmax_scale=self.metadata.softmax_scale,
            softmax_dtype=self.metadata.runtime_softmax_dtype or jnp.float32,
            causal=causal,
        )
        return AttentionOutput(weights, out)


def _tiles(metadata: AttentionMetadata, q: jax.Array) -> AbstractContextManager[Any]:
    """The block sizes of the settings, where the kernel that is chosen has such tiles."""
    sizes = {"block_q": metadata.blocksize_q, "block_k": metadata.blocksize_k}
    given = {name: size for name, size in sizes.items() if size is not None}
    if not given:
        return nullcontext()
    if target_of((q,), metadata.mesh).backend == "tpu":
        from ejkernel.kernels.softmax.pallas_tpu import Config
    else:
        from ejkernel.kernels.softmax.xla import Config
    return use_config(flash_attention, Config(**given))
