"""The warpgroups of a Mosaic GPU kernel: consumers compute one tile after another, and a producer copies blocks."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu.private_mosaic import ROW
from ejkernel.kernels.softmax.mosaic_gpu.retry import attempts, decide_retry, report_nans
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import TileScheduler
from ejkernel.kernels.softmax.mosaic_gpu.tiles import zeros


def run_warpgroup(
    role: Literal["consumer", "producer"],
    scratch: dict[str, Any],
    attempt: Callable[[Any], Any],
    registers: tuple[int, int] = (232, 40),
) -> None:
    """Run attempt(retry) as a consumer (two or three of them) or as the producer, each with its number of registers.

    They share the register file: a thread's share of three warpgroups is 168, and 2 * 232 + 40 is 3 * 168; of four it
    is 128, and 3 * 160 + 32 is 4 * 128. A producer that zeroes what is not finite spills with 40, and is rare.
    """
    consumer, producer = registers
    if role == "consumer":
        plgpu.set_max_registers(consumer, action="increase")
    else:
        plgpu.set_max_registers(producer, action="decrease")
    attempts(scratch, attempt)


def consume_tiles(
    scheduler: TileScheduler,
    scratch: dict[str, Any],
    w: Any,
    retry: Any,
    fetch_operands: Callable[[Any], None],
    compute: Callable[[Any, Any], tuple[Any, list[tuple[jax.Array, Any, Any]]]],
    *,
    separate_outputs: bool,
) -> Any:
    """One attempt of consumer warpgroup w; how many blocks it took.

    Args:
        fetch_operands: starts the copies of what the n-th tile reads all the time.
        compute: (n, blocks so far) to blocks so far, and outputs: (value, shared memory to pass through, where to).
        separate_outputs: whether that shared memory is only for outputs; if not, the copies of the next tile's operands
            wait until the outputs have left it.
    """
    count = scheduler.count()

    def fetch_next(n: Any) -> None:
        if not scheduler.one_tile_each:
            pl.when(n + 1 < count)(lambda: fetch_operands(n + 1))

    def tile(n: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        blocks, nan_sums = carry
        blocks, outputs = compute(n, blocks)
        if separate_outputs:
            fetch_next(n)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the outputs of the previous tile
        if nan_sums is not None:
            nan_sums += sum((value * 0.0).sum(axis=1) for value, _, _ in outputs if value.ndim == 2)
        for value, smem, _ in outputs:
            smem[...] = value.astype(smem.dtype)
        plgpu.commit_smem()
        for _, smem, target in outputs:
            plgpu.copy_smem_to_gmem(smem, target)
        if not separate_outputs:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch_next(n)
        return blocks, nan_sums

    if retry is not False:  # the first attempt's outputs must not arrive after the second's
        pl.when(retry)(lambda: plgpu.wait_smem_to_gmem(0))
    fetch_operands(jnp.int32(0))
    blocks, nan_sums = scheduler.loop(tile, (jnp.int32(0), zeros((64,), ROW) if "retry_decided" in scratch else None))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    report_nans(scratch, w, retry, nan_sums)
    return blocks


def produce_tiles(
    scheduler: TileScheduler,
    scratch: dict[str, Any],
    retry: Any,
    rings: dict[str, int],
    fill: Callable[[bool, Any, Any], Any],
    consumers: int = 2,
    *,
    zeroes_nonfinite: bool = True,
) -> None:
    """One attempt of the producer: fill(nan_safe, n, blocks so far) -> blocks so far copies what the n-th tile visits.

    `rings` has the mbarriers of stages that became free, and how many stages a block takes. Nan-safe copies, which zero
    what is not finite, have a loop of their own: what they need would be spilled in the other one too. Without
    `zeroes_nonfinite` there are none.
    """

    def run(nan_safe: bool) -> None:
        blocks = scheduler.loop(partial(fill, nan_safe), jnp.int32(0))
        for free, stages in rings.items():
            drain(scratch[free], blocks * stages)

    if retry is False or not zeroes_nonfinite:
        run(False)
    else:
        pl.when(jnp.logical_not(retry))(partial(run, False))
        pl.when(retry)(partial(run, True))
    decide_retry(scratch, retry, consumers)


def drain(free: Any, uses: Any) -> None:
    """Wait until the stages of a ring that was used so often are free, so that another attempt finds them so."""
    for stage in range(free.shape[0]):
        pl.when(uses > stage)(lambda stage=stage: plgpu.barrier_wait(free.at[stage]))
