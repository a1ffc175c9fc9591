"""Chunks of queries, over which the XLA programs of this family loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.operation import Arrays


def query_chunks(rows: Arrays, size: int, fill: dict[str, Any]) -> Arrays:
    """Arrays (B, T, ...) as (chunks, B, size, ...); the last one is filled up with zeros, or as `fill` says."""

    def one(name: str, x: jax.Array) -> jax.Array:
        B, T, *trailing = x.shape
        padding = [(0, 0), (0, -T % size)] + [(0, 0)] * len(trailing)
        padded = jnp.pad(x, padding, constant_values=fill.get(name, 0))
        return jnp.moveaxis(padded.reshape(B, -1, size, *trailing), 1, 0)

    return {name: one(name, x) for name, x in rows.items()}


def joined_chunks(chunks: jax.Array, T: int) -> jax.Array:
    """(chunks, B, size, ...) as (B, T, ...)."""
    n, B, size, *trailing = chunks.shape
    return jnp.moveaxis(chunks, 0, 1).reshape(B, n * size, *trailing)[:, :T]


def over_chunks(function: Callable[[Arrays], Any], rows: Arrays, size: int, fill: dict[str, Any]) -> Any:
    """`function` of every chunk, joined; its results have the queries on axis 1."""
    T = next(iter(rows.values())).shape[1]
    return jax.tree.map(lambda x: joined_chunks(x, T), jax.lax.map(function, query_chunks(rows, size, fill)))
