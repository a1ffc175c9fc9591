"""How far a result is from the definition, and may be: twice as far as the naive computation in its dtype."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

# of the largest value: by how much float32 sums of some hundred terms may differ when their order does
FLOOR = 64 * float(np.finfo(np.float32).eps)

Array = jax.Array | np.ndarray


@dataclass(frozen=True)
class Error:
    """A largest deviation from the float32 definition, beside that of the naive computation in the same dtype."""

    error: float
    naive: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # false for NaN

    @property
    def severity(self) -> float:
        return float("inf") if np.isnan(self.error) else self.error / max(self.limit, 1e-30)


def _largest_difference(a: Array, b: Array) -> float:
    """On the device, or on the host where both are there: that needs no program for their shape."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return float(np.abs(a.astype(np.float32) - b.astype(np.float32)).max())
    return float(_on_the_device(a, b))


@jax.jit
def _on_the_device(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()


@dataclass(frozen=True)
class Truth:
    """Exact results of one kind (outputs, or gradients) by name, and the errors of the naive computation.

    A result that cancels to zero is judged by the largest value among all of its kind.
    """

    exact: Mapping[str, Array]
    naive: Mapping[str, float]
    floor: float

    @classmethod
    def of(cls, exact: Mapping[str, Array], naive: Mapping[str, Array], floor: float = FLOOR) -> "Truth":
        """`floor` is relative to the largest exact value."""
        errors = {name: _largest_difference(naive[name], exact[name]) for name in exact}
        return cls(exact, errors, floor * max(float(abs(x).max()) for x in exact.values()))

    def error(self, name: str, got: Array) -> Error:
        exact, naive = self.exact[name], self.naive[name]
        if got.shape != exact.shape:
            raise ValueError(f"{name} has shape {got.shape}, not {exact.shape}")
        return Error(_largest_difference(got, exact), naive, 2 * naive + self.floor)
