"""What the Mosaic GPU kernels of softmax attention share: element masks, biases, copies, launching."""

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.common import dropout as bits
from ejkernel.kernels.softmax import schedule
from ejkernel.kernels.softmax.mosaic_gpu.block_lists import PIECE, Piece, entries, tile_sizes
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import Masked, Runs, Walk, schedule_index
from ejkernel.kernels.softmax.spec import Band, Dimensions, dimensions
from ejkernel.ops import Call, fusion_barrier

LOG2_E = 1.4426950408889634

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
COL = WGMMA.reduce(0)

# JAX 0.10 wants an index for `load`, JAX 0.11 deprecates it, JAX 0.12 has none
_index = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_INDEX = ((),) if _index is not None and _index.default is inspect.Parameter.empty else ()


# an array of (batch, head, row, column) is the same for all rows, for all columns, or for neither; or there is none
Extent = Literal["", "tile", "row", "column"]


@dataclass(frozen=True)
class Logits:
    """From a tile of q.k to logits in base 2."""

    factor: float
    soft_cap: float | None

    @classmethod
    def of(cls, call: Call) -> "Logits":
        return cls(call.spec.scale, call.spec.soft_cap)

    def base2(self, logits: jax.Array, bias: jax.Array | None = None) -> tuple[jax.Array, float, jax.Array | None]:
        """x, c and t with base-2 logits x * c, c > 0 (left to the caller's fused multiply-add), t the capped tanh."""
        if bias is not None:
            return Logits(1.0, self.soft_cap).base2(logits * self.factor + bias.astype(jnp.float32))
        if self.soft_cap is not None:
            # tanh from exp2: the hardware's own tanh is good to 2^-11, which a cap of 50 turns into 2% of a weight
            t = 1.0 - 2.0 / (jnp.exp2(logits * (2.0 * LOG2_E * self.factor / self.soft_cap)) + 1.0)
            return t, self.soft_cap * LOG2_E, t
        if self.factor <= 0.0:
            return logits * (self.factor * LOG2_E), 1.0, None
        return logits, self.factor * LOG2_E, None


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
    # the blocks are listed, and a piece may be for one half of the rows only
    halves: bool = False
    # an array says which elements
    dense: Extent = ""

    @classmethod
    def of(cls, call: Call, side: schedule.Side) -> "Masks":
        spec, packed, halves = call.spec, _packed(call), "pattern" in call or "mask" in call
        positions = "q_positions" in call and not packed
        # explicit positions leave a ragged tail to the segments, which `arrays` then makes up if there are none
        segments = positions or ("q_segments" in call and not packed)
        band, both = _seen_from(spec.band, side), packed or spec.chunk is not None
        tail = side == "q" and not segments
        return cls(
            both or band.lo is not None,
            both or band.hi is not None or tail,
            segments,
            positions,
            both or segments or halves or spec.band != Band(),
            halves,
            extent(call.get("mask"), side),
        )

    def arrays(self, call: Call, side: schedule.Side, row_tile: int, column_tile: int) -> dict[str, jax.Array]:
        """What `keep` reads: int32 (B|1, length) each, lengths padded to whole tiles; columns that come in pieces also
        by the rest of a tile before the first and after the last.
        """
        dims, found = dimensions(call), {}
        around = column_tile - PIECE if self.halves else 0
        column_tile -= around
        lengths = (dims.T, dims.S) if side == "q" else (dims.S, dims.T)
        if self.lower or self.upper:
            low, high = self._intervals(call, side, dims)
            none = low > high  # `keep` wants the ends of an interval in order: of an empty one both are far off
            low, high = (jnp.where(none, -(2**30), x) for x in (low, high))
            found["row_low"], found["row_high"] = (_padded(x, row_tile, 0) for x in (low, high))
        if self.segments:
            # padding never matches: -2 on the rows, -1 on the columns
            for name, axis, tile, none, more in (("row", 0, row_tile, -2, 0), ("column", 1, column_tile, -1, around)):
                ids = call.get("q_segments" if (side == "q") == (axis == 0) else "kv_segments")
                ids = jnp.zeros((1, lengths[axis]), jnp.int32) if ids is None else ids
                found[f"{name}_segments"] = _padded(jnp.where(ids < 0, none, ids), tile, none, more)
        if self.positions:
            positions = call["kv_positions" if side == "q" else "q_positions"]
            found["column_positions"] = _padded(positions, column_tile, 0, around)
        if self.dense:
            found["mask"] = laid_out(call["mask"].astype(jnp.int8), side, dims.S, row_tile, column_tile, around)
        return found

    def _intervals(self, call: Call, side: schedule.Side, dims: Dimensions) -> tuple[jax.Array, jax.Array]:
        """First and last column coordinate each row sees, (B|1, rows)."""
        band, chunk, offset = _seen_from(call.spec.band, side), call.spec.chunk, dims.S - dims.T
        if _packed(call):
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
        found = {name: load(refs[name].at[batch_index(refs[name], b), pl.ds(start, size)], ROW) for name in names}
        return {"start": start, **found}

    def keep(
        self,
        refs: dict[str, Any],
        rows: dict[str, Any],
        b: Any,
        h: Any,
        half: Any,
        pieces: list[Piece],
        shape: Any,
        run: Masked,
    ) -> Any:
        """Which elements of the tile whose columns are these pieces count; None if all do."""
        # the unmasked run does not begin before the last row's interval: behind it, no column lies before a row's
        lower = self.lower and (run == "before" or self.positions or self.halves)
        width = shape[1] // len(pieces)
        starts, before = _starts(pieces, shape), shape[1] - width

        def number() -> jax.Array:
            return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)

        def chosen(values: list[Any]) -> Any:
            return _chosen(values, shape)

        def column(name: str) -> jax.Array:
            ref = refs[name]
            return chosen(
                [
                    across(load(ref.at[batch_index(ref, b), pl.ds(start + before, shape[1])], COL), shape, 1)
                    for start in starts
                ]
            )

        conditions = []
        if self.halves:
            conditions.append(number() < chosen([(piece.halves >> half & 1) * shape[1] for piece in pieces]))
        if lower or self.upper:
            if self.positions:
                at, origin = column("column_positions"), 0
            elif len(pieces) == 1:
                at, origin = number(), pieces[0].start
            else:
                at, origin = number() + chosen(starts), 0
            if lower and self.upper:  # one comparison: what lies before the interval is far behind it, unsigned
                past = at - across(rows["row_low"] - origin, shape, 0)
                most = across(rows["row_high"] - rows["row_low"], shape, 0)
                conditions.append(past.astype(jnp.uint32) <= most.astype(jnp.uint32))
            elif lower:
                conditions.append(at >= across(rows["row_low"] - origin, shape, 0))
            elif self.upper:
                conditions.append(at <= across(rows["row_high"] - origin, shape, 0))
        if self.segments:
            conditions.append(across(rows["row_segments"], shape, 0) == column("column_segments"))
        if self.dense:
            conditions.append(spread(refs["mask"], self.dense, b, h, rows, pieces, shape) != 0)
        keep = None
        for condition in conditions:
            keep = condition if keep is None else keep & condition
        return keep


