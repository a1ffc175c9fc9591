"""Queries a few at a time: what XLA programs of this family loop over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.operation import Arrays


def cut_rows(rows: Arrays, size: int, fill: dict[str, Any]) -> Arrays:
    """Arrays (B, T, ...) as (parts, B, size, ...); the last part is filled up with zeros, or with what `fill` says."""

    def one(name: str, x: jax.Array) -> jax.Array:
        B, T, *trailing = x.shape
        padding = [(0, 0), (0, -T % size)] + [(0, 0)] * len(trailing)
        padded = jnp.pad(x, padding, constant_values=fill.get(name, 0))
        return jnp.moveaxis(padded.reshape(B, -1, size, *trailing), 1, 0)

    return {name: one(name, x) for name, x in rows.items()}


def joined_rows(parts: jax.Array, T: int) -> jax.Array:
    """(parts, B, size, ...) as (B, T, ...)."""
    n, B, size, *trailing = parts.shape
    return jnp.moveaxis(parts, 0, 1).reshape(B, n * size, *trailing)[:, :T]


def over_rows(function: Callable[[Arrays], Any], rows: Arrays, size: int, fill: dict[str, Any]) -> Any:
    """`function` of every part, joined; its results have the queries on axis 1."""
    T = next(iter(rows.values())).shape[1]
    return jax.tree.map(lambda x: joined_rows(x, T), jax.lax.map(function, cut_rows(rows, size, fill)))
