"""A batch without rows: empty arrays, and no kernel starts."""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.operation import Arrays


def _is_empty(arrays: Arrays) -> bool:
    return any(x.shape[0] == 0 for x in arrays.values())


def allow_empty(function: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
    """A function of named arrays that answers no rows with no rows, of the shapes that it has for one."""

    def allowed(arrays: Arrays) -> Any:
        if not _is_empty(arrays):
            return function(arrays)
        one_row = {n: jax.ShapeDtypeStruct((x.shape[0] or 1, *x.shape[1:]), x.dtype) for n, x in arrays.items()}
        shapes = jax.eval_shape(function, one_row)
        return jax.tree.map(lambda x: jnp.zeros((0, *x.shape[1:]), x.dtype), shapes)

    return allowed


def allow_empty_gradient(function: Callable[[Any, Any, Any], Arrays], trained: Collection[str]):
    """A function (arrays, residuals, cotangents) -> gradients by name that answers no rows with zeros."""

    def allowed(arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
        if not _is_empty(arrays):
            return function(arrays, residuals, cotangents)
        return {name: jnp.zeros_like(x) for name, x in arrays.items() if name in trained}

    return allowed
