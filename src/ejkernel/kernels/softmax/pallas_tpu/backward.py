"""The backward kernels: dq of query blocks, dk and dv of key blocks, and the gradients of a bias and of operands.

Each result is owned by one kernel and summed in VMEM in the order of the schedule: nothing is added atomically. All of
them compute a tile's logits again and share `_tile`; tiles stay (keys, queries), as in the forward.
"""

import math
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.expressions.nodes import Expression
from ejkernel.kernels.common.pallas_tpu import transposed
from ejkernel.kernels.common.tiles import uncapped_gradient
from ejkernel.kernels.softmax.pallas_tpu.schedule import FIRST, LAST, Scalars, divided, statuses
from ejkernel.kernels.softmax.pallas_tpu.tiles import (
    GridStep,
    Operand,
    Refs,
    Scratch,
    Tiles,
    length_last,
    length_second,
    nonfinite_zeroed,
    whole_block,
)
from ejkernel.kernels.softmax.rules import slopes
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call


class Rows(NamedTuple):
    """What the backward knows of each query: dout (B, T, H, Dv), lse and delta (B, H, T)."""

    dout: jax.Array
    lse: jax.Array
    delta: jax.Array


def _operands(tiles: Tiles, rows: Rows) -> dict[str, Operand]:
    row = tiles.of_queries(1)
    return tiles.operands() | {
        "dout": (length_last(rows.dout), tiles.of_queries(tiles.dims.Dv)),
        "lse": ((rows.lse / tiles.unit)[:, :, None], row),
        "delta": (rows.delta[:, :, None], row),
    }


class _Inputs(NamedTuple):
    """The blocks of a tile."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    dout: jax.Array

    @classmethod
    def read(cls, arrays: Refs) -> "_Inputs":
        return cls(*(arrays[name][...] for name in cls._fields))

    def nonfinite_zeroed(self, masked: bool) -> "_Inputs":
        """For products that sum over rows: where some are hidden, without what could leak as 0 * nan."""
        return _Inputs(*map(nonfinite_zeroed, self)) if masked else self


def _tile(
    tiles: Tiles,
    scalars: Scalars,
    arrays: Refs,
    inputs: _Inputs,
    at: GridStep,
    masked: bool,
    operand_slope: Expression | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weights after dropout and a gradient, both (block_k, block_q).

    The gradient is that of the logits before score function and soft cap; with `operand_slope`, the derivative of the
    score function by an operand, that of the operand.
    """
    dropout, cap, rule = tiles.spec.dropout, tiles.spec.soft_cap, tiles.spec.rules.score
    scores = tiles.scores(arrays, inputs.query, inputs.key)
    p = tiles.weights(tiles.logits(scalars, arrays, at, scores), arrays["lse"][...])
    dp = tiles.dot(inputs.value, inputs.dout, (0, 0))
    if masked:
        p = jnp.where(dp - dp == 0.0, p, jnp.nan)  # a bad row of dout shows in dv, which multiplies zeros
    kept = p
    if dropout:
        stays = tiles.stays(scalars, at)
        kept, dp = (jnp.where(stays, y * (1.0 / (1.0 - dropout)), 0.0) for y in (p, dp))
    ds = p * (dp - arrays["delta"][...])
    if operand_slope is not None:
        ds *= tiles.value(operand_slope, scalars, arrays, at, scores)
    elif rule is not None:
        ds *= tiles.value(slopes(rule).score, scalars, arrays, at, scores)
    if operand_slope is None:
        ds = uncapped_gradient(ds, scores, cap)
    if masked:
        seen = tiles.seen(scalars, arrays, at)
        kept, ds = jnp.where(seen, kept, 0.0), jnp.where(seen, ds, 0.0)
    return kept, ds


class _Visit(NamedTuple):
    """A step of the grid, and the blocks of its tile for products that sum over rows."""

    at: GridStep
    inputs: _Inputs


def scratch(kernel: str, call: Call, block_q: int, block_k: int) -> dict[str, Scratch]:
    """The sums that a kernel keeps from tile to tile."""
    dims = dimensions(call)
    if kernel == "dbias":
        _, _, T, S = call["bias"].shape
        shapes = {"sum": (block_q if T > 1 else 1, block_k if S > 1 else 1)}
    elif kernel == "dq":
        shapes = {"sum": (dims.D, block_q)}
    elif kernel in ("drow", "dcolumn"):
        shapes = {"sum": (1, block_q) if kernel == "drow" else (dims.G, block_k)}
    else:
        shapes = {"dk": (dims.D, block_k), "dv": (dims.Dv, block_k)}
    return {name: (shape, jnp.float32) for name, shape in shapes.items()}


