"""Several sequences in a row: by cumulative lengths with a state each, or by segment ids where a state starts anew."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import cumulative_lengths, float_array, int_array, integers
from ejkernel.kernels.common.batch import Batch, folded
from ejkernel.kernels.linear.chunks import LEAST_DECAY
from ejkernel.ops.operation import Arrays


def packing(arrays: Arrays, cu_seqlens: Any, query: jax.Array) -> Arrays:
    """The arrays of a call with cumulative lengths, which pack sequences into one row."""
    if cu_seqlens is None:
        return arrays
    if arrays["query"].shape[0] != 1:
        raise ValueError(f"cu_seqlens packs sequences into one row; query {query.shape} has more, needed 1")
    return arrays | {"cu_seqlens": cumulative_lengths("cu_seqlens", cu_seqlens, query.shape[-3])[None]}


def first_states(arrays: Arrays, initial_state: Any, batch: Batch, shape: tuple[int, ...]) -> Arrays:
    """The arrays of a call with the states that its sequences begin with."""
    if initial_state is None:
        return arrays
    packed = "cu_seqlens" in arrays
    sequences = (arrays["cu_seqlens"].shape[1] - 1,) if packed else batch
    state = float_array("initial_state", initial_state).astype(jnp.float32)
    if state.shape != (*sequences, *shape):
        raise ValueError(f"initial_state has shape {state.shape}, needed {(*sequences, *shape)}")
    return arrays | {"initial_state": state[None] if packed else folded(state)[:, None]}


def segmented(arrays: Arrays, segment_ids: Any, batch: Batch, reverse: bool = False) -> Arrays:
    """The arrays of a call (B, T, ...) with segment ids: at its first token a segment forgets all, padding is nothing.

    Padding is selected away, not multiplied by zero: it may be nan. The state passes through it.
    """
    if segment_ids is None:
        return arrays
    for name in ("cu_seqlens", "initial_state"):
        if name in arrays:
            raise ValueError(f"segment_ids are not for calls with {name}: a segment begins with a state of zeros")
    B, T, *_ = arrays["value"].shape
    ids = int_array("segment_ids", segment_ids)
    if ids.shape not in ((T,), (*batch, T)):
        raise ValueError(f"segment_ids have shape {ids.shape}, needed {(*batch, T)}")
    return _forgetting(arrays, jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (*batch, T)).reshape(B, T), reverse)


# compiled: outside jit, its constants would be sent to the device one by one
@partial(jax.jit, static_argnums=2)
def _forgetting(arrays: Arrays, ids: jax.Array, reverse: bool) -> Arrays:
    B, T, H, _ = arrays["value"].shape
    first = np.arange(T)[None] == (T - 1 if reverse else 0)
    token = ids >= 0
    starts = (ids != jnp.roll(ids, -1 if reverse else 1, 1)) & ~first & token

    def real(x: jax.Array) -> jax.Array:
        return jnp.where(token.reshape(B, T, *(1,) * (x.ndim - 2)), x, jnp.zeros_like(x))

    # what all tokens of a head have is a decay of each, but for padding
    of_heads = arrays.get("g_gamma")
    arrays = {name: real(x) for name, x in arrays.items() if name != "g_gamma"}
    g = arrays["g"] if "g" in arrays else jnp.zeros((B, T, H), jnp.float32)
    if of_heads is not None:
        g = g.astype(jnp.float32) + real(jnp.broadcast_to(of_heads[:, None], (B, T, H)))
    return arrays | {"g": jnp.where(starts[..., None], jnp.full_like(g, LEAST_DECAY), g)}


def without_padding_tokens(
    arrays: tuple[jax.Array, ...], segment_ids: Any, cu_seqlens: Any, batch: Batch, T: int
) -> tuple[jax.Array, ...]:
    """Arrays (*batch, T, ...) with zeros for padding, before anything is computed of it: it may be nan.

    Ids and lengths that do not fit are refused later.
    """
    if segment_ids is not None:
        ids = int_array("segment_ids", segment_ids)
        return _of_tokens(arrays, ids, batch) if ids.shape in ((T,), (*batch, T)) else arrays
    if cu_seqlens is not None:
        lengths = integers("cu_seqlens", cu_seqlens, 1)
        return _of_lengths(arrays, jnp.asarray(lengths, jnp.int32), batch) if lengths.size else arrays
    return arrays


@partial(jax.jit, static_argnums=2)
def _of_tokens(arrays: tuple[jax.Array, ...], ids: jax.Array, batch: Batch) -> tuple[jax.Array, ...]:
    token = jnp.broadcast_to(ids >= 0, (*batch, ids.shape[-1]))

    def real(x: jax.Array) -> jax.Array:
        return jnp.where(token.reshape(*token.shape, *(1,) * (x.ndim - token.ndim)), x, jnp.zeros_like(x))

    return tuple(map(real, arrays))


@partial(jax.jit, static_argnums=2)
def _of_lengths(arrays: tuple[jax.Array, ...], lengths: jax.Array, batch: Batch) -> tuple[jax.Array, ...]:
    token = np.arange(arrays[0].shape[len(batch)], dtype=np.int32)
    return _of_tokens(arrays, jnp.where(token < lengths[-1], 0, -1), batch)
