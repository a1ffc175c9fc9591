"""What a call costs on a TPU: operations, bytes and the time a chip cannot beat, as its kernels tell the compiler."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from ejkernel.kernels.common.pallas_tpu import Chip
from ejkernel.ops import Call, Implementation


@dataclass(frozen=True)
class Cost:
    """One kernel of a call: operations and bytes of the tiles it visits, and the head dimension of its products."""

    kernel: str
    flops: int
    bytes: int
    dim: int

    def seconds(self, chip: Chip) -> float:
        """The roofline: the longer of computing at the peak that the head dimension allows, and of copying."""
        idle = -(-self.dim // chip.mxu) * chip.mxu / self.dim
        return max(self.flops * idle / chip.flops, self.bytes / chip.bandwidth)


def costs(implementation: Implementation, call: Call, config: Any) -> list[Cost]:
    """The cost of each kernel of a call's forward and backward, in that order; arrays may be shapes alone."""
    assert implementation.backward is not None
    backward = implementation.backward

    def both(arrays: Any) -> Any:
        given = Call(call.spec, arrays, call.target)
        outputs, residuals = implementation.forward(given, config)
        return outputs, backward(given, residuals, outputs, config)

    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.arrays.items()}
    kernels = list(_kernels(jax.make_jaxpr(both)(structs).jaxpr))
    dim = call["query"].shape[3]
    return [Cost(name, estimate.flops, estimate.bytes_accessed, dim) for name, estimate in kernels]


def _kernels(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Names and estimates of the kernels in a traced program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield str(equation.params["name"]), equation.params["cost_estimate"]
            continue
        for inner in jaxprs_in_params(equation.params):
            yield from _kernels(inner)
