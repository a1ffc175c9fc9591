"""Which elements of a Mosaic GPU kernel's tile count, and how an array with a number for each pair is read there."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels.softmax import schedule
from ejkernel.kernels.softmax.mosaic_gpu.block_lists import SUB_BLOCK, SubBlock
from ejkernel.kernels.softmax.mosaic_gpu.private_mosaic import COL, ROW, WGMMA, load, tile_iota
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import MaskedRun
from ejkernel.kernels.softmax.spec import Band, Dimensions, dimensions
from ejkernel.ops import Call

# what an array of (batch, head, row, column) differs by: rows and columns, rows alone, columns alone; or there is none
Extent = Literal["", "tile", "row", "column"]


@dataclass(frozen=True)
class Masks:
    """Element masks of a tile whose rows are one side and whose columns are the other.

    A row sees the columns whose coordinate lies in its interval and whose segment is its own. The coordinate of a
    column is its index, or its explicit position. Of packed sequences a row's interval says everything.
    """

    lower: bool = False
    upper: bool = False
    segments: bool = False
    positions: bool = False
    # a tile can hold columns that some of its rows must not see; a ragged tail alone is zeros from the copy engine
    mixed: bool = False
    # the blocks are listed, and a sub-block may be for one half of the rows only
    halves: bool = False
    # an array says which elements
    dense: Extent = ""

    @classmethod
    def of(cls, call: Call, side: schedule.Side) -> "Masks":
        spec, packed, halves = call.spec, _is_packed(call), "pattern" in call or "mask" in call
        positions = "q_positions" in call and not packed
        # explicit positions leave a ragged tail to the segments, which `arrays` then makes up if there are none
        segments = positions or ("q_segments" in call and not packed)
        band, both = _columns_minus_rows(spec.band, side), packed or spec.chunk is not None
        tail = side == "q" and not segments
        lower, upper = both or band.lo is not None, both or band.hi is not None or tail
        mixed, dense = both or segments or halves or spec.band != Band(), extent(call.get("mask"), side)
        return cls(lower, upper, segments, positions, mixed, halves, dense)

    def arrays(self, call: Call, side: schedule.Side, row_tile: int, column_tile: int) -> dict[str, jax.Array]:
        """What `keep` reads: int32 (B|1, length) each, lengths padded to whole tiles.

        Columns that come in sub-blocks have a margin before the first and after the last, the tile less a sub-block:
        a whole tile of columns is read for each sub-block, with the sub-block where it belongs in the tile.
        """
        dims, arrays = dimensions(call), {}
        margin = column_tile - SUB_BLOCK if self.halves else 0
        column_tile -= margin
        lengths = (dims.T, dims.S) if side == "q" else (dims.S, dims.T)
        if self.lower or self.upper:
            low, high = self._intervals(call, side, dims)
            none = low > high  # `keep` wants the ends of an interval in order: of an empty one both are far off
            low, high = (jnp.where(none, -(2**30), x) for x in (low, high))
            arrays["row_low"], arrays["row_high"] = (_padded(x, row_tile, 0) for x in (low, high))
        if self.segments:
            # padding never matches: -2 on the rows, -1 on the columns
            for name, axis, tile, none, more in (("row", 0, row_tile, -2, 0), ("column", 1, column_tile, -1, margin)):
                ids = call.get("q_segments" if (side == "q") == (axis == 0) else "kv_segments")
                ids = jnp.zeros((1, lengths[axis]), jnp.int32) if ids is None else ids
                arrays[f"{name}_segments"] = _padded(jnp.where(ids < 0, none, ids), tile, none, more)
        if self.positions:
            positions = call["kv_positions" if side == "q" else "q_positions"]
            arrays["column_positions"] = _padded(positions, column_tile, 0, margin)
        if self.dense:
            arrays["mask"] = padded_pairs(call["mask"].astype(jnp.int8), side, dims.S, row_tile, column_tile, margin)
        return arrays

    def _intervals(self, call: Call, side: schedule.Side, dims: Dimensions) -> tuple[jax.Array, jax.Array]:
        """First and last column coordinate each row sees, (B|1, rows)."""
        band, chunk, offset = _columns_minus_rows(call.spec.band, side), call.spec.chunk, dims.S - dims.T
        if _is_packed(call):
            return _packed_intervals(call, side, band)
        if self.positions:
            at, shift, last = call["q_positions" if side == "q" else "kv_positions"], 0, 2**31 - 1
        elif side == "q":
            at, shift, last = jnp.arange(dims.T, dtype=jnp.int32)[None] + offset, 0, dims.S - 1
        else:
            at, shift, last = jnp.arange(dims.S, dtype=jnp.int32)[None], offset, 2**30
        low, high = jnp.full_like(at, -(2**30)), jnp.full_like(at, 2**30)
        if band.lo is not None:
            low = jnp.maximum(low, at + band.lo)
        if band.hi is not None:
            high = jnp.minimum(high, at + band.hi)
        if chunk is not None:
            low, high = jnp.maximum(low, at // chunk * chunk), jnp.minimum(high, at // chunk * chunk + chunk - 1)
        return low - shift, jnp.minimum(high - shift, last)

    def rows(self, refs: dict[str, Any], b: Any, start: Any, size: int) -> dict[str, jax.Array]:
        """Where the rows of a tile begin, and their vectors, loaded once."""
        names = ["row_low"] * self.lower + ["row_high"] * self.upper + ["row_segments"] * self.segments
        vectors = {name: load(refs[name].at[batch_index(refs[name], b), pl.ds(start, size)], ROW) for name in names}
        return {"start": start, **vectors}

    def keep(
        self, refs: Any, rows: Any, b: Any, h: Any, half: Any, sub_blocks: list[SubBlock], shape: Any, run: MaskedRun
    ) -> Any:
        """Which elements of the tile whose columns are these sub-blocks count; None if all do."""
        # the unmasked run does not begin before the last row's interval: behind it, no column lies before a row's
        lower = self.lower and (run == "before" or self.positions or self.halves)
        starts, margin = tile_starts(sub_blocks, shape), shape[1] - shape[1] // len(sub_blocks)

        def column(name: str) -> jax.Array:
            ref = refs[name]
            columns = (ref.at[batch_index(ref, b), pl.ds(start + margin, shape[1])] for start in starts)
            return by_sub_block([broadcast(load(x, COL), shape, 1) for x in columns], shape)

        conditions = []
        if self.halves:
            number = tile_iota(shape, 1)
            conditions.append(number < by_sub_block([(s.halves >> half & 1) * shape[1] for s in sub_blocks], shape))
        if lower or self.upper:
            if self.positions:
                at, origin = column("column_positions"), 0
            elif len(sub_blocks) == 1:
                at, origin = tile_iota(shape, 1), sub_blocks[0].start
            else:
                at, origin = tile_iota(shape, 1) + by_sub_block(starts, shape), 0
            if lower and self.upper:  # one comparison: what lies before the interval is far behind it, unsigned
                past = at - broadcast(rows["row_low"] - origin, shape, 0)
                most = broadcast(rows["row_high"] - rows["row_low"], shape, 0)
                conditions.append(past.astype(jnp.uint32) <= most.astype(jnp.uint32))
            elif lower:
                conditions.append(at >= broadcast(rows["row_low"] - origin, shape, 0))
            elif self.upper:
                conditions.append(at <= broadcast(rows["row_high"] - origin, shape, 0))
        if self.segments:
            conditions.append(broadcast(rows["row_segments"], shape, 0) == column("column_segments"))
        if self.dense:
            conditions.append(load_pairs(refs["mask"], self.dense, b, h, rows, sub_blocks, shape) != 0)
        keep = None
        for condition in conditions:
            keep = condition if keep is None else keep & condition
        return keep


def extent(x: Any, side: schedule.Side) -> Extent:
    """What an array (B|1, H|1, T|1, S|1), or None, differs by; one number a head counts as one for each key."""
    if x is None:
        return ""
    if 1 not in x.shape[2:]:
        return "tile"
    return "column" if (x.shape[2] == 1) == (side == "q") else "row"


def padded_pairs(
    x: jax.Array, side: schedule.Side, keys: int, row_tile: int, column_tile: int, margin: int
) -> jax.Array:
    """Such an array as `load_pairs` reads it: rows first, whole tiles of both, and the margin of `Masks.arrays`."""
    kind = extent(x, side)
    if x.shape[2] == 1:
        x = jnp.broadcast_to(x, (*x.shape[:3], keys))
    x = x if side == "q" else x.swapaxes(2, 3)
    rows = (0, -x.shape[2] % row_tile if kind != "column" else 0)
    columns = (margin, -x.shape[3] % column_tile + margin) if kind != "row" else (0, 0)
    x = jnp.pad(x, ((0, 0), (0, 0), rows, columns))
    return x if kind == "tile" else x.reshape(*x.shape[:2], -1)


def load_pairs(
    ref: Any, kind: Extent, b: Any, h: Any, rows: dict[str, Any], sub_blocks: list[SubBlock], shape: tuple[int, int]
) -> jax.Array:
    """From global memory, the numbers of such an array for a tile of these rows and of these sub-blocks of columns."""
    at = batch_index(ref, b), h if ref.shape[1] > 1 else 0
    row_span = pl.ds(rows["start"], shape[0])

    def read(spans: tuple[Any, ...], layout: Any) -> jax.Array:
        x = load(ref.at[*at, *spans], layout)
        return x.astype(jnp.int32) if ref.dtype == jnp.int8 else x  # Mosaic has no `where` for bytes

    if kind == "row":
        return broadcast(read((row_span,), ROW), shape, 0)
    margin = shape[1] - shape[1] // len(sub_blocks)
    spans = [pl.ds(start + margin, shape[1]) for start in tile_starts(sub_blocks, shape)]
    if kind == "column":
        return by_sub_block([broadcast(read((span,), COL), shape, 1) for span in spans], shape)
    return by_sub_block([read((row_span, span), WGMMA) for span in spans], shape)


def tile_starts(sub_blocks: list[SubBlock], shape: tuple[int, int]) -> list[Any]:
    """For each sub-block, the first of a whole tile of columns that has this sub-block where it belongs."""
    return [sub_block.start - n * (shape[1] // len(sub_blocks)) for n, sub_block in enumerate(sub_blocks)]


def by_sub_block(values: list[Any], shape: tuple[int, int]) -> Any:
    """For each column, the value of its sub-block."""
    chosen = values[0]
    for n, value in enumerate(values[1:], 1):
        chosen = jnp.where(tile_iota(shape, 1) >= n * (shape[1] // len(values)), value, chosen)
    return chosen


def _columns_minus_rows(band: Band, side: schedule.Side) -> Band:
    """The band on column position minus row position."""
    if side == "q":
        return band
    return Band(None if band.hi is None else -band.hi, None if band.lo is None else -band.lo)


def _is_packed(call: Call) -> bool:
    """Whether sequences lie one after another, and nothing else hides a column but a band."""
    return "q_offsets" in call


def _packed_intervals(call: Call, side: schedule.Side, band: Band) -> tuple[jax.Array, jax.Array]:
    """First and last column each row of packed sequences sees, (B|1, rows); the ends of a sequence are aligned."""
    offsets = [call["q_offsets"], call["kv_offsets" if "kv_offsets" in call else "q_offsets"]]
    row_offsets, column_offsets = offsets if side == "q" else offsets[::-1]
    ids = call["q_segments" if side == "q" else "kv_segments"]
    first, row_end, end = (
        jnp.take_along_axis(x, jnp.maximum(ids, 0) + n, axis=1)
        for x, n in ((column_offsets, 0), (row_offsets, 1), (column_offsets, 1))
    )
    at = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] - row_end + end
    low = first if band.lo is None else jnp.maximum(first, at + band.lo)
    high = end - 1 if band.hi is None else jnp.minimum(end - 1, at + band.hi)
    return low, jnp.where(ids < 0, -1, high)  # padding sees nothing


def _padded(x: jax.Array, tile: int, value: int, margin: int = 0) -> jax.Array:
    x = x.astype(jnp.int32)
    return jnp.pad(x, ((0, 0), (margin, -x.shape[1] % tile + margin)), constant_values=value)


def batch_index(ref: Any, b: Any) -> Any:
    """Batch index into an array whose batch may be broadcast."""
    return b if ref.shape[0] > 1 else 0


def broadcast(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A tile from a vector that has a number for each row (axis 0) or column (axis 1)."""
    return lax.broadcast_in_dim(x, shape, [axis])
