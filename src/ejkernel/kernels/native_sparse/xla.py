"""Attention over selected blocks in XLA: a few queries at a time gather their keys; runs everywhere."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.kernels.native_sparse.block_table import first_keys
from ejkernel.kernels.native_sparse.rows import joined_chunks, over_chunks, query_chunks
from ejkernel.kernels.native_sparse.spec import Dimensions, dimensions
from ejkernel.kernels.native_sparse.xla_rules import GatheredPairs, float_operands, seen_alike
from ejkernel.kernels.softmax.gradients import output_cotangent, row_terms, sink_gradient
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays
from ejkernel.ops.sharding import varying_like


@dataclass(frozen=True)
class Config:
    """Queries at a time."""

    block_q: int = 64

    def __post_init__(self) -> None:
        config_ints(self, ("block_q",))


def unsupported(call: Call) -> list[str]:
    return []


def default_config(call: Call) -> Config:
    """As many queries as keep the keys and values they gather near 8 MB."""
    dims = dimensions(call)
    per_query = dims.B * dims.Hkv * dims.K * call.spec.block_size * (dims.D + dims.Dv)
    return Config(max(1, min(256, 2**21 // max(1, per_query))))


def search_space(call: Call) -> list[Config]:
    return [Config(block_q) for block_q in (4, 16, 32, 64, 128, 256)]


class _Source(NamedTuple):
    """Keys and values to gather from, (B, Hkv, S + block_size, D), and where blocks start (B|1, N)."""

    key: jax.Array
    value: jax.Array
    starts: jax.Array


def _source(call: Call) -> _Source:
    def padded(x: jax.Array) -> jax.Array:
        # a gathered block never ends behind the array, which would shift its start
        return jnp.pad(x.swapaxes(1, 2), [(0, 0), (0, 0), (0, call.spec.block_size), (0, 0)])

    return _Source(padded(call["key"]), padded(call["value"]), call["starts"])


def _gather(x: jax.Array, first: jax.Array, size: int) -> jax.Array:
    """Blocks (B, Hkv, C, K * size, D) of rows of x (B, Hkv, S', D) from the rows `first` (B, Hkv, C, K) on."""
    rows, D = x.shape[2:]

    def block(one: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(one, (jnp.minimum(at, rows - size), jnp.int32(0)), (size, D))

    over_blocks = jax.vmap(jax.vmap(block, (None, 0)), (None, 0))
    blocks = jax.vmap(jax.vmap(over_blocks))(x, first)
    B, H, C, K = first.shape
    return blocks.reshape(B, H, C, K * size, D)


class _Gathered(NamedTuple):
    """What some queries see: keys and values (B, Hkv, C, K * block_size, D), zeros where they may not look."""

    key: jax.Array
    value: jax.Array
    seen: jax.Array  # (B, Hkv, C, K * block_size)
    position: jax.Array
    pairs: GatheredPairs


def _gathered(call: Call, source: _Source, rows: Arrays) -> _Gathered:
    size = call.spec.block_size
    # that of none is behind the last
    first = first_keys(source.starts, rows["indices"], source.key.shape[2]).swapaxes(1, 2)
    position = (first[..., None] + jnp.arange(size, dtype=jnp.int32)).reshape(*first.shape[:3], -1)
    pairs = GatheredPairs(call, rows["number"][0], jnp.minimum(position, call["key"].shape[1] - 1))
    seen = pairs.seen(position < rows["limits"][:, None, :, None])

    def visible(x: jax.Array) -> jax.Array:
        # not by a weight of zero: what is hidden may be nan
        return jnp.where(seen[..., None], _gather(x, first, size), 0)

    return _Gathered(visible(source.key), visible(source.value), seen, position, pairs)


def _by_key_head(x: jax.Array, dims: Dimensions) -> jax.Array:
    """(B, C, H, D) as (B, Hkv, C, G, D)."""
    B, C, _, D = x.shape
    return jnp.moveaxis(x.reshape(B, C, dims.Hkv, dims.G, D), 1, 2)


def _by_head(x: jax.Array) -> jax.Array:
    """(B, Hkv, C, G, ...) as (B, C, H, ...)."""
    B, Hkv, C, G, *trailing = x.shape
    return jnp.moveaxis(x, 1, 2).reshape(B, C, Hkv * G, *trailing)


_product = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def _rows(call: Call) -> Arrays:
    number = jnp.arange(call["query"].shape[1], dtype=jnp.int32)[None]
    return {"query": call["query"], "indices": call["indices"], "limits": call["limits"], "number": number}


_FILL = {"indices": -1}


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    call = seen_alike(call)
    dims, source = dimensions(call), _source(call)
    sinks = call["sinks"] if "sinks" in call else jnp.full((1, dims.H), -jnp.inf)
    sinks = sinks.reshape(-1, dims.Hkv, 1, dims.G)

    def attend(rows: Arrays) -> tuple[jax.Array, jax.Array]:
        gathered = _gathered(call, source, rows)
        logits = call.spec.scale * _product("bhcgd,bhckd->bhcgk", _by_key_head(rows["query"], dims), gathered.key)
        logits = jnp.where(gathered.seen[:, :, :, None], gathered.pairs.scored(logits), -jnp.inf)
        top = jnp.maximum(logits.max(-1), sinks)
        top = jnp.where(jnp.isneginf(top), 0.0, top)
        weights = jnp.exp(logits - top[..., None])
        total = weights.sum(-1) + jnp.exp(sinks - top)
        some = total != 0.0
        total = jnp.where(some, total, 1.0)
        out = _product("bhcgk,bhckd->bhcgd", weights.astype(gathered.value.dtype), gathered.value) / total[..., None]
        return _by_head(out).astype(call["query"].dtype), _by_head(jnp.where(some, top + jnp.log(total), -jnp.inf))

    out, lse = over_chunks(attend, _rows(call), min(config.block_q, dims.T), _FILL)
    outputs = {"out": out, "lse": lse.swapaxes(1, 2)}
    return outputs, outputs


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    given, call = call, seen_alike(call)
    dims, source = dimensions(call), _source(call)
    lse, delta = row_terms(residuals, cotangents)
    rows = _rows(call) | {"dout": output_cotangent(residuals, cotangents)}
    rows |= {"lse": lse.swapaxes(1, 2), "delta": delta.swapaxes(1, 2)}

    def add(sums: Arrays, rows: Arrays) -> tuple[Arrays, jax.Array]:
        gathered = _gathered(call, source, rows)
        query, dout = _by_key_head(rows["query"], dims), _by_key_head(rows["dout"], dims)
        lse, delta = (_by_key_head(rows[name][..., None], dims) for name in ("lse", "delta"))
        logits = call.spec.scale * _product("bhcgd,bhckd->bhcgk", query, gathered.key)
        seen = gathered.seen[:, :, :, None]
        weights = jnp.where(seen, jnp.exp(gathered.pairs.scored(logits) - lse), 0.0)
        dlogits = weights * (_product("bhcgd,bhckd->bhcgk", dout, gathered.value) - delta)
        dlogits, sums = gathered.pairs.gradients(logits, seen, dlogits, sums)
        dlogits = jnp.where(seen, dlogits, 0.0).astype(query.dtype)
        dquery = call.spec.scale * _product("bhcgk,bhckd->bhcgd", dlogits, gathered.key)
        dkey = call.spec.scale * _product("bhcgk,bhcgd->bhckd", dlogits, query)
        dvalue = _product("bhcgk,bhcgd->bhckd", weights.astype(dout.dtype), dout)
        more = {"key": _scattered(sums["key"], gathered, dkey), "value": _scattered(sums["value"], gathered, dvalue)}
        return sums | more, _by_head(dquery)

    summed = {"key": source.key, "value": source.value} | float_operands(call)
    start = varying_like({n: jnp.zeros(x.shape, jnp.float32) for n, x in summed.items()}, (call.arrays, cotangents))
    chunks = query_chunks(rows, min(config.block_q, dims.T), _FILL | {"lse": jnp.inf})
    sums, dquery = jax.lax.scan(add, start, chunks)
    gradients = sums | {"query": joined_chunks(dquery, dims.T)}
    for name in ("key", "value"):
        of_heads = sums[name][:, :, : dims.S].swapaxes(1, 2)
        gradients[name] = of_heads.reshape(*given[name].shape[:3], -1, of_heads.shape[3]).sum(3)
    gradients = {name: x.astype(call[name].dtype) for name, x in gradients.items()}
    return gradients | sink_gradient(call, lse, delta)


def _scattered(total: jax.Array, gathered: _Gathered, rows: jax.Array) -> jax.Array:
    """`total` (B, Hkv, S', D) and what the gathered keys (B, Hkv, C, K * block_size, D) add to it."""
    # nothing is added where a query may not look: the query itself may be nan there
    rows = jnp.where(gathered.seen[..., None], rows, 0.0)
    over_heads = jax.vmap(jax.vmap(lambda one, at, more: one.at[at].add(more, mode="drop")))
    return over_heads(total, gathered.position, rows)


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)
