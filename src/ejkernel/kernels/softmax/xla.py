"""Softmax attention in plain XLA: runs everywhere, visits only the scheduled tiles, needs O(T) memory."""

import math
import os
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.checks.options import config_ints
from ejkernel.expressions.nodes import LOOKUP
from ejkernel.kernels.common import dropout as bits
from ejkernel.kernels.common.online_softmax import (
    MASKED,
    OnlineSoftmax,
    nothing_seen,
    online_finish,
    online_step,
    with_sinks,
)
from ejkernel.kernels.common.rules import TileOperands, array_name, table_index
from ejkernel.kernels.common.tiles import (
    capped,
    exp_on_cpu,
    finite,
    matmul,
    nan_rows,
    rounded,
    uncapped_gradient,
)
from ejkernel.kernels.softmax.gradients import output_cotangent, row_terms, sink_gradient
from ejkernel.kernels.softmax.rules import ARRAYS, slopes
from ejkernel.kernels.softmax.schedule import Schedule, plan
from ejkernel.kernels.softmax.spec import Dimensions, Spec, dimensions
from ejkernel.ops import Call, Implementation
from ejkernel.ops.sharding import varying_like
from ejkernel.types.visibility import Tokens, pattern_cells, visible


@dataclass(frozen=True)
class Config:
    """Tile sizes, and how many independent loops share the work.

    Attributes:
        block_q: queries per tile.
        block_k: keys per tile.
        lanes: independent loops that share the work; XLA on a CPU is free to run them side by side.
    """

    block_q: int = 512
    block_k: int = 512
    lanes: int = 1

    def __post_init__(self) -> None:
        config_ints(self, ("block_q", "block_k", "lanes"))


def unsupported(call: Call) -> list[str]:
    return []


