"""What the warpgroups of a Mosaic GPU kernel do: two or three compute tiles one after another, and one copies."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ejkernel.kernels.softmax.mosaic_gpu.retry import attempts, decide, report_nans
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import Walk
from ejkernel.kernels.softmax.mosaic_gpu.tiles import ROW, zeros


def act(
    role: Literal["compute", "copy"],
    scratch: dict[str, Any],
    attempt: Callable[[Any], Any],
    registers: tuple[int, int] = (232, 40),
) -> None:
    """A warpgroup's part in a kernel: two or three compute, and one copies.

    They share the register file: a thread's share of three warpgroups is 168, and 2 * 232 + 40 is 3 * 168; of four it
    is 128, and 3 * 160 + 32 is 4 * 128. Scrubbing spills with 40, and is rare.
    """
    computing, copying = registers
    if role == "compute":
        plgpu.set_max_registers(computing, action="increase")
    else:
        plgpu.set_max_registers(copying, action="decrease")
    attempts(scratch, attempt)


def compute_tiles(
    walk: Walk,
    scratch: dict[str, Any],
    w: Any,
    scrub: Any,
    fetch: Callable[[Any], None],
    work: Callable[[Any, Any], tuple[Any, list[tuple[jax.Array, Any, Any]]]],
    *,
    apart: bool,
) -> Any:
    """A compute warpgroup's part of an attempt; how many blocks it took.

    Args:
        fetch: starts the copies of what the n-th tile owns.
        work: (n, blocks so far) to blocks so far, and results: (value, shared memory to pass through, where to).
        apart: whether that shared memory is only for results; if not, the next tile's copies wait until they left.
    """
    count = walk.count()

    def following(n: Any) -> None:
        if not walk.single:
            pl.when(n + 1 < count)(lambda: fetch(n + 1))

    def tile(n: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        blocks, nought = carry
        blocks, results = work(n, blocks)
        if apart:
            following(n)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous results
        if nought is not None:
            nought += sum((value * 0.0).sum(axis=1) for value, _, _ in results if value.ndim == 2)
        for value, smem, _ in results:
            smem[...] = value.astype(smem.dtype)
        plgpu.commit_smem()
        for _, smem, target in results:
            plgpu.copy_smem_to_gmem(smem, target)
        if not apart:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            following(n)
        return blocks, nought

    if scrub is not False:  # lest the first attempt's results overtake the second's
        pl.when(scrub)(lambda: plgpu.wait_smem_to_gmem(0))
    fetch(jnp.int32(0))
    blocks, nought = walk.loop(tile, (jnp.int32(0), zeros((64,), ROW) if "decided" in scratch else None))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    report_nans(scratch, w, scrub, nought)
    return blocks


def copy_tiles(
    walk: Walk,
    scratch: dict[str, Any],
    scrub: Any,
    rings: dict[str, int],
    feed: Callable[[bool, Any, Any], Any],
    groups: int = 2,
    *,
    scrubs: bool = True,
) -> None:
    """The copying warpgroup's part: feed(careful, n, blocks so far) -> blocks so far fills the rings for the n-th tile.

    `rings` has the barriers of slots that became free, and how many slots a block takes. Careful copies, which scrub,
    have a loop of their own: what they need would be spilled in every other one. Without `scrubs` none are.
    """

    def run(careful: bool) -> None:
        blocks = walk.loop(partial(feed, careful), jnp.int32(0))
        for free, each in rings.items():
            drain(scratch[free], blocks * each)

    if scrub is False or not scrubs:
        run(False)
    else:
        pl.when(jnp.logical_not(scrub))(partial(run, False))
        pl.when(scrub)(partial(run, True))
    decide(scratch, scrub, groups)


def drain(free: Any, uses: Any) -> None:
    """Wait until the slots of a ring that was used so often are free, so that another attempt finds them so."""
    for slot in range(free.shape[0]):
        pl.when(uses > slot)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))
