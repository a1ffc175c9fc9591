"""What every Pallas kernel for TPUs needs: the chips, a launch, and transposes of tiles."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.ops import Target
from ejkernel.ops.sharding import varying_like

LANES = 128
SUBLANES = 8
LOG2_E = 1.4426950408889634
MIB = 2**20


@dataclass(frozen=True)
class Chip:
    """What a kernel must know of a TPU.

    Attributes:
        vmem_bytes: vector memory of a core. What a kernel may use of it is `vmem_budget`.
        flops: bfloat16 operations a second, of the whole chip.
        bandwidth: bytes a second between the chip and its HBM.
        mxu: rows and columns of its matrix unit: a product over fewer leaves part of it idle.
        cores: cores that share `flops` and `bandwidth`.
    """

    name: str
    vmem_bytes: int
    flops: float
    bandwidth: float
    mxu: int = 128
    cores: int = 1

    @property
    def vmem_budget(self) -> int:
        """Seven eighths: the rest is for what the compiler keeps beside a kernel's arrays."""
        return self.vmem_bytes * 7 // 8


SMEM_BYTES = MIB  # scalar memory of a core, on all of these

# by the device kind JAX reports, as `Target.kind` spells it
CHIPS = {
    "tpu_v4": Chip("v4", 16 * MIB, 275e12, 1.23e12, cores=2),
    "tpu_v5_lite": Chip("v5e", 128 * MIB, 197e12, 0.82e12),
    "tpu_v5": Chip("v5p", 64 * MIB, 459e12, 2.77e12, cores=2),
    "tpu_v6_lite": Chip("v6e", 128 * MIB, 918e12, 1.64e12, mxu=256),
}
ALIASES = {"tpu_v5e": "tpu_v5_lite", "tpu_v5p": "tpu_v5", "tpu_v6e": "tpu_v6_lite"}


def chip_of(target: Target) -> Chip:
    """The chip of a target; an interpreter stands for v5e, and a TPU not listed gets the memory of the smallest."""
    if target.interpreted:
        return CHIPS["tpu_v5_lite"]
    return CHIPS.get(ALIASES.get(target.kind, target.kind), CHIPS["tpu_v4"])


def tile_bytes(shape: Sequence[int | None], dtype: Any) -> int:
    """Bytes of VMEM that a block or scratch takes: whole tiles, of 8 rows of 128 words of 32 bits."""
    *lead, rows, columns = (1, *(n for n in shape if n is not None))
    size = jnp.dtype(dtype).itemsize
    packed = SUBLANES * 4 // size
    return size * math.prod(lead) * -(-rows // packed) * packed * -(-columns // LANES) * LANES


def launch(
    kernel: Callable[..., None],
    *,
    target: Target,
    grid: Sequence[Any],
    scalars: Sequence[jax.Array],
    arrays: dict[str, tuple[jax.Array, pl.BlockSpec]],
    outputs: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: dict[str, Any],
    cost: pl.CostEstimate | None = None,
    parallel: int = 0,
    bounds_checks: bool = True,
    copies: bool = False,
) -> dict[str, jax.Array]:
    """Run `kernel(scalars, arrays, outputs, scratch)`, each a tuple or dict of refs, over a grid.

    Index maps get the grid indices, then the refs of `scalars`, which lie in scalar memory before the grid starts.
    The first `parallel` grid dimensions may be split over the cores of a chip; the last one runs innermost.
    `bounds_checks` are the compiler's, of every copy that the kernel itself starts; `copies` says that it starts some,
    and then the interpreter reports two accesses that nothing orders.
    """

    def body(*refs: Any) -> None:
        given = iter(refs)
        kernel(
            tuple(next(given) for _ in scalars),
            {name: next(given) for name in arrays},
            {name: next(given) for name in outputs},
            {name: next(given) for name in scratch},
        )

    inputs = [*scalars, *(x for x, _ in arrays.values())]
    inputs = varying_like(inputs, inputs)
    axes = jax.typeof(inputs[0]).manual_axis_type  # inside a checked shard_map, outputs vary as inputs do
    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=tuple(grid),
            in_specs=[spec for _, spec in arrays.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[struct.update(manual_axis_type=axes) for struct, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL] * parallel + [pltpu.ARBITRARY] * (len(grid) - parallel),
            vmem_limit_bytes=chip_of(target).vmem_budget,
            disable_bounds_checks=not bounds_checks,
        ),
        # memory starts as nan
        interpret=pltpu.InterpretParams(detect_races=copies, uninitialized_memory="nan")
        if target.interpreted
        else False,
        cost_estimate=cost,
        name=getattr(kernel, "__name__", None),
    )(*inputs)
    return dict(zip(outputs, results, strict=True))


def transposed(x: jax.Array) -> jax.Array:
    """A 32-bit tile (m, n) as (n, m). The hardware transposes full tiles: it passes through one where m or n is 1."""
    m, n = x.shape
    wide = jnp.broadcast_to(x, (LANES if m == 1 else m, LANES if n == 1 else n)).T
    return wide[: 1 if n == 1 else n, : 1 if m == 1 else m]