def extent(x: Any, side: schedule.Side) -> Extent:
    """What an array (B|1, H|1, T|1, S|1), or None, is different for; one number a head counts as one for each key."""
    if x is None:
        return ""
    if 1 not in x.shape[2:]:
        return "tile"
    return "column" if (x.shape[2] == 1) == (side == "q") else "row"


def laid_out(x: jax.Array, side: schedule.Side, keys: int, row_tile: int, column_tile: int, around: int) -> jax.Array:
    """Such an array as `spread` reads it: rows first, both in whole tiles, and columns as `Masks.arrays` has them."""
    kind = extent(x, side)
    if x.shape[2] == 1:
        x = jnp.broadcast_to(x, (*x.shape[:3], keys))
    x = x if side == "q" else x.swapaxes(2, 3)
    rows = (0, -x.shape[2] % row_tile if kind != "column" else 0)
    columns = (around, -x.shape[3] % column_tile + around) if kind != "row" else (0, 0)
    x = jnp.pad(x, ((0, 0), (0, 0), rows, columns))
    return x if kind == "tile" else x.reshape(*x.shape[:2], -1)


def spread(
    ref: Any, kind: Extent, b: Any, h: Any, rows: dict[str, Any], pieces: list[Piece], shape: tuple[int, int]
) -> jax.Array:
    """The part of an array in global memory, laid out, for these rows of a tile and these pieces of columns."""
    at = batch_index(ref, b), h if ref.shape[1] > 1 else 0
    own_rows = pl.ds(rows["start"], shape[0])

    def read(part: tuple[Any, ...], layout: Any) -> jax.Array:
        found = load(ref.at[*at, *part], layout)
        return found.astype(jnp.int32) if ref.dtype == jnp.int8 else found  # of which Mosaic chooses none

    if kind == "row":
        return across(read((own_rows,), ROW), shape, 0)
    before = shape[1] - shape[1] // len(pieces)
    parts = [pl.ds(start + before, shape[1]) for start in _starts(pieces, shape)]
    if kind == "column":
        return _chosen([across(read((part,), COL), shape, 1) for part in parts], shape)
    return _chosen([read((own_rows, part), WGMMA) for part in parts], shape)


