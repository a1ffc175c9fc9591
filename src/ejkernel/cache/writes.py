"""Writing new keys and values into pages, in place where the caches are donated."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.checks.arrays import integers
from ejkernel.checks.caches import array, cache, cache_scale
from ejkernel.checks.values import check


def write_pages(
    pages: dict[str, Any], key: jax.Array, value: jax.Array, slots: Any, k_scale: Any, v_scale: Any
) -> tuple[jax.Array, jax.Array]:
    """`write_kv_pages`: `pages` are the two caches by the names that errors give them."""
    slots = _checked_slots(pages, {"key": key, "value": value}, slots)
    key_pages, value_pages = pages.values()
    keys = _write(key_pages, _divided(key, k_scale, "k_scale"), slots)
    return keys, _write(value_pages, _divided(value, v_scale, "v_scale"), slots)


def write_interleaved_pages(
    pages: dict[str, Any], key: jax.Array, value: jax.Array, slots: Any, k_scale: Any, v_scale: Any
) -> jax.Array:
    """`write_interleaved_kv_pages`: `pages` is the one cache by its name."""
    slots = _checked_slots(pages, {"key": key, "value": value}, slots)
    pair = jnp.stack([_divided(key, k_scale, "k_scale"), _divided(value, v_scale, "v_scale")], axis=2)
    (kv_pages,) = pages.values()
    return _write(kv_pages, pair.reshape(key.shape[0], 2 * key.shape[1], key.shape[2]), slots)


@jax.jit
def _write(pages: Any, rows: jax.Array, slots: Any) -> jax.Array:
    """`pages` (P, L, heads, D) with `rows` (N, heads, D) at `slots` (N,); a slot outside is left out."""
    P, L, *trailing = pages.shape
    flat = jnp.asarray(pages).reshape(P * L, *trailing)
    # a negative index would count from the end
    at = jnp.where(jnp.asarray(slots) < 0, P * L, slots)
    return flat.at[at].set(stored(rows, pages.dtype), mode="drop").reshape(pages.shape)


def stored(x: jax.Array, dtype: Any) -> jax.Array:
    """x in the dtype of a cache: rounded to nearest, values beyond its range to its ends."""
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x.astype(jnp.float32)), -128, 127).astype(dtype)
    if jnp.finfo(dtype).bits == 8:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(dtype)


def _divided(x: jax.Array, scale: Any, name: str) -> jax.Array:
    """x (N, heads, D) divided by what a reader will multiply with: a scalar or (heads,)."""
    scale = cache_scale(name, scale, x.shape[1])
    return x if scale is None else x.astype(jnp.float32) / scale[None, :, None]


def _repeated(xp: Any, slots: Any) -> Any:
    """Which slots of a page another row has too."""
    ascending = xp.sort(slots)
    rows = xp.searchsorted(ascending, slots, side="right") - xp.searchsorted(ascending, slots, side="left")
    return (slots >= 0) & (rows > 1)


def _checked_slots(pages: dict[str, Any], rows: dict[str, Any], slots: Any) -> Any:
    """`slots` as an array, after checking that caches, rows and slots fit; one cache may hold both keys and values."""
    slots = integers("slots", slots, 1)
    both = len(rows) // len(pages)
    for (name, x), (row_name, row) in zip([p for p in pages.items() for _ in range(both)], rows.items(), strict=True):
        cache(name, x, "(pages, page_size, heads, head_dim)", 4)
        array(row_name, row, "(tokens, heads, head_dim)", 3, rows="unknown")
        if x.shape[2] % both:
            raise ValueError(f"{name} {x.shape} must hold pairs of key and value: an even number of rows per token")
        wanted = (slots.shape[0], x.shape[2] // both, x.shape[3])
        if row.shape != wanted:
            raise ValueError(f"{row_name} {row.shape} must be (slots, heads, head_dim) = {wanted} for {name} {x.shape}")
    first = next(iter(pages.values()))
    room = first.shape[0] * first.shape[1]
    if any(x.shape[:2] != first.shape[:2] for x in pages.values()):
        raise ValueError(f"caches must have the same pages: {', '.join(f'{n} {x.shape}' for n, x in pages.items())}")
    check(slots, lambda xp, slot: slot >= room, f"slots must be below {room}, the tokens of all pages", (slots,))
    check(slots, _repeated, "slots must not come twice", (slots,))
    return slots