def _launch(
    name: str,
    tiles: Tiles,
    rows: Rows,
    outputs: Any,
    width: int,
    step: Any,
    finish: Any,
    operand_slope: Expression | None = None,
) -> dict[str, jax.Array]:
    """The outputs of the kernel of that name, which sums in VMEM over the tiles of each row of the schedule.

    `step(sums, tile, weights, ds)` adds a tile, `finish(outputs, sums)` writes what a row comes to. `operand_slope` is
    that of `_tile`.
    """

    def kernel(scalars: Scalars, arrays: Refs, outs: Refs, kept: Refs) -> None:
        at = tiles.current_step(scalars)

        @pl.when(at.has(FIRST))
        def _start() -> None:
            for sums in kept.values():
                sums[...] = jnp.zeros(sums.shape, jnp.float32)

        def visit(masked: bool) -> None:
            inputs = _Inputs.read(arrays)
            made = _tile(tiles, scalars, arrays, inputs, at, masked, operand_slope)
            step(kept, _Visit(at, inputs.nonfinite_zeroed(masked)), *made)

        tiles.visit(at, visit)
        pl.when(at.has(LAST))(lambda: finish(outs, kept))

    kernel.__name__ = f"softmax_{name}"
    kept = scratch(name, tiles.call, tiles.block_q, tiles.block_k)
    return tiles.launch(kernel, _operands(tiles, rows), outputs, kept, width)


def dquery(call: Call, rows: Rows, block_q: int, block_k: int) -> jax.Array:
    """The gradient of the queries, (B, T, H, D)."""
    tiles = Tiles.of(call, block_q, block_k, "q")
    B, T, _, H, _, D, Dv = tiles.dims
    outputs = {"dq": (jax.ShapeDtypeStruct((B, H, D, T), call["query"].dtype), tiles.of_queries(D))}

    def step(kept: Refs, tile: _Visit, p: jax.Array, ds: jax.Array) -> None:
        key = tile.inputs.key
        kept["sum"][...] += tiles.dot(key, ds.astype(key.dtype), (1, 0))

    def finish(outs: Refs, kept: Refs) -> None:
        outs["dq"][...] = (kept["sum"][...] * tiles.spec.scale).astype(outs["dq"].dtype)

    return length_second(_launch("dq", tiles, rows, outputs, 2 * D + Dv, step, finish)["dq"])


