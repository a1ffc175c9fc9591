"""What all attention operators have in common: which device they are asked for, and what they cannot honour."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.cache import TransformerCacheView
from ejkernel.operators.metadata import AttentionMetadata, Mode
from ejkernel.ops.target import default_device
from ejkernel.types import MaskInfo


class AttentionOutput(NamedTuple):
    """What a call gives; the weights only where they are formed."""

    attention_weights: jax.Array | None = None
    attention_outputs: jax.Array | None = None


class AttentionImpl(ABC):
    """An attention operator: settings, and a call.

    A call runs `forward_cpu`, `forward_gpu`, `forward_cuda`, `forward_rocm` or `forward_tpu`, by the backend in its
    settings or else that of this machine. All of them are `forward_native` where that device is: the platform and its
    kernel are chosen as everywhere in ejkernel.

    All classes take the same keywords, so that one line of a model can call any of them: `mask`, `bias`, `init_bias`,
    `causal`, `deterministic`, `dropout_rng`, `cache_view`, `cache_metadata`. One that would change the answer and
    cannot be honoured raises.
    """

    def __init__(self, metadata: AttentionMetadata):
        if not isinstance(metadata, AttentionMetadata):
            raise TypeError(f"metadata must be an AttentionMetadata, got {type(metadata).__name__}")
        self.metadata = metadata

    @classmethod
    @abstractmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """The name, or names, it is registered under."""

    @classmethod
    def impl_names(cls) -> tuple[str, ...]:
        """Every name it is registered under."""
        names = cls.get_impl_name()
        return (names,) if isinstance(names, str) else names

    def get_impl_metadata(self) -> AttentionMetadata:
        """The settings it was made with."""
        return self.metadata

    @staticmethod
    def get_mode(q: jax.Array) -> Mode:
        """The mode: "decode" where there is one query a row, else "prefill"."""
        return "decode" if q.shape[1] == 1 else "prefill"

    @abstractmethod
    def forward_native(self, q: jax.Array, k: jax.Array, v: jax.Array, *args: Any, **kwargs: Any) -> AttentionOutput:
        """The call itself, on whatever device JAX computes on."""

    def __call__(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """The call, for the backend in its settings."""
        backend = self.metadata.backend or jax.default_backend()
        return getattr(self, f"forward_{backend}")(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native` on a CPU."""
        return self._forward_on("cpu", *args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native` on a GPU; raises where there is none."""
        return self._forward_on("gpu", *args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native` on an NVIDIA GPU; raises where there is none."""
        return self._forward_on("cuda", *args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native` on an AMD GPU; raises where there is none."""
        return self._forward_on("rocm", *args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native` on a TPU; raises where there is none."""
        return self._forward_on("tpu", *args, **kwargs)

    def _forward_on(self, backend: str, *args: Any, **kwargs: Any) -> AttentionOutput:
        with _placed(backend, f"{type(self).__name__}.forward_{backend}"):
            return self.forward_native(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.impl_names()))})"

    # for the classes

    def cast(self, *arrays: jax.Array) -> list[jax.Array]:
        """The arrays in the runtime dtype."""
        dtype = self.metadata.runtime_dtype
        return [x if dtype is None else jnp.asarray(x).astype(dtype) for x in arrays]

    def refuse(self, why: str, **given: Any) -> None:
        """Raise, naming the keywords that are given and cannot be honoured."""
        found = [name for name, x in given.items() if x is not None]
        if found:
            raise NotImplementedError(f"{type(self).__name__} cannot honour {', '.join(found)}: {why}")

    def dropout(self, deterministic: bool) -> float:
        """The chance that a weight is dropped in this call."""
        return 0.0 if deterministic else self.metadata.dropout_prob

    def refuse_dropout(self, deterministic: bool) -> None:
        """For classes without dropout."""
        if self.dropout(deterministic):
            raise NotImplementedError(
                f"{type(self).__name__} has no dropout, asked for dropout_prob={self.metadata.dropout_prob}; "
                "give deterministic=True, or take FlashAttn"
            )

    def refuse_softmax_dtype(self) -> None:
        """For classes whose softmax is float32."""
        dtype = self.metadata.runtime_softmax_dtype
        if dtype is not None and jnp.dtype(dtype) != jnp.float32:
            raise NotImplementedError(f"the softmax of {type(self).__name__} is float32, asked for {jnp.dtype(dtype)}")


def _placed(backend: str, who: str) -> AbstractContextManager[Any]:
    """Where new arrays, and so kernels, are for a device of that backend."""
    try:
        device = jax.devices(backend)[0]
    except RuntimeError:
        here = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise RuntimeError(f"{who} needs a {backend} device, and JAX has only {here} here") from None
    return nullcontext() if device.platform == default_device().platform else jax.default_device(device)


def mask_of(q: jax.Array, k: jax.Array, mask: Any, cache_view: Any) -> MaskInfo | None:
    """What `mask`, which broadcasts to (B, H, T, S), and the valid tokens of a contiguous cache leave; None is all."""
    found = None
    if isinstance(mask, MaskInfo):
        found = mask
    elif mask is not None:
        given = jnp.asarray(mask)
        if given.ndim > 4 or given.ndim == 0:
            raise ValueError(f"mask {given.shape} does not broadcast to (batch, heads, q_len, kv_len)")
        found = MaskInfo.from_attention_mask(given.reshape((1,) * (4 - given.ndim) + given.shape))
        found = found.with_lengths(q.shape[1], k.shape[1])
    if cache_view is None:
        return found
    cached = _cache_mask(q, k, cache_view)
    return cached if found is None else cached & found


def _cache_mask(q: jax.Array, k: jax.Array, cache_view: Any) -> MaskInfo:
    """The queries are the newest tokens of each row, and see its valid ones."""
    if not isinstance(cache_view, TransformerCacheView):
        raise TypeError(f"cache_view must be a TransformerCacheView, got {type(cache_view).__name__}")
    (B, T), S = q.shape[:2], k.shape[1]
    if cache_view.key.shape[1] != S:
        raise ValueError(f"k has {S} tokens and its cache_view {cache_view.key.shape[1]}: k and v must be the cache's")
    token = jnp.arange(S, dtype=jnp.int32)[None]
    valid = (token >= cache_view.starts[:, None]) & (token < cache_view.index[:, None])
    ids = jnp.where(valid, 0, -1)
    at = cache_view.index[:, None] - T + jnp.arange(T, dtype=jnp.int32)[None]
    return MaskInfo.from_segments(jnp.zeros((B, T), jnp.int32), ids, at, jnp.broadcast_to(token, (B, S)))
