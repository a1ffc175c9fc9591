"""Ragged decode attention whose softmax can be merged: `(o, m, l)` of one query per row over a contiguous cache.

Key `s` of row `b` is valid where `starts[b] <= s < lengths[b]`. Logits are not scaled: scale the queries. `o` is
normalised, `m` is the largest logit of a row and `l` the sum of exponentials against it, both float32, so results over
disjoint keys can be merged. A row without a valid key has `o = 0`, `m = mask_value`, `l = 0`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.checks.caches import array, cache
from ejkernel.checks.options import number, static_int
from ejkernel.kernels.paged import xla
from ejkernel.kernels.paged.calls import ragged_decode_call
from ejkernel.kernels.paged.operations import RAGGED_DECODE_ATTENTION
from ejkernel.kernels.paged.reference import reference
from ejkernel.kernels.paged.spec import Cost, Spec
from ejkernel.ops import Call, run, use_config

MASK_VALUE = -2.381976426469702e38

_NAMES = {"key_pages": "key", "value_pages": "value", "context_lens": "lengths", "starts": "starts"}
# of the functions that call the arrays q, k and v
_SHORT_NAMES = _NAMES | {"query": "q", "key_pages": "k", "value_pages": "v"}

PartialSoftmax = tuple[jax.Array, jax.Array, jax.Array]


def ragged_mqa(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    starts: jax.Array,
    *,
    block_size: int = 256,
    mask_value: float = MASK_VALUE,
    cost_estimate: Any = None,
) -> PartialSoftmax:
    """All query heads on one key head.

    Args:
        q: `(B, H, D)`.
        k: `(B, S, D)`; `v` likewise.
        lengths: `(B,)`, one past the last valid key; `starts` `(B,)`, the first.
        block_size: keys per step on XLA; the kernels of other platforms have other tiles.
        mask_value: `m` of a row without a valid key; so low that a hidden key has no weight.
        cost_estimate: a `pallas.CostEstimate` that the TPU kernel tells its compiler instead of its own estimate; the
            compilers of other platforms take none.

    Returns:
        `(o, m, l)`: `(B, H, D)`, `(B, H, 1)`, `(B, H, 1)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.kernels.paged.ragged import ragged_mqa
    >>> cache = jnp.ones((2, 10, 8))
    >>> o, m, l = ragged_mqa(jnp.ones((2, 1, 8)), cache, cache, jnp.array([10, 4]), jnp.array([0, 2]))
    >>> o.shape, m.ravel().tolist(), l.ravel().round(3).tolist()
    ((2, 1, 8), [8.0, 8.0], [10.0, 2.0])
    """
    q, k, v = _one_key_head(q, k, v)
    cost = _cost(cost_estimate)
    return _ragged(q, k, v, lengths, starts, block_size, mask_value, cost=cost, names=_SHORT_NAMES)


def _one_key_head(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    q = array("q", q, "(batch, heads, head_dim)", 3, rows="any")
    k, v = (cache(name, x, "(batch, length, head_dim)", 3, rows="any") for name, x in (("k", k), ("v", v)))
    return q, k[:, :, None], v[:, :, None]


def ragged_mha(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    starts: jax.Array,
    *,
    block_size: int = 256,
    mask_value: float = MASK_VALUE,
) -> PartialSoftmax:
    """As many key heads as query heads: query `(B, 1, H, D)`, key and value `(B, S, H, D)`.

    Returns and options as in `ragged_mqa`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.kernels.paged.ragged import ragged_mha
    >>> cache = jnp.ones((2, 10, 4, 8))
    >>> ragged_mha(jnp.ones((2, 1, 4, 8)), cache, cache, jnp.array([10, 4]), jnp.array([0, 2]))[0].shape
    (2, 4, 8)
    """
    query = array("query", query, "(batch, 1, heads, head_dim)", 4, rows="any")
    key = cache("key", key, "(batch, length, heads, head_dim)", 4, rows="any")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"query {query.shape} and key {key.shape} must have the same heads; else use ragged_gqa")
    return _ragged(query, key, value, lengths, starts, block_size, mask_value)


def ragged_gqa(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    starts: jax.Array,
    *,
    block_size: int = 256,
    mask_value: float = MASK_VALUE,
) -> PartialSoftmax:
    """Groups of query heads per key head: query `(B, H, D)` (or `(B, 1, H, D)`), key and value `(B, S, Hkv, D)`.

    Returns and options as in `ragged_mqa`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.kernels.paged.ragged import ragged_gqa
    >>> cache = jnp.ones((2, 10, 2, 8))
    >>> ragged_gqa(jnp.ones((2, 4, 8)), cache, cache, jnp.array([10, 4]), jnp.array([0, 2]))[0].shape
    (2, 4, 8)
    """
    return _ragged(query, key, value, lengths, starts, block_size, mask_value)


def reference_mqa(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, starts: jax.Array, *, mask_value: float = MASK_VALUE
) -> PartialSoftmax:
    """`ragged_mqa` by the definition, in float32: `(B, 1, H, D)`, `(B, 1, H, 1)`, `(B, 1, H, 1)`."""
    return reference_gqa(*_one_key_head(q, k, v), lengths, starts, mask_value)


def reference_mha(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, starts: jax.Array, *, mask_value: float = MASK_VALUE
) -> PartialSoftmax:
    """`ragged_mha` by the definition, in float32: `(B, 1, H, D)`, `(B, 1, H, 1)`, `(B, 1, H, 1)`."""
    return reference_gqa(q, k, v, lengths, starts, mask_value)


def reference_gqa(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, starts: jax.Array, mask_value: float = MASK_VALUE
) -> PartialSoftmax:
    """`ragged_gqa` by the definition, in float32: `(B, 1, H, D)`, `(B, 1, H, 1)`, `(B, 1, H, 1)`."""
    q = array("q", q, "(batch, heads, head_dim) or (batch, 1, heads, head_dim)", 3, 4, rows="any")
    layout = "(batch, length, key heads, head_dim)"
    k, v = (cache(name, x, layout, 4, rows="any") for name, x in (("k", k), ("v", v)))
    call = ragged_decode_call(q, k, v, starts, lengths, softmax_scale=1.0, names=_SHORT_NAMES)
    return _defined(call.spec, call.arrays, q.shape[0], _lowest(mask_value))


@partial(jax.jit, static_argnums=(0, 2, 3))
def _defined(spec: Spec, arrays: dict[str, jax.Array], B: int, lowest: float) -> PartialSoftmax:
    o, m, l = _partial_softmax(reference(Call(spec, arrays)), B, lowest)
    return o[:, None], m[:, None], l[:, None]


def ragged_flash_attention_kernel(
    lengths_ref: Any,
    starts_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    o_ref: Any,
    m_ref: Any,
    l_ref: Any,
    *,
    block_size: int,
    mask_value: float,
) -> None:
    """A Pallas kernel with the results of `ragged_mqa`, for a `pallas_call` over the grid (B, blocks of keys).

    Grid step (b, i) adds the keys of block i to row b by online softmax. The outputs of a row are its accumulators, so
    they must stay there while i goes from 0 upwards. What lies outside of the valid keys, NaN too, is never used.

    Args:
        lengths_ref: `(B,)`, one past the last valid key of each row; `starts_ref` `(B,)`, the first.
        q_ref: `(H, D)`, the queries of row b.
        k_ref: `(block_size, D)`, block i of the keys of row b; `v_ref` likewise.
        o_ref: `(H, D)`; float32 keeps it from being rounded at every block.
        m_ref: `(H, W)` float32 for any W, all columns the same; `l_ref` likewise.
        block_size: keys in a block.
        mask_value: `m` of a row without a valid key.

    >>> import jax, jax.numpy as jnp
    >>> from functools import partial
    >>> from jax.experimental import pallas as pl
    >>> from jax.experimental.pallas import tpu as pltpu
    >>> from ejkernel.kernels.paged.ragged import MASK_VALUE, ragged_flash_attention_kernel
    >>> row = pl.BlockSpec((None, 1, 8), lambda b, i, *_: (b, 0, 0))
    >>> block = pl.BlockSpec((None, 4, 8), lambda b, i, *_: (b, i, 0))
    >>> grid = pltpu.PrefetchScalarGridSpec(
    ...     num_scalar_prefetch=2, grid=(2, 3), in_specs=[row, block, block], out_specs=[row] * 3
    ... )
    >>> attend = pl.pallas_call(
    ...     partial(ragged_flash_attention_kernel, block_size=4, mask_value=MASK_VALUE),
    ...     grid_spec=grid, out_shape=[jax.ShapeDtypeStruct((2, 1, 8), "float32")] * 3, interpret=True,
    ... )
    >>> cache = jnp.ones((2, 10, 8))
    >>> o, m, l = attend(jnp.array([10, 4]), jnp.array([0, 2]), jnp.ones((2, 1, 8)), cache, cache)
    >>> o[:, 0, 0].tolist(), m[:, 0, 0].tolist(), l[:, 0, 0].tolist()
    ([1.0, 1.0], [8.0, 8.0], [10.0, 2.0])
    """
    from jax.experimental import pallas as pl

    row, block = pl.program_id(0), pl.program_id(1)
    start, length, first_key = starts_ref[row], lengths_ref[row], block * block_size

    @pl.when(block == 0)
    def _initialize() -> None:
        o_ref[...] = jnp.zeros_like(o_ref)
        m_ref[...] = jnp.full_like(m_ref, mask_value)
        l_ref[...] = jnp.zeros_like(l_ref)

    @pl.when((first_key < length) & (first_key + block_size > start))
    def _add_block() -> None:
        q, k, v = (ref[...].astype(jnp.float32) for ref in (q_ref, k_ref, v_ref))
        product = partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

        def valid(shape: tuple[int, ...], axis: int) -> jax.Array:
            key = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            return (key >= start) & (key < length)

        logits = product(q, k, (((1,), (1,)), ((), ())))  # (H, block_size)
        seen = valid(logits.shape, 1)
        logits = jnp.where(seen, logits, mask_value)
        old_max, old_sum = m_ref[:, :1], l_ref[:, :1]
        new_max = jnp.maximum(old_max, logits.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(logits - new_max), 0.0)
        kept_sum = jnp.exp(old_max - new_max) * old_sum
        new_sum = kept_sum + weights.sum(axis=1, keepdims=True)
        added = product(weights, jnp.where(valid(v.shape, 0), v, 0.0), (((1,), (0,)), ((), ())))
        divisor = jnp.where(new_sum == 0.0, 1.0, new_sum)
        o_ref[...] = ((kept_sum * o_ref[...].astype(jnp.float32) + added) / divisor).astype(o_ref.dtype)
        m_ref[...] = jnp.broadcast_to(new_max, m_ref.shape)
        l_ref[...] = jnp.broadcast_to(new_sum, l_ref.shape)


def get_mha_cost_estimate(shape_dtype: Any) -> Any:
    """The cost of `ragged_mha` as a `pallas.CostEstimate`, from the shapes of query, key, value and lengths.

    >>> import jax
    >>> from ejkernel.kernels.paged.ragged import get_mha_cost_estimate
    >>> query, cache = jax.ShapeDtypeStruct((2, 1, 4, 8), "float32"), jax.ShapeDtypeStruct((2, 10, 4, 8), "float32")
    >>> get_mha_cost_estimate((query, cache, cache, jax.ShapeDtypeStruct((2,), "int32"))).flops
    2560
    """
    from jax.experimental import pallas as pl

    query, key, value, *others = shape_dtype
    B, _, H, D = query.shape
    S, Dv = key.shape[1], value.shape[3]
    moved = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (query, key, value, *others))
    written = B * H * (Dv * jnp.dtype(query.dtype).itemsize + 8)
    return pl.CostEstimate(flops=2 * B * H * S * (D + Dv), transcendentals=B * H * S, bytes_accessed=moved + written)


def _cost(estimate: Any) -> Cost | None:
    if estimate is None:
        return None
    try:
        return Cost(*(static_int(f"cost_estimate.{name}", getattr(estimate, name), 0) for name in Cost._fields))
    except AttributeError:
        raise TypeError(f"cost_estimate must be a pallas.CostEstimate, got {type(estimate).__name__}") from None


def _ragged(
    query: Any,
    key: Any,
    value: Any,
    lengths: Any,
    starts: Any,
    block_size: int,
    mask_value: float,
    *,
    cost: Cost | None = None,
    names: Mapping[str, str] = MappingProxyType(_NAMES),
) -> PartialSoftmax:
    lowest = _lowest(mask_value)
    options = {"softmax_scale": 1.0, "return_lse": True, "names": names}
    call = ragged_decode_call(query, key, value, starts, lengths, **options)
    call = replace(call, spec=replace(call.spec, cost=cost))
    with use_config(RAGGED_DECODE_ATTENTION, xla.Config(block_q=1, block_k=static_int("block_size", block_size, 1))):
        return _partial_softmax(run(RAGGED_DECODE_ATTENTION, call), query.shape[0], lowest)


def _lowest(mask_value: float) -> float:
    lowest = number("mask_value", mask_value)
    if lowest > -1e30:
        raise ValueError(f"mask_value={lowest} must be below -1e30: a hidden key has no weight")
    return lowest


@partial(jax.jit, static_argnums=(1, 2))  # one program: debug_nans and debug_infs do not see its lse of -inf
def _partial_softmax(outputs: dict[str, jax.Array], B: int, lowest: float) -> PartialSoftmax:
    lse, top = outputs["lse"][0].T[:B, :, None], outputs["top"][0].T[:B, :, None]  # (B, H, 1)
    some = ~jnp.isneginf(lse)
    total = jnp.where(some, jnp.exp(lse - jnp.where(some, top, 0.0)), 0.0)
    return outputs["out"][0][:B], jnp.where(some, top, lowest), total
