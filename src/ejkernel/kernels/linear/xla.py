"""Linear attention in plain XLA: chunk by chunk, in float32."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.checks.options import config_ints
from ejkernel.kernels.linear import chunks, scans
from ejkernel.kernels.linear.layout import Layout, layout_of
from ejkernel.kernels.linear.scans import Scan, ScanResult
from ejkernel.kernels.linear.spec import dimensions
from ejkernel.kernels.linear.xla_chunks import (
    chunk_of,
    decayed,
    from_earlier,
    hidden_zeros,
    in_groups,
    pair_scores,
    product,
    started,
)
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays
from ejkernel.ops.sharding import varying_like


@dataclass(frozen=True)
class Config:
    """How a scan is cut.

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
    return Config(chunk_of(dims.T, dims.N))


def search_space(call: Call) -> list[Config]:
    return [Config(chunk, group) for chunk in (1, 16, 32, 64, 128) for group in (1, 8)]


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    return scans.forward(call, partial(run_scan, config))


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    return scans.backward(call, residuals, cotangents, partial(run_scan, config))


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)

_TOKENS = ("a", "b", "c", "g", "inner", "outer", "factor", "minuend")


def run_scan(config: Config, scan: Scan) -> ScanResult:
    """The scan, so many tokens at a time."""
    if scan.descending:
        return unmirrored(run_scan(config, mirrored(scan)))
    B, N, H, _, C = scan.state_shape
    layout = layout_of(scan.a.shape[1], scan.cu_seqlens, config.chunk)
    rows = layout.valid.shape[1]
    group = max(1, min(config.group, rows))
    starts = hidden_zeros(jnp.zeros(scan.state_shape, jnp.float32) if scan.start is None else scan.start)
    channels = (C,) if scan.outer is not None else ()
    sums_starts = jnp.zeros((B, N, H, *channels), jnp.float32) if scan.sums_start is None else scan.sums_start
    packed = scan.cu_seqlens is not None

    def over_chunks(starts: jax.Array, state: jax.Array, *x: Any) -> tuple[jax.Array, Any]:
        """The state after a group; and those before each of its chunks, and after it."""
        return lax.scan(partial(_next_state, starts if packed else None), state, x)

    def merged(x: jax.Array) -> jax.Array:
        """(group, B, ...) to (group * B, ...): what chunks do side by side."""
        return x.reshape(group * B, *x.shape[2:])

    def unmerged(x: jax.Array) -> jax.Array:
        return x.reshape(group, B, *x.shape[1:])

    def step(carried: Any, x: tuple[Arrays, Any]) -> tuple[Any, Any]:
        """A group: tiles (group, B, H, chunk, ...), flags (group, B)."""
        tile, flags = x
        (state, tangent, sums), chunk = carried, {name: merged(y) for name, y in tile.items()}
        gain, keep = map(unmerged, _gain(scan, chunk))
        state, (before, after) = over_chunks(starts, state, flags, gain, keep)
        states = [merged(before)]
        if scan.tangent:
            gain, _ = _gain(scan, _tangent(chunk))
            gain = unmerged(gain) + keep * before * tile["count"][..., None, None]
            tangent, (before, after) = over_chunks(jnp.zeros_like(starts), tangent, flags, gain, keep)
            states.append(merged(before))
        out, products = _outputs(scan, chunk, *states)
        if products is not None:
            products = unmerged(products)
        if products is not None and scan.minuend is not None:
            products = tile["minuend"] - products
            total = products.sum(3)
            sums, (before, _) = over_chunks(sums_starts, sums, flags, total, jnp.ones_like(total))
            products = jnp.cumsum(products, 3) + jnp.expand_dims(before, 3)
        out = unmerged(out) if scan.with_out and out is not None else None
        return (state, tangent, sums), (out, products, after if scan.with_state and packed else None)

    tokens = {name: in_groups(x, group) for name, x in _tokens(scan, layout).items()}
    flags = in_groups(layout.first, group), in_groups(layout.sequence, group)
    states = (starts[:, 0], hidden_zeros(jnp.zeros_like(starts[:, 0])), sums_starts[:, 0])
    states = varying_like(states, (tokens, starts, sums_starts))
    (state, tangent, _), groups = lax.scan(step, states, (tokens, flags))
    out, products, after = jax.tree.map(lambda x: x.reshape(x.shape[0] * group, *x.shape[2:])[:rows], groups)
    starts, state = (jnp.zeros_like(starts), tangent) if scan.tangent else (starts, state)
    return ScanResult(
        None if out is None else layout.scatter(out).astype(scan.c.dtype),
        layout.final_states(starts, state, after) if scan.with_state else None,
        None if products is None else layout.scatter(products),
    )


