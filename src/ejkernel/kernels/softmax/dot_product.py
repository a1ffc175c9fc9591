"""From the arguments of `jax.nn.dot_product_attention`, and those that Flax adds, to a canonical call and back."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.checks.arrays import FLOATS, number_array
from ejkernel.checks.options import flag, int_pair
from ejkernel.kernels.common.batch import Batch, folded, folded_broadcast, unfolded
from ejkernel.kernels.softmax.operations import DOT_PRODUCT_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Call, run
from ejkernel.ops.target import target_of
from ejkernel.types import MaskInfo

# of jax.nn's names
PLATFORMS = {None: None, "xla": "xla", "cudnn": "cudnn"}


class Dropout(NamedTuple):
    """What Flax says of dropout; `deterministic=None` where it is not Flax that calls."""

    rng: Any = None
    rate: float = 0.0
    broadcast: bool = True
    deterministic: bool | None = None


def platform_of(implementation: Any, platform: str | None) -> str | None:
    """The platform that jax.nn's `implementation` is, unless `platform` says one."""
    if implementation is not None and not (isinstance(implementation, str) and implementation in PLATFORMS):
        known = ", ".join(map(repr, PLATFORMS))
        raise ValueError(f"implementation={implementation!r} is unknown; use {known}, or platform=")
    if implementation is not None and platform is not None:
        raise ValueError(f"give {implementation=} or {platform=}, not both")
    return PLATFORMS[implementation] if platform is None else platform


class Arguments(NamedTuple):
    """What the caller gave, under jax.nn's names."""

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    scale: Any
    is_causal: Any
    query_seq_lengths: Any
    key_value_seq_lengths: Any
    local_window_size: Any
    return_residual: Any


def dot_product(
    arguments: Arguments, dropout: Dropout, dtype: Any, precision: Any, implementation: Any, platform: Any, cfg: Any
) -> Any:
    """The answer, as jax.nn gives it."""
    platform = platform_of(implementation, platform)
    return_residual = flag("return_residual", arguments.return_residual)
    call = dot_product_call(arguments, dropout, dtype, precision)
    try:
        outputs = run(DOT_PRODUCT_ATTENTION, call, platform=platform, cfg=cfg)
    except NotImplementedError:
        ours = call.spec.dropout or any(option is not None for option in (dtype, precision, cfg))
        if implementation != "cudnn" or ours or target_of(call.arrays.values()).backend != "gpu":
            raise
        # a call that our use of cuDNN refuses: jax.nn's promises less about hidden keys, but the caller named it
        return jax.nn.dot_product_attention(**arguments._asdict(), implementation="cudnn")
    return _results(outputs, arguments.query, dtype, return_residual)


def dot_product_call(arguments: Arguments, dropout: Dropout, dtype: Any, precision: Any) -> Call:
    """The canonical call; its arrays have one batch dimension, whatever the caller's have."""
    query, key, value = (_as_float(name, getattr(arguments, name), dtype) for name in ("query", "key", "value"))
    batch = query.shape[:-3]
    query, key, value = folded(query), folded(key), folded(value)
    _, T, _, _ = query.shape
    S = key.shape[1]
    mask = _masks(arguments, batch, (T, S), flax=dropout.deterministic is not None)
    # jax.nn aligns the starts of queries and keys: of their ends, the queries' are that much later
    mask = _banded(mask, flag("is_causal", arguments.is_causal), arguments.local_window_size, T - S)
    bias = arguments.bias
    rate = 0.0 if dropout.deterministic else dropout.rate
    call = canonicalise(
        query,
        key,
        value,
        None if bias is None else folded_broadcast(_as_float("bias", bias, None), batch),
        mask_info=mask,
        softmax_scale=arguments.scale,
        dropout_prob=rate,
        dropout_seed=dropout.rng,
        precision=precision,
        names={"dropout_prob": "dropout_rate", "dropout_seed": "dropout_rng", "softmax_scale": "scale"},
    )
    return _with_shared_dropout(call) if rate and dropout.broadcast else call


def _as_float(name: str, x: Any, dtype: Any) -> jax.Array:
    """An array in the requested dtype, or its own; floats that this library has no kernels for become float32."""
    array = number_array(name, x)
    if array.ndim < 3 and name != "bias":
        raise ValueError(f"{name} must have 4 dimensions (batch, length, heads, head_dim), got shape {array.shape}")
    array = array if dtype is None else array.astype(_dtype(dtype))
    if array.dtype.name in FLOATS:
        return array
    if not jnp.issubdtype(array.dtype, jnp.floating) and name != "bias":
        raise TypeError(f"{name} has dtype {array.dtype}; it must be a float")
    return array.astype(jnp.float32)


