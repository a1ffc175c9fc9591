"""Optimization barriers around a kernel call, so that XLA does not fuse slices of a loop's arrays into it."""

from collections.abc import Callable
from typing import Any

from jax import lax


def fusion_barrier(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same GPU kernel, which XLA fuses with nothing around it.

    From JAX 0.11 on, XLA fuses slices into the custom calls that they feed or follow. In a loop over layers, a kernel
    whose output is both kept for the backward and used in the forward then runs twice, and a kernel that adds to an
    array it is given finds memory that nobody has written.
    """

    def with_barriers(*arrays: Any) -> Any:
        return lax.optimization_barrier(kernel(*lax.optimization_barrier(arrays)))

    return with_barriers
