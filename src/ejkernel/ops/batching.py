"""vmap, for every operation: the mapped axis is folded into the batch axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.sharding import split_vmap


def batch_size(arrays: dict[str, Any], mapped: dict[str, bool] | None = None) -> int:
    """The batch of a set of arrays: each holds B or 1 rows (behind the mapped axis, where it has one)."""
    return max(x.shape[1 if mapped is not None and mapped[name] else 0] for name, x in arrays.items())


def _fold(x: jax.Array, mapped: bool, size: int, B: int, expand: bool) -> jax.Array:
    """(size, b, ...) or (b, ...) to (size * B, ...); an unmapped broadcast row stays one row unless `expand`."""
    if not mapped and x.shape[0] == 1 and not expand:
        return x
    trailing = x.shape[2:] if mapped else x.shape[1:]
    x = x if mapped else x[None]
    return jnp.broadcast_to(x, (size, B, *trailing)).reshape(size * B, *trailing)


def _unfold(x: jax.Array, size: int, B: int, rows: int) -> jax.Array:
    """(size * B, ...) to (size, rows, ...), summing over the batch where the original held one broadcast row."""
    x = x.reshape(size, B, *x.shape[1:])
    return x if rows == B else x.sum(1, keepdims=True)


def fold_forward(function: Callable[[Any], Any], whole: frozenset[str]) -> Callable[[Any], Any]:
    """A function of named arrays whose outputs all have the whole batch; those named in `whole` never broadcast."""
    wrapped = jax.custom_batching.custom_vmap(function)

    @wrapped.def_vmap
    @split_vmap
    def rule(axis_size, in_batched, arrays):  # pyright: ignore[reportUnusedFunction]
        (mapped,) = in_batched
        B = batch_size(arrays, mapped)
        folded = {name: _fold(x, mapped[name], axis_size, B, name in whole) for name, x in arrays.items()}
        outputs = wrapped(folded)
        unfolded = jax.tree.map(lambda x: _unfold(x, axis_size, B, B), outputs)
        return unfolded, jax.tree.map(lambda _: True, unfolded)

    return wrapped


def fold_backward(function: Callable[[Any, Any, Any], Any], whole: frozenset[str]) -> Callable[[Any, Any, Any], Any]:
    """A function (arrays, residuals, cotangents) -> gradients by array name.

    The rows of arrays named in `whole` are expanded, no others': they get a gradient for every mapped call, or never
    broadcast.
    """
    wrapped = jax.custom_batching.custom_vmap(function)

    @wrapped.def_vmap
    @split_vmap
    def rule(axis_size, in_batched, *groups):  # pyright: ignore[reportUnusedFunction]
        B = max(batch_size(group, mapped) for group, mapped in zip(groups, in_batched, strict=True) if group)
        arrays, mapped = groups[0], in_batched[0]
        folded = {name: _fold(x, mapped[name], axis_size, B, name in whole) for name, x in arrays.items()}
        others = [
            {name: _fold(x, mapped[name], axis_size, B, expand=True) for name, x in group.items()}
            for group, mapped in zip(groups[1:], in_batched[1:], strict=True)
        ]
        gradients = wrapped(folded, *others)
        unfolded = {
            name: _unfold(x, axis_size, B, arrays[name].shape[1 if mapped[name] else 0])
            for name, x in gradients.items()
        }
        return unfolded, jax.tree.map(lambda _: True, unfolded)

    return wrapped
