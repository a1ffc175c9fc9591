"""The model: layers of grouped-query attention and an MLP, around an attention that is given.

Norms have no weights, positions no encoding, and the MLP is narrow: all that would cost every contender the same, and
two cases must fit a GPU side by side.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

Weights = dict[str, jax.Array]
# query (..., H, D), key and value (..., Hkv, D) to (..., H, D)
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# (cache, number of the step, query (B, H, D), key, value (B, Hkv, D)) to the cache with both, and (B, H, D)
AttendCached = Callable[[Any, jax.Array, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]

WEIGHTS = ("w_query", "w_key", "w_value", "w_out", "w_up", "w_down")


class Sizes(Protocol):
    @property
    def layers(self) -> int: ...
    @property
    def H(self) -> int: ...
    @property
    def Hkv(self) -> int: ...
    @property
    def D(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...


def weight_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Of the embedding, which is the output's too, and of the weights of one layer."""
    width, keys = sizes.H * sizes.D, sizes.Hkv * sizes.D
    layer = ((width, width), (width, keys), (width, keys), (width, width), (width, 2 * width), (2 * width, width))
    return {"embedding": (sizes.vocabulary, width), **dict(zip(WEIGHTS, layer, strict=True))}


def normed(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def layer(sizes: Sizes, weights: Weights, x: jax.Array, attend: Attend) -> jax.Array:
    """One layer of tokens (..., width)."""
    inner = normed(x)
    query, key, value = ((inner @ weights[name]).reshape(*x.shape[:-1], -1, sizes.D) for name in WEIGHTS[:3])
    x = x + attend(query, key, value).reshape(x.shape) @ weights["w_out"]
    return x + jax.nn.relu(normed(x) @ weights["w_up"]) @ weights["w_down"]


def logits(embedding: jax.Array, x: jax.Array) -> jax.Array:
    """float32 (..., vocabulary)."""
    product = jnp.einsum("...w,vw->...v", normed(x), embedding, preferred_element_type=jnp.float32)
    return product * embedding.shape[1] ** -0.5


def losses(
    sizes: Sizes, weights: Weights, tokens: jax.Array, targets: jax.Array, attend: Attend, dtype: Any, keep: bool = True
) -> jax.Array:
    """The loss of every token (1, T), in float32; weights are (layers, ...), and cast to `dtype`.

    `keep=False` computes layers again for the backward.
    """
    weights = {name: x.astype(dtype) for name, x in weights.items()}

    def one(x: jax.Array, weights: Weights) -> tuple[jax.Array, None]:
        return layer(sizes, weights, x, attend), None

    x = weights["embedding"][tokens]
    x, _ = lax.scan(one if keep else jax.checkpoint(one), x, {name: weights[name] for name in WEIGHTS})
    scores = logits(weights["embedding"], x)
    chosen = jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(scores, -1) - chosen


def decode(sizes: Sizes, weights: Weights, caches: Sequence[Any], tokens: jax.Array, attend: AttendCached) -> jax.Array:
    """Logits (steps, B, vocabulary) of tokens (steps, B), one step after another.

    Every layer's cache is an array of its own, which the loop updates in place.
    """

    def step(caches: list[Any], given: tuple[jax.Array, jax.Array]) -> tuple[list[Any], jax.Array]:
        number, token = given
        x, written = weights["embedding"][token], []

        def attend_next(cache: Any, *qkv: jax.Array) -> jax.Array:
            cache, out = attend(cache, number, *qkv)
            written.append(cache)
            return out

        for i, cache in enumerate(caches):
            x = layer(sizes, {name: weights[name][i] for name in WEIGHTS}, x, partial(attend_next, cache))
        return written, logits(weights["embedding"], x)

    return lax.scan(step, list(caches), (jnp.arange(len(tokens)), tokens))[1]