def dkey_dvalue(call: Call, rows: Rows, block_q: int, block_k: int) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys (B, S, Hkv, D) and values (B, S, Hkv, Dv), summed over the query heads that share them."""
    tiles = Tiles.of(call, block_q, block_k, "k")
    B, _, S, _, Hkv, D, Dv = tiles.dims
    outputs = {
        "dk": (jax.ShapeDtypeStruct((B, Hkv, D, S), call["key"].dtype), tiles.of_keys(D)),
        "dv": (jax.ShapeDtypeStruct((B, Hkv, Dv, S), call["value"].dtype), tiles.of_keys(Dv)),
    }

    def step(kept: Refs, tile: _Visit, p: jax.Array, ds: jax.Array) -> None:
        query, _, _, dout = tile.inputs
        kept["dv"][...] += tiles.dot(dout, p.astype(dout.dtype), (1, 1))
        kept["dk"][...] += tiles.dot(query, ds.astype(query.dtype), (1, 1))

    def finish(outs: Refs, kept: Refs) -> None:
        outs["dk"][...] = (kept["dk"][...] * tiles.spec.scale).astype(outs["dk"].dtype)
        outs["dv"][...] = kept["dv"][...].astype(outs["dv"].dtype)

    done = _launch("dkv", tiles, rows, outputs, 2 * (D + Dv), step, finish)
    return length_second(done["dk"]), length_second(done["dv"])


def operand_gradient(call: Call, rows: Rows, block_q: int, block_k: int, of_keys: bool, slope: Expression) -> jax.Array:
    """The gradient of a score function's operand, by which its derivative is `slope`.

    With `of_keys` summed over the queries of each head, (B, H, S); else over keys, (B, H, T).
    """
    tiles = Tiles.of(call, block_q, block_k, "k" if of_keys else "q")
    B, T, S, H, Hkv, D, Dv = tiles.dims
    # of a key block, the heads that share it lie beside each other
    shape = (B, Hkv, tiles.dims.G, S) if of_keys else (B, H, 1, T)
    block = tiles.of_keys(tiles.dims.G) if of_keys else tiles.of_queries(1)
    outputs = {"sums": (jax.ShapeDtypeStruct(shape, jnp.float32), block)}

    def step(kept: Refs, tile: _Visit, p: jax.Array, gradient: jax.Array) -> None:
        if of_keys:
            kept["sum"][pl.ds(tile.at.member, 1)] += transposed(gradient.sum(1, keepdims=True))
        else:
            kept["sum"][...] += gradient.sum(0, keepdims=True)

    def finish(outs: Refs, kept: Refs) -> None:
        outs["sums"][...] = kept["sum"][...]

    name = "dcolumn" if of_keys else "drow"
    return _launch(name, tiles, rows, outputs, D + Dv, step, finish, slope)["sums"].reshape(B, H, -1)


class _BiasStep(GridStep):
    """A step of the grid of a bias: an axis is an outer one of the bias, or an inner one that it broadcasts along."""

    def _axis(self, n: int) -> Any:
        return self.index[n] if self.tiles.call["bias"].shape[n] > 1 else self.index[n + 4]

    @property
    def b(self) -> Any:
        return self._axis(0)

    @cached_property
    def h(self) -> Any:
        return self._axis(1)

    @cached_property
    def i(self) -> Any:
        return self._axis(2)

    @cached_property
    def j(self) -> Any:
        return self._axis(3)

    @cached_property
    def kv(self) -> Any:
        return divided(self.h, self.tiles.dims.G)

    @cached_property
    def flags(self) -> Any:
        inner = sum(self.index[4:])
        last = sum(n - 1 for n in self.tiles.grid[4:])
        of_tile = self.tiles.schedule.flags(self.scalars, self.b, self.h, self.i, self.j)
        return of_tile + jnp.where(inner == 0, FIRST, 0) + jnp.where(inner == last, LAST, 0)


class BiasTiles(Tiles):
    """A grid over the tiles of a bias, and inside over what it broadcasts along: each tile owns its whole sum."""

    @classmethod
    def of_bias(cls, call: Call, block_q: int, block_k: int) -> "BiasTiles":
        dims = dimensions(call)
        block_q, block_k = whole_block(block_q, dims.T), whole_block(block_k, dims.S)
        return cls(call, dims, block_q, block_k, "q", statuses(call, block_q, block_k))

    @property
    def grid(self) -> tuple[int, ...]:
        full = (self.dims.B, self.dims.H, self.schedule.nq, self.schedule.nk)
        kept_sizes = [n if size > 1 else 1 for n, size in zip(full, self.call["bias"].shape, strict=True)]
        return (*kept_sizes, *(n // m for n, m in zip(full, kept_sizes, strict=True)))

    @property
    def visits(self) -> int:
        return math.prod(self.grid)

    def step(self, index: tuple[Any, ...], scalars: Any) -> GridStep:
        return _BiasStep(self, index, scalars)


def dbias(call: Call, rows: Rows, block_q: int, block_k: int) -> jax.Array:
    """The gradient of the bias in its own shape, summed over the axes it broadcasts along."""
    tiles = BiasTiles.of_bias(call, block_q, block_k)
    bias = call["bias"]
    outputs = {"dbias": (jax.ShapeDtypeStruct(bias.shape, bias.dtype), tiles.of_matrix(bias.shape))}

    def step(kept: Refs, tile: _Visit, p: jax.Array, ds: jax.Array) -> None:
        for axis, size in enumerate(kept["sum"].shape):  # a tile is (keys, queries), a bias (queries, keys)
            ds = ds.sum(1 - axis, keepdims=True) if size == 1 else ds
        kept["sum"][...] += transposed(ds)

    def finish(outs: Refs, kept: Refs) -> None:
        outs["dbias"][...] = kept["sum"][...].astype(outs["dbias"].dtype)

    return _launch("dbias", tiles, rows, outputs, tiles.dims.D + tiles.dims.Dv, step, finish)["dbias"]
