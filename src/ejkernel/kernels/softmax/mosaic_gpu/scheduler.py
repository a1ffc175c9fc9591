"""Which tiles a program of a Mosaic GPU kernel computes, and which blocks a tile visits."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.softmax import schedule
from ejkernel.ops import Call

# which run of a tile's blocks a block is in: the unmasked one (false), or the masked one before or after it
MaskedRun = Literal["", "before", "after"]

# the batch, head and number in that head of a tile
Coordinates = tuple[Any, Any, Any]

# more tiles than these are left to the hardware's order: assigning one takes some microseconds, in every trace
_MOST_ASSIGNED = 2**16


class Bounds(NamedTuple):
    """The blocks that a tile visits, lo to hi; those from full_lo to full_hi need no mask."""

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any


@dataclass(frozen=True)
class BlockRuns:
    """The block schedule of a kernel: for each tile up to three runs of blocks, masked, unmasked, masked.

    The bounds of a tile are constants if all tiles have the same and nothing is masked, else read from memory. Blocks
    are ranges of rows, or entries of a list (`listed`, see block_lists.py). Nothing traced is kept here: JAX holds on
    to the body of a kernel, and so to all that it refers to.
    """

    constant: Bounds | None
    # which of the three runs any tile has
    masked_before: bool
    unmasked: bool
    masked_after: bool
    # (B|1, H|1, tiles, 4), if it was known while tracing and is no constant
    static: np.ndarray | None = None
    listed: bool = False

    @classmethod
    def of(cls, call: Call, block_q: int, block_k: int, side: schedule.Side) -> "BlockRuns":
        if "pattern" in call or "mask" in call:
            return cls(None, False, True, True, listed=True)
        bounds = schedule.plan(call, block_q, block_k, side).bounds  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(bounds, np.ndarray):
            return cls(None, True, True, True)
        lo, full_lo, full_hi, hi = np.moveaxis(bounds, -1, 0)
        present = bool((full_lo > lo).any()), bool((full_hi > full_lo).any()), bool((hi > full_hi).any())
        rows = np.unique(bounds.reshape(-1, 4), axis=0)
        # with a masked tail the bounds stay variables: with constants such a call was seen to take half as long again
        if len(rows) == 1 and not (present[0] or present[2]):
            return cls(Bounds(*map(int, rows[0])), *present)
        return cls(None, *present, bounds)

    @property
    def masked(self) -> bool:
        return self.masked_before or self.masked_after

    @property
    def never_empty(self) -> bool:
        """Whether every tile is known to visit a block."""
        if self.constant is not None:
            return self.constant.hi > self.constant.lo
        return self.static is not None and bool((self.static[..., 3] > self.static[..., 0]).all())

    @property
    def blocks_per_tile(self) -> np.ndarray | None:
        """How many blocks each tile of a head visits, where that is known, varies, and is the same for all heads."""
        if self.static is None or self.static.shape[:2] != (1, 1):
            return None
        return self.static[0, 0, :, 3] - self.static[0, 0, :, 0]

    def bounds(self, refs: dict[str, Any], b: Any, h: Any, i: Any) -> Bounds:
        """Those of the tile at this batch, head and number."""
        if self.constant is not None:
            return self.constant
        ref = refs["bounds"]
        at = schedule_index(ref, (b, h, i))
        return Bounds(*(ref[*at, n] for n in range(4)))

    def present(self, bounds: tuple[Any, ...]) -> list[tuple[Any, Any, MaskedRun]]:
        """The runs that can exist, in order: from, to, and whether masked."""
        lo, full_lo, full_hi, hi = bounds
        runs: list[tuple[Any, Any, MaskedRun]] = [
            (lo, full_lo, "before"),
            (full_lo, full_hi, ""),
            (full_hi, hi, "after"),
        ]
        possible = self.masked_before, self.unmasked, self.masked_after
        return [run for run, exists in zip(runs, possible, strict=True) if exists]

    def loop(self, bounds: tuple[Any, ...], step: Callable[..., Any], carry: Any) -> Any:
        """carry after step(i, carry, masked=...) over all visited blocks in order."""
        for first, last, masked in self.present(bounds):
            carry = lax.fori_loop(first, last, partial(step, masked=masked), carry)
        return carry


@dataclass(frozen=True)
class TileScheduler:
    """A persistent tile scheduler: which tiles a program computes, one after another.

    Where there are many tiles, as many programs as the device has cores share them: the prologue and epilogue of a tile
    then hide behind the work of its neighbours. If all tiles visit the same blocks and few are left over at the end,
    each program takes every `programs`-th, so that those that run together read the same keys. Tiles that are known to
    differ are assigned while tracing (`assigned`). Where only the device knows how much a tile visits, it sorts them,
    the longest first (`longest_first`), and neighbours in that order are alike. Else every tile has its own program,
    and the hardware schedules.
    """

    tiles_per_head: int
    heads: int
    tiles: int
    programs: int
    last_tile_first: bool = False
    longest_first: bool = False
    # for each program how many tiles it has, and which
    assigned: np.ndarray | None = field(default=None, compare=False)
    # in a kernel, the `table` in memory: see `Kernel.scheduler_in`
    table_ref: Any = None

    @classmethod
    def of(
        cls, B: int, H: int, tiles_per_head: int, runs: BlockRuns, side: schedule.Side, cores: int, sort: bool = False
    ) -> "TileScheduler":
        tiles, uniform, blocks = B * H * tiles_per_head, runs.constant is not None, runs.blocks_per_tile
        shared = cls(tiles_per_head, H, tiles, cores)
        if 0 < cores < tiles:
            if uniform and tiles >= 0.95 * -(-tiles // cores) * cores:
                return shared
            if blocks is not None and tiles <= _MOST_ASSIGNED:
                return replace(shared, assigned=longest_first_assignment(blocks, B * H, cores))
            if sort and not uniform and runs.static is None:
                return replace(shared, longest_first=True)
        # under a causal mask the last queries and the first keys work longest, and should start first
        return cls(tiles_per_head, H, tiles, tiles, last_tile_first=side == "q" and not uniform)

    @property
    def one_tile_each(self) -> bool:
        return self.programs == self.tiles

    def table(self, bounds: jax.Array | None = None) -> dict[str, jax.Array]:
        """What a kernel reads: the tiles of each program, or all in the order of bounds (B|1, H|1, tiles, 4)."""
        if self.assigned is not None:
            return {"program_tiles": jnp.asarray(self.assigned.reshape(-1))}
        return {"program_tiles": self._longest_first_order(bounds)} if self.longest_first and bounds is not None else {}

    def _longest_first_order(self, bounds: jax.Array) -> jax.Array:
        """The numbers of all tiles, int32 (tiles,), those with the most blocks first.

        Tiles with the same bounds, which are of different batches or heads, stay together.
        """
        blocks = bounds[..., 3] - bounds[..., 0]
        if blocks.shape[1] > self.heads:  # a tile of keys is visited by all heads of a group
            blocks = blocks.reshape(blocks.shape[0], self.heads, -1, self.tiles_per_head).sum(2, dtype=jnp.int32)
        batch = self.tiles // (self.heads * self.tiles_per_head)
        order = jnp.argsort(-blocks.reshape(-1), stable=True).astype(jnp.int32)[:, None, None]
        tile, head = order % self.tiles_per_head, order // self.tiles_per_head
        b, h = head // blocks.shape[1], head % blocks.shape[1]
        b += jnp.arange(batch // blocks.shape[0], dtype=jnp.int32)[:, None]
        h += jnp.arange(self.heads // blocks.shape[1], dtype=jnp.int32)
        return ((b * self.heads + h) * self.tiles_per_head + tile).reshape(-1)

    def count(self) -> Any:
        """Tiles of this program."""
        if self.one_tile_each:
            return 1
        if self.assigned is not None:
            return self.table_ref[lax.axis_index("program") * self.assigned.shape[1]]
        return lax.div(self.tiles - 1 - lax.axis_index("program"), jnp.int32(self.programs)) + 1

    def tile_coordinates(self, n: Any) -> Coordinates:
        """Batch, head and number in that head of this program's n-th tile."""
        tile = lax.axis_index("program")
        if self.assigned is not None:
            tile = self.table_ref[tile * self.assigned.shape[1] + 1 + n]
        elif not self.one_tile_each:
            tile += n * self.programs
        if self.longest_first:
            tile = self.table_ref[tile]
        head, i = lax.div(tile, jnp.int32(self.tiles_per_head)), lax.rem(tile, jnp.int32(self.tiles_per_head))
        if self.last_tile_first:
            i = self.tiles_per_head - 1 - i
        return lax.div(head, jnp.int32(self.heads)), lax.rem(head, jnp.int32(self.heads)), i

    def loop(self, tile: Callable[[Any, Any], Any], carry: Any) -> Any:
        """carry after tile(n, carry) for all tiles of this program."""
        return tile(jnp.int32(0), carry) if self.one_tile_each else lax.fori_loop(0, self.count(), tile, carry)


