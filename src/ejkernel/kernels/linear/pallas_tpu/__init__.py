"""Linear attention on TPUs, in Pallas: every scan is one kernel, in chunks as long as VMEM has room for.

VMEM in bytes, for chunks of L tokens and W channels, the larger of both dimensions, rounded up:

    blocks    of every array, as the scan asks for them, whole tiles; twice, for the pipeline copies one meanwhile
    scratch   as the scan asks for it
    values    4 * L * W * 8 + 4 * L * L * 4 + 4 * W * W * 3; half as much again for float32, whose
              products take several passes, and two more states for a tangent scan

libtpu 0.0.42 allocates less, 6.4 of 7.4 MiB for every gate in float32 with W 256.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.packed_chunks import max_packed_chunks
from ejkernel.kernels.common.pallas_tpu import LANES, MIB, SMEM_BYTES, chip_of, launch
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.linear import scans, xla
from ejkernel.kernels.linear.layout import Layout, layout_of
from ejkernel.kernels.linear.pallas_tpu.scan import ScanKernel
from ejkernel.kernels.linear.scans import Scan, ScanResult
from ejkernel.kernels.linear.spec import Spec, dimensions
from ejkernel.ops import Call, Implementation, Target
from ejkernel.ops.autodiff import default_rules
from ejkernel.ops.operation import Arrays

LEAST_CHUNK = 16  # rows of a tile of bfloat16


@dataclass(frozen=True)
class Config:
    """Tokens per chunk."""

    chunk: int = 128

    def __post_init__(self) -> None:
        config_ints(self, ("chunk",), LEAST_CHUNK, power_of_two=True)


# What fits ---------------------------------------------------------------------------------------------------


def vmem_bytes(call: Call, config: Config) -> int:
    """Bytes of VMEM that the largest scan of a call needs; the arithmetic is at the top of this file."""
    shapes = tuple((name, x.shape, str(x.dtype)) for name, x in call.arrays.items())
    return _largest_scan(call.spec, shapes, config.chunk)


@lru_cache(maxsize=256)
def _largest_scan(spec: Spec, shapes: tuple[Any, ...], chunk: int) -> int:
    needs = [0]

    def measure(scan: Scan) -> ScanResult:
        layout = layout_of(scan.a.shape[1], scan.cu_seqlens, chunk)
        if _has_tokens(scan, layout):
            needs.append(ScanKernel(scan, chunk, layout).vmem_bytes())
        products = jnp.zeros(scan.c.shape[:3] if scan.outer is None else scan.c.shape)
        return ScanResult.wanted(scan, scan.c, jnp.zeros(scan.state_shape), products)

    def both(arrays: Any) -> None:
        call = Call(spec, arrays)
        outputs, residuals = scans.forward(call, measure)
        scans.backward(call, residuals, outputs, measure)

    with default_rules():
        jax.eval_shape(both, {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes})
    return max(needs)


def _has_tokens(scan: Scan, layout: Layout) -> bool:
    """Whether there is anything to scan: no kernel has an empty grid."""
    return 0 not in scan.a.shape[:3] and layout.sequences > 0


def smem_bytes(call: Call, config: Config) -> int:
    """Bytes of scalar memory: three numbers of every chunk of packed sequences, and the decays of heads."""
    dims = dimensions(call)
    rows = max_packed_chunks(dims.T, dims.N, config.chunk) if "cu_seqlens" in call else 0
    return 4 * dims.B * (3 * rows + ("g_gamma" in call) * dims.H)


def unsupported(call: Call) -> list[str]:
    """Why a TPU cannot do the call; empty if it can."""
    return unsupported_config(call, default_config(call))


def unsupported_config(call: Call, config: Config) -> list[str]:
    """Why a config does not fit the chip; empty if it does."""
    chip, reasons = chip_of(call.target), []
    if (need := vmem_bytes(call, config)) > chip.vmem_budget:
        reasons.append(f"{config}: needs {need / MIB:.1f} MiB of VMEM, {chip.name} has {chip.vmem_budget / MIB:.1f}")
    if (need := smem_bytes(call, config)) > SMEM_BYTES // 2:
        reasons.append(
            f"{config}: the chunks of packed sequences need {need / 1024:.0f} KiB of scalar memory, "
            f"{SMEM_BYTES // 2048} are to spare"
        )
    return reasons


def default_config(call: Call) -> Config:
    """Chunks that fill the matrix unit, but no longer than a sequence, halved until they fit."""
    dims = dimensions(call)
    length = power_of_two(max(1, dims.T // max(1, dims.N)), LEAST_CHUNK)
    config = Config(min(LANES, length))
    while vmem_bytes(call, config) > chip_of(call.target).vmem_budget and config.chunk > LEAST_CHUNK:
        config = Config(config.chunk // 2)
    return config


def search_space(call: Call) -> list[Config]:
    configs = [Config(chunk) for chunk in (16, 32, 64, 128, 256)]
    return [config for config in configs if not unsupported_config(call, config)]


# A scan ------------------------------------------------------------------------------------------------------


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    return scans.forward(call, partial(run_scan, config, call.target))


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    return scans.backward(call, residuals, cotangents, partial(run_scan, config, call.target))


IMPLEMENTATION = Implementation(
    Config, unsupported, default_config, search_space, forward, backward, unsupported_config
)


def run_scan(config: Config, target: Target, scan: Scan) -> ScanResult:
    """The scan, so many tokens at a time."""
    layout = layout_of(scan.a.shape[1], scan.cu_seqlens, config.chunk)
    if not _has_tokens(scan, layout):
        return xla.run_scan(xla.Config(), scan)
    kernel = ScanKernel(scan, config.chunk, layout)
    arrays, outputs = kernel.operands(), kernel.outputs()
    results = launch(
        kernel.linear_scan_kernel,
        target=target,
        grid=kernel.grid,
        scalars=list(kernel.scalars.values()),
        arrays=arrays,
        outputs=outputs,
        scratch={name: pltpu.VMEM(shape, jnp.float32) for name, shape in kernel.scratch().items()},
        cost=kernel.cost(arrays, outputs),
        parallel=2,
    )
    out, state, products = (results.get(name) for name in ("out", "state", "products"))
    return ScanResult(
        None if out is None else kernel.from_tokens(out).astype(scan.c.dtype),
        None if state is None else kernel.final_states(state),
        None if products is None else kernel.from_products(products),
    )
