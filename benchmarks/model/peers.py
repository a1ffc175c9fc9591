"""The same model with what else there is for JAX. Documents are a mask where a library has no other word for them."""

import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.measuring.benchmark import Arrays, Contender, DeviceLock, Program, jax_program, passes_of
from benchmarks.model.cases import TRAINED, Case, contiguous
from benchmarks.model.transformer import decode, losses

# (case, arrays, query, key, value) to (1, T, H, D)
Attend = Callable[..., jax.Array]
# (query (B, 1, H, D), key and value (B, S, Hkv, D), lengths (B,)) to (B, 1, H, D)
AttendCached = Callable[..., jax.Array]


def peers() -> list[Contender]:
    """All, installed or not."""
    return [
        _contender("jax-nn", "jax.nn (XLA)", ("cpu", "tpu"), "jax", *_jax_nn("xla"), most=4),
        _contender("jax-cudnn", "cuDNN (jax.nn)", ("gpu",), "jax", *_jax_nn("cudnn")),
        _contender("tokamax", "tokamax Mosaic", ("gpu", "tpu"), "tokamax", _tokamax),
        _contender("fa4", "fa4-jax varlen", ("gpu",), "fa4_jax", _fa4),
    ]


def _contender(
    key: str,
    name: str,
    backends: tuple[str, ...],
    package: str,
    attend: Attend,
    cached: AttendCached | None = None,
    *,
    most: float = math.inf,
) -> Contender:
    """`most` is the GiB of logits it may make."""

    def missing(backend: str) -> str | None:
        if importlib.util.find_spec(package) is None:
            return "not installed"
        return None if backend in backends else f"needs {' or '.join(backends)}, this is {backend}"

    def refusal(case: Case) -> str | None:
        if case.decodes:
            return None if cached is not None else "it has no call for a token against a cache"
        gigabytes = 4 * case.H * case.T * case.T / 2**30
        return f"its logits would take {gigabytes:.0f} GiB" if gigabytes > most else None

    def build(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
        importlib.import_module(package)  # no part of a first call
        if case.decodes:
            assert cached is not None
            return _build_decoding(cached, case, arrays, device_lock)
        if case.packed:
            with device_lock:
                arrays = {**arrays, "mask": jax.block_until_ready(_same_document(arrays["segments"]))}

        def training_step(arrays: Arrays) -> jax.Array:
            weights = {name: arrays[name] for name in TRAINED}
            attend_here = partial(attend, arrays)
            return losses(case, weights, arrays["tokens"], arrays["targets"], attend_here, case.dtype)

        return jax_program(passes_of(training_step, what, TRAINED), arrays, device_lock, compiler_options=_options())

    return Contender(key, name, build, missing, refusal)


def _options() -> dict[str, Any]:
    """Without XLA's fusion of slices into kernel calls: in a loop over layers some then run twice, or are wrong.

    Ours have a barrier against it, `ejkernel.ops.fusion_barrier`.
    """
    return {"xla_gpu_enable_dynamic_slice_fusion": False} if jax.default_backend() == "gpu" else {}


@jax.jit
def _same_document(segments: jax.Array) -> jax.Array:
    """(1, 1, T, T)."""
    return (segments[:, :, None] == segments[:, None])[:, None]


def _jax_nn(implementation: Any) -> tuple[Attend, AttendCached]:
    """For training, with a mask where there are documents; and against a cache."""
    attention = partial(jax.nn.dot_product_attention, implementation=implementation)

    def attend(arrays: Arrays, *qkv: jax.Array) -> jax.Array:
        return attention(*qkv, mask=arrays.get("mask"), is_causal=True)

    def cached(query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array) -> jax.Array:
        return attention(query, key, value, key_value_seq_lengths=lengths)

    return attend, cached


def _tokamax(arrays: Arrays, *qkv: jax.Array) -> jax.Array:
    import tokamax

    return tokamax.dot_product_attention(*qkv, mask=arrays.get("mask"), is_causal=True, implementation="mosaic")


def _fa4(arrays: Arrays, *qkv: jax.Array) -> jax.Array:
    import fa4_jax

    if "offsets" not in arrays:
        return fa4_jax.flash_attn(*qkv, causal=True)
    offsets = arrays["offsets"]
    return fa4_jax.flash_attn_varlen(*(x[0] for x in qkv), offsets, offsets, causal=True)[None]


# A loop over a contiguous cache -----------------------------------------------------------------------------------


def _build_decoding(attend: AttendCached, case: Case, arrays: Arrays, device_lock: DeviceLock) -> Program:
    with device_lock:
        table, side_by_side = arrays["block_tables"], jax.jit(partial(contiguous, case))
        caches = [tuple(side_by_side(cache, table) for cache in pages) for pages in arrays["caches"]]
        jax.block_until_ready(caches)

    def one(cache: Any, number: jax.Array, query: jax.Array, *new: jax.Array) -> Any:
        at = case.T + number
        cache = [lax.dynamic_update_slice_in_dim(old, x[:, None], at, 1) for old, x in zip(cache, new, strict=True)]
        lengths = jnp.full((case.B,), at + 1, jnp.int32)
        return tuple(cache), attend(query[:, None], *cache, lengths)[:, 0]

    def decode_loop(arrays: Arrays) -> Arrays:
        weights = {name: arrays[name] for name in TRAINED}
        return {"out": decode(case, weights, arrays["caches"], arrays["tokens"], one)}

    return jax_program(decode_loop, {**arrays, "caches": caches}, device_lock)
