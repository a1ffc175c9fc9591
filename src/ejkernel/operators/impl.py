"""What all attention operators have in common: how a call reaches the device, and what they refuse or ignore."""

import functools
import inspect
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.cache import TransformerCacheView
from ejkernel.checks.arrays import FLOATS, bool_array, check_has_numbers
from ejkernel.checks.names import errors_as_called
from ejkernel.operators.metadata import BACKENDS, AttentionMetadata, Mode
from ejkernel.ops.target import default_device
from ejkernel.types import MaskInfo

# what `ejkernel.modules` calls the arguments of a forward
ARGUMENTS = {
    "query": "q",
    "queries": "q",
    "key": "k",
    "value": "v",
    "mask_info": "mask",
    "dropout_seed": "dropout_rng",
    "logits_dtype": "runtime_softmax_dtype",
    "softmax_dtype": "runtime_softmax_dtype",
    "sequence_start": "cache_view.starts",
    "sequence_end": "cache_view.index",
    "keys of kv_pages": "cache_view.key_pages",
    "values of kv_pages": "cache_view.value_pages",
    "key_cache": "cache_view.key_pages",
    "value_cache": "cache_view.value_pages",
    "context_len": "cache_metadata.context_lens",
    "context_lens": "cache_metadata.context_lens",
    "page_indices": "cache_metadata.block_tables",
    "block_tables": "cache_metadata.block_tables",
    "query_start_loc": "cache_metadata.query_start_loc",
    "num_seqs": "cache_metadata.num_seqs",
}

Forward = Callable[..., "AttentionOutput"]


class AttentionOutput(NamedTuple):
    """The result of a call; the weights only of classes that form them."""

    attention_weights: jax.Array | None = None
    attention_outputs: jax.Array | None = None


