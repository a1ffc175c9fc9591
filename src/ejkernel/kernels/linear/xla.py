"""Linear attention in plain XLA: chunk by chunk, in float32."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.linear import chunks, walks
from ejkernel.kernels.linear.layout import layout_of
from ejkernel.kernels.linear.spec import dimensions
from ejkernel.kernels.linear.walks import Walk, Walked
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays
from ejkernel.ops.sharding import varying_like


@dataclass(frozen=True)
class Config:
    """Tokens per chunk; 1 is the recurrence itself."""

    chunk: int = 64

    def __post_init__(self) -> None:
        config_ints(self, ("chunk",), power_of_two=True)


def unsupported(call: Call) -> list[str]:
    return []


def default_config(call: Call) -> Config:
    return Config(min(64, power_of_two(max(1, dimensions(call).T))))


def search_space(call: Call) -> list[Config]:
    return [Config(chunk) for chunk in (1, 16, 32, 64, 128)]


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    return walks.forward(call, partial(walk, config.chunk))


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    return walks.backward(call, residuals, cotangents, partial(walk, config.chunk))


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)

_TOKENS = ("a", "b", "c", "g", "inner", "outer", "factor", "balance")
_product = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def walk(chunk: int, w: Walk) -> Walked:
    """Take a walk, so many tokens at a time."""
    if w.descending:
        return unmirrored(walk(chunk, mirrored(w)))
    B, _, H, A = w.a.shape
    C, dtype = w.c.shape[3], w.c.dtype
    layout = layout_of(w, chunk)
    tokens = {name: layout.gather(getattr(w, name)) for name in _TOKENS if getattr(w, name) is not None}
    tokens = {name: x.astype(jnp.float32) for name, x in tokens.items()}
    tokens |= {
        name: jnp.maximum(tokens[name], chunks.LEAST_DECAY) for name in ("g", "inner", "outer") if name in tokens
    }
    if w.g_gamma is not None:
        # padding of a chunk does not decay the state
        gamma = jnp.where(layout.valid[..., None], jnp.maximum(w.g_gamma, chunks.LEAST_DECAY)[:, None, None], 0)
        tokens["g"] = tokens.get("g", 0.0) + jnp.moveaxis(gamma, -1, 2)
    starts = jnp.zeros((B, layout.sequences, H, A, C), jnp.float32) if w.start is None else w.start
    states = (starts[:, 0], jnp.zeros((B, H, C) if w.outer is not None else (B, H), jnp.float32))
    if w.rest is not None:
        states = (states[0], w.rest[:, 0])
    rests = jnp.zeros((B, layout.sequences, *states[1].shape[1:]), jnp.float32) if w.rest is None else w.rest

    def step(carried: Any, x: tuple[Arrays, Any]) -> tuple[Any, Any]:
        tile, (first, sequence) = x
        if w.cu_seqlens is not None:
            at = partial(_rows_at, sequence)
            carried = tuple(_select(first, at(new), old) for new, old in zip((starts, rests), carried, strict=True))
        state, rest = carried
        state, out, products = _chunk(w, tile, state)
        if products is not None and w.balance is not None:
            products, rest = _running(tile["balance"] - products, rest)
        kept = state if w.with_state and w.cu_seqlens is not None else None
        return (state, rest), (out if w.with_out else None, products, kept)

    tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()}
    flags = (jnp.moveaxis(layout.first, 1, 0), jnp.moveaxis(layout.sequence, 1, 0))
    (state, _), (out, products, kept) = lax.scan(step, varying_like(states, (tokens, starts, rests)), (tokens, flags))
    return Walked(
        None if out is None else layout.scatter(out).astype(dtype),
        layout.final_states(starts, state, kept) if w.with_state else None,
        None if products is None else layout.scatter(products),
    )


def _rows_at(index: jax.Array, x: jax.Array) -> jax.Array:
    """x[b, index[b]] of every row b."""
    return jax.vmap(lambda row, i: row[i])(x, index)


def _select(where: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(where.reshape(-1, *(1,) * (x.ndim - 1)), x, y)


# One chunk: tiles are (B, H, chunk, channels) and (B, H, chunk) --------------------------------------------


def _chunk(w: Walk, x: Arrays, h: jax.Array) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The state after a chunk, its output and its products."""
    chunk = x["a"].shape[2]
    to_start, to_end = (m.astype(np.float32) for m in chunks.ends(chunk, w.late))
    a, b, c = x["a"], x["b"], x["c"]
    out = products = None
    if w.with_out or w.factor is not None:
        before = _decayed(a, x, "inner", to_start)
        before = _decayed(_product("bhia,bhac->bhic", before, h), x, "outer", to_start)
        others = w.scale * (before + _others(x, _scores(x, w.late), w.late))
        own = w.scale * _product("bhia,bhia->bhi", a, b)[..., None] * c
        out = others + own
        if w.factor is not None:
            products = x["factor"] * others
            products = products if w.outer is not None else products.sum(-1)
    everything = np.ones((1, chunk), np.float32)
    # g counts once: with the inner decays
    kept = _decayed(h, x, "inner", everything, turned=True)
    kept = kept * jnp.exp(_product("rl,bhlc->bhrc", everything, x["outer"])) if "outer" in x else kept
    b, c = _decayed(b, x, "inner", to_end), _decayed(c, x, "outer", to_end)
    return kept + _product("bhia,bhic->bhac", b, c), out, products


