"""What the Mosaic GPU kernels of softmax attention share: logits, biases, copies, shared memory, launching."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.common import dropout as dropout_bits
from ejkernel.kernels.softmax import schedule
from ejkernel.kernels.softmax.mosaic_gpu.block_lists import SUB_BLOCK, SubBlock, block_lists, tile_sizes
from ejkernel.kernels.softmax.mosaic_gpu.masks import (
    Extent,
    Masks,
    batch_index,
    broadcast,
    by_sub_block,
    extent,
    load_pairs,
    padded_pairs,
    tile_starts,
)
from ejkernel.kernels.softmax.mosaic_gpu.private_mosaic import COL, ROW, WGMMA, compiler_params, load, tile_iota
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import (
    BlockRuns,
    Bounds,
    Coordinates,
    MaskedRun,
    TileScheduler,
    schedule_index,
)
from ejkernel.kernels.softmax.spec import Dimensions, dimensions
from ejkernel.ops import Call, fusion_barrier

LOG2_E = 1.4426950408889634


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


def copied_bias(call: Call, side: schedule.Side) -> Extent:
    """What the producer copies of a bias: columns', or 16-bit tiles, where shared memory has room for them."""
    kind, dims = extent(call.get("bias"), side), dimensions(call)
    narrow = kind == "column" or (kind == "tile" and call["bias"].dtype == call["query"].dtype)
    return kind if narrow and max(dims.D, dims.Dv) <= 128 else ""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel of one call: a tile is `rows` of a side, and visits blocks of `block` of the other.

    In its methods `refs` are the references of `operands`, and `scratch` is what `launch` allocates, both by name;
    `rows` are what `Masks.rows` loads, and `half` is the number of a consumer warpgroup, which has 64 rows of the tile.
    """

    side: schedule.Side
    rows: int
    block: int
    dims: Dimensions
    config: Any
    runs: BlockRuns
    masks: Masks
    logits: Logits
    dtype: Any
    scheduler: TileScheduler
    bias_extent: Extent
    bias_copied: Extent
    dropout: float

    # whether the halves of a listed tile are no neighbours but visit about as many blocks, the longest first
    halves_longest_first = False

    @classmethod
    def of(cls, call: Call, config: Any, side: schedule.Side, rows: int, block: int) -> Self:
        dims = dimensions(call)
        length, heads = (dims.T, dims.H) if side == "q" else (dims.S, dims.Hkv)
        runs = BlockRuns.of(call, *tile_sizes(side, rows, block), side)
        masks = Masks.of(call, side) if runs.masked else Masks()
        cores = call.target.cores if config.persistent else 0
        scheduler = TileScheduler.of(dims.B, heads, -(-length // rows), runs, side, cores, config.longest_first)
        logits, dtype, bias = Logits.of(call), call["query"].dtype, extent(call.get("bias"), side)
        copied, dropout = copied_bias(call, side), call.spec.dropout
        return cls(side, rows, block, dims, config, runs, masks, logits, dtype, scheduler, bias, copied, dropout)

    def operands(self, call: Call) -> dict[str, jax.Array]:
        """What the schedule, the masks and the logits read."""
        arrays = self.masks.arrays(call, self.side, self.rows, self.block)
        if self.dropout:
            arrays["seeds"] = call["dropout_seeds"]
        if self.bias_copied == "tile":
            bias = call["bias"] if self.side == "q" else call["bias"].swapaxes(2, 3)
            # whole tiles of the swizzle, as Mosaic's copies want them
            arrays["bias"] = jnp.pad(bias, ((0, 0), (0, 0), (0, -bias.shape[2] % 8), (0, -bias.shape[3] % 64)))
        elif self.bias_extent:
            width = SUB_BLOCK if self.runs.listed else self.block
            margin = 0 if self.bias_copied else self.block - width
            bias = call["bias"].astype(jnp.float32)
            arrays["bias"] = padded_pairs(bias, self.side, self.dims.S, self.rows, width, margin)
        if self.runs.constant is not None:
            return arrays
        if self.runs.listed:
            pairs = self.halves_longest_first
            arrays |= block_lists(call, self.side, self.rows, self.sub_blocks_per_block, longest_first=pairs)
        else:
            planned: Any = schedule.plan(call, *tile_sizes(self.side, self.rows, self.block), self.side)
            arrays["bounds"] = jnp.asarray(planned.bounds)
        return arrays | self.scheduler.table(arrays["bounds"])

    def bias_scratch(self, stages: int) -> dict[str, Any]:
        """Of a bias that is copied: tiles, a half of each for each consumer, or columns' numbers."""
        if not self.bias_copied:
            return {}
        tiles = self.bias_copied == "tile"
        smem = swizzled_smem((stages, self.consumers, 64, self.block), self.dtype)
        copies = self.consumers if tiles else self.sub_blocks_per_block
        return {
            "bias_smem": smem if tiles else plgpu.SMEM((stages, self.block), jnp.float32),
            "bias_ready": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        }

    def copy_bias(
        self, refs: dict[str, Any], scratch: dict[str, Any], stage: Any, tile: Coordinates, spans: Any
    ) -> None:
        """Copy the bias of a tile's rows, at this batch, query head and number, and of a block's columns."""
        if not self.bias_copied:
            return
        (b, h, i), ref = tile, refs["bias"]
        at = batch_index(ref, b), h if ref.shape[1] > 1 else 0
        smem, ready = scratch["bias_smem"].at[stage], scratch["bias_ready"].at[stage]
        if self.bias_copied == "column":
            copy_sub_blocks([ref.at[*at, span] for span in spans], smem, ready)
            return
        (columns,) = spans
        row_tile = b, h if self.side == "q" else lax.div(h, jnp.int32(self.dims.G)), i
        for half in range(self.consumers):
            rows = pl.ds(self.start(refs, row_tile, half), 64)
            plgpu.copy_gmem_to_smem(ref.at[*at, rows, columns], scratch["bias_smem"].at[stage, half], ready)

    def bias(
        self, refs: dict[str, Any], scratch: dict[str, Any], rows: dict[str, Any], tile: Coordinates, half: Any
    ) -> Callable[[Any, Any], jax.Array | None]:
        """For a consumer's half of the rows: (stage, i) to the bias of block i, which is in that stage if copied."""
        (b, h, _), shape = tile, (64, self.block)
        row_bias = None
        if self.bias_extent == "row":
            ref = refs["bias"]
            row_bias = load(ref.at[batch_index(ref, b), h if ref.shape[1] > 1 else 0, pl.ds(rows["start"], 64)], ROW)

        def of_block(stage: Any, i: Any) -> jax.Array | None:
            if not self.bias_extent:
                return None
            if row_bias is not None:
                return broadcast(row_bias, shape, 0)
            if not self.bias_copied:
                return load_pairs(refs["bias"], self.bias_extent, b, h, rows, self.sub_blocks(refs, tile, i), shape)
            plgpu.barrier_wait(scratch["bias_ready"].at[stage])
            if self.bias_copied == "column":
                return broadcast(load(scratch["bias_smem"].at[stage], COL), shape, 1)
            return load(scratch["bias_smem"].at[stage, half], WGMMA)

        return of_block

    def at_most_zero(self, x: jax.Array) -> jax.Array:
        """Logits minus their maximum: a fused multiply-add may pass 0 by a rounding, which is large beside -1e9."""
        return jnp.minimum(x, 0.0) if self.bias_extent else x

    def dropout_keep(self, refs: dict[str, Any], rows: dict[str, Any], tile: Coordinates, i: Any, shape: Any) -> Any:
        """Which pairs of these rows and of that block are not dropped; None where none are."""
        if not self.dropout:
            return None
        b, h, _ = tile
        row, column = (tile_iota(shape, axis) for axis in (0, 1))
        starts = tile_starts(self.sub_blocks(refs, tile, i), shape)
        row, column = row + rows["start"], column + by_sub_block(starts, shape)
        pair = (row, column) if self.side == "q" else (column, row)
        return dropout_bits.keep(refs["seeds"][b, h], *pair, self.dropout)

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, of 64 rows each."""
        return self.rows // 64

    @property
    def sub_blocks_per_block(self) -> int:
        return self.block // SUB_BLOCK if self.runs.listed else 1

    def scheduler_in(self, refs: dict[str, Any]) -> TileScheduler:
        """The scheduler with what it reads in a kernel."""
        return replace(self.scheduler, table_ref=refs.get("program_tiles"))

    def tile_coordinates(self, refs: dict[str, Any], n: Any) -> Coordinates:
        """Batch, head of the side, and number of this program's n-th tile."""
        return self.scheduler_in(refs).tile_coordinates(n)

    def start(self, refs: dict[str, Any], tile: Coordinates, half: Any) -> Any:
        """The first row of a half of the tile at this batch, head of the side, and number."""
        if not (self.runs.listed and self.halves_longest_first):
            return tile[2] * self.rows + half * 64
        return refs["rows"][*schedule_index(refs["rows"], tile), half] * SUB_BLOCK  # Mosaic must see what divides it

    def sub_blocks(self, refs: dict[str, Any], tile: Coordinates, i: Any) -> list[SubBlock]:
        """What the i-th block that this tile visits is made of."""
        if not self.runs.listed:
            return [SubBlock(i * self.block)]
        ref = refs["entries"]
        at = schedule_index(ref, tile)
        count = self.sub_blocks_per_block
        entries = [ref[*at, i * count + n] for n in range(count)]
        return [SubBlock(entry & -SUB_BLOCK, entry) for entry in entries]

    def spans(self, refs: dict[str, Any], tile: Coordinates, i: Any) -> list[Any]:
        """The indices of that block's rows in global memory, sub-block by sub-block."""
        size = self.block // self.sub_blocks_per_block
        return [pl.ds(sub_block.start, size) for sub_block in self.sub_blocks(refs, tile, i)]

    def half_sees(self, refs: dict[str, Any], tile: Coordinates, half: Any, i: Any) -> jax.Array:
        """Whether a half of the rows sees any sub-block of that block."""
        bits = reduce(operator.or_, (sub_block.halves for sub_block in self.sub_blocks(refs, tile, i)))
        return bits >> half & 1 != 0

    def keep(
        self, refs: Any, rows: Any, tile: Coordinates, half: Any, i: Any, shape: tuple[int, int], run: MaskedRun
    ) -> Any:
        """Which elements of a masked tile count, of a consumer's half of the rows and that block; None if all do."""
        if not run:
            return None
        return self.masks.keep(refs, rows, *tile[:2], half, self.sub_blocks(refs, tile, i), shape, run)


