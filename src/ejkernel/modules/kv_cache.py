"""Writing into a paged cache of keys and values."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ejkernel.cache.writes import write_interleaved_pages, write_pages


def write_kv_pages(
    key_cache: jax.Array,
    value_cache: jax.Array,
    key: Float[Array, "N Hkv D"],
    value: Float[Array, "N Hkv Dv"],
    slots: Int[Array, " N"],
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Put new keys and values into their slots of the pages.

    In place under jit with the caches donated (`donate_argnums=(0, 1)`): nothing of them is copied. Numbers are cast to
    the dtype of the cache, rounded to nearest; into int8 and float8 what is beyond the range becomes its end.

    Args:
        key_cache: `(pages, page_size, Hkv, D)`: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8.
        value_cache: `(pages, page_size, Hkv, Dv)`.
        key: `(N, Hkv, D)`, one row per new token.
        value: `(N, Hkv, Dv)`.
        slots: `(N,)`, `page * page_size + offset` of each token; a negative one is skipped. No slot may come twice,
            which is checked on the host, or with `EJKERNEL_CHECKS=1`.
        k_scale: scalar or `(Hkv,)`: keys are divided by it, as readers given the same `k_scale` multiply by it.
        v_scale: the same for values.

    Returns:
        Both caches.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import write_kv_pages
    >>> cache = jnp.zeros((2, 4, 1, 1))
    >>> key, value = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1), jnp.ones((3, 1, 1))
    >>> write_kv_pages(cache, cache, key, value, jnp.array([5, -1, 0]))[0][..., 0, 0].tolist()
    [[3.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    """
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    return write_pages(caches, key, value, slots, k_scale, v_scale)


def write_interleaved_kv_pages(
    kv_pages: jax.Array,
    key: Float[Array, "N Hkv D"],
    value: Float[Array, "N Hkv D"],
    slots: Int[Array, " N"],
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> jax.Array:
    """The same for the pages of `ragged_page_attention`, which hold keys in even rows and values in odd ones.

    Args:
        kv_pages: `(pages, page_size, 2 * Hkv, D)`; donate it.
        key: `(N, Hkv, D)`; `value`, `slots` and the scales as in `write_kv_pages`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import write_interleaved_kv_pages
    >>> pages = write_interleaved_kv_pages(jnp.zeros((1, 2, 2, 1)), jnp.ones((1, 1, 1)), jnp.full((1, 1, 1), 2.0), [1])
    >>> pages[0, :, :, 0].tolist()
    [[0.0, 0.0], [1.0, 2.0]]
    """
    return write_interleaved_pages({"kv_pages": kv_pages}, key, value, slots, k_scale, v_scale)
