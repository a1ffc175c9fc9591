"""Calls with an empty dimension (no rows, no queries, no keys): answered by their shapes, and no kernel starts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.operation import Arrays, Call, Dims, Operation


def empty_dimensions(operation: Operation, arrays: Arrays) -> frozenset[str]:
    """The letters of those that are empty: of the batch, or of any where the operation says what is then."""
    sizes = [size for name, x in arrays.items() for size in zip(operation.arrays[name].axes, x.shape, strict=True)]
    letters = {letter for letter, n in sizes if n == 0}
    return frozenset(letters if operation.of_nothing is not None else letters & {"B"})


def _sized(arrays: Arrays) -> Any:
    """On shapes, with no dimension empty."""
    return {n: jax.ShapeDtypeStruct(tuple(size or 1 for size in x.shape), x.dtype) for n, x in arrays.items()}


def to_plan(operation: Operation, call: Call) -> Call:
    """The call, or a full one in place of an empty one: what would run."""
    return Call(call.spec, _sized(call.arrays), call.target) if empty_dimensions(operation, call.arrays) else call


def _of_nothing(operation: Operation, arrays: Arrays, zeros: Arrays) -> Arrays:
    return zeros if operation.of_nothing is None else operation.of_nothing(arrays, zeros)


def allow_empty(
    function: Callable[[Arrays], tuple[Arrays, Arrays]], operation: Operation, results: dict[str, Dims]
) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
    """A function from named arrays to outputs and residuals, of these dimensions, that knows those of empty arrays."""

    def allowed(arrays: Arrays) -> tuple[Arrays, Arrays]:
        empty = empty_dimensions(operation, arrays)
        if not empty:
            return function(arrays)

        def zeros(name: str, full: jax.ShapeDtypeStruct) -> jax.Array:
            letters = results[name].axes if name in results else ("B", *full.shape[1:])
            shape = tuple(0 if c in empty else n for c, n in zip(letters, full.shape, strict=True))
            return jnp.zeros(shape, full.dtype)

        shapes = jax.eval_shape(function, _sized(arrays))
        outputs, residuals = ({name: zeros(name, x) for name, x in group.items()} for group in shapes)
        outputs = _of_nothing(operation, arrays, outputs)
        return outputs, {name: outputs.get(name, x) for name, x in residuals.items()}

    return allowed


def allow_empty_gradient(function: Callable[[Arrays, Arrays, Arrays], Arrays], operation: Operation) -> Any:
    """The same for a function (arrays, residuals, cotangents) -> gradients by name."""

    def allowed(arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
        if not empty_dimensions(operation, arrays):
            return function(arrays, residuals, cotangents)
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in cotangents.items()}
        trained = {name: x for name, x in arrays.items() if operation.arrays[name].grad}
        _, pull = jax.vjp(lambda trained: _of_nothing(operation, arrays | trained, zeros), trained)
        return pull(cotangents)[0]

    return allowed
