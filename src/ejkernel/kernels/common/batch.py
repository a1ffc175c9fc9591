"""Leading batch dimensions: none, one or several as the caller has them, exactly one inside."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ejkernel.ops import Shards

Batch = tuple[int, ...]


def folded(x: jax.Array, rank: int = 3) -> jax.Array:
    """(*batch, ...) to (B, ...), where `rank` dimensions are behind the batch."""
    batch, trailing = x.shape[: x.ndim - rank], x.shape[x.ndim - rank :]
    return x if len(batch) == 1 else x.reshape(math.prod(batch), *trailing)


def folded_broadcast(x: jax.Array, batch: Batch, rank: int = 3) -> jax.Array:
    """The same for what broadcasts along the batch and may lack leading dimensions: (B, ...), or (1, ...) if alike."""
    batch = batch or (1,)
    x = x.reshape((1,) * (len(batch) + rank - x.ndim) + x.shape)
    if len(batch) > 1 and set(x.shape[: len(batch)]) != {1}:
        x = jnp.broadcast_to(x, (*batch, *x.shape[len(batch) :]))
    return x.reshape(math.prod(x.shape[: len(batch)]), *x.shape[len(batch) :])


def unfolded(x: jax.Array, batch: Batch) -> jax.Array:
    """(B, ...) to (*batch, ...)."""
    return x if len(batch) == 1 else x.reshape(*batch, *x.shape[1:])


def folded_specs(specs: Any, dimensions: int) -> Any:
    """PartitionSpecs (one, several, by name, or None) of arrays with so many batch dimensions, as those of one."""
    if specs is None or dimensions == 1:
        return specs
    if isinstance(specs, dict):
        return {name: folded_specs(spec, dimensions) for name, spec in specs.items()}
    if not isinstance(specs, PartitionSpec):
        return tuple(folded_specs(spec, dimensions) for spec in specs)
    if dimensions == 0:
        return PartitionSpec(None, *specs)
    if any(entry is not None for entry in specs[1:dimensions]):
        raise ValueError(f"{specs} splits batch dimensions behind the first, of {dimensions}: only the first may be")
    return PartitionSpec(*specs[:1], *specs[dimensions:])


def shards(shape: tuple[int, ...], mesh: Any, in_specs: Any, out_specs: Any) -> Shards:
    """The caller's words on many devices, whose query has that shape."""
    dimensions = len(shape) - 3
    return Shards(mesh, folded_specs(in_specs, dimensions), folded_specs(out_specs, dimensions))
