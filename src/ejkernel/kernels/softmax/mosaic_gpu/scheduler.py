"""Which tiles a program of a Mosaic GPU kernel computes, and which blocks a tile visits."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.softmax import schedule
from ejkernel.ops import Call

# where a block of a schedule row lies: in the unmasked run, or in the masked one before or after it
Masked = Literal["", "before", "after"]

# more tiles than these are the hardware's to deal: it takes some microseconds for each, in every trace
_MOST_DEALT = 2**16


@dataclass(frozen=True)
class Runs:
    """The schedule of a kernel: one row of constants, or none where it reads bounds, and which runs can exist.

    A run is one of blocks, or of places in a list of them (`listed`).
    Nothing traced is kept here: JAX holds on to the body of a kernel, and so to all that it refers to.
    """

    constant: tuple[int, ...] | None
    before: bool
    inner: bool
    after: bool
    static: np.ndarray | None = None
    listed: bool = False

    @classmethod
    def of(cls, call: Call, block_q: int, block_k: int, side: schedule.Side) -> "Runs":
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
            return cls(tuple(int(x) for x in rows[0]), *present)
        return cls(None, *present, bounds)

    @property
    def masked(self) -> bool:
        return self.before or self.after

    @property
    def never_empty(self) -> bool:
        """Whether every row is known to visit a block."""
        if self.constant is not None:
            return self.constant[3] > self.constant[0]
        return self.static is not None and bool((self.static[..., 3] > self.static[..., 0]).all())

    @property
    def blocks(self) -> np.ndarray | None:
        """How many each tile of a head visits, where that is known, no constant, and the same for all heads."""
        if self.static is None or self.static.shape[:2] != (1, 1):
            return None
        return self.static[0, 0, :, 3] - self.static[0, 0, :, 0]

    def row(self, refs: dict[str, Any], b: Any, h: Any, i: Any) -> tuple[Any, ...]:
        """Visit from, unmasked from, unmasked to, visit to."""
        if self.constant is not None:
            return self.constant
        ref = refs["bounds"]
        at = schedule_index(ref, (b, h, i))
        return ref[*at, 0], ref[*at, 1], ref[*at, 2], ref[*at, 3]

    def parts(self, row: tuple[Any, ...]) -> list[tuple[Any, Any, Masked]]:
        """The runs that can exist, in order: from, to, and whether masked."""
        lo, full_lo, full_hi, hi = row
        found: list[tuple[Any, Any, Masked]] = [(lo, full_lo, "before"), (full_lo, full_hi, ""), (full_hi, hi, "after")]
        return [run for run, exists in zip(found, (self.before, self.inner, self.after), strict=True) if exists]

    def loop(self, row: tuple[Any, ...], step: Callable[..., Any], carry: Any) -> Any:
        """carry after step(i, carry, masked=...) over all visited blocks in order."""
        for first, last, masked in self.parts(row):
            carry = lax.fori_loop(first, last, partial(step, masked=masked), carry)
        return carry


@dataclass(frozen=True)
class Walk:
    """Which tiles a program computes, one after another.

    Where there are many tiles, as many programs as the device has cores share them: what starts and ends a tile then
    hides behind the work of its neighbours. Tiles that are alike go round, if not many are left over, and each program
    takes every `programs`-th, so that those that run together read the same keys. Tiles that are known to differ are
    dealt out beforehand (`dealt`). Where only the device knows how much a tile visits, it puts them in an order, the
    longest first (`ordered`), and neighbours in it are alike. Else every tile has a program, and the hardware deals.
    """

    tiles: int
    heads: int
    units: int
    programs: int
    reverse: bool = False
    ordered: bool = False
    # for each program how many tiles it has, and which
    dealt: np.ndarray | None = field(default=None, compare=False)
    # what a kernel reads of either: see `Kernel.walking`
    read: Any = None

    @classmethod
    def of(
        cls, batch: int, heads: int, tiles: int, runs: Runs, side: schedule.Side, cores: int, ordered: bool = False
    ) -> "Walk":
        count, alike, blocks = batch * heads * tiles, runs.constant is not None, runs.blocks
        shared = cls(tiles, heads, count, cores)
        if 0 < cores < count:
            if alike and count >= 0.95 * -(-count // cores) * cores:
                return shared
            if blocks is not None and count <= _MOST_DEALT:
                return replace(shared, dealt=deal(blocks, batch * heads, cores))
            if ordered and not alike and runs.static is None:
                return replace(shared, ordered=True)
        # under a causal mask the last queries and the first keys work longest, and should start first
        return cls(tiles, heads, count, count, reverse=side == "q" and not alike)

    @property
    def single(self) -> bool:
        return self.programs == self.units

    def order(self, bounds: jax.Array | None = None) -> dict[str, jax.Array]:
        """What `read` is to be: the tiles of each program, or all in the order of bounds (B|1, H|1, tiles, 4)."""
        if self.dealt is not None:
            return {"order": jnp.asarray(self.dealt.reshape(-1))}
        return {"order": self._by_length(bounds)} if self.ordered and bounds is not None else {}

    def _by_length(self, bounds: jax.Array) -> jax.Array:
        """The numbers of all tiles, int32 (units,), those with the most blocks first.

        Tiles with the same row of bounds, which are of different batches or heads, stay together.
        """
        blocks = bounds[..., 3] - bounds[..., 0]
        if blocks.shape[1] > self.heads:  # a tile of keys is visited by all heads of a group
            blocks = blocks.reshape(blocks.shape[0], self.heads, -1, self.tiles).sum(2, dtype=jnp.int32)
        batch = self.units // (self.heads * self.tiles)
        rows = jnp.argsort(-blocks.reshape(-1), stable=True).astype(jnp.int32)[:, None, None]
        tile, row = rows % self.tiles, rows // self.tiles
        b, h = row // blocks.shape[1], row % blocks.shape[1]
        b += jnp.arange(batch // blocks.shape[0], dtype=jnp.int32)[:, None]
        h += jnp.arange(self.heads // blocks.shape[1], dtype=jnp.int32)
        return ((b * self.heads + h) * self.tiles + tile).reshape(-1)

    def count(self) -> Any:
        """Tiles of this program."""
        if self.single:
            return 1
        if self.dealt is not None:
            return self.read[lax.axis_index("program") * self.dealt.shape[1]]
        return lax.div(self.units - 1 - lax.axis_index("program"), jnp.int32(self.programs)) + 1

    def place(self, n: Any) -> tuple[Any, Any, Any]:
        """Batch, head and tile of this program's n-th tile."""
        unit = lax.axis_index("program")
        if self.dealt is not None:
            unit = self.read[unit * self.dealt.shape[1] + 1 + n]
        elif not self.single:
            unit += n * self.programs
        if self.ordered:
            unit = self.read[unit]
        head, tile = lax.div(unit, jnp.int32(self.tiles)), lax.rem(unit, jnp.int32(self.tiles))
        if self.reverse:
            tile = self.tiles - 1 - tile
        return lax.div(head, jnp.int32(self.heads)), lax.rem(head, jnp.int32(self.heads)), tile

    def loop(self, tile: Callable[[Any, Any], Any], carry: Any) -> Any:
        """carry after tile(n, carry) for all tiles of this program."""
        return tile(jnp.int32(0), carry) if self.single else lax.fori_loop(0, self.count(), tile, carry)