def _dtype(dtype: Any) -> Any:
    try:
        return jnp.dtype(dtype)
    except TypeError:
        raise TypeError(f"dtype={dtype!r:.80} is not the name of one") from None


def _masks(arguments: Arguments, batch: Batch, lengths: tuple[int, int], *, flax: bool) -> MaskInfo:
    """The mask as given and the lengths, in one."""
    T, S = lengths
    mask, q_lengths, kv_lengths = arguments.mask, arguments.query_seq_lengths, arguments.key_value_seq_lengths
    combined = MaskInfo(T, S)
    if mask is not None:
        combined = MaskInfo.from_attention_mask(_four_dimensions(_as_bool(mask, flax), batch, lengths)).with_lengths(
            T, S
        )
    if q_lengths is None and kv_lengths is None:
        return combined
    rows = math.prod(batch)
    sides = {"query_seq_lengths": (q_lengths, T), "key_value_seq_lengths": (kv_lengths, S)}
    q, kv = (_lengths(name, x, length, rows) for name, (x, length) in sides.items())
    return combined & MaskInfo.from_lengths(q, kv, q_len=T, kv_len=S)


def _as_bool(mask: Any, flax: bool) -> jax.Array:
    mask = number_array("mask", mask)
    if mask.dtype == jnp.bool_:
        return mask
    if flax:  # whose masks are ones and zeros of any dtype
        return mask != 0
    raise ValueError(f"mask must be bool, True where a key is seen, got {mask.dtype}; bias is for what is added")


def _four_dimensions(mask: jax.Array, batch: Batch, lengths: tuple[int, int]) -> jax.Array:
    """(B|1, H|1, T|1, S|1); a mask that knows neither queries nor keys is as long as one of them."""
    if mask.ndim > len(batch or (1,)) + 3:
        raise ValueError(f"mask {mask.shape} does not broadcast to (batch, heads, q_len, kv_len)")
    mask = folded_broadcast(mask, batch)
    B, H, *sizes = mask.shape
    if any(n not in (1, length) for n, length in zip(sizes, lengths, strict=True)):
        raise ValueError(f"mask {mask.shape} does not broadcast to lengths (q_len, kv_len) = {lengths}")
    if sizes == [1, 1]:
        T, S = lengths
        mask = jnp.broadcast_to(mask, (B, H, 1, S) if S > 1 else (B, H, T, 1))
    return mask


def _lengths(name: str, x: Any, length: int, rows: int) -> jax.Array:
    """(B,) lengths; those past the end mean the end, as in jax.nn."""
    if x is None:
        return jnp.full(rows, length, jnp.int32)
    x = number_array(name, x)
    if x.shape != (rows,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be int32 ({rows},), one per sequence, got {x.dtype} {x.shape}")
    return jnp.clip(x, 0, length).astype(jnp.int32)


def _banded(mask: MaskInfo, is_causal: bool, window: Any, offset: int) -> MaskInfo:
    if window is not None:
        # half of int32, in which positions are: more is as good as unbounded
        left, right = (min(max(side, -(2**30)), 2**30) for side in int_pair("local_window_size", window))
        mask = mask.narrowed((offset - left, offset + right))
    return mask.apply_causal(offset) if is_causal else mask


def _with_shared_dropout(call: Call) -> Call:
    """The same pairs are dropped in every row and head."""
    seeds = call["dropout_seeds"]
    return replace(call, arrays=call.arrays | {"dropout_seeds": jnp.broadcast_to(seeds[:1, :1], seeds.shape)})


def _results(outputs: dict[str, jax.Array], query: Any, dtype: Any, return_residual: bool) -> Any:
    """out like the query, and lse (*batch, T, H), in its dtype and without a gradient as in jax.nn."""
    query = jnp.asarray(query)
    dtype, batch = query.dtype if dtype is None else jnp.dtype(dtype), query.shape[:-3]
    out = unfolded(outputs["out"], batch).astype(dtype)
    if not return_residual:
        return out
    lse = jax.lax.stop_gradient(outputs["lse"]).swapaxes(1, 2)
    return out, unfolded(lse, batch).astype(dtype)
