"""The block schedule: for each block of one side, which blocks of the other to visit, and which need a mask.

Every platform reads the same schedule, so a mask is written once. Work is proportional to the blocks visited.
A schedule has one of two forms, by what the mask can promise:

- `Ranges`: the visited blocks are one run, and inside it one run needs no element mask. Causal, window and chunk
  masks give them in closed form, as constants of the traced program; segments, lengths and positions give them on
  the device, from the smallest and largest id and position in each block.
- `Lists`: the visited blocks are listed one by one, those that need no mask first. Block patterns and dense masks.

The arithmetic is written over a namespace `xp` of arrays: jax.numpy, or numpy where everything is known on the host.
For tensors with lengths `triton/schedule.py` says the same in Triton.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.expressions.bounds import Interval, axis_interval, bounds, has_operands, is_exact, operand_interval
from ejkernel.expressions.nodes import Expression
from ejkernel.kernels.common.rules import array_name
from ejkernel.kernels.softmax import rules
from ejkernel.kernels.softmax.spec import Band, Dimensions, Spec, dimensions
from ejkernel.ops import Call

Side = Literal["q", "k"]

_FAR = np.int32(2**30)


class Ranges(NamedTuple):
    """`bounds` int32 (B|1, H|1, n, 4): visit from, unmasked from, unmasked to, visit to (exclusive)."""

    bounds: Any

    def counts(self, b: Any, h: Any, i: Any) -> tuple[Any, Any]:
        """How many visited blocks of row i need no mask, and how many there are in all."""
        lo, full_lo, full_hi, hi = self._row(b, h, i)
        return full_hi - full_lo, hi - lo

    def block(self, b: Any, h: Any, i: Any, n: Any) -> Any:
        """The n-th block row i visits, unmasked ones first."""
        lo, full_lo, full_hi, _ = self._row(b, h, i)
        masked = lo + n - (full_hi - full_lo)
        after = masked + (full_hi - full_lo)
        return jnp.where(n < full_hi - full_lo, full_lo + n, jnp.where(masked < full_lo, masked, after))

    def _row(self, b: Any, h: Any, i: Any) -> Any:
        Bs, Hs, _, _ = self.bounds.shape
        row = jnp.asarray(self.bounds)[b if Bs > 1 else 0, h if Hs > 1 else 0, i]
        return row[0], row[1], row[2], row[3]


class Lists(NamedTuple):
    """`number` int32 (B|1, H|1, n, 2): unmasked and all; `index` int32 (B|1, H|1, n, m): unmasked blocks first."""

    number: Any
    index: Any

    def counts(self, b: Any, h: Any, i: Any) -> tuple[Any, Any]:
        Bs, Hs, _, _ = self.number.shape
        row = self.number[b if Bs > 1 else 0, h if Hs > 1 else 0, i]
        return row[0], row[1]

    def block(self, b: Any, h: Any, i: Any, n: Any) -> Any:
        Bs, Hs, _, _ = self.index.shape
        return self.index[b if Bs > 1 else 0, h if Hs > 1 else 0, i, n]


Schedule = Ranges | Lists


def plan(call: Call, block_q: int, block_k: int, side: Side, xp: Any = jnp) -> Schedule:
    """The schedule of a call: one row per query block (`side="q"`) or per key block (`side="k"`)."""
    dims, rule = dimensions(call), call.spec.rules.mask
    known = None if rule is None else _known_runs(call, dims, block_q, block_k, side)
    if "pattern" in call or "mask" in call or (rule is not None and known is None):
        return compact(*maps(call, block_q, block_k, side, xp), xp)
    ranges = _closed_ranges(call, dims, block_q, block_k, side)
    if known is not None:
        ranges = _intersect(ranges, known, np)
    if "q_segments" in call or "q_positions" in call:
        some, every = _interval_maps(call, dims, block_q, block_k, xp)
        return Ranges(_intersect(xp.asarray(ranges), _runs(*_oriented(some, every, side, xp), xp), xp))
    return Ranges(ranges)


def by_index(call: Call, block_q: int, block_k: int, side: Side) -> Ranges:
    """Every block that indices do not rule out, all of them masked: more work than `plan` says, but nothing to make."""
    ranges = _closed_ranges(call, dimensions(call), block_q, block_k, side)
    ranges[..., 1:3] = ranges[..., :1]
    return Ranges(ranges)


# Closed form ------------------------------------------------------------------------------------------------


def _closed_ranges(call: Call, dims: Dimensions, block_q: int, block_k: int, side: Side) -> np.ndarray:
    """Ranges (1, 1, n, 4) from raw indices: the ragged tail, and band and chunk unless explicit positions decide."""
    spec: Spec = call.spec
    offset = dims.S - dims.T
    if side == "q":
        rows, columns, size, band = _blocks(dims.T, block_q, offset), (0, dims.S - 1), block_k, spec.band
    else:
        rows, columns, size = _blocks(dims.S, block_k, 0), (offset, offset + dims.T - 1), block_q
        band = Band(_negated(spec.band.hi), _negated(spec.band.lo))
    first, last = rows
    some = [np.full_like(first, columns[0]), np.full_like(first, columns[1])]
    every = [some[0].copy(), some[1].copy()]
    if "q_positions" not in call:
        _narrow(some, every, *_band_intervals(first, last, band))
        if spec.chunk is not None:
            _narrow(some, every, *_chunk_intervals(first, last, spec.chunk))
    if side == "k" and dims.S % block_k:
        every[1][-1] = every[0][-1] - 1  # keys past the end are hidden from every query
    return _block_units(some, every, columns, size)[None, None]


def _negated(bound: int | None) -> int | None:
    return None if bound is None else -bound


def _blocks(length: int, block: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last position of each block."""
    first = np.arange(0, length, block, dtype=np.int64)
    return first + offset, np.minimum(first + block, length) - 1 + offset


