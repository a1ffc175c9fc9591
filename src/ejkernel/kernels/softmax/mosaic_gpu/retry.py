"""The second attempt of a Mosaic GPU kernel whose outputs hold a nan.

What a mask may hide is then made finite before it is summed, and a forward that assumed the running maximum of a row's
first blocks computes maxima.
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

from ejkernel.kernels.softmax.mosaic_gpu.private_mosaic import COL, ROW, WGMMA, load
from ejkernel.kernels.softmax.mosaic_gpu.tiles import copy_sub_blocks, zeros


def retry_scratch(needed: bool, stages: int, columns: int, sub_blocks: int, consumers: int = 2) -> dict[str, Any]:
    """What `attempts` and nan-safe copies share; `stages` are those of tiles that may be made finite.

    `nan_flags` is one array of 16-bit numbers, since shared memory comes in kilobytes and D256 has three to spare:
    whether there is any nan, the nans of the rows of each of up to three consumers, and the flags of tiles that were
    made finite. A tile is copied by its `sub_blocks`.
    """
    if not needed:
        return {}
    return {
        "nan_flags": plgpu.SMEM((4 + stages, max(64, columns)), jnp.bfloat16),
        "nans_reported": plgpu.Barrier(num_arrivals=consumers),
        "retry_decided": plgpu.Barrier(),
    } | ({"raw_ready": plgpu.Barrier(num_arrivals=sub_blocks)} if stages else {})


def nans_of(scratch: dict[str, Any], w: Any) -> Any:
    return scratch["nan_flags"].at[1 + w, pl.ds(0, 64)]


def flags_of(scratch: dict[str, Any], stage: Any, columns: int) -> Any:
    return scratch["nan_flags"].at[4 + stage, pl.ds(0, columns)]


def attempts(scratch: dict[str, Any], attempt: Callable[[Any], Any]) -> None:
    """Run attempt(retry) with retry false; if it left a nan anywhere, once more with retry true.

    A masked weight is 0, and 0 times a nan is a nan in the sums of rows that must not see it. To make every masked tile
    finite while it is copied costs up to a tenth of the time, so it is done only after a nan. All warpgroups run
    this loop and read the same flag.
    """
    if "retry_decided" not in scratch:
        attempt(False)
        return

    @pl.loop(0, 2)
    def _attempt(n):
        pl.when(n == 1)(lambda: plgpu.barrier_wait(scratch["retry_decided"]))

        @pl.when(jnp.logical_or(n == 0, scratch["nan_flags"][0, 0].astype(jnp.float32) != 0.0))
        def _run() -> None:
            attempt(n == 1)


def report_nans(scratch: dict[str, Any], w: Any, retry: Any, nan_sums: Any) -> None:
    """Say which rows of this consumer's outputs hold a nan: their sums are nan, all others' 0."""

    def report() -> None:
        nans_of(scratch, w)[...] = nan_sums.astype(jnp.bfloat16)
        plgpu.barrier_arrive(scratch["nans_reported"])

    if "retry_decided" in scratch:
        pl.when(jnp.logical_not(retry))(report)


def decide_retry(scratch: dict[str, Any], retry: Any, consumers: int = 2) -> None:
    """Whether there is to be another attempt. One warpgroup reduces to a scalar: Mosaic's scratch for it is shared."""

    def decide() -> None:
        plgpu.barrier_wait(scratch["nans_reported"])
        nans = reduce(operator.add, (load(nans_of(scratch, w), ROW).astype(jnp.float32) for w in range(consumers)))
        scratch["nan_flags"][0, 0] = jnp.where(nans.sum() == 0.0, 0.0, 1.0).astype(jnp.bfloat16)
        plgpu.barrier_arrive(scratch["retry_decided"])

    if "retry_decided" in scratch:
        pl.when(jnp.logical_not(retry))(decide)


def copy_block(
    sources: list[Any], target: Any, ready: Any, masked: Any = None, raw_ready: Any = None, flags: Any = None
) -> None:
    """Copy a tile that will be summed over its rows; with `flags`, make it finite first if it is masked."""
    if flags is None:
        copy_sub_blocks(sources, target, ready)
        return

    @pl.when(jnp.logical_not(masked))
    def _plain() -> None:
        copy_sub_blocks(sources, target, ready)

    @pl.when(masked)
    def _nan_safe() -> None:
        copy_sub_blocks(sources, target, raw_ready)
        plgpu.barrier_wait(raw_ready)
        zero_nonfinite(target, flags)
        plgpu.commit_smem()
        for _ in sources:
            plgpu.barrier_arrive(ready)


def zero_nonfinite(tile: Any, flags: Any) -> None:
    """Zero what is not finite in a tile, and set its rows' flags: nan where there was some, else 0.

    A row that may see it gets its nan back by the flag, added to its weights (or their logits) before they are masked.
    """
    rows, D = tile.shape
    width = 64 if D % 64 == 0 else 32
    for r in range(0, rows, 64):
        nan_sums = zeros((64,), ROW)
        for column in range(0, D, width):
            columns = tile.at[pl.ds(r, 64), pl.ds(column, width)]
            x = load(columns, WGMMA)
            zero_or_nan = x.astype(jnp.float32) * 0.0  # nan for nan and infinities
            nan_sums += zero_or_nan.sum(axis=1)
            columns[...] = jnp.where(zero_or_nan == 0.0, x, jnp.zeros_like(x))
        flags.at[pl.ds(r, 64)][...] = nan_sums.astype(jnp.bfloat16)


def with_flags(x: jax.Array, scratch: dict[str, Any], stages: tuple[Any, ...], needed: Any) -> jax.Array:
    """A tile, or a vector of its columns, with the flags of tiles that were made finite, if any were."""

    def flagged(x: jax.Array) -> jax.Array:
        for stage in stages:
            flags = load(flags_of(scratch, stage, x.shape[-1]), COL).astype(jnp.float32)
            x += lax.broadcast_in_dim(flags, x.shape, [x.ndim - 1])
        return x

    return lax.cond(needed, flagged, lambda x: x, x)