def _decayed(y: jax.Array, x: Arrays, name: str, reach: np.ndarray, turned: bool = False) -> jax.Array:
    """y times the decays that each row reaches over; those of whole heads are among the inner ones.

    Rows are the second last axis of y, or with `turned` one row is all of it: channels are the second last axis.
    """
    if name in x:
        total = _product("rl,bhlc->bhrc", reach, x[name])
        y = y * jnp.exp(total.mT if turned else total)
    if name == "inner" and "g" in x:
        y = y * jnp.exp(_product("rl,bhl->bhr", reach, x["g"]))[..., None]
    return y


def _scores(x: Arrays, late: bool) -> jax.Array:
    """(B, H, chunk, chunk): a_i . b_j, decayed from j to i by inner and head decays, for j before i; zero elsewhere."""
    chunk = x["a"].shape[2]
    lower = np.tri(chunk, k=-1, dtype=bool)
    if "inner" not in x:
        scores = jnp.where(lower, _product("bhia,bhja->bhij", x["a"], x["b"]), 0)
    else:
        scores = jnp.zeros((*x["a"].shape[:3], chunk), jnp.float32)
        for level, p, q in _factors(x["inner"], late):
            scores = jnp.where(level.pairs, _product("bhia,bhja->bhij", x["a"] * p, x["b"] * q), scores)
    if "g" in x:
        to_start, to_end = (m.astype(np.float32) for m in chunks.ends(chunk, late))
        # decays between j and i, which are those behind j up to i: sums of them alone, so that nothing cancels
        between = _product("il,bhlj->bhij", to_start, x["g"][..., None] * to_end.T)
        scores = jnp.where(lower, scores * jnp.exp(jnp.where(lower, between, 0)), 0)
    return scores


def _others(x: Arrays, scores: jax.Array, late: bool) -> jax.Array:
    """What the tokens of a chunk get from those before them in it."""
    if "outer" not in x:
        return _product("bhij,bhjc->bhic", scores, x["c"])
    out = jnp.zeros(x["c"].shape, jnp.float32)
    for level, p, q in _factors(x["outer"], late):
        out += p * _product("bhij,bhjc->bhic", jnp.where(level.pairs, scores, 0), x["c"] * q)
    return out


def _factors(gates: jax.Array, late: bool) -> list[tuple[chunks.Level, jax.Array, jax.Array]]:
    """Of every level, what its pairs are weighed with: that of i and that of j, per channel."""
    chunk, found = gates.shape[2], []
    for level in chunks.levels(chunk, late):
        factor = jnp.exp(_product("rl,bhlc->bhrc", level.reach.astype(np.float32), gates))
        found.append((level, factor, factor))
    level = chunks.near(chunk, late)
    total = _product("rl,bhlc->bhrc", level.reach.astype(np.float32), jnp.maximum(gates, chunks.NEAR_DECAY))
    return [*found, (level, jnp.exp(total), jnp.exp(-total))]


def _running(x: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums along the tokens of a chunk, from what came before it, and the last of them."""
    sums = jnp.cumsum(x, axis=2) + jnp.expand_dims(rest, 2)
    return sums, sums[:, :, -1]


def mirrored(w: Walk) -> Walk:
    """The same walk the other way, on arrays turned round: `unmirrored` turns its results back."""
    names = (*_TOKENS, "start", "rest")
    turned: dict[str, Any] = {name: jnp.flip(getattr(w, name), 1) for name in names if getattr(w, name) is not None}
    if w.cu_seqlens is not None:
        # padding comes first then, and the last sequence
        turned["cu_seqlens"] = w.a.shape[1] - jnp.flip(w.cu_seqlens, 1)
    return replace(w, descending=not w.descending, **turned)


def unmirrored(walked: Walked) -> Walked:
    return Walked(*(None if x is None else jnp.flip(x, 1) for x in walked))