def _band_intervals(first: np.ndarray, last: np.ndarray, band: Band):
    """What some, and what every, position of a block sees: inclusive intervals."""
    far = np.full_like(first, _FAR)
    lo, hi = band.lo, band.hi
    some = (-far if lo is None else first + lo, far if hi is None else last + hi)
    every = (-far if lo is None else last + lo, far if hi is None else first + hi)
    return some, every


def _chunk_intervals(first: np.ndarray, last: np.ndarray, chunk: int):
    some = (first // chunk * chunk, last // chunk * chunk + chunk - 1)
    return some, (last // chunk * chunk, first // chunk * chunk + chunk - 1)


def _narrow(some: list[np.ndarray], every: list[np.ndarray], some_more: Any, every_more: Any) -> None:
    for interval, more in ((some, some_more), (every, every_more)):
        interval[0], interval[1] = np.maximum(interval[0], more[0]), np.minimum(interval[1], more[1])


def _block_units(some: list[np.ndarray], every: list[np.ndarray], columns: tuple[int, int], size: int) -> np.ndarray:
    """Inclusive position intervals to half-open block ranges (n, 4); a ragged last block is never unmasked."""
    origin = columns[0]
    length = columns[1] - origin + 1
    lo = (some[0] - origin) // size
    hi = np.where(some[1] < some[0], lo, (some[1] - origin) // size + 1)
    full_lo = -((origin - every[0]) // size)
    full_hi = np.minimum((every[1] - origin + 1) // size, length // size)
    full_lo = np.clip(full_lo, lo, hi)
    full_hi = np.clip(full_hi, full_lo, hi)
    return np.stack([lo, full_lo, full_hi, hi], axis=-1).astype(np.int32)


# On the device ----------------------------------------------------------------------------------------------


class _Extent(NamedTuple):
    """Smallest and largest value in each block, over the entries that count; whether all of them count."""

    low: Any  # (B|1, n)
    high: Any
    full: Any


def _extents(values: Any, valid: Any, block: int, xp: Any) -> _Extent:
    valid = xp.ones((1, values.shape[1]), dtype=xp.bool_) if valid is None else valid
    rows, length = np.broadcast_shapes(tuple(values.shape), tuple(valid.shape))
    padding = ((0, 0), (0, -length % block))
    values, valid = (xp.pad(xp.broadcast_to(x, (rows, length)), padding) for x in (values, valid))
    low = xp.min(xp.where(valid, values, _FAR).reshape(rows, -1, block), axis=-1)
    high = xp.max(xp.where(valid, values, -_FAR).reshape(rows, -1, block), axis=-1)
    return _Extent(low, high, xp.all(valid.reshape(rows, -1, block), axis=-1))


def _position_extents(call: Call, dims: Dimensions, block_q: int, block_k: int, xp: Any) -> tuple[_Extent, _Extent]:
    """Of the explicit positions, or of plain indices with the ends aligned."""
    if "q_positions" in call:
        q_valid, k_valid = _valid(call)
        return (
            _extents(call["q_positions"], q_valid, block_q, xp),
            _extents(call["kv_positions"], k_valid, block_k, xp),
        )
    blocks = (_blocks(dims.T, block_q, dims.S - dims.T), _blocks(dims.S, block_k, 0))
    q, k = (_Extent(*(xp.asarray(x[None]) for x in (*ends, np.ones(len(ends[0]), bool)))) for ends in blocks)
    return q, k


def _valid(call: Call) -> tuple[Any, Any]:
    """Which queries and which keys are no padding; None where all are."""
    if "q_segments" not in call:
        return None, None
    return call["q_segments"] >= 0, call["kv_segments"] >= 0


def _interval_maps(call: Call, dims: Dimensions, block_q: int, block_k: int, xp: Any) -> tuple[Any, Any]:
    """Block maps (B|1, nq, nk) from segments and explicit positions: may a pair be visible, are all pairs?"""
    some = every = xp.ones((1, 1, 1), dtype=xp.bool_)
    if "q_segments" in call:
        q_valid, k_valid = _valid(call)
        q, k = _across(
            _extents(call["q_segments"], q_valid, block_q, xp), _extents(call["kv_segments"], k_valid, block_k, xp)
        )
        some = (q.low <= k.high) & (k.low <= q.high)
        every = (q.low == q.high) & (k.low == k.high) & (q.low == k.low) & q.full & k.full
    if "q_positions" in call:
        q, k = _across(*_position_extents(call, dims, block_q, block_k, xp))
        visible, covered = _position_maps(call.spec, q, k, xp)
        # a block with no entry that counts has low > high: it is never visited
        some = some & visible & (q.low <= q.high) & (k.low <= k.high)
        every = every & covered & q.full & k.full
    return some, every


def _across(q: _Extent, k: _Extent) -> tuple[_Extent, _Extent]:
    return _Extent(*(x[:, :, None] for x in q)), _Extent(*(x[:, None, :] for x in k))


def _position_maps(spec: Spec, q: _Extent, k: _Extent, xp: Any) -> tuple[Any, Any]:
    some = every = xp.ones((1, 1, 1), dtype=xp.bool_)
    if spec.band.lo is not None:
        some, every = some & (k.high - q.low >= spec.band.lo), every & (k.low - q.high >= spec.band.lo)
    if spec.band.hi is not None:
        some, every = some & (k.low - q.high <= spec.band.hi), every & (k.high - q.low <= spec.band.hi)
    if spec.chunk is not None:
        c = spec.chunk
        some = some & (q.low // c <= k.high // c) & (k.low // c <= q.high // c)
        every = every & (q.low // c == q.high // c) & (k.low // c == k.high // c) & (q.low // c == k.low // c)
    return some, every


def _oriented(some: Any, every: Any, side: Side, xp: Any) -> tuple[Any, Any]:
    return (some, every) if side == "q" else (xp.swapaxes(some, -1, -2), xp.swapaxes(every, -1, -2))


def _runs(some: Any, every: Any, xp: Any) -> Any:
    """Maps (B|1, n, m) to bounds (B|1, 1, n, 4): the hull of the visible blocks, the first run of unmasked ones."""
    m = some.shape[-1]
    at = xp.arange(m, dtype=xp.int32)
    lo = xp.min(xp.where(some, at, m), axis=-1)
    hi = xp.max(xp.where(some, at + 1, 0), axis=-1)
    full_lo = xp.min(xp.where(every & some, at, m), axis=-1)
    full_hi = xp.min(xp.where(~(every & some) & (at >= full_lo[..., None]), at, m), axis=-1)
    return xp.asarray(xp.stack([lo, full_lo, full_hi, xp.maximum(hi, lo)], axis=-1)[:, None], dtype=xp.int32)


def _intersect(a: Any, b: Any, xp: Any) -> Any:
    """Bounds that both allow; an empty result is an empty range, never a negative one."""
    lo, hi = xp.maximum(a[..., 0], b[..., 0]), xp.minimum(a[..., 3], b[..., 3])
    hi = xp.maximum(hi, lo)
    full_lo = xp.clip(xp.maximum(a[..., 1], b[..., 1]), lo, hi)
    full_hi = xp.clip(xp.minimum(a[..., 2], b[..., 2]), full_lo, hi)
    return xp.asarray(xp.stack([lo, full_lo, full_hi, hi], axis=-1), dtype=xp.int32)


# Lists ------------------------------------------------------------------------------------------------------


def maps(call: Call, block_q: int, block_k: int, side: Side, xp: Any = jnp) -> tuple[Any, Any]:
    """Whether each block of the side visits each of the other, and whether without a mask: (B|1, H|1, n, m) each."""
    dims = dimensions(call)
    ranges = _closed_ranges(call, dims, block_q, block_k, side)
    some, every = _range_maps(ranges, dims, block_q, block_k, side, xp)
    if "q_segments" in call or "q_positions" in call:
        seen, full = _interval_maps(call, dims, block_q, block_k, xp)
        seen, full = _oriented(seen[:, None], full[:, None], side, xp)
        some, every = some & seen, every & full
    for name in ("pattern", "mask"):
        if name in call:
            seen, full = _oriented(*_cell_maps(call, name, dims, block_q, block_k, xp), side, xp)
            some, every = some & seen, every & full
    if call.spec.rules.mask is not None:
        seen, full = _oriented(*_rule_maps(call, dims, block_q, block_k, xp), side, xp)
        some, every = some & seen, every & full
    return some, some & every


def _known_runs(call: Call, dims: Dimensions, block_q: int, block_k: int, side: Side) -> np.ndarray | None:
    """The bounds (1, 1, n, 4) that a rule of indices alone has, where each row visits one run of blocks."""
    if has_operands(call.spec.rules.mask):
        return None
    some, every = _oriented(*_rule_maps(call, dims, block_q, block_k, np), side, np)
    ranges = _runs(some[0], every[0], np)
    lo, full_lo, full_hi, hi = (ranges[..., n, None] for n in range(4))
    at = np.arange(some.shape[-1])
    one_run = ((lo <= at) & (at < hi) == some).all()
    return ranges if one_run and ((full_lo <= at) & (at < full_hi) == some & every).all() else None


def _rule_maps(call: Call, dims: Dimensions, block_q: int, block_k: int, xp: Any) -> tuple[Any, Any]:
    """Whether a rule shows any, and whether it shows every, pair of a tile: (B|1, H|1, nq, nk) each."""
    rule = call.spec.rules.mask
    if not is_exact(rule):
        return _counted_maps(call, dims, block_q, block_k)
    sizes: dict[str, int | None] = {"scalar": None, "row": block_q, "column": block_k}

    def operand(node: Expression) -> Interval:
        kind, number = node.data
        interval = operand_interval(call[array_name(node)][:, :, number], sizes[kind], xp)
        added = {"row": (..., None), "column": (..., None, slice(None))}.get(kind, ...)
        return Interval(*(x[added] for x in interval))

    rows, columns = (axis_interval(n, block, xp) for n, block in ((dims.T, block_q), (dims.S, block_k)))
    every, some, _ = bounds(rule, {"i": Interval(*(x[:, None] for x in rows[:2])), "j": columns}, operand, xp)
    shape = (1, 1, len(rows.low), len(columns.low))
    return tuple(xp.broadcast_to(x, np.broadcast_shapes(np.shape(x), shape)) for x in (some, every))


def _counted_maps(call: Call, dims: Dimensions, block_q: int, block_k: int) -> tuple[Any, Any]:
    """The same by computing every pair, a block of queries of one head at a time."""
    rule, arrays = call.spec.rules.mask, {name: call[name] for name in call.arrays if name in rules.ARRAYS}
    leading = tuple(max((x.shape[axis] for x in arrays.values()), default=1) for axis in (0, 1))
    nq, nk = -(-dims.T // block_q), -(-dims.S // block_k)
    # past the end, the last query and the last key count again
    keys = jnp.minimum(jnp.arange(nk * block_k, dtype=jnp.int32), dims.S - 1)

    def one(number: Any) -> tuple[Any, Any]:
        b, h, i = number // (leading[1] * nq), number // nq % leading[1], number % nq
        head = {n: x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0] for n, x in arrays.items()}
        queries = jnp.minimum(i * block_q + jnp.arange(block_q, dtype=jnp.int32), dims.T - 1)
        seen = rules.head_operands(head, queries, keys).value(rule, queries[:, None], keys[None])
        tiles = jnp.broadcast_to(seen, (block_q, nk * block_k)).reshape(block_q, nk, block_k)
        return tiles.any((0, 2)), tiles.all((0, 2))

    some, every = jax.lax.map(one, jnp.arange(leading[0] * leading[1] * nq))
    return some.reshape(*leading, nq, nk), every.reshape(*leading, nq, nk)


def _range_maps(ranges: np.ndarray, dims: Dimensions, block_q: int, block_k: int, side: Side, xp: Any):
    m = -(-dims.S // block_k) if side == "q" else -(-dims.T // block_q)
    at = np.arange(m)
    lo, full_lo, full_hi, hi = np.moveaxis(ranges, -1, 0)[..., None]
    return xp.asarray((lo <= at) & (at < hi)), xp.asarray((full_lo <= at) & (at < full_hi))


class _Cells(NamedTuple):
    """A boolean grid (B|1, H|1, rows, columns) whose cells cover `height` queries and `width` keys each."""

    grid: Any
    height: int
    width: int


def _cell_maps(call: Call, name: str, dims: Dimensions, block_q: int, block_k: int, xp: Any) -> tuple[Any, Any]:
    """Whether any, and whether every, cell that a tile touches is set: (B|1, H|1, nq, nk) each."""
    # XLA's evaluator would take a minute for what follows from cells that are known while compiling
    grid = jax.lax.optimization_barrier(call[name]) if xp is jnp else call[name]
    if name == "mask":
        cells = _Cells(grid, 1 if grid.shape[2] > 1 else dims.T, 1 if grid.shape[3] > 1 else dims.S)
        return _reduced(cells, dims, block_q, block_k, xp)
    cells = _Cells(grid, *call.spec.pattern_block)
    if call.spec.pattern_by_position:
        return _cells_between(cells, *_position_extents(call, dims, block_q, block_k, xp), xp)
    return _reduced(cells, dims, block_q, block_k, xp)


def _cells_between(cells: _Cells, q: _Extent, k: _Extent, xp: Any) -> tuple[Any, Any]:
    """Of cells (1, H|1, rows, columns) counted by position, from the positions in each tile.

    A sum over a rectangle of cells is a difference of four sums over those that start at the origin.
    """
    _, _, R, C = cells.grid.shape
    top, bottom = _cell_range(q, cells.height, R, xp)  # (B|1, nq)
    left, right = _cell_range(k, cells.width, C, xp)  # (B|1, nk)
    sums = xp.cumsum(xp.cumsum(xp.asarray(cells.grid[0], dtype=xp.int32), axis=-2, dtype=xp.int32), axis=-1)
    sums = xp.pad(sums, ((0, 0), (1, 0), (1, 0)))  # (H|1, R + 1, C + 1)

    def up_to(row: Any, column: Any) -> Any:
        return sums[:, row[:, :, None], column[:, None, :]]  # (H|1, B|1, nq, nk)

    number = up_to(bottom, right) - up_to(top, right) - up_to(bottom, left) + up_to(top, left)
    number = xp.swapaxes(number, 0, 1)
    inside_q, inside_k = (q.low >= 0) & (q.high < R * cells.height), (k.low >= 0) & (k.high < C * cells.width)
    area = ((bottom - top)[:, :, None] * (right - left)[:, None, :])[:, None]
    inside = (inside_q[:, :, None] & inside_k[:, None, :])[:, None]
    return number > 0, (number == area) & inside


def _cell_range(extent: _Extent, size: int, cells: int, xp: Any) -> tuple[Any, Any]:
    """The cells that the positions of each block lie in: the first, and one past the last; none may be an empty run."""
    first = xp.clip(extent.low // size, 0, cells)
    return first, xp.maximum(xp.clip(extent.high // size + 1, 0, cells), first)


def _reduced(cells: _Cells, dims: Dimensions, block_q: int, block_k: int, xp: Any) -> tuple[Any, Any]:
    """The same for cells counted by plain index."""
    some, every = cells.grid, cells.grid
    for axis, size, block, length in ((2, cells.height, block_q, dims.T), (3, cells.width, block_k, dims.S)):
        some = _grouped(some, size, block, length, axis, xp)
        every = ~_grouped(~every, size, block, length, axis, xp)
    return some, every


def _grouped(x: Any, size: int, block: int, length: int, axis: int, xp: Any) -> Any:
    """Whether any cell of x (each `size` long) that touches a block is set, along one axis."""
    starts = np.arange(0, length, block)
    if block % size == 0:
        cells = [(0, 0)] * x.ndim
        cells[axis] = (0, len(starts) * (block // size) - x.shape[axis])
        shape = (*x.shape[:axis], len(starts), block // size, *x.shape[axis + 1 :])
        return xp.any(xp.pad(x, cells).reshape(shape), axis=axis + 1)
    first, last = starts // size, (np.minimum(starts + block, length) - 1) // size
    touched = xp.zeros((*x.shape[:axis], len(starts), *x.shape[axis + 1 :]), dtype=xp.bool_)
    for step in range(int((last - first).max()) + 1):
        touched = touched | xp.take(x, np.minimum(first + step, last), axis=axis)
    return touched


def in_order(call: Call, block_q: int, block_k: int, sub_block: int, xp: Any = jnp) -> tuple[Lists, Any]:
    """Lists for blocks of keys that are put together from sub-blocks, and the order of these, (B|1, Hkv|1, n).

    A block visits what any of its sub-blocks needs. So those that many more queries see than usual (stripes) come first
    and together, where that is less in all than with sub-blocks as they lie. The last block is filled up with such past
    the end, and masked for them.
    """
    dims = dimensions(call)
    some, every = maps(call, block_q, sub_block, "k", xp)
    B, H, n, m = some.shape
    heads = dims.Hkv if H > 1 else 1
    seen = xp.sum(xp.asarray(xp.sum(some, axis=-1), dtype=xp.int32).reshape(B, heads, -1, n), axis=2)
    usual = xp.sort(seen, axis=-1)[..., n // 4, None]
    few = seen <= usual + usual // 4 + 1
    stripes_first = xp.asarray(xp.argsort(few, axis=-1, stable=True), dtype=xp.int32)
    as_is = xp.broadcast_to(xp.arange(n, dtype=xp.int32), (B, heads, n))

    def joined(order: Any) -> tuple[Any, Any]:
        at = xp.repeat(order, H // heads, axis=1)[..., None]
        fill = ((0, 0), (0, 0), (0, -n % (block_k // sub_block)), (0, 0))
        ordered = (xp.pad(xp.take_along_axis(x, at, axis=2), fill) for x in (some, every))
        some_of, every_of = (x.reshape(B, H, -1, block_k // sub_block, m) for x in ordered)
        return xp.any(some_of, axis=3), xp.all(every_of, axis=3)

    def visits(order: Any) -> Any:
        return xp.sum(joined(order)[0].reshape(B, heads, -1), axis=-1)[..., None]

    order = xp.where(visits(stripes_first) < visits(as_is), stripes_first, as_is)
    padded = xp.pad(order, ((0, 0), (0, 0), (0, -n % (block_k // sub_block))), constant_values=n)
    return compact(*joined(order), xp), padded


def compact(some: Any, every: Any, xp: Any = jnp) -> Lists:
    """Maps (B|1, H|1, n, m) to lists: a stable sort by (unmasked, masked, not visited)."""
    rank = xp.asarray(xp.where(every, 0, xp.where(some, 1, 2)), dtype=xp.int32)
    index = xp.asarray(xp.argsort(rank, axis=-1, stable=True), dtype=xp.int32)
    number = xp.stack([xp.sum(every, axis=-1), xp.sum(some, axis=-1)], axis=-1)
    return Lists(xp.asarray(number, dtype=xp.int32), index)
