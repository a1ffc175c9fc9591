"""A cache of the states of linear attention: one of fixed size for each sequence, however long it grows."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import ArrayInput, as_array, int_array
from ejkernel.checks.dims import format_shape
from ejkernel.checks.options import static_int
from ejkernel.checks.values import check_rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class StateCacheView:
    """The states of `recurrent_attention` and its kin, in slots that sequences come and go from.

    A pytree next to `PagedCacheView`: a hybrid model keeps pages for its softmax layers and one of these for each of
    its linear ones. Every method but `read` gives a new view, in place under jit where the old one is donated.
    A negative slot reads as zeros and is never written, so that a batch may be padded to a fixed size.

    Fields:
        state: (slots, H, D, Dv) float32.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.modules import recurrent_attention
    >>> from ejkernel.types import StateCacheView
    >>> @jax.jit(donate_argnums=0)
    ... def step(cache, slots, query, key, value, g):
    ...     out, state = recurrent_attention(
    ...         query, key, value, g, initial_state=cache.read(slots), return_state=True
    ...     )
    ...     return cache.write(slots, state), out
    >>> cache = StateCacheView.create(8, 4, 16)
    >>> token = jnp.ones((2, 1, 4, 16))
    >>> cache, out = step(cache, jnp.array([5, 2]), token, token, token, jnp.zeros((2, 1, 4)))
    >>> out.shape, cache.state[:, 0, 0, 0].tolist()
    ((2, 1, 4, 16), [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    """

    state: Any

    @classmethod
    def create(cls, slots: int, heads: int, head_dim: int, *, value_dim: int | None = None) -> "StateCacheView":
        """Empty states for `slots` sequences; `value_dim` is by default `head_dim`.

        >>> StateCacheView.create(64, 16, 128, value_dim=256)
        StateCacheView(state=float32(64, 16, 128, 256))
        """
        sizes = {"slots": slots, "heads": heads, "head_dim": head_dim}
        shape = [static_int(name, size, 1) for name, size in sizes.items()]
        last = shape[2] if value_dim is None else static_int("value_dim", value_dim, 1)
        return cls(jnp.zeros((*shape, last), jnp.float32))

    @property
    def slots(self) -> int:
        return self.state.shape[0]

    def read(self, slots: ArrayInput) -> jax.Array:
        """The states (B, H, D, Dv) in some slots (B,): `initial_state` of a batch, or of packed sequences.

        >>> StateCacheView.create(4, 2, 8).read([3, -1]).shape
        (2, 2, 8, 8)
        """
        at = self._checked("slots", slots)
        states = jnp.asarray(self.state).at[at].get(mode="clip")
        return jnp.where((at < self.slots)[:, None, None, None], states, 0.0)

    def write(self, slots: ArrayInput, states: jax.Array) -> "StateCacheView":
        """With these states (B, H, D, Dv) in their slots (B,), none of them twice.

        >>> cache = StateCacheView.create(3, 1, 1).write([2, -1], jnp.ones((2, 1, 1, 1)))
        >>> cache.state.ravel().tolist()
        [0.0, 0.0, 1.0]
        """
        at = self._checked("slots", slots, once=True)
        wanted = (at.shape[0], *self.state.shape[1:])
        if jnp.shape(states) != wanted:
            raise ValueError(f"states must be {wanted}, one for each of the slots, got {jnp.shape(states)}")
        return self._put(at, jnp.asarray(states, jnp.float32))

    def fork(self, sources: ArrayInput, targets: ArrayInput) -> "StateCacheView":
        """With copies of some states (N,) in other slots (N,): sequences that go on from a prefix they share.

        All are read before any is written; a negative target is skipped.

        >>> cache = StateCacheView.create(3, 1, 1).write([0], jnp.ones((1, 1, 1, 1)))
        >>> cache.fork([0, 0], [1, 2]).state.ravel().tolist()
        [1.0, 1.0, 1.0]
        """
        source, target = self._checked("sources", sources), self._checked("targets", targets, once=True)
        if source.shape != target.shape:
            raise ValueError(f"sources {source.shape} and targets {target.shape} must both be (N,)")
        return self._put(target, self.read(sources))

    def reset(self, slots: ArrayInput) -> "StateCacheView":
        """With nothing in some slots (N,): for the next sequence to come.

        >>> cache = StateCacheView(jnp.ones((3, 1, 1, 1)))
        >>> cache.reset([1]).state.ravel().tolist()
        [1.0, 0.0, 1.0]
        """
        return self._put(self._checked("slots", slots), jnp.float32(0.0))

    def _put(self, at: jax.Array, states: jax.Array) -> "StateCacheView":
        return StateCacheView(jnp.asarray(self.state).at[at].set(states, mode="drop"))

    def _checked(self, name: str, slots: ArrayInput, once: bool = False) -> jax.Array:
        """(N,) int32, past the end where they were negative, which would count from the end; `once`: each at most."""
        if not hasattr(self.state, "ndim") or self.state.ndim != 4:
            raise ValueError(f"state has shape {format_shape('slots H D Dv', jnp.shape(self.state))}")
        given = as_array(name, slots)
        if given.ndim != 1:
            raise ValueError(f"{name} must have shape (N,), got {given.shape}")
        check_rows(given, given >= self.slots, f"{name} must be below {self.slots}, or negative to be skipped")
        if once:
            earlier = np.tri(given.shape[0], k=-1, dtype=bool)
            again = ((given[:, None] == given[None, :]) & earlier).any(1) & (given >= 0)
            check_rows(given, again, f"{name} must not hold a slot twice")
        at = int_array(name, given)
        return jnp.where((at < 0) | (at >= self.slots), self.slots, at)

    def __repr__(self) -> str:
        shown = f"{self.state.dtype}{self.state.shape}" if hasattr(self.state, "dtype") else repr(self.state)
        return f"StateCacheView(state={shown})"