def longest_first_assignment(blocks: np.ndarray, heads: int, cores: int) -> np.ndarray:
    """The tiles of each core, int32 (cores, 1 + most): how many, and which; `blocks` has how many a tile visits.

    In longest-processing-time order each goes to the core that has least to do: a few heads at a time, since the cache
    holds the keys of few. The last heads come together, so that short tiles are left for the end.
    """
    tiles = len(blocks)
    work, few = blocks + 1, max(1, cores // tiles)  # what begins and ends a tile counts as a block
    last = heads - -(-3 * cores // (2 * tiles))
    tile, head = np.tile(np.arange(tiles), heads), np.repeat(np.arange(heads), tiles)
    loads, tiles_of = [(0, core) for core in range(cores)], [[] for _ in range(cores)]
    for n in np.lexsort((-work[tile], np.where(head < last, head // few, heads))).tolist():
        load, core = loads[0]
        tiles_of[core].append(n)
        heapq.heapreplace(loads, (load + int(work[n % tiles]), core))
    table = np.zeros((cores, 1 + max(map(len, tiles_of))), np.int32)
    for row, numbers in zip(table, tiles_of, strict=True):
        row[: 1 + len(numbers)] = len(numbers), *numbers
    return table


def schedule_index(ref: Any, tile: Coordinates) -> Coordinates:
    """Where the entry of a batch, head and tile lies in an array of the schedule, which may broadcast."""
    (Bs, Hs, _, _), (b, h, i) = ref.shape, tile
    return b if Bs > 1 else 0, h if Hs > 1 else 0, i