def deal(blocks: np.ndarray, heads: int, cores: int) -> np.ndarray:
    """The tiles of each core, int32 (cores, 1 + most): how many, and which; `blocks` says what a tile of a head visits.

    Each goes to the core that has least to do: a few heads at a time, since the cache holds the keys of few, and of
    these the longest tiles first. The last heads come together, so that short ones are left for the end.
    """
    tiles = len(blocks)
    work, few = blocks + 1, max(1, cores // tiles)  # what begins and ends a tile counts as a block
    last = heads - -(-3 * cores // (2 * tiles))
    tile, head = np.tile(np.arange(tiles), heads), np.repeat(np.arange(heads), tiles)
    loads, dealt = [(0, core) for core in range(cores)], [[] for _ in range(cores)]
    for unit in np.lexsort((-work[tile], np.where(head < last, head // few, heads))).tolist():
        load, core = loads[0]
        dealt[core].append(unit)
        heapq.heapreplace(loads, (load + int(work[unit % tiles]), core))
    found = np.zeros((cores, 1 + max(map(len, dealt))), np.int32)
    for row, units in zip(found, dealt, strict=True):
        row[: 1 + len(units)] = len(units), *units
    return found


def schedule_index(ref: Any, place: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Where the row of a batch, head and tile lies in an array of the schedule, which may broadcast."""
    (Bs, Hs, _, _), (b, h, i) = ref.shape, place
    return b if Bs > 1 else 0, h if Hs > 1 else 0, i