# lanes beyond this make the program longer and no faster: the matmuls inside a lane use idle cores too
_MOST_LANES = 4


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    sparse = any(name in call for name in ("q_segments", "q_positions", "mask", "pattern")) or call.spec.rules.mask
    # large tiles are faster, small ones waste less where a row sees few keys
    block = 128 if sparse or _reach(call) < 1024 <= dims.S else 512
    tiles = dims.B * dims.H * -(-dims.T // block) * -(-dims.S // block)
    lanes = min(os.cpu_count() or 1, _MOST_LANES) if call.target.backend == "cpu" and tiles >= 64 else 1
    return Config(block, block, lanes)


def _reach(call: Call) -> int:
    """How many keys a query may see at most, as far as the static mask tells."""
    S, (lo, hi) = dimensions(call).S, call.spec.band
    return min(S, S if lo is None or hi is None else hi - lo + 1, call.spec.chunk or S)


def search_space(call: Call) -> list[Config]:
    dims, lanes = dimensions(call), default_config(call).lanes
    # from the first that holds the whole length on, they are one
    by_q, by_k = ([n for n in (128, 256, 512, 1024) if n == 128 or n < 2 * length] for length in (dims.T, dims.S))
    return [Config(q, k, lanes) for q in by_q for k in by_k]


class _Tiling(NamedTuple):
    """The static shape of the work."""

    spec: Spec
    dims: Dimensions
    block_q: int
    block_k: int
    scaled: bool  # the scale is in the queries
    on_cpu: bool

    def exp(self, x: jax.Array) -> jax.Array:
        """Of a tile whose numbers are at most about 0."""
        return exp_on_cpu(x) if self.on_cpu else jnp.exp(x)

    @property
    def rows(self) -> int:
        return -(-self.dims.T // self.block_q)

    @property
    def columns(self) -> int:
        return -(-self.dims.S // self.block_k)


class _Head(NamedTuple):
    """One (batch, head) of the arrays, which stay whole: only tiles are ever cut out of them."""

    arrays: dict[str, jax.Array]
    b: Any
    h: Any
    kv: Any  # the key head of h

    def at(self, name: str) -> tuple[Any, ...]:
        """The leading indices of an array: batch, and head unless it has none."""
        numbers = {"B": self.b, "H": self.h, "K": self.kv}
        axes = zip(_AXES[name], self.arrays[name].shape, strict=False)
        return tuple(numbers[letter] if n > 1 else 0 for letter, n in axes if letter in numbers)


# the axes that arrays have once heads come before lengths; K are key heads
_AXES = {
    **dict.fromkeys(("query", "finite_query", "dout"), "BHT."),
    **dict.fromkeys(("key", "finite_key", "value"), "BKS."),
    **dict.fromkeys(("lse", "delta"), "BHT"),
    **dict.fromkeys(("bias", "mask"), "BHTS"),
    **dict.fromkeys(("q_segments", "q_positions"), "BT"),
    **dict.fromkeys(("kv_segments", "kv_positions"), "BS"),
    **dict.fromkeys(("sinks", "dropout_seeds"), "BH"),
    "pattern": "BH..",
    # what mask and score functions read
    **{name: {"rows": "BH.T", "columns": "BH.S"}.get(name.partition("_")[2], "BH.") for name in ARRAYS},
}


def _tiling(call: Call, config: Config) -> _Tiling:
    dims = dimensions(call)
    block_q, block_k = min(config.block_q, dims.T), min(config.block_k, dims.S)
    return _Tiling(call.spec, dims, block_q, block_k, _scale_in_query(call), call.target.backend == "cpu")


def _scale_in_query(call: Call) -> bool:
    """Whether the scale can move into the queries, saving a pass over every tile, without rounding them more.

    A power of two may take float16 out of its range.
    """
    dtype = call["query"].dtype
    return dtype == jnp.float32 or (dtype == jnp.bfloat16 and math.frexp(abs(call.spec.scale))[0] == 0.5)


def _padded(x: jax.Array, axis: int, length: int) -> jax.Array:
    """x with an axis grown to `length`; a broadcast axis of size 1 stays."""
    if x.shape[axis] in (1, length):
        return x
    return jnp.pad(x, [(0, length - n if a == axis else 0) for a, n in enumerate(x.shape)])


def _by_head(call: Call, tiling: _Tiling) -> dict[str, jax.Array]:
    """The arrays with batch and head first and whole tiles of rows; values finite, their marks in the keys."""
    lengths = {"T": tiling.rows * tiling.block_q, "S": tiling.columns * tiling.block_k}
    # a head's rows lie together
    arrays = call.arrays | {name: call[name].swapaxes(1, 2) for name in ("query", "key", "value")}
    arrays["key"] = nan_rows(arrays["key"], arrays["value"])
    arrays["value"] = finite(arrays["value"])
    if _scale_in_query(call):
        arrays["query"] *= tiling.spec.scale
    for name in [name for name in arrays if name in _AXES]:
        for axis, letter in enumerate(_AXES[name]):
            arrays[name] = _padded(arrays[name], axis, lengths[letter]) if letter in lengths else arrays[name]
    return arrays


def _head(arrays: dict[str, jax.Array], dims: Dimensions, number: Any) -> _Head:
    """One (batch, head), numbered batch-major."""
    b, h = number // dims.H, number % dims.H
    return _Head(arrays, b, h, h // dims.G)


def _indices(tiling: _Tiling, i: Any, j: Any) -> tuple[jax.Array, jax.Array]:
    """Query (block_q, 1) and key (1, block_k) indices of a tile."""
    rows = i * tiling.block_q + lax.broadcasted_iota(jnp.int32, (tiling.block_q, 1), 0)
    return rows, j * tiling.block_k + lax.broadcasted_iota(jnp.int32, (1, tiling.block_k), 1)


def _cut(tiling: _Tiling, head: _Head, name: str, i: Any = 0, j: Any = 0) -> jax.Array:
    """What tile (i, j) has of an array: queries of block i, keys of block j; axes of size 1 and the last stay whole."""
    x, at = head.arrays[name], head.at(name)
    blocks = {"T": (i, tiling.block_q), "S": (j, tiling.block_k)}
    axes = list(zip(_AXES[name], x.shape, strict=True))[len(at) :]
    cuts = [(0, n) if n == 1 or a not in blocks else (blocks[a][0] * blocks[a][1], blocks[a][1]) for a, n in axes]
    starts, shape = zip(*cuts, strict=True)
    return lax.dynamic_slice(x, (*at, *starts), (1,) * len(at) + shape).reshape(shape)


def _product(spec: Spec, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Left open, float32 is multiplied as such, as on other platforms: by default, XLA rounds it on GPUs and TPUs."""
    precision, default = spec.precision, jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if precision is None and default is None and a.dtype == jnp.float32:
        precision = lax.Precision.HIGHEST
    return matmul(a, b, contract, precision)


def _logits(tiling: _Tiling, head: _Head, query: jax.Array, key: jax.Array, i: Any, j: Any) -> jax.Array:
    """Logits (block_q, block_k) after bias and soft cap, before score function and mask."""
    spec = tiling.spec
    logits = _product(spec, query, key, (1, 1))
    if not tiling.scaled:
        # This maximum changes no number. It keeps the compiler from fusing the product with the subtraction of the row
        # maximum: a fused product is not rounded as the maximum is, and their difference could pass 0, by as much as
        # 2^16 where logits are 1e12.
        logits = jnp.maximum(logits * spec.scale, jnp.finfo(jnp.float32).min)
    if "bias" in head.arrays:
        logits += _cut(tiling, head, "bias", i, j).astype(jnp.float32)
    return capped(logits, spec.soft_cap)


def _finished(tiling: _Tiling, head: _Head, logits: jax.Array, i: Any, j: Any) -> jax.Array:
    """Logits through the score function, rounded."""
    if (rule := tiling.spec.rules.score) is not None:
        logits = _operands(tiling, head, i, j).value(rule, *_indices(tiling, i, j), logits)
    return rounded(logits, tiling.spec.logits_dtype)


def _operands(tiling: _Tiling, head: _Head, i: Any, j: Any) -> TileOperands:
    """What mask and score functions read of a tile."""
    return TileOperands(
        lambda name, n: head.arrays[name][(*head.at(name), n)],
        lambda name, n: _cut(tiling, head, name, i, j)[n][:, None],
        lambda name, n: _cut(tiling, head, name, i, j)[n][None],
        lambda name: head.arrays[name][head.at(name)],
    )


def _seen(tiling: _Tiling, head: _Head, i: Any, j: Any) -> jax.Array:
    """Which pairs of a tile are visible, (block_q, block_k)."""
    spec, dims = tiling.spec, tiling.dims
    at_q, at_k = _indices(tiling, i, j)
    queries, keys = Tokens(at_q + (dims.S - dims.T)), Tokens(at_k)
    if "q_positions" in head.arrays:
        queries = Tokens(_cut(tiling, head, "q_positions", i)[:, None])
        keys = Tokens(_cut(tiling, head, "kv_positions", j=j)[None, :])
    if "q_segments" in head.arrays:
        queries = queries._replace(segment=_cut(tiling, head, "q_segments", i)[:, None])
        keys = keys._replace(segment=_cut(tiling, head, "kv_segments", j=j)[None, :])
    rules = [_cut(tiling, head, "mask", i, j)] if "mask" in head.arrays else []
    if "pattern" in head.arrays:
        blocks, row = head.arrays["pattern"], head.at("pattern")
        rules.append(pattern_cells(blocks, at_q, at_k, spec.pattern_block or (1, 1), row))
    if spec.rules.mask is not None:
        rules.append(_operands(tiling, head, i, j).value(spec.rules.mask, at_q, at_k))
    return visible(queries, keys, spec.band, spec.chunk, pairs=(at_q < dims.T) & (at_k < dims.S), also=rules)


def _stays(tiling: _Tiling, head: _Head, i: Any, j: Any) -> jax.Array:
    seed = head.arrays["dropout_seeds"][head.at("dropout_seeds")]
    return bits.keep(seed, *_indices(tiling, i, j), tiling.spec.dropout)


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
    scans = [lax.scan(step, start, jnp.arange(lane, count, lanes)) for lane in range(lanes)]
    carries, outputs = zip(*scans, strict=True)
    return list(carries), jax.tree.map(lambda *x: jnp.stack(x, 1).reshape(count, *x[0].shape[1:]), *outputs)


# Forward ----------------------------------------------------------------------------------------------------


class _Best(NamedTuple):
    """The largest logit of each row over keys alone, and where."""

    logit: jax.Array
    index: jax.Array


def _forward_rows(tiling: _Tiling, head: _Head, schedule: Schedule, i: Any) -> dict[str, jax.Array]:
    """One block of query rows against every key block it visits."""
    spec, (rows, size) = tiling.spec, (tiling.block_q, tiling.dims.Dv)
    query = _cut(tiling, head, "query", i)

    def step(masked: bool, j: Any, state: tuple[OnlineSoftmax, _Best | None]):
        online, best = state
        key, value = _cut(tiling, head, "key", j=j), _cut(tiling, head, "value", j=j)
        logits = _finished(tiling, head, _logits(tiling, head, query, key, i, j), i, j)
        logits = jnp.where(_seen(tiling, head, i, j), logits, MASKED) if masked else logits
        if best is not None:
            highest, at = logits.max(-1), j * tiling.block_k + logits.argmax(-1).astype(jnp.int32)
            best = _Best(jnp.maximum(best.logit, highest), jnp.where(highest > best.logit, at, best.index))
        online, weights = online_step(online, logits, tiling.exp)
        if spec.dropout:
            weights = jnp.where(_stays(tiling, head, i, j), weights / (1.0 - spec.dropout), 0.0)
        product = _product(spec, weights.astype(value.dtype), value, (1, 0))
        return online._replace(out=online.out + product), best

    online = nothing_seen((rows,), size)
    if "sinks" in head.arrays:
        online = with_sinks(online, head.arrays["sinks"][head.at("sinks")])
    best = _Best(jnp.full((rows,), MASKED), jnp.full((rows,), -1, jnp.int32)) if spec.with_argmax else None
    start = (online, best)
    online, best = _visit(schedule, head, i, step, varying_like(start, head.arrays))
    out, lse = online_finish(online)
    outputs = {"out": out.astype(query.dtype), "lse": lse}
    return outputs if best is None else {**outputs, "total": online.running_sum, "argmax": best.index}


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
    key: jax.Array  # (D, block_k), of one key block
    value: jax.Array  # (Dv, block_k)
    bias: Any  # (T|1, S|1) or None
    operands: dict[str, jax.Array]  # of what a score function reads, of the whole head


def _add_block(x: jax.Array, update: jax.Array, i: Any, size: int) -> jax.Array:
    old = lax.dynamic_slice_in_dim(x, i * size, size, 0)
    return lax.dynamic_update_slice_in_dim(x, old + update, i * size, 0)


def _add_bias(total: jax.Array, ds: jax.Array, tiling: _Tiling, i: Any, j: Any) -> jax.Array:
    """Add a tile's gradient to that of a bias (T|1, S|1), summed over the axes it broadcasts along."""
    axes = [a for a in (0, 1) if total.shape[a] == 1]
    added = ds.sum(axes, keepdims=True) if axes else ds
    at = (0 if 0 in axes else i * tiling.block_q, 0 if 1 in axes else j * tiling.block_k)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, added.shape) + added, at)


def _backward_tile(tiling: _Tiling, head: _Head, masked: bool, i: Any, j: Any, so_far: _Gradients) -> _Gradients:
    """Five matmuls: the logits and dp again, then what the tile adds to dv, dk and dq."""
    spec = tiling.spec
    query, key = _cut(tiling, head, "query", i), _cut(tiling, head, "key", j=j)
    value, dout = _cut(tiling, head, "value", j=j), _cut(tiling, head, "dout", i)
    lse, delta = (_cut(tiling, head, name, i)[:, None] for name in ("lse", "delta"))
    scores = _logits(tiling, head, query, key, i, j)
    logits = _finished(tiling, head, scores, i, j)
    seen = _seen(tiling, head, i, j) if masked else True
    # no weight is above 1, also where lse is rounded by more than that
    p = tiling.exp(jnp.minimum((jnp.where(seen, logits, MASKED) if masked else logits) - lse, 0.0))
    dp = _product(spec, dout, value, (1, 1))
    kept = p
    if spec.dropout:
        stays = _stays(tiling, head, i, j)
        kept, dp = (jnp.where(stays, x / (1.0 - spec.dropout), 0.0) for x in (p, dp))
    ds = p * (dp - delta)
    operands = so_far.operands
    if spec.rules.score is not None:
        operands = _add_operands(tiling, head, operands, jnp.where(seen, ds, 0.0) if masked else ds, scores, i, j)
        slope = slopes(spec.rules.score).score
        ds *= _operands(tiling, head, i, j).value(slope, *_indices(tiling, i, j), scores)
    ds = uncapped_gradient(ds, scores, spec.soft_cap)
    if masked:
        ds = jnp.where(seen, ds, 0.0)  # dp of a hidden value may be inf, the slope of the cap at a hidden nan is nan

    finite_key, finite_query = _cut(tiling, head, "finite_key", j=j), _cut(tiling, head, "finite_query", i)
    # the small side of a product is the one that is transposed: on CPUs a transposed tile takes half as long again
    dquery = _product(spec, ds.astype(finite_key.dtype), finite_key, (1, 0))
    dkey = _product(spec, finite_query, ds.astype(finite_query.dtype), (0, 0))
    dvalue = _product(spec, dout, kept.astype(dout.dtype), (0, 0))
    return _Gradients(
        _add_block(so_far.query, dquery, i, tiling.block_q),
        so_far.key + dkey,
        so_far.value + dvalue,
        None if so_far.bias is None else _add_bias(so_far.bias, ds, tiling, i, j),
        operands,
    )


def _add_operands(
    tiling: _Tiling, head: _Head, totals: dict[str, jax.Array], ds: jax.Array, scores: jax.Array, i: Any, j: Any
) -> dict[str, jax.Array]:
    """Add a tile's gradients to those of a score function's operands."""
    totals, (at_q, at_k) = dict(totals), _indices(tiling, i, j)
    read = _operands(tiling, head, i, j)
    inside = (at_q < tiling.dims.T) & (at_k < tiling.dims.S)
    for node, slope in slopes(tiling.spec.rules.score).operands:
        name = array_name(node)
        by_pair = jnp.where(inside, ds * read.value(slope, at_q, at_k, scores), 0.0)
        total = totals[name]
        if node.name == LOOKUP:
            index = [read.value(arg, at_q, at_k, scores) for arg in node.args]
            at = jnp.broadcast_to(table_index(node, tuple(index)), by_pair.shape)
            totals[name] = total.at[at].add(by_pair)
            continue
        kind, number = node.data
        if kind == "scalar":
            totals[name] = total.at[number].add(by_pair.sum())
        else:
            sums, start = (
                (by_pair.sum(1), i * tiling.block_q) if kind == "row" else (by_pair.sum(0), j * tiling.block_k)
            )
            old = lax.dynamic_slice(total, (number, start), (1, len(sums)))
            totals[name] = lax.dynamic_update_slice(total, old + sums, (number, start))
    return totals


def _backward_head(tiling: _Tiling, head: _Head, schedule: Schedule) -> _Gradients:
    """All key blocks of a head, each owning its dk and dv; dq and dbias grow as they pass."""
    dims, (columns, size) = tiling.dims, (tiling.columns, tiling.block_k)

    def column(carry: tuple[jax.Array, Any, Any], j: jax.Array):
        start = _Gradients(carry[0], jnp.zeros((dims.D, size)), jnp.zeros((dims.Dv, size)), *carry[1:])
        step = partial(_backward_tile, tiling, head)
        done = _visit(
            schedule, head, j, lambda masked, i, sums: step(masked, i, j, sums), varying_like(start, head.arrays)
        )
        return (done.query, done.bias, done.operands), (done.key.T, done.value.T)

    bias = head.arrays.get("bias")
    start = (
        jnp.zeros((tiling.rows * tiling.block_q, dims.D)),
        None if bias is None else jnp.zeros(bias.shape[2:]),
        {name: jnp.zeros(head.arrays[name].shape[2:]) for name in _trained(head.arrays)},
    )
    (dquery, dbias, operands), (dkey, dvalue) = lax.scan(column, varying_like(start, head.arrays), jnp.arange(columns))
    scale = tiling.spec.scale
    dkey_scale = 1.0 if tiling.scaled else scale  # the queries it multiplied may hold the scale already
    return _Gradients(
        dquery * scale,
        dkey.reshape(columns * size, dims.D) * dkey_scale,
        dvalue.reshape(columns * size, dims.Dv),
        dbias,
        operands,
    )


def _trained(arrays: dict[str, jax.Array]) -> list[str]:
    """The operands that have a gradient."""
    return [name for name in arrays if name in ARRAYS and ARRAYS[name].grad]


def _with_cotangents(arrays: dict[str, jax.Array], tiling: _Tiling, dout: Any, lse: Any, delta: Any):
    """The arrays of a backward: terms of each query row, and finite rows for the products that sum over rows.

    A row whose terms are not finite is nan wherever it is seen, and nowhere else: its query is marked.
    """
    T = tiling.rows * tiling.block_q
    # the ones that the gradient of a sum begins with are a constant, which XLA would look through for seconds
    dout = lax.optimization_barrier(dout)
    dout, lse, delta = (_padded(x, 2, T) for x in (dout, lse, delta))
    hidden_nan = jnp.where(jnp.isnan(lse), jnp.nan, 0.0)
    return arrays | {
        "query": nan_rows(arrays["query"], dout, delta[..., None], hidden_nan[..., None]),
        "finite_query": finite(arrays["query"]),
        "finite_key": finite(arrays["key"]),
        "dout": finite(dout),
        "lse": jnp.where(jnp.isnan(lse), 0.0, lse),
        "delta": finite(delta),
    }


def backward(call: Call, residuals: Any, cotangents: Any, config: Config) -> dict[str, jax.Array]:
    tiling = _tiling(call, config)
    arrays, dims = _by_head(call, tiling), tiling.dims
    schedule = plan(call, tiling.block_q, tiling.block_k, "k")
    lse, delta = row_terms(residuals, cotangents)
    arrays = _with_cotangents(arrays, tiling, output_cotangent(residuals, cotangents).swapaxes(1, 2), lse, delta)

    def one(totals: dict[str, jax.Array], number: jax.Array):
        head = _head(arrays, dims, number)
        gradients = _backward_head(tiling, head, schedule)
        of_head = gradients.operands if gradients.bias is None else gradients.operands | {"bias": gradients.bias}
        totals = {name: x.at[head.at(name)].add(of_head[name]) for name, x in totals.items()}
        return totals, gradients._replace(bias=None, operands={})

    shared = [*(["bias"] if "bias" in call else []), *_trained(arrays)]
    start = {name: jnp.zeros(arrays[name].shape, jnp.float32) for name in shared}
    totals, by_head = _in_lanes(one, varying_like(start, arrays), dims.B * dims.H, config.lanes)

    def joined(x: jax.Array, heads: int, length: int, like: jax.Array) -> jax.Array:
        """(B * H, padded length, dim) to the layout of `like`, query heads of one key head summed."""
        x = x.reshape(dims.B, heads, -1, *x.shape[1:]).sum(2)[:, :, :length]
        return x.swapaxes(1, 2).astype(like.dtype)

    result = {
        "query": joined(by_head.query, dims.H, dims.T, call["query"]),
        "key": joined(by_head.key, dims.Hkv, dims.S, call["key"]),
        "value": joined(by_head.value, dims.Hkv, dims.S, call["value"]),
    }
    for name in shared:
        x, total = call[name], jnp.stack([lane[name] for lane in totals]).sum(0)
        result[name] = total[tuple(slice(n) for n in x.shape)].astype(x.dtype)
    return result | sink_gradient(call, lse, delta)


def table_gradients(call: Call, residuals: Any, cotangents: Any) -> dict[str, jax.Array]:
    """Those of what a score function looks up by query and key, for platforms that cannot add to any entry."""
    return {"float_tables": backward(call, residuals, cotangents, default_config(call))["float_tables"]}


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)
