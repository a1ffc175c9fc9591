"""Softmax attention in plain XLA: runs everywhere, visits only the scheduled tiles, needs O(T) memory."""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.common import dropout as bits
from ejkernel.kernels.common.tiles import (
    MASKED,
    Online,
    capped,
    finite_rows,
    matmul,
    online_finish,
    online_step,
    uncapped_gradient,
)
from ejkernel.kernels.softmax.gradients import row_terms, sink_gradient
from ejkernel.kernels.softmax.schedule import Schedule, plan
from ejkernel.kernels.softmax.spec import Dimensions, Spec, dimensions
from ejkernel.ops import Call
from ejkernel.ops.sharding import varying_like


@dataclass(frozen=True)
class Config:
    """Tile sizes, and how many independent loops share the work.

    Attributes:
        block_q: queries per tile.
        block_k: keys per tile.
        lanes: XLA on a CPU runs one loop's steps in sequence but several loops side by side, one per core.
    """

    block_q: int = 512
    block_k: int = 512
    lanes: int = 1

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "lanes"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive int")


def unsupported(call: Call) -> list[str]:
    return []


# lanes beyond this make the program longer and no faster: the matmuls inside a lane use idle cores too
_MOST_LANES = 4


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    block = 512 if _reach(call) >= 2048 else 256
    tiles = dims.B * dims.H * -(-dims.T // block) * -(-dims.S // block)
    lanes = min(os.cpu_count() or 1, _MOST_LANES) if call.target.backend == "cpu" and tiles >= 64 else 1
    return Config(block, block, lanes)


def _reach(call: Call) -> int:
    """How many keys a query may see at most, as far as the static mask tells."""
    S, (lo, hi) = dimensions(call).S, call.spec.band
    return min(S, S if lo is None or hi is None else hi - lo + 1, call.spec.chunk or S)


def search_space(call: Call) -> list[Config]:
    lanes = default_config(call).lanes
    return [Config(q, k, lanes) for q in (128, 256, 512, 1024) for k in (128, 256, 512, 1024)]


class _Tiling(NamedTuple):
    """The static shape of the work."""

    spec: Spec
    dims: Dimensions
    block_q: int
    block_k: int

    @property
    def rows(self) -> int:
        return -(-self.dims.T // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.dims.S // self.block_k)


class _Head(NamedTuple):
    """What one (batch, head) works on, lengths padded to whole tiles; absent options are None."""

    b: Any
    h: Any
    query: Any  # (T, D)
    key: Any  # (S, D)
    value: Any  # (S, Dv)
    bias: Any  # (T|1, S|1)
    sinks: Any  # ()
    q_segments: Any  # (T,)
    kv_segments: Any  # (S,)
    q_positions: Any
    kv_positions: Any
    mask: Any  # (T|1, S|1)
    pattern: Any  # (Tb, Sb)
    dropout_seeds: Any  # ()
    query_marks: Any  # (T,) nan where a row is not finite
    key_marks: Any  # (S,) of keys and values


def _tiling(call: Call, config: Config) -> _Tiling:
    dims = dimensions(call)
    return _Tiling(call.spec, dims, min(config.block_q, dims.T), min(config.block_k, dims.S))


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    """x with an axis grown to `length`; a broadcast axis of size 1 stays."""
    if x.shape[axis] in (1, length):
        return x
    return jnp.pad(x, [(0, length - n if a == axis else 0) for a, n in enumerate(x.shape)])


# the axes that are lengths, once heads come before them
_LENGTHS = {
    "query": "..T.",
    "key": "..S.",
    "value": "..S.",
    "bias": "..TS",
    "mask": "..TS",
    "q_segments": ".T",
    "kv_segments": ".S",
    "q_positions": ".T",
    "kv_positions": ".S",
    "query_marks": "..T",
    "key_marks": "..S",
}


def _by_head(call: Call, tiling: _Tiling) -> dict[str, jax.Array]:
    """The arrays with batch and head first, lengths padded to whole tiles, and finite rows."""
    lengths = {"T": tiling.rows * tiling.block_q, "S": tiling.columns * tiling.block_k}
    arrays = dict(call.arrays)
    marks = {}
    for name in ("query", "key", "value"):
        arrays[name], marks[name] = finite_rows(arrays[name].swapaxes(1, 2))  # a head's rows lie together
    arrays["query_marks"], arrays["key_marks"] = marks["query"], marks["key"] + marks["value"]
    for name, axes in _LENGTHS.items():
        for axis, letter in enumerate(axes if name in arrays else ""):
            arrays[name] = _padded(arrays[name], axis, lengths[letter]) if letter in lengths else arrays[name]
    return arrays


def _pick(x: jax.Array | None, *index: Any) -> Any:
    """x at leading indices, where an axis of size 1 broadcasts."""
    return None if x is None else x[tuple(i if n > 1 else 0 for i, n in zip(index, x.shape, strict=False))]


def _head(arrays: dict[str, jax.Array], dims: Dimensions, number: Any) -> _Head:
    """The arrays of one (batch, head), numbered batch-major."""
    b, h = number // dims.H, number % dims.H
    rows = {n: _pick(arrays.get(n), b) for n in ("q_segments", "kv_segments", "q_positions", "kv_positions")}
    names = ("query", "query_marks", "bias", "sinks", "mask", "pattern", "dropout_seeds")
    heads = {n: _pick(arrays.get(n), b, h) for n in names}
    shared = {n: arrays[n][b, h // dims.G] for n in ("key", "value", "key_marks")}
    return _Head(b, h, **shared, **rows, **heads)


def _block(x: jax.Array, i: Any, size: int, axis: int = 0) -> jax.Array:
    return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _tile_of(x: jax.Array, i: Any, j: Any, tiling: _Tiling) -> jax.Array:
    """The tile (i, j) of a matrix (T|1, S|1)."""
    return _block(_block(x, i, tiling.block_q, 0), j, tiling.block_k, 1)


def _indices(tiling: _Tiling, i: Any, j: Any) -> tuple[jax.Array, jax.Array]:
    """Query (block_q, 1) and key (1, block_k) indices of a tile."""
    rows = i * tiling.block_q + lax.broadcasted_iota(jnp.int32, (tiling.block_q, 1), 0)
    return rows, j * tiling.block_k + lax.broadcasted_iota(jnp.int32, (1, tiling.block_k), 1)


def _logits(tiling: _Tiling, head: _Head, query: jax.Array, key: jax.Array, i: Any, j: Any) -> jax.Array:
    """Logits (block_q, block_k) after bias and soft cap, before the mask."""
    spec = tiling.spec
    logits = spec.scale * matmul(query, key, (1, 1), spec.precision)
    logits += _block(head.query_marks, i, tiling.block_q)[:, None] + _block(head.key_marks, j, tiling.block_k)[None, :]
    if head.bias is not None:
        logits += _tile_of(head.bias, i, j, tiling).astype(jnp.float32)
    return capped(logits, spec.soft_cap).astype(spec.logits_dtype).astype(jnp.float32)


def _seen(tiling: _Tiling, head: _Head, i: Any, j: Any) -> jax.Array:
    """Which pairs of a tile are visible, (block_q, block_k)."""
    spec, dims = tiling.spec, tiling.dims
    queries, keys = _indices(tiling, i, j)
    seen = (queries < dims.T) & (keys < dims.S)
    if head.q_positions is None:
        q_pos, k_pos = queries + (dims.S - dims.T), keys
    else:
        q_pos = _block(head.q_positions, i, tiling.block_q)[:, None]
        k_pos = _block(head.kv_positions, j, tiling.block_k)[None, :]
    if spec.band.lo is not None:
        seen &= k_pos - q_pos >= spec.band.lo
    if spec.band.hi is not None:
        seen &= k_pos - q_pos <= spec.band.hi
    if spec.chunk is not None:
        seen &= q_pos // spec.chunk == k_pos // spec.chunk
    if head.q_segments is not None:
        q_ids = _block(head.q_segments, i, tiling.block_q)[:, None]
        seen &= (q_ids == _block(head.kv_segments, j, tiling.block_k)[None, :]) & (q_ids >= 0)
    if head.mask is not None:
        seen &= _tile_of(head.mask, i, j, tiling)
    if head.pattern is not None:
        height, width = spec.pattern_block or (1, 1)
        seen &= head.pattern[queries // height, keys // width]
    return seen


def _stays(tiling: _Tiling, head: _Head, i: Any, j: Any) -> jax.Array:
    return bits.keep(head.dropout_seeds, *_indices(tiling, i, j), tiling.spec.dropout)


def _visit(schedule: Schedule, head: _Head, i: Any, step: Any, state: Any) -> Any:
    """Fold step(masked, block, state) over the blocks row i visits, those that need no mask first."""
    unmasked, total = schedule.counts(head.b, head.h, i)

    def body(masked: bool):
        return lambda n, state: step(masked, schedule.block(head.b, head.h, i, n), state)

    state = lax.fori_loop(0, unmasked, body(False), state)
    return lax.fori_loop(unmasked, total, body(True), state)


def _in_lanes(step: Any, start: Any, count: int, lanes: int) -> tuple[list[Any], Any]:
    """scan(step, start, 0 .. count) as several independent scans: every lane's carry, and the outputs in order."""
    lanes = max(n for n in range(1, min(lanes, count) + 1) if count % n == 0)
    parts = [lax.scan(step, start, jnp.arange(lane, count, lanes)) for lane in range(lanes)]
    carries, outputs = zip(*parts, strict=True)
    return list(carries), jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(count, *x[0].shape[1:]), *outputs)


# Forward ----------------------------------------------------------------------------------------------------


class _Best(NamedTuple):
    """The largest logit of each row over keys alone, and where."""

    logit: jax.Array
    index: jax.Array


def _forward_rows(tiling: _Tiling, head: _Head, schedule: Schedule, i: Any) -> dict[str, jax.Array]:
    """One block of query rows against every key block it visits."""
    spec, (rows, size) = tiling.spec, (tiling.block_q, tiling.dims.Dv)
    query = _block(head.query, i, rows)

    def step(masked: bool, j: Any, state: tuple[Online, _Best | None]):
        online, best = state
        key, value = _block(head.key, j, tiling.block_k), _block(head.value, j, tiling.block_k)
        logits = _logits(tiling, head, query, key, i, j)
        logits = jnp.where(_seen(tiling, head, i, j), logits, MASKED) if masked else logits
        if best is not None:
            top, at = logits.max(-1), j * tiling.block_k + logits.argmax(-1).astype(jnp.int32)
            best = _Best(jnp.maximum(best.logit, top), jnp.where(top > best.logit, at, best.index))
        online, weights = online_step(online, logits)
        if spec.dropout:
            weights = jnp.where(_stays(tiling, head, i, j), weights / (1.0 - spec.dropout), 0.0)
        product = matmul(weights.astype(value.dtype), value, (1, 0), spec.precision)
        return online._replace(out=online.out + product), best

    top = jnp.full((rows,), MASKED) if head.sinks is None else jnp.full((rows,), jnp.maximum(head.sinks, MASKED))
    total = jnp.zeros((rows,)) if head.sinks is None else jnp.exp(head.sinks - top)
    best = _Best(jnp.full((rows,), MASKED), jnp.full((rows,), -1, jnp.int32)) if spec.with_argmax else None
    start = (Online(top, total, jnp.zeros((rows, size))), best)
    online, best = _visit(schedule, head, i, step, varying_like(start, head))
    out, lse = online_finish(online)
    outputs = {"out": out.astype(query.dtype), "lse": lse}
    return outputs if best is None else {**outputs, "argmax": best.index}


def forward(call: Call, config: Config) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    tiling = _tiling(call, config)
    arrays, dims = _by_head(call, tiling), tiling.dims
    schedule = plan(call, tiling.block_q, tiling.block_k, "q")

    def one(_: None, number: jax.Array) -> tuple[None, dict[str, jax.Array]]:
        head = _head(arrays, dims, number // tiling.rows)
        return None, _forward_rows(tiling, head, schedule, number % tiling.rows)

    _, blocks = _in_lanes(one, None, dims.B * dims.H * tiling.rows, config.lanes)

    def joined(x: jax.Array) -> jax.Array:  # (B * H * rows, block_q, ...) to (B, H, T, ...)
        return x.reshape(dims.B, dims.H, -1, *x.shape[2:])[:, :, : dims.T]

    outputs = {name: joined(x) for name, x in blocks.items()}
    outputs["out"] = outputs["out"].swapaxes(1, 2)
    return outputs, {"out": outputs["out"], "lse": outputs["lse"]}


# Backward ---------------------------------------------------------------------------------------------------


class _Gradients(NamedTuple):
    query: jax.Array  # (T, D), of the whole head
    key: jax.Array  # (block_k, D), of one key block
    value: jax.Array  # (block_k, Dv)
    bias: Any  # (T|1, S|1) or None


class _Rows(NamedTuple):
    """Per query row of one head: the cotangent of out, lse and delta."""

    dout: jax.Array  # (T, Dv)
    lse: jax.Array  # (T,)
    delta: jax.Array


def _finite_terms(dout: jax.Array, lse: jax.Array, delta: jax.Array) -> tuple[_Rows, jax.Array]:
    """The terms of each row (B, H, T, ...) with zeros for nan, and a mark where there was any."""
    dout, bad_dout = finite_rows(dout)
    delta, bad_delta = finite_rows(delta[..., None])
    bad = bad_dout + bad_delta + jnp.where(jnp.isnan(lse), jnp.nan, 0.0)
    return _Rows(dout, jnp.where(jnp.isnan(lse), 0.0, lse), delta[..., 0]), bad


def _add_block(x: jax.Array, update: jax.Array, i: Any, size: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, _block(x, i, size) + update, i * size, 0)


def _add_bias(total: jax.Array, ds: jax.Array, tiling: _Tiling, i: Any, j: Any) -> jax.Array:
    """Add a tile's gradient to that of a bias (T|1, S|1), summed over the axes it broadcasts along."""
    axes = [a for a in (0, 1) if total.shape[a] == 1]
    part = ds.sum(axes, keepdims=True) if axes else ds
    at = (0 if 0 in axes else i * tiling.block_q, 0 if 1 in axes else j * tiling.block_k)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, part.shape) + part, at)


def _backward_tile(
    tiling: _Tiling, head: _Head, rows: _Rows, masked: bool, i: Any, j: Any, so_far: _Gradients
) -> _Gradients:
    """Five matmuls: the logits and dp again, then what the tile adds to dv, dk and dq."""
    spec = tiling.spec
    query, key = _block(head.query, i, tiling.block_q), _block(head.key, j, tiling.block_k)
    value, dout = _block(head.value, j, tiling.block_k), _block(rows.dout, i, tiling.block_q)
    lse, delta = _block(rows.lse, i, tiling.block_q)[:, None], _block(rows.delta, i, tiling.block_q)[:, None]
    logits = _logits(tiling, head, query, key, i, j)
    seen = _seen(tiling, head, i, j) if masked else True
    p = jnp.exp((jnp.where(seen, logits, MASKED) if masked else logits) - lse)
    dp = matmul(dout, value, (1, 1), spec.precision)
    kept = p
    if spec.dropout:
        stays = _stays(tiling, head, i, j)
        kept, dp = (jnp.where(stays, x / (1.0 - spec.dropout), 0.0) for x in (p, dp))
    ds = uncapped_gradient(p * (dp - delta), logits, spec.soft_cap)
    if spec.soft_cap is not None:
        ds = jnp.where(seen, ds, 0.0)  # the slope of the cap at a hidden nan is nan

    def times(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        return matmul(a.astype(b.dtype), b, contract, spec.precision)

    return _Gradients(
        _add_block(so_far.query, times(ds, key, (1, 0)), i, tiling.block_q),
        so_far.key + times(ds, query, (0, 0)),
        so_far.value + times(kept, dout, (0, 0)),
        None if so_far.bias is None else _add_bias(so_far.bias, ds, tiling, i, j),
    )


def _backward_head(tiling: _Tiling, head: _Head, rows: _Rows, schedule: Schedule) -> _Gradients:
    """All key blocks of a head, each owning its dk and dv; dq and dbias grow as they pass."""

    def column(carry: tuple[jax.Array, Any], j: jax.Array):
        zeros = jnp.zeros((tiling.block_k, tiling.dims.D)), jnp.zeros((tiling.block_k, tiling.dims.Dv))
        start = varying_like(_Gradients(carry[0], *zeros, carry[1]), (head, rows))
        done = _visit(
            schedule, head, j, lambda masked, i, sums: _backward_tile(tiling, head, rows, masked, i, j, sums), start
        )
        return (done.query, done.bias), (done.key, done.value)

    dbias = None if head.bias is None else jnp.zeros(head.bias.shape, jnp.float32)
    start = varying_like((jnp.zeros(head.query.shape, jnp.float32), dbias), (head, rows))
    (dquery, dbias), (dkey, dvalue) = lax.scan(column, start, jnp.arange(tiling.columns))
    scale = tiling.spec.scale
    return _Gradients(dquery * scale, dkey.reshape(head.key.shape) * scale, dvalue.reshape(head.value.shape), dbias)


def backward(call: Call, residuals: Any, cotangents: Any, config: Config) -> dict[str, jax.Array]:
    tiling = _tiling(call, config)
    arrays, dims = _by_head(call, tiling), tiling.dims
    schedule = plan(call, tiling.block_q, tiling.block_k, "k")
    lse, delta = row_terms(residuals, cotangents)
    T = tiling.rows * tiling.block_q
    rows, marks = _finite_terms(cotangents["out"].swapaxes(1, 2), lse, delta)
    rows = _Rows(*(_padded(x, 2, T) for x in rows))
    arrays["query_marks"] += _padded(marks, 2, T)

    def one(total_bias: Any, number: jax.Array):
        head = _head(arrays, dims, number)
        own = _Rows(*(x[head.b, head.h] for x in rows))
        gradients = _backward_head(tiling, head, own, schedule)
        if total_bias is not None:
            at = tuple(i if n > 1 else 0 for i, n in zip((head.b, head.h), total_bias.shape, strict=False))
            total_bias = total_bias.at[at].add(gradients.bias)
        return total_bias, gradients._replace(bias=None)

    dbias = jnp.zeros(arrays["bias"].shape, jnp.float32) if "bias" in call else None
    dbias = varying_like(dbias, (arrays, rows))
    dbiases, by_head = _in_lanes(one, dbias, dims.B * dims.H, config.lanes)

    def joined(x: jax.Array, heads: int, length: int, like: jax.Array) -> jax.Array:
        """(B * H, padded length, dim) to the layout of `like`, query heads of one key head summed."""
        x = x.reshape(dims.B, heads, -1, *x.shape[1:]).sum(2)[:, :, :length]
        return x.swapaxes(1, 2).astype(like.dtype)

    result = {
        "query": joined(by_head.query, dims.H, dims.T, call["query"]),
        "key": joined(by_head.key, dims.Hkv, dims.S, call["key"]),
        "value": joined(by_head.value, dims.Hkv, dims.S, call["value"]),
    }
    if dbias is not None:
        bias, dbias = call["bias"], jnp.stack(dbiases).sum(0)
        result["bias"] = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return result | sink_gradient(call, lse, delta)
