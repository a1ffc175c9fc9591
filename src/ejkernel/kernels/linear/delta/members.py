"""Members of the family whose tokens write several times: each is as many tokens of the delta rule."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import as_array, check_cumulative, float_array, integers
from ejkernel.kernels.linear.delta.spec import canonicalise
from ejkernel.kernels.linear.sequences import without_padding_tokens
from ejkernel.kernels.linear.spec import LAYOUT, of_shape
from ejkernel.ops import Call

# below, a state is not read before it has decayed: exp(12) is multiplied into what reads it
LEAST_RWKV_DECAY = -12.0


def product_call(
    query: Any,
    key: Any,
    value: Any,
    g: Any = None,
    beta: Any = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    *,
    segment_ids: Any = None,
    **options: Any,
) -> Call:
    """The call of a gated delta product, each of whose tokens is n, the last of which has its output."""
    query, key, value = float_array("query", query), float_array("key", key), float_array("value", value)
    if query.ndim < 3:
        raise ValueError(f"query must have 4 dimensions, got shape {query.shape}; {LAYOUT}")
    if key.ndim != query.ndim + 1 or value.ndim != query.ndim + 1:
        raise ValueError(
            f"key {key.shape} and value {value.shape} must have one dimension more than query {query.shape}: "
            f"(batch, length, writes, heads, head_dim)"
        )
    n = key.shape[-3]
    if n == 0:
        raise ValueError(f"key {key.shape} has no writes: its dimension -3 is empty")
    wanted = (*query.shape[:-2], n)
    if key.shape[:-2] != wanted or value.shape[:-2] != wanted:
        raise ValueError(f"key {key.shape} and value {value.shape} must begin with {wanted}, as query {query.shape}")
    *batch, T, _, D = query.shape
    H = value.shape[-2]
    if g is not None:
        shape = (*batch, T, H, D) if float_array("g", g).ndim == query.ndim else (*batch, T, H)
        g = _at_write(of_shape("g", g, shape), n, 0, query.ndim - 3)
    if beta is not None:
        beta = _merged(of_shape("beta", beta, (*batch, T, n, H)), query.ndim - 3)
    return canonicalise(
        _at_write(query, n, n - 1, query.ndim - 3),
        _merged(key, query.ndim - 3),
        _merged(value, query.ndim - 3),
        g,
        beta,
        initial_state,
        _of_writes(cu_seqlens, n, query.shape[-3]),
        segment_ids=_of_each_write(segment_ids, n),
        **options,
    )


def rwkv7_call(
    r: Any,
    w: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    *,
    segment_ids: Any = None,
    softmax_scale: Any = 1.0,
    **options: Any,
) -> Call:
    """The call of RWKV-7: a token first reads the state by `a` and writes that by `b`, then writes v by k.

    Erasing reads the decayed state, `a` the one before: it is multiplied by what has decayed.
    """
    given = {"r": r, "w": w, "k": k, "a": a, "b": b}
    arrays = {name: float_array(name, x) for name, x in given.items()}
    v = float_array("v", v)
    r, w, k, a, b = arrays.values()
    for name, x in arrays.items():
        if x.shape != r.shape or x.ndim < 3:
            raise ValueError(f"{name} {x.shape} must have the shape of r {r.shape}; {LAYOUT}")
    if v.shape[:-1] != r.shape[:-1]:
        raise ValueError(f"v {v.shape} must have the batch, length and heads of r {r.shape}; {LAYOUT}")
    length = r.ndim - 3
    tokens = (r, w, k, v, a, b)
    r, w, k, v, a, b = without_padding_tokens(tokens, segment_ids, cu_seqlens, r.shape[:-3], r.shape[-3])
    decay, erase = _decay_and_erase(w, a)
    return canonicalise(
        _at_write(r, 2, 1, length),
        _merged(jnp.stack([b, k], length + 1), length),
        _at_write(v, 2, 1, length),
        _at_write(decay, 2, 0, length),
        None,
        initial_state,
        _of_writes(cu_seqlens, 2, r.shape[-3]),
        segment_ids=_of_each_write(segment_ids, 2),
        erase_key=_at_write(erase, 2, 0, length),
        softmax_scale=softmax_scale,
        **options,
    )


def _of_writes(cu_seqlens: Any, n: int, T: int) -> Any:
    """Cumulative lengths of sequences each of whose tokens is n."""
    if cu_seqlens is None:
        return None
    lengths = integers("cu_seqlens", cu_seqlens, 1)
    check_cumulative("cu_seqlens", lengths, T)
    return lengths * n if isinstance(lengths, np.ndarray) else _multiplied(lengths, n)


def _of_each_write(ids: Any, n: int) -> Any:
    if ids is None:
        return None
    ids = as_array("segment_ids", ids)
    return np.repeat(ids, n, -1) if isinstance(ids, np.ndarray) else jnp.repeat(ids, n, -1)


# compiled: outside jit, their constants would be sent to the device one by one
@partial(jax.jit, static_argnums=1)
def _multiplied(x: jax.Array, n: int) -> jax.Array:
    return x * n


@jax.jit
def _decay_and_erase(w: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    decay = jnp.maximum(w.astype(jnp.float32), LEAST_RWKV_DECAY)
    erase = -a.astype(jnp.float32) * jnp.exp(-decay)
    return decay, erase if a.dtype == jnp.float16 else erase.astype(a.dtype)  # float16 may not hold it


@partial(jax.jit, static_argnums=(1, 2, 3))
def _at_write(x: jax.Array, n: int, at: int, axis: int) -> jax.Array:
    """One of n tokens is that of x, the others are zeros."""
    widths = [(0, 0)] * (x.ndim + 1)
    widths[axis + 1] = (at, n - 1 - at)
    return _merged(jnp.pad(jnp.expand_dims(x, axis + 1), widths), axis)


def _merged(x: jax.Array, axis: int) -> jax.Array:
    """(..., T, n, ...) to (..., T * n, ...)."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