def _tokens(scan: Scan, layout: Layout) -> Arrays:
    """The arrays of a scan in chunks, float32; the decays of heads in one."""
    given = {name: getattr(scan, name) for name in _TOKENS if getattr(scan, name) is not None}
    tiles = {name: layout.gather(x).astype(jnp.float32) for name, x in given.items()}
    tiles |= {name: jnp.maximum(tiles[name], chunks.LEAST_DECAY) for name in ("g", "inner", "outer") if name in tiles}
    if scan.g_gamma is not None:
        # padding of a chunk does not decay the state
        gamma = jnp.where(layout.valid[..., None], jnp.maximum(scan.g_gamma, chunks.LEAST_DECAY)[:, None, None], 0)
        gamma = jnp.moveaxis(gamma, -1, 2)
        tiles["g"] = tiles.get("g", 0.0) + jnp.broadcast_to(gamma, (scan.a.shape[0], *gamma.shape[1:]))
    if scan.tangent:
        count = jnp.asarray(layout.valid).sum(-1, dtype=jnp.float32)[:, :, None]
        tiles["count"] = jnp.broadcast_to(count, (scan.a.shape[0], *count.shape[1:]))
    return tiles


def _next_state(starts: jax.Array | None, state: jax.Array, x: Any) -> tuple[jax.Array, Any]:
    """The state after a chunk, from the one before; and both. `starts` are those of packed sequences."""
    (first, sequence), added, keep = x
    state = started(starts, state, first, sequence)
    after = keep * state + added
    return after, (state, after)


# Chunks: tiles are (B, H, chunk, channels) and (B, H, chunk), where B may be several chunks' -----------------


def _gain(scan: Scan, x: Arrays) -> tuple[jax.Array, jax.Array]:
    """What a chunk adds to the state, and how much it keeps of it."""
    chunk = x["a"].shape[2]
    _, to_end = (m.astype(np.float32) for m in chunks.ends(chunk, scan.deferred))
    all_tokens = np.ones((1, chunk), np.float32)
    # g counts once: with the inner decays
    keep = decayed(
        jnp.ones((*x["b"].shape[:2], x["b"].shape[3], 1), jnp.float32), x, "inner", all_tokens, transposed=True
    )
    keep = keep * jnp.exp(product("rl,bhlc->bhrc", all_tokens, x["outer"])) if "outer" in x else keep
    b, c = decayed(x["b"], x, "inner", to_end), decayed(x["c"], x, "outer", to_end)
    return product("bhia,bhic->bhac", b, c), keep


def _tangent(x: Arrays) -> Arrays:
    """With b times the number of decays from each token to the end of its chunk: what the tangent of a state gains."""
    to_end = jnp.maximum(x["count"][..., None] - _upto(x), 0)
    return x | {"b": x["b"] * to_end[..., None]}


def _upto(x: Arrays) -> np.ndarray:
    """How many tokens of a chunk come up to each."""
    return np.arange(1, x["a"].shape[2] + 1, dtype=np.float32)


def _outputs(
    scan: Scan, x: Arrays, h: jax.Array, tangent: jax.Array | None = None
) -> tuple[jax.Array | None, jax.Array | None]:
    """The output of a chunk and its products, where they are wanted, from the states before it."""
    if not scan.with_out and scan.factor is None:
        return None, None
    to_start, _ = (m.astype(np.float32) for m in chunks.ends(x["a"].shape[2], scan.deferred))
    a, scores = decayed(x["a"], x, "inner", to_start), pair_scores(x, scan.deferred)
    if tangent is not None:
        token = _upto(x)
        a, h = jnp.concatenate([token[:, None] * a, a], 3), jnp.concatenate([h, tangent], 2)
        scores *= token[:, None] - token[None, :]
    from_state = decayed(product("bhia,bhac->bhic", a, h), x, "outer", to_start)
    others = scan.scale * (from_state + from_earlier(x, scores, scan.deferred))
    products = None
    if scan.factor is not None:
        products = x["factor"] * others
        products = products if scan.outer is not None else products.sum(-1)
    if tangent is not None:  # what a token gives itself has not been decayed
        return others, products
    diagonal = scan.scale * product("bhia,bhia->bhi", x["a"], x["b"])[..., None] * x["c"]
    return others + diagonal, products


def mirrored(scan: Scan) -> Scan:
    """The same scan the other way, on reversed arrays: `unmirrored` reverses its results."""
    names = (*_TOKENS, "start", "sums_start")
    flipped: dict[str, Any] = {
        name: jnp.flip(getattr(scan, name), 1) for name in names if getattr(scan, name) is not None
    }
    if scan.cu_seqlens is not None:
        # padding comes first then, and the last sequence
        flipped["cu_seqlens"] = scan.a.shape[1] - jnp.flip(scan.cu_seqlens, 1)
    return replace(scan, descending=not scan.descending, **flipped)


def unmirrored(result: ScanResult) -> ScanResult:
    return ScanResult(*(None if x is None else jnp.flip(x, 1) for x in result))
