"""Paged attention as it is defined: every query token with its own copy of its sequence's keys, in float32."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.paged.rules import row_operands
from ejkernel.kernels.paged.spec import (
    Dimensions,
    Spec,
    by_row,
    dimensions,
    lowest_keys,
    page_ids,
    read_pages,
    sequences,
)
from ejkernel.ops import Call


def reference(call: Call, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """out (B, T, H, Dv), lse and top (B, H, T); with a narrow `dtype`, the naive computation in that dtype."""
    return by_row(call, partial(_one_row, call.spec, dimensions(call), dtype))


def _one_row(spec: Spec, dims: Dimensions, dtype: Any, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    T, H, Hkv, S = dims.T, dims.H, dims.Hkv, dims.S
    rows = sequences(spec, dims, arrays)
    token, key_index = jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    last = rows.first + rows.queries
    mine = (rows.first[None] <= token[:, None]) & (token[:, None] < last[None])  # (T, N)
    owned, n = mine.any(1), mine.argmax(1)
    position = (rows.length - rows.queries - rows.first)[n] + token
    seen = owned[:, None] & (rows.start[n][:, None] <= key_index[None]) & (key_index[None] < rows.length[n][:, None])
    if spec.causal:
        seen &= key_index[None] <= position[:, None]
    if (low := lowest_keys(spec, position, arrays.get("window"))) is not None:
        seen &= key_index[None] >= low[:, None]
    seen = jnp.broadcast_to(seen, (H, T, S))
    operands = row_operands(arrays)
    if spec.rules.mask is not None:
        seen &= operands.value(spec.rules.mask, position[:, None], key_index[None])

    def wide(cache: jax.Array, name: str) -> jax.Array:
        """The cache of every token's sequence (T, S, H, D), scaled, without what the token and head do not see."""
        scale = arrays.get(name, jnp.ones(Hkv, jnp.float32))[None, None, :, None]
        cache = cache.reshape(T, S, Hkv, -1).astype(jnp.float32) * scale
        cache = jnp.repeat(cache.astype(dtype), H // Hkv, axis=2)
        return jnp.where(jnp.moveaxis(seen, 0, 2)[..., None], cache, 0)

    key, value = read_pages(arrays, lambda pages: pages[page_ids(dims, arrays)[n]])
    key, value = wide(key, "k_scale"), wide(value, "v_scale")
    einsum = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    logits = spec.scale * einsum("thd,tshd->hts", arrays["query"].astype(dtype), key)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    if spec.rules.score is not None:
        logits = operands.value(spec.rules.score, position[:, None], key_index[None], logits)
    logits = jnp.where(seen, logits, -jnp.inf)
    sinks = arrays.get("sinks", jnp.full(H, -jnp.inf, jnp.float32))
    sinks = jnp.where(owned[None], sinks[:, None], -jnp.inf)
    top = jnp.maximum(logits.max(-1), sinks)
    base = jnp.where(jnp.isneginf(top), 0.0, top)  # a row that sees nothing: exp(-inf - 0) is the 0 it should be
    weights = jnp.exp(logits - base[..., None])
    total = weights.sum(-1) + jnp.exp(sinks - base)
    weights = weights / jnp.where(total == 0, 1.0, total)[..., None]
    out = einsum("hts,tshd->thd", weights.astype(dtype), value).astype(dtype)
    return {"out": out, "lse": top + jnp.log(jnp.where(total == 0, 1.0, total)), "top": top}
