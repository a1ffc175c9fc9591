"""The scale of logits, which is part of a kernel's program unless it is traced."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import core as jax_core

from ejkernel.checks.options import number


def with_static_scale(name: str, query: jax.Array, scale: Any) -> tuple[jax.Array, float]:
    """The queries and a static scale, `D ** -0.5` where None is given; a traced one is multiplied into the queries."""
    if not isinstance(scale, jax_core.Tracer):
        return query, query.shape[-1] ** -0.5 if scale is None else number(name, scale)
    if scale.shape != () or not any(jnp.issubdtype(scale.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"{name} must be a number, got {scale.dtype} of shape {scale.shape}")
    return (query.astype(jnp.float32) * scale.astype(jnp.float32)).astype(query.dtype), 1.0
