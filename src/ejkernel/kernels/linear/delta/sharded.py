"""Sequences split over devices along their length: states are passed on, tokens stay where they are."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear.delta.spec import dimensions
from ejkernel.kernels.linear.sharded import passed_on
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays


class _Transition(NamedTuple):
    """What the tokens of some devices make of a state: h becomes `matrix @ h + state`.

    Attributes:
        state: (B, N, H, D, Dv).
        matrix: (B, N, H, D, D).
    """

    state: jax.Array
    matrix: jax.Array

    def after(self, other: "_Transition") -> "_Transition":
        """Both, the other first."""
        return _Transition(self.of(other.state), _product(self.matrix, other.matrix))

    def of(self, initial: jax.Array, unchanged: jax.Array | bool = False) -> jax.Array:
        """What becomes of a state; where it is `unchanged`, that state itself."""
        return jnp.where(unchanged, initial, _product(self.matrix, initial)) + self.state


def along_length(call: Call, axes: tuple[str, ...], run: Callable[[Call], Arrays]) -> Arrays:
    """What a device computes of a call whose tokens are split over `axes`."""
    return passed_on(call, axes, run, _transition, reverse=False)


def _transition(call: Call, run: Callable[[Call], Arrays]) -> _Transition:
    """In one run: values of zero from a state of ones on the diagonal give the matrix, beside those of the call."""
    B, T, H, _, D, Dv, N = dimensions(call)
    start = jnp.concatenate([jnp.zeros((D, Dv)), jnp.eye(D)], 1)
    arrays = call.arrays | {"initial_state": jnp.broadcast_to(start, (B, N, H, *start.shape))}
    for name in ("value", "write_gate"):
        if name in call:
            arrays[name] = jnp.concatenate([call[name], jnp.zeros((B, T, H, D), call[name].dtype)], -1)
    return _Transition(*jnp.split(run(replace(call, arrays=arrays))["state"], [Dv], -1))


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")
