"""Checks of queries beside a cache, and of the keys, values and scales that a cache holds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import FLOATS, check_has_numbers, check_sizes_known

# the dtypes that a cache may have beside those of queries
CACHE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")


def array(name: str, x: Any, layout: str, *ranks: int, dtypes: tuple[str, ...] = FLOATS, rows: str = "some") -> Any:
    """An array with one of the ranks and dtypes, without an empty dimension.

    `rows` of the first one: "some", "any" for none too, or "unknown" while tracing.
    """
    check_has_numbers(name, x)
    if rows != "unknown":
        check_sizes_known(name, x)
    if str(x.dtype) not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; supported: {', '.join(dtypes)}")
    if x.ndim not in ranks:
        raise ValueError(f"{name} must be {layout}, got shape {x.shape}")
    if 0 in x.shape[rows != "some" :]:
        raise ValueError(f"{name} has an empty dimension: shape {x.shape}")
    return jnp.asarray(x)


def cache(name: str, x: Any, layout: str, rank: int, *, rows: str = "some") -> Any:
    """A cache of keys or values: the dtypes of queries, or the narrow ones."""
    return array(name, x, layout, rank, dtypes=(*FLOATS, *CACHE_DTYPES), rows=rows)


def cache_scale(name: str, scale: Any, Hkv: int) -> jax.Array | None:
    """(Hkv,) float32 from a scalar or one number per key head."""
    if scale is None:
        return None
    scale = scale if isinstance(scale, jax.Array) else np.asarray(scale)
    if not jnp.issubdtype(scale.dtype, jnp.integer) and not jnp.issubdtype(scale.dtype, jnp.floating):
        raise TypeError(f"{name} must be a number or numbers, got {scale.dtype}")
    if scale.shape not in ((), (1,), (Hkv,)):
        raise ValueError(f"{name} must be a scalar or (key heads,) = ({Hkv},), got shape {scale.shape}")
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (Hkv,))