def copy_sub_blocks(sources: list[Any], target: Any, ready: Any) -> None:
    """Copy arrays that fill a tile in shared memory one after another; each is an arrival at the mbarrier `ready`."""
    rows = target.shape[0] // len(sources)
    for n, source in enumerate(sources):
        sub_block = target if len(sources) == 1 else target.at[pl.ds(n * rows, rows)]
        plgpu.copy_gmem_to_smem(source, sub_block, ready)


def pad_to_8(x: jax.Array) -> jax.Array:
    """x (B, length, ...) with its length grown to a multiple of 8, which Mosaic's tiled copies want."""
    missing = -x.shape[1] % 8
    return jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) if missing else x


def is_masked(bounds: Bounds, i: Any) -> jax.Array:
    """Whether block i of a tile lies outside the unmasked run."""
    return jnp.logical_or(i < bounds.full_lo, i >= bounds.full_hi)


def zeros(shape: tuple[int, ...], layout: Any = WGMMA) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def swizzled_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for 16-bit tiles, in the swizzle that wgmma and the copy engine read."""
    swizzle = 128 if shape[-1] % 64 == 0 else 64
    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def separate_outputs(head_dim: int) -> bool:
    """Whether outputs have shared memory of their own, so that the next tile need not wait until they have left."""
    return head_dim <= 128


def launch(kernel: Any, *, out_type: Any, name: str, auto_barriers: bool = True) -> Callable[..., Any]:
    """A kernel ready to be called: one grid dimension, because the others end at 65535; see `compiler_params`."""
    scratch = kernel.scratch()

    def body(*refs: Any) -> None:
        kernel(*refs[: -len(scratch)], **dict(zip(scratch, refs[-len(scratch) :], strict=True)))

    launched = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=list(scratch.values()),
        grid=(kernel.scheduler.programs,),
        grid_names=("program",),
        num_threads=kernel.consumers + 1,
        thread_name="warpgroup",
        compiler_params=compiler_params(auto_barriers=auto_barriers),
        kernel_name=name,
    )
    return fusion_barrier(launched)