def _starts(pieces: list[Piece], shape: tuple[int, int]) -> list[Any]:
    """Of pieces, where a run of columns as long as the tile would begin of which each is its own part."""
    return [piece.start - n * (shape[1] // len(pieces)) for n, piece in enumerate(pieces)]


def _chosen(values: list[Any], shape: tuple[int, int]) -> Any:
    """For each column, the value of its piece."""
    found = values[0]
    for n, value in enumerate(values[1:], 1):
        number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
        found = jnp.where(number >= n * (shape[1] // len(values)), value, found)
    return found


def copy_parts(sources: list[Any], target: Any, ready: Any) -> None:
    """Copy arrays that fill a tile in shared memory one after another; each is an arrival at `ready`."""
    rows = target.shape[0] // len(sources)
    for n, source in enumerate(sources):
        part = target if len(sources) == 1 else target.at[pl.ds(n * rows, rows)]
        plgpu.copy_gmem_to_smem(source, part, ready)


def copied_bias(call: Call, side: schedule.Side) -> Extent:
    """What the copy engine brings of a bias: columns', or 16-bit tiles, where shared memory has room for them."""
    kind, dims = extent(call.get("bias"), side), dimensions(call)
    narrow = kind == "column" or (kind == "tile" and call["bias"].dtype == call["query"].dtype)
    return kind if narrow and max(dims.D, dims.Dv) <= 128 else ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel of one call: a tile is `rows` of a side, and visits blocks of `block` of the other."""

    side: schedule.Side
    rows: int
    block: int
    dims: Dimensions
    config: Any
    runs: Runs
    masks: Masks
    logits: Logits
    dtype: Any
    walk: Walk
    bias_extent: Extent
    bias_copied: Extent
    dropout: float

    # whether the halves of a listed tile are put together by what they visit
    alike = False

    @classmethod
    def of(cls, call: Call, config: Any, side: schedule.Side, rows: int, block: int) -> Self:
        dims = dimensions(call)
        length, heads = (dims.T, dims.H) if side == "q" else (dims.S, dims.Hkv)
        runs = Runs.of(call, *tile_sizes(side, rows, block), side)
        masks = Masks.of(call, side) if runs.masked else Masks()
        cores = call.target.cores if config.persistent else 0
        walk = Walk.of(dims.B, heads, -(-length // rows), runs, side, cores, config.ordered)
        dtype, bias = call["query"].dtype, extent(call.get("bias"), side)
        known = side, rows, block, dims, config, runs, masks, Logits.of(call), dtype, walk
        return cls(*known, bias, copied_bias(call, side), call.spec.dropout)

    def operands(self, call: Call) -> dict[str, jax.Array]:
        """What the schedule, the masks and the logits read."""
        found = self.masks.arrays(call, self.side, self.rows, self.block)
        if self.dropout:
            found["seeds"] = call["dropout_seeds"]
        if self.bias_copied == "tile":
            bias = call["bias"] if self.side == "q" else call["bias"].swapaxes(2, 3)
            # whole tiles of the swizzle, as Mosaic's copies want them
            found["bias"] = jnp.pad(bias, ((0, 0), (0, 0), (0, -bias.shape[2] % 8), (0, -bias.shape[3] % 64)))
        elif self.bias_extent:
            width, around = (PIECE, self.block - PIECE) if self.runs.listed else (self.block, 0)
            around = 0 if self.bias_copied else around
            found["bias"] = laid_out(call["bias"].astype(jnp.float32), self.side, self.dims.S, self.rows, width, around)
        if self.runs.constant is not None:
            return found
        if self.runs.listed:
            found |= entries(call, self.side, self.rows, self.parts, alike=self.alike)
        else:
            planned: Any = schedule.plan(call, *tile_sizes(self.side, self.rows, self.block), self.side)
            found["bounds"] = jnp.asarray(planned.bounds)
        return found | self.walk.order(found["bounds"])

    def bias_scratch(self, stages: int) -> dict[str, Any]:
        """A bias that is copied: tiles, a half of each for each compute warpgroup, or columns' numbers."""
        if not self.bias_copied:
            return {}
        whole = self.bias_copied == "tile"
        smem = tile_ref((stages, self.groups, 64, self.block), self.dtype)
        return {
            "bias_smem": smem if whole else plgpu.SMEM((stages, self.block), jnp.float32),
            "bias_ready": plgpu.Barrier(num_arrivals=self.groups if whole else self.parts, num_barriers=stages),
        }

    def fetch_bias(self, refs: dict[str, Any], scratch: dict[str, Any], slot: Any, place: Any, spans: Any) -> None:
        """Copy the bias of a tile's rows, at this batch, query head and number, and of a block's columns."""
        if not self.bias_copied:
            return
        (b, h, i), ref = place, refs["bias"]
        at = batch_index(ref, b), h if ref.shape[1] > 1 else 0
        if self.bias_copied == "column":
            copy_parts(
                [ref.at[*at, span] for span in spans], scratch["bias_smem"].at[slot], scratch["bias_ready"].at[slot]
            )
            return
        (columns,) = spans
        own_place = b, h if self.side == "q" else lax.div(h, jnp.int32(self.dims.G)), i
        for half in range(self.groups):
            rows, target = pl.ds(self.start(refs, own_place, half), 64), scratch["bias_smem"].at[slot, half]
            plgpu.copy_gmem_to_smem(ref.at[*at, rows, columns], target, scratch["bias_ready"].at[slot])

    def bias(
        self,
        refs: dict[str, Any],
        scratch: dict[str, Any],
        rows: dict[str, Any],
        place: tuple[Any, Any, Any],
        half: Any,
    ) -> Callable[[Any, Any], jax.Array | None]:
        """For a warpgroup's half of the rows: the bias of block i, which lies in a slot if it was copied."""
        (b, h, _), shape = place, (64, self.block)
        once = None
        if self.bias_extent == "row":
            ref = refs["bias"]
            once = load(ref.at[batch_index(ref, b), h if ref.shape[1] > 1 else 0, pl.ds(rows["start"], 64)], ROW)

        def of_block(slot: Any, i: Any) -> jax.Array | None:
            if not self.bias_extent:
                return None
            if once is not None:
                return across(once, shape, 0)
            if not self.bias_copied:
                return spread(refs["bias"], self.bias_extent, b, h, rows, self.pieces(refs, place, i), shape)
            plgpu.barrier_wait(scratch["bias_ready"].at[slot])
            if self.bias_copied == "column":
                return across(load(scratch["bias_smem"].at[slot], COL), shape, 1)
            return load(scratch["bias_smem"].at[slot, half], WGMMA)

        return of_block

    def capped(self, x: jax.Array) -> jax.Array:
        """What remains of logits after their maximum: a fused product may pass 0 by a rounding, large beside -1e9."""
        return jnp.minimum(x, 0.0) if self.bias_extent else x

    def stays(self, refs: dict[str, Any], rows: dict[str, Any], place: tuple[Any, Any, Any], i: Any, shape: Any) -> Any:
        """Which pairs of these rows and of that block are not dropped; None where none are."""
        if not self.dropout:
            return None
        b, h, _ = place
        row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) for axis in (0, 1))
        starts = _starts(self.pieces(refs, place, i), shape)
        row, column = row + rows["start"], column + _chosen(starts, shape)
        return bits.keep(refs["seeds"][b, h], *((row, column) if self.side == "q" else (column, row)), self.dropout)

    @property
    def groups(self) -> int:
        """Compute warpgroups, of 64 rows each."""
        return self.rows // 64

    @property
    def parts(self) -> int:
        """Pieces of a block."""
        return self.block // PIECE if self.runs.listed else 1

    def walking(self, refs: dict[str, Any]) -> Walk:
        """The walk as a kernel does it."""
        return replace(self.walk, read=refs.get("order"))

    def place(self, refs: dict[str, Any], n: Any) -> tuple[Any, Any, Any]:
        """Batch, head of the side, and number of this program's n-th tile."""
        return self.walking(refs).place(n)

    def start(self, refs: dict[str, Any], place: tuple[Any, Any, Any], half: Any) -> Any:
        """The first row of a half of the tile at this batch, head of the side, and number."""
        if not (self.runs.listed and self.alike):
            return place[2] * self.rows + half * 64
        return refs["rows"][*schedule_index(refs["rows"], place), half] * PIECE  # Mosaic must see what divides it

    def pieces(self, refs: dict[str, Any], place: tuple[Any, Any, Any], i: Any) -> list[Piece]:
        """What the i-th block of the schedule row of this batch, head and tile is made of."""
        if not self.runs.listed:
            return [Piece(i * self.block)]
        ref = refs["entries"]
        at = schedule_index(ref, place)
        found = [ref[*at, i * self.parts + n] for n in range(self.parts)]
        return [Piece(entry & -PIECE, entry) for entry in found]

    def spans(self, refs: dict[str, Any], place: tuple[Any, Any, Any], i: Any) -> list[Any]:
        """The indices of that block's rows in global memory, piece by piece."""
        return [pl.ds(piece.start, self.block // self.parts) for piece in self.pieces(refs, place, i)]

    def shown(self, refs: dict[str, Any], place: tuple[Any, Any, Any], half: Any, i: Any) -> jax.Array:
        """Whether a half of the rows sees any piece of that block."""
        bits = reduce(operator.or_, (piece.halves for piece in self.pieces(refs, place, i)))
        return bits >> half & 1 != 0

    def keep(
        self, refs: Any, rows: Any, place: tuple[Any, Any, Any], half: Any, i: Any, shape: tuple[int, int], run: Masked
    ) -> Any:
        """Which elements of a masked tile count, of a warpgroup's half of the rows and that block; None if all do."""
        return self.masks.keep(refs, rows, *place[:2], half, self.pieces(refs, place, i), shape, run) if run else None


def _seen_from(band: Band, side: schedule.Side) -> Band:
    """The band on column position minus row position."""
    if side == "q":
        return band
    return Band(None if band.hi is None else -band.hi, None if band.lo is None else -band.lo)


def _packed(call: Call) -> bool:
    """Whether sequences lie one after another, and nothing else hides a column but a band."""
    return "q_offsets" in call


def _packed_intervals(call: Call, side: schedule.Side, band: Band) -> tuple[jax.Array, jax.Array]:
    """First and last column each row of packed sequences sees, (B|1, rows); the ends of a sequence are aligned."""
    offsets = [call["q_offsets"], call["kv_offsets" if "kv_offsets" in call else "q_offsets"]]
    (own_starts, other_starts), ids = (
        offsets if side == "q" else offsets[::-1],
        call["q_segments" if side == "q" else "kv_segments"],
    )
    first, own_end, end = (
        jnp.take_along_axis(x, jnp.maximum(ids, 0) + n, axis=1)
        for x, n in ((other_starts, 0), (own_starts, 1), (other_starts, 1))
    )
    at = jnp.arange(ids.shape[1], dtype=jnp.int32)[None] - own_end + end
    low = first if band.lo is None else jnp.maximum(first, at + band.lo)
    high = end - 1 if band.hi is None else jnp.minimum(end - 1, at + band.hi)
    return low, jnp.where(ids < 0, -1, high)  # padding sees nothing


def _padded(x: jax.Array, tile: int, value: int, around: int = 0) -> jax.Array:
    x = x.astype(jnp.int32)
    return jnp.pad(x, ((0, 0), (around, -x.shape[1] % tile + around)), constant_values=value)


def padded_to_8(x: jax.Array) -> jax.Array:
    """x (B, length, ...) with its length grown to a multiple of 8, which Mosaic's tiled copies want."""
    missing = -x.shape[1] % 8
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def batch_index(ref: Any, b: Any) -> Any:
    """Batch index into an array whose batch may be broadcast."""
    return b if ref.shape[0] > 1 else 0


def load(ref: Any, layout: Any) -> jax.Array:
    """A vector from global or shared memory, each thread the values its part of a tile needs."""
    return plgpu.load(ref, *_LOAD_INDEX, layout=layout, optimized=False)


def across(x: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    """A row (axis 0) or column (axis 1) vector spread over a tile."""
    return lax.broadcast_in_dim(x, shape, [axis])


def masked_block(row: tuple[Any, ...], i: Any) -> jax.Array:
    """Whether block i of a schedule row lies outside the unmasked run."""
    _, full_lo, full_hi, _ = row
    return jnp.logical_or(i < full_lo, i >= full_hi)


def unknown(number: Any) -> Any:
    """The number, which the compiler cannot know to be the same in every round of a loop.

    Addresses made from it before the loop would fill registers, and what they drive out to local memory can be more
    than its cache holds. JAX 0.10 has no barrier for a number.
    """
    return lax.optimization_barrier(number) if jax.__version_info__ >= (0, 11) else number


def zeros(shape: tuple[int, ...], layout: Any = WGMMA) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def tile_ref(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for 16-bit tiles, in the swizzle wgmma and the copy engine read."""
    swizzle = 128 if shape[-1] % 64 == 0 else 64
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def results_apart(head_dim: int) -> bool:
    """Whether results have shared memory of their own, so that the next tile need not wait until they left."""
    return head_dim <= 128


def launch(
    body: Callable[..., None],
    *,
    out_type: Any,
    scratch: dict[str, Any],
    programs: int,
    name: str,
    groups: int = 2,
    barriers: bool = True,
) -> Callable[..., Any]:
    """A kernel of so many programs: one grid dimension, because the others end at 65535.

    `groups` warpgroups compute, and one copies. `barriers`: whether Mosaic puts its own between what a warpgroup writes
    to shared memory and what it reads there.
    """
    names = list(scratch)

    def entry(*refs: Any) -> None:
        body(*refs[: -len(names)], **dict(zip(names, refs[-len(names) :], strict=True)))

    kernel = plgpu.kernel(
        entry,
        out_type=out_type,
        scratch_types=list(scratch.values()),
        grid=(programs,),
        grid_names=("program",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        # one reduction crosses warps, that of nans: 4 numbers; D256 has no shared memory to spare
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # that by warpgroups gives the same code, and takes up to twice as long: it looks for layouts
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=16,
            unsafe_no_auto_barriers=not barriers,
        ),
        kernel_name=name,
    )
    return fusion_barrier(kernel)
