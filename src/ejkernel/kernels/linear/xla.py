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
from ejkernel.kernels.linear import chunks, scans
from ejkernel.kernels.linear.layout import Layout, layout_of
from ejkernel.kernels.linear.scans import Walk, Walked
from ejkernel.kernels.linear.spec import dimensions
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays
from ejkernel.ops.sharding import varying_like


@dataclass(frozen=True)
class Config:
    """How a walk is cut.

    Attributes:
        chunk: tokens done at once; 1 is the recurrence itself.
        group: chunks done side by side: all but the states between them, which pass from one to the next.
    """

    chunk: int = 64
    group: int = 8

    def __post_init__(self) -> None:
        config_ints(self, ("chunk",), power_of_two=True)
        config_ints(self, ("group",))


def unsupported(call: Call) -> list[str]:
    return []


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    # no longer than packed sequences are: a chunk belongs to one
    return Config(min(64, power_of_two(max(1, min(dims.T, max(8, dims.T // max(1, dims.N)))))))


def search_space(call: Call) -> list[Config]:
    return [Config(chunk, group) for chunk in (1, 16, 32, 64, 128) for group in (1, 8)]


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    return scans.forward(call, partial(walk, config))


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    return scans.backward(call, residuals, cotangents, partial(walk, config))


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)

_TOKENS = ("a", "b", "c", "g", "inner", "outer", "factor", "balance")
_product = partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def walk(config: Config, w: Walk) -> Walked:
    """Take a walk, so many tokens at a time."""
    if w.descending:
        return unmirrored(walk(config, mirrored(w)))
    B, _, H, A = w.a.shape
    C, layout = w.c.shape[3], layout_of(w, config.chunk)
    rows = layout.valid.shape[1]
    group = max(1, min(config.group, rows))
    starts = _unknown(jnp.zeros((B, layout.sequences, H, A, C), jnp.float32) if w.start is None else w.start)
    channels = (C,) if w.outer is not None else ()
    sums_starts = jnp.zeros((B, layout.sequences, H, *channels), jnp.float32) if w.sums_start is None else w.sums_start
    packed = w.cu_seqlens is not None

    def pass_on(starts: jax.Array, state: jax.Array, *x: Any) -> tuple[jax.Array, Any]:
        """The state behind a group; and those before each of its chunks, and behind."""
        return lax.scan(partial(_pass_on, starts if packed else None), state, x)

    def step(carried: Any, x: tuple[Arrays, Any]) -> tuple[Any, Any]:
        """A group: tiles (group, B, H, chunk, ...), flags (group, B)."""
        tile, flags = x
        (state, aged, sums), many = carried, {name: y.reshape(group * B, *y.shape[2:]) for name, y in tile.items()}
        gain, keep = (y.reshape(group, B, *y.shape[1:]) for y in _gain(w, many))
        state, (before, behind) = pass_on(starts, state, flags, gain, keep)
        states = [before.reshape(group * B, *before.shape[2:])]
        if w.aged:
            gain, _ = (y.reshape(group, B, *y.shape[1:]) for y in _gain(w, _aged(many)))
            gain = gain + keep * before * tile["count"][..., None, None]
            aged, (before, behind) = pass_on(jnp.zeros_like(starts), aged, flags, gain, keep)
            states.append(before.reshape(group * B, *before.shape[2:]))
        out, products = _outputs(w, many, *states)
        if products is not None:
            products = products.reshape(group, B, *products.shape[1:])
        if products is not None and w.balance is not None:
            products = tile["balance"] - products
            total = products.sum(3)
            sums, (before, _) = pass_on(sums_starts, sums, flags, total, jnp.ones_like(total))
            products = jnp.cumsum(products, 3) + jnp.expand_dims(before, 3)
        out = out.reshape(group, B, *out.shape[1:]) if w.with_out and out is not None else None
        return (state, aged, sums), (out, products, behind if w.with_state and packed else None)

    def grouped(x: Any) -> jax.Array:
        """(B or 1, rows, ...) to (groups, group, B or 1, ...), with chunks of no tokens at the end."""
        x = jnp.moveaxis(jnp.asarray(x), 1, 0)
        x = jnp.pad(x, ((0, -rows % group), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(x.shape[0] // group, group, *x.shape[1:])

    tokens = {name: grouped(x) for name, x in _tokens(w, layout).items()}
    states = (starts[:, 0], _unknown(jnp.zeros_like(starts[:, 0])), sums_starts[:, 0])
    states = varying_like(states, (tokens, starts, sums_starts))
    (state, aged, _), found = lax.scan(step, states, (tokens, (grouped(layout.first), grouped(layout.sequence))))
    out, products, behind = (None if x is None else x.reshape(x.shape[0] * group, *x.shape[2:])[:rows] for x in found)
    return Walked(
        None if out is None else layout.scatter(out).astype(w.c.dtype),
        layout.final_states(*((jnp.zeros_like(starts), aged) if w.aged else (starts, state)), behind)
        if w.with_state
        else None,
        None if products is None else layout.scatter(products),
    )


def _unknown(state: jax.Array) -> jax.Array:
    """The state, hidden from the compiler, which may know that it is zero.

    XLA for CPUs leaves a product with such zeros unwritten (jaxlib 0.10.2 seldom, 0.12.0.1 often) and goes on with
    whatever lies there.
    """
    return lax.optimization_barrier(state)


def _tokens(w: Walk, layout: Layout) -> Arrays:
    """The arrays of a walk in chunks, float32; the decays of heads in one."""
    found = {name: layout.gather(getattr(w, name)) for name in _TOKENS if getattr(w, name) is not None}
    found = {name: x.astype(jnp.float32) for name, x in found.items()}
    found |= {name: jnp.maximum(found[name], chunks.LEAST_DECAY) for name in ("g", "inner", "outer") if name in found}
    if w.g_gamma is not None:
        # padding of a chunk does not decay the state
        gamma = jnp.where(layout.valid[..., None], jnp.maximum(w.g_gamma, chunks.LEAST_DECAY)[:, None, None], 0)
        gamma = jnp.moveaxis(gamma, -1, 2)
        found["g"] = found.get("g", 0.0) + jnp.broadcast_to(gamma, (w.a.shape[0], *gamma.shape[1:]))
    if w.aged:
        count = jnp.asarray(layout.valid).sum(-1, dtype=jnp.float32)[:, :, None]
        found["count"] = jnp.broadcast_to(count, (w.a.shape[0], *count.shape[1:]))
    return found


def _pass_on(starts: jax.Array | None, state: jax.Array, x: Any) -> tuple[jax.Array, Any]:
    """The state behind a chunk, from the one before; and both. `starts` are those of packed sequences."""
    (first, sequence), added, keep = x
    if starts is not None:
        sequence, first = (jnp.broadcast_to(y, state.shape[:1]) for y in (sequence, first))
        state = _select(first, _rows_at(sequence, starts), state)
    behind = keep * state + added
    return behind, (state, behind)


def _rows_at(index: jax.Array, x: jax.Array) -> jax.Array:
    """x[b, index[b]] of every row b."""
    return jax.vmap(lambda row, i: row[i])(x, index)


def _select(where: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(where.reshape(-1, *(1,) * (x.ndim - 1)), x, y)


# Chunks: tiles are (B, H, chunk, channels) and (B, H, chunk), where B may be several chunks' -----------------


def _gain(w: Walk, x: Arrays) -> tuple[jax.Array, jax.Array]:
    """What a chunk adds to the state, and how much it keeps of it."""
    chunk = x["a"].shape[2]
    _, to_end = (m.astype(np.float32) for m in chunks.ends(chunk, w.late))
    everything = np.ones((1, chunk), np.float32)
    # g counts once: with the inner decays
    keep = _decayed(
        jnp.ones((*x["b"].shape[:2], x["b"].shape[3], 1), jnp.float32), x, "inner", everything, transposed=True
    )
    keep = keep * jnp.exp(_product("rl,bhlc->bhrc", everything, x["outer"])) if "outer" in x else keep
    b, c = _decayed(x["b"], x, "inner", to_end), _decayed(x["c"], x, "outer", to_end)
    return _product("bhia,bhic->bhac", b, c), keep


def _aged(x: Arrays) -> Arrays:
    """With b times the number of decays from each token to the end of its chunk: what an early walk's state gains."""
    to_end = jnp.maximum(x["count"][..., None] - _upto(x), 0)
    return x | {"b": x["b"] * to_end[..., None]}


def _upto(x: Arrays) -> np.ndarray:
    """How many tokens of a chunk come up to each."""
    return np.arange(1, x["a"].shape[2] + 1, dtype=np.float32)


def _outputs(
    w: Walk, x: Arrays, h: jax.Array, aged: jax.Array | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """The output of a chunk and its products, where they are wanted, from the states before it."""
    if not w.with_out and w.factor is None:
        return None, None
    to_start, _ = (m.astype(np.float32) for m in chunks.ends(x["a"].shape[2], w.late))
    looking, scores = _decayed(x["a"], x, "inner", to_start), _scores(x, w.late)
    if aged is not None:
        token = _upto(x)
        looking, h = jnp.concatenate([token[:, None] * looking, looking], 3), jnp.concatenate([h, aged], 2)
        scores *= token[:, None] - token[None, :]
    looked = _product("bhia,bhac->bhic", looking, h)
    looked = _decayed(looked, x, "outer", to_start)
    others = w.scale * (looked + _others(x, scores, w.late))
    products = None
    if w.factor is not None:
        products = x["factor"] * others
        products = products if w.outer is not None else products.sum(-1)
    if aged is not None:  # what a token gives itself has not been decayed
        return others, products
    diagonal = w.scale * _product("bhia,bhia->bhi", x["a"], x["b"])[..., None] * x["c"]
    return others + diagonal, products


def _decayed(y: jax.Array, x: Arrays, name: str, reach: np.ndarray, transposed: bool = False) -> jax.Array:
    """y times the decays that each row reaches over; those of whole heads are among the inner ones.

    Rows are the second last axis of y, or with `transposed` one row is all of it: channels are the second last axis.
    """
    if name in x:
        total = _product("rl,bhlc->bhrc", reach, x[name])
        y = y * jnp.exp(total.mT if transposed else total)
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


def mirrored(w: Walk) -> Walk:
    """The same walk the other way, on arrays turned round: `unmirrored` turns its results back."""
    names = (*_TOKENS, "start", "sums_start")
    flipped: dict[str, Any] = {name: jnp.flip(getattr(w, name), 1) for name in names if getattr(w, name) is not None}
    if w.cu_seqlens is not None:
        # padding comes first then, and the last sequence
        flipped["cu_seqlens"] = w.a.shape[1] - jnp.flip(w.cu_seqlens, 1)
    return replace(w, descending=not w.descending, **flipped)


def unmirrored(walked: Walked) -> Walked:
    return Walked(*(None if x is None else jnp.flip(x, 1) for x in walked))