class AttentionImpl(ABC):
    """An attention operator: settings, and a call.

    A call runs `forward_cpu`, `forward_gpu`, `forward_cuda`, `forward_rocm` or `forward_tpu`, by the backend in its
    settings or else that of this machine. All of them are `forward_native` on a device of that backend, or where JAX
    computes if there is none: the platform and its kernel are chosen as everywhere in ejkernel.

    All classes take the same keywords, so that one line of a model can call any of them: `mask`, `bias`, `init_bias`,
    `causal`, `deterministic`, `dropout_rng`, `cache_view`, `cache_metadata`. One of these that would change the answer
    and cannot be honoured raises. Any other keyword is ignored, and named in a warning the first time.
    """

    def __init__(self, metadata: AttentionMetadata):
        if not isinstance(metadata, AttentionMetadata):
            raise TypeError(f"metadata must be an AttentionMetadata, got {type(metadata).__name__}")
        self.metadata = metadata

    def __init_subclass__(cls, **options: Any):
        """Errors of `forward_native` name the class that was called; what delegates to it has its signature."""
        super().__init_subclass__(**options)
        if "forward_native" not in vars(cls):
            return
        signature = inspect.signature(cls.forward_native)
        setattr(cls, "forward_native", _naming_the_class(cls.forward_native))  # noqa: B010
        for name in ("__call__", *(f"forward_{backend}" for backend in BACKENDS)):
            delegate: Forward = getattr(AttentionImpl, name)
            method = getattr(cls, name)
            if delegate in (method, getattr(method, "__wrapped__", None)):  # else a class defined its own
                setattr(cls, name, _with_signature(delegate, signature, f"{cls.__qualname__}.{name}"))

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
        """The mode: "decode" where there is one query a row, `(B, 1, H, D)` or `(B, H, D)`, else "prefill"."""
        return "decode" if q.ndim == 3 or q.shape[1] == 1 else "prefill"

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
        """`forward_native` on a GPU, or where JAX computes if there is none."""
        return self._forward_on("gpu", *args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native` on an NVIDIA GPU, or where JAX computes if there is none."""
        return self._forward_on("cuda", *args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native` on an AMD GPU, or where JAX computes if there is none."""
        return self._forward_on("rocm", *args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> AttentionOutput:
        """`forward_native` on a TPU, or where JAX computes if there is none."""
        return self._forward_on("tpu", *args, **kwargs)

    def _forward_on(self, backend: str, *args: Any, **kwargs: Any) -> AttentionOutput:
        with _computing_on(backend):
            return self.forward_native(*args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.impl_names()))})"

    # for subclasses

    def cast(self, **arrays: jax.Array) -> list[jax.Array]:
        """The arrays in the runtime dtype; TypeError, by their names, where they do not hold floats."""
        dtype = self.metadata.runtime_dtype
        for name, x in arrays.items():
            check_has_numbers(name, x)
            if dtype is not None and not jnp.issubdtype(x.dtype, jnp.floating):
                raise TypeError(f"{name} has dtype {x.dtype}; supported: {', '.join(FLOATS)}")
        return [x if dtype is None else jnp.asarray(x).astype(dtype) for x in arrays.values()]

    def refuse(self, why: str, **given: Any) -> None:
        """Raise, naming the keywords that are given and cannot be honoured."""
        names = [name for name, x in given.items() if x is not None]
        if names:
            raise NotImplementedError(f"{type(self).__name__} cannot honour {', '.join(names)}: {why}")

    def warn_of_ignored(self, ignored: dict[str, Any]) -> None:
        """Name the keywords that no class knows in a warning, once for each class."""
        new = [name for name in ignored if (type(self), name) not in _NAMED_IN_WARNINGS]
        if new:
            _NAMED_IN_WARNINGS.update((type(self), name) for name in new)
            warnings.warn(
                f"{type(self).__name__} does not know {', '.join(new)}, and ignores what is given there",
                stacklevel=_depth_of_user() + 1,
            )

    def shared_options(self) -> dict[str, Any]:
        """The keywords of every function of `ejkernel.modules` that come from the settings alone."""
        return {name: getattr(self.metadata, name) for name in ("softmax_scale", "platform", "mesh")}

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


# (class, keyword)
_NAMED_IN_WARNINGS: set[tuple[type[AttentionImpl], str]] = set()


def _depth_of_user() -> int:
    """How many frames of this package lie above the one that called into it."""
    package, depth = f"{__name__.partition('.')[0]}.", 0
    while sys._getframe(depth + 1).f_globals.get("__name__", "").startswith(package):
        depth += 1
    return depth


def _naming_the_class(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def named(self: AttentionImpl, *args: Any, **kwargs: Any) -> AttentionOutput:
        with errors_as_called(ARGUMENTS, type(self).__name__):
            return forward(self, *args, **kwargs)

    return named


def _with_signature(delegate: Forward, signature: inspect.Signature, qualified_name: str) -> Forward:
    @functools.wraps(delegate)
    def signed(self: AttentionImpl, *args: Any, **kwargs: Any) -> AttentionOutput:
        return delegate(self, *args, **kwargs)

    signed.__qualname__ = qualified_name
    setattr(signed, "__signature__", signature)  # noqa: B010
    return signed


def _computing_on(backend: str) -> AbstractContextManager[Any]:
    """Where new arrays, and so kernels, are for a device of that backend, if JAX has one."""
    try:
        device = jax.devices(backend)[0]
    except RuntimeError:
        return nullcontext()
    return nullcontext() if device.platform == default_device().platform else jax.default_device(device)


def mask_of(q: jax.Array, k: jax.Array, mask: Any, cache_view: Any) -> MaskInfo | None:
    """What `mask` and the valid tokens of a contiguous cache leave to be seen; None is all."""
    if mask is None and cache_view is None:
        return None
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q {q.shape} and k {k.shape} must be (batch, length, heads, head_dim) beside a mask or cache")
    given = mask if mask is None or isinstance(mask, MaskInfo) else _broadcast_mask(q, k, mask)
    if cache_view is None:
        return given
    cached = _cache_mask(q, k, cache_view)
    return cached if given is None else cached & given


def _broadcast_mask(q: jax.Array, k: jax.Array, mask: Any) -> MaskInfo:
    """A mask that broadcasts to (B, H, T, S), or that says (B, S) which keys are padding."""
    mask = jnp.asarray(bool_array("mask", mask))
    (B, T, H), S = q.shape[:3], k.shape[1]
    shape, wanted = (1,) * (4 - mask.ndim) + mask.shape, (B, H, T, S)
    if mask.ndim == 2 and mask.shape[0] == B > 1:
        if B == T:
            raise ValueError(
                f"mask {mask.shape} may be (batch, kv_len) or (q_len, kv_len), which are the same here: "
                "give it as mask[:, None, None, :] or as mask[None, None]"
            )
        shape = (B, 1, 1, mask.shape[1])
    if len(shape) != 4 or any(size not in (1, full) for size, full in zip(shape, wanted, strict=True)):
        raise ValueError(f"mask {mask.shape} does not broadcast to (batch, heads, q_len, kv_len) = {wanted}")
    mask = mask.reshape(shape)
    if shape[2:] == (1, 1):  # MaskInfo broadcasts one of the lengths where the other is given
        mask = jnp.broadcast_to(mask, (*shape[:2], 1, S) if S > 1 else (*shape[:2], T, 1))
    return MaskInfo.from_attention_mask(mask).with_lengths(T, S)


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
    position = cache_view.index[:, None] - T + jnp.arange(T, dtype=jnp.int32)[None]
    return MaskInfo.from_segments(jnp.zeros((B, T), jnp.int32), ids, position, jnp.broadcast_to(token, (B, S)))
