"""The second attempt of a Mosaic GPU kernel that left a nan.

What a mask may hide is then scrubbed before it is summed, and a forward that did without maxima computes them.
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu.tiles import COL, ROW, WGMMA, copy_parts, load, zeros


def retry_scratch(needed: bool, flags: int, columns: int, parts: int, groups: int = 2) -> dict[str, Any]:
    """What `attempts` and scrubbing share.

    `marks` is one array of 16-bit numbers, since shared memory comes in kilobytes and D256 has three to spare: whether
    there is any nan, the nans of the rows of each of up to three compute warpgroups, and the flags of scrubbed tiles.
    Tiles come in `parts`.
    """
    if not needed:
        return {}
    return {
        "marks": plgpu.SMEM((4 + flags, max(64, columns)), jnp.bfloat16),
        "reported": plgpu.Barrier(num_arrivals=groups),
        "decided": plgpu.Barrier(),
    } | ({"raw": plgpu.Barrier(num_arrivals=parts)} if flags else {})


def nans_of(scratch: dict[str, Any], w: Any) -> Any:
    return scratch["marks"].at[1 + w, pl.ds(0, 64)]


def flags_of(scratch: dict[str, Any], slot: Any, columns: int) -> Any:
    return scratch["marks"].at[4 + slot, pl.ds(0, columns)]


def attempts(scratch: dict[str, Any], attempt: Callable[[Any], Any]) -> None:
    """Run attempt(scrub) with scrub false; if it left a nan anywhere, once more with scrub true.

    A masked weight is 0, and 0 times a nan is a nan in the sums of rows that must not see it. Scrubbing every masked
    tile while it is copied costs up to a tenth of the time, so it waits until a nan has turned up. All
    warpgroups run this loop and read the same mark.
    """
    if "decided" not in scratch:
        attempt(False)
        return

    @pl.loop(0, 2)
    def _attempt(n):
        pl.when(n == 1)(lambda: plgpu.barrier_wait(scratch["decided"]))

        @pl.when(jnp.logical_or(n == 0, scratch["marks"][0, 0].astype(jnp.float32) != 0.0))
        def _run() -> None:
            attempt(n == 1)


def report_nans(scratch: dict[str, Any], w: Any, scrub: Any, nought: Any) -> None:
    """Say whether this compute warpgroup's results hold a nan."""

    def say() -> None:
        nans_of(scratch, w)[...] = nought.astype(jnp.bfloat16)
        plgpu.barrier_arrive(scratch["reported"])

    if "decided" in scratch:
        pl.when(jnp.logical_not(scrub))(say)


def decide(scratch: dict[str, Any], scrub: Any, groups: int = 2) -> None:
    """Whether there is to be another attempt. One warpgroup reduces to a scalar: Mosaic's scratch for it is shared."""

    def look() -> None:
        plgpu.barrier_wait(scratch["reported"])
        nought = reduce(operator.add, (load(nans_of(scratch, w), ROW).astype(jnp.float32) for w in range(groups)))
        scratch["marks"][0, 0] = jnp.where(nought.sum() == 0.0, 0.0, 1.0).astype(jnp.bfloat16)
        plgpu.barrier_arrive(scratch["decided"])

    if "decided" in scratch:
        pl.when(jnp.logical_not(scrub))(look)


def fetch(sources: list[Any], target: Any, ready: Any, scrub: Any = None, raw: Any = None, flag: Any = None) -> None:
    """Copy a tile that is about to be summed over its rows; scrub it, if asked, before anyone reads it."""
    if flag is None:
        copy_parts(sources, target, ready)
        return

    @pl.when(jnp.logical_not(scrub))
    def _plain() -> None:
        copy_parts(sources, target, ready)

    @pl.when(scrub)
    def _scrubbed() -> None:
        copy_parts(sources, target, raw)
        plgpu.barrier_wait(raw)
        scrub_tile(target, flag)
        plgpu.commit_smem()
        for _ in sources:
            plgpu.barrier_arrive(ready)


def scrub_tile(tile: Any, flag: Any) -> None:
    """Zero what is not finite in a tile, and set its rows' flags: nan there, else 0.

    A row that may see it gets its nan back by the flag, added to its weights (or their logits) before they are masked.
    """
    rows, D = tile.shape
    width = 64 if D % 64 == 0 else 32
    for r in range(0, rows, 64):
        total = zeros((64,), ROW)
        for column in range(0, D, width):
            part = tile.at[pl.ds(r, 64), pl.ds(column, width)]
            x = load(part, WGMMA)
            nought = x.astype(jnp.float32) * 0.0  # nan for nan and infinities
            total += nought.sum(axis=1)
            part[...] = jnp.where(nought == 0.0, x, jnp.zeros_like(x))
        flag.at[pl.ds(r, 64)][...] = total.astype(jnp.bfloat16)


def with_flags(x: jax.Array, scratch: dict[str, Any], slots: tuple[Any, ...], scrub: Any) -> jax.Array:
    """A tile, or a vector of its columns, with the flags of tiles that this attempt scrubbed, if it does."""

    def flagged(x: jax.Array) -> jax.Array:
        for slot in slots:
            marks = load(flags_of(scratch, slot, x.shape[-1]), COL).astype(jnp.float32)
            x += lax.broadcast_in_dim(marks, x.shape, [x.ndim - 1])
        return x

    return lax.cond(scrub, flagged, lambda x: x, x)
