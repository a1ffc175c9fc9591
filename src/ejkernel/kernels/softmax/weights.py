"""Attention with its matrix of weights: plain JAX by the definition, on every device."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ejkernel.checks.arrays import float_dtype
from ejkernel.kernels.softmax.reference import dropped, weighted_values, weights
from ejkernel.kernels.softmax.spec import Spec
from ejkernel.ops import Call, Implementation, Operation, run_plain
from ejkernel.ops.operation import Arrays


@dataclass(frozen=True)
class WeightsSpec:
    """Static facts: those of softmax attention, and the dtype of both results."""

    softmax: Spec
    dtype: str


@dataclass(frozen=True)
class Config:
    """Nothing to choose."""


def with_weights(operation: Operation, call: Call, dtype: Any = None) -> tuple[jax.Array, jax.Array]:
    """out (B, T, H, Dv) and weights (B, H, T, S), both in `dtype`."""
    dtype = call["query"].dtype if dtype is None else float_dtype("dtype", dtype)
    made = WeightsSpec(call.spec, dtype.name)
    why = "its definition: the matrix of weights is an output"
    outputs = run_plain(operation, Call(made, call.arrays), partial(_outputs, made), why)
    return outputs["out"], outputs["weights"]


@partial(jax.jit, static_argnums=0)
def _outputs(spec: WeightsSpec, arrays: Arrays) -> Arrays:
    call = Call(spec.softmax, arrays)
    p, _ = weights(call, spec.dtype)
    p = dropped(call, p).astype(spec.dtype)
    return {"out": weighted_values(call, p).astype(spec.dtype), "weights": p}


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    return _outputs(call.spec, call.arrays), {}


IMPLEMENTATION = Implementation(
    Config,
    unsupported=lambda call: [],
    default_config=lambda call: Config(),
    search_space=lambda call: [Config()],
    forward=forward,
)
