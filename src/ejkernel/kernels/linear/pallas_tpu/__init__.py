"""Linear attention on TPUs, in Pallas: every scan is one kernel, in chunks as long as VMEM has room for.

VMEM in bytes, for chunks of L tokens and W channels, the larger of both dimensions, rounded up:

    blocks    of every array, as the scan asks for them, whole tiles; twice, for the pipeline copies one meanwhile
    scratch   as the scan asks for it
    values    4 * L * W * 8 + 4 * L * L * 4 + 4 * W * W * 3; half as much again for float32, whose
              products take several passes, two more states for a tangent scan, twelve more L * L for the delta rule

libtpu 0.0.42 allocates less, 6.4 of 7.4 MiB for every gate in float32 with W 256.
"""

from collections.abc import Callable
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
from ejkernel.kernels.linear.spec import dimensions
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


def _measured(needs: list[int], chunk: int, scan: Scan) -> ScanResult:
    """What comes of a scan, by its shapes, where it is noted how much VMEM it needs."""
    layout = layout_of(scan.a.shape[1], scan.cu_seqlens, chunk)
    if _has_tokens(scan, layout):
        needs.append(ScanKernel(scan, chunk, layout).vmem_bytes())
    products = jnp.zeros(scan.c.shape[:3] if scan.outer is None else scan.c.shape)
    result = ScanResult.wanted(scan, scan.c, jnp.zeros(scan.state_shape), products)
    return result._replace(written=scan.c if scan.with_written else None)


def _has_tokens(scan: Scan, layout: Layout) -> bool:
    """Whether there is anything to scan: no kernel has an empty grid."""
    return 0 not in scan.a.shape[:3] and layout.sequences > 0


class Scans:
    """How a call is done by scans, and what fits on a chip.

    Args:
        forward: `(call, run_scan)` to outputs and residuals.
        backward: `(call, residuals, cotangents, run_scan)` to gradients.
        dimensions: of a call, with T, N, B and H among them.
    """

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any], dimensions: Callable[..., Any]):
        self._forward, self._backward, self._dimensions = forward, backward, dimensions
        self._largest_scan = lru_cache(maxsize=256)(self._measure)

    def implementation(self, **more: Any) -> Implementation:
        given = (self.unsupported, self.default_config, self.search_space, self.forward, self.backward)
        return Implementation(Config, *given, self.unsupported_config, **more)

    def forward(self, call: Call, config: Config) -> tuple[Arrays, Arrays]:
        return self._forward(call, partial(run_scan, config, call.target))

    def backward(self, call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
        return self._backward(call, residuals, cotangents, partial(run_scan, config, call.target))

    def vmem_bytes(self, call: Call, config: Config) -> int:
        """Bytes of VMEM that the largest scan of a call needs; the arithmetic is at the top of this file."""
        shapes = tuple((name, x.shape, str(x.dtype)) for name, x in call.arrays.items())
        return self._largest_scan(call.spec, shapes, config.chunk)

    def _measure(self, spec: Any, shapes: tuple[Any, ...], chunk: int) -> int:
        needs = [0]

        def both(arrays: Any) -> None:
            call = Call(spec, arrays)
            outputs, residuals = self._forward(call, partial(_measured, needs, chunk))
            self._backward(call, residuals, outputs, partial(_measured, needs, chunk))

        with default_rules():
            jax.eval_shape(both, {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes})
        return max(needs)

    def smem_bytes(self, call: Call, config: Config) -> int:
        """Bytes of scalar memory: three numbers of every chunk of packed sequences, and the decays of heads."""
        dims = self._dimensions(call)
        rows = max_packed_chunks(dims.T, dims.N, config.chunk) if "cu_seqlens" in call else 0
        return 4 * dims.B * (3 * rows + ("g_gamma" in call) * dims.H)

    def unsupported(self, call: Call) -> list[str]:
        """Why a TPU cannot do the call; empty if it can."""
        return self.unsupported_config(call, self.default_config(call))

    def unsupported_config(self, call: Call, config: Config) -> list[str]:
        """Why a config does not fit the chip; empty if it does."""
        chip, reasons = chip_of(call.target), []
        if (need := self.vmem_bytes(call, config)) > chip.vmem_budget:
            reasons.append(
                f"{config}: needs {need / MIB:.1f} MiB of VMEM, {chip.name} has {chip.vmem_budget / MIB:.1f}"
            )
        if (need := self.smem_bytes(call, config)) > SMEM_BYTES // 2:
            reasons.append(
                f"{config}: the chunks of packed sequences need {need / 1024:.0f} KiB of scalar memory, "
                f"{SMEM_BYTES // 2048} are to spare"
            )
        return reasons

    def default_config(self, call: Call) -> Config:
        """Chunks that fill the matrix unit, but no longer than a sequence, halved until they fit."""
        dims = self._dimensions(call)
        length = power_of_two(max(1, dims.T // max(1, dims.N)), LEAST_CHUNK)
        config = Config(min(LANES, length))
        while self.vmem_bytes(call, config) > chip_of(call.target).vmem_budget and config.chunk > LEAST_CHUNK:
            config = Config(config.chunk // 2)
        return config

    def search_space(self, call: Call) -> list[Config]:
        configs = [Config(chunk) for chunk in (16, 32, 64, 128, 256)]
        return [config for config in configs if not self.unsupported_config(call, config)]


# A scan ------------------------------------------------------------------------------------------------------


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
    out, state, products, written = (results.get(name) for name in ("out", "state", "products", "written"))
    return ScanResult(
        None if out is None else kernel.from_tokens(out).astype(scan.c.dtype),
        None if state is None else kernel.final_states(state),
        None if products is None else kernel.from_products(products),
        None if written is None else kernel.from_tokens(written).astype(scan.c.dtype),
    )


LINEAR = Scans(scans.forward, scans.backward, dimensions)
IMPLEMENTATION = LINEAR.implementation()
