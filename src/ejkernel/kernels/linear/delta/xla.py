"""The delta rule in plain XLA: chunk by chunk, in float32, its gradient by autodiff.

Of a chunk with the state h before it, what its tokens write once they have erased, d, solves a triangular system:

    d = (I + L)^-1 (w * v - p+ h),   out = scale * (q+ h + P d),   h' = keep * h + k-^T d

where L and P are the products of erase keys and of queries with earlier keys, decayed from these on, q+ and p+ are
decayed from the beginning of the chunk on and k- to its end. The inverses and all but d and h are made for several
chunks at once.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.linear import chunks
from ejkernel.kernels.linear.delta.inverse import unit_lower_inverse
from ejkernel.kernels.linear.delta.spec import ARRAYS, dimensions
from ejkernel.kernels.linear.layout import Layout, layout_of
from ejkernel.kernels.linear.xla import Config
from ejkernel.kernels.linear.xla_chunks import chunk_of, decayed, hidden_zeros, in_groups, pair_scores, product, started
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays
from ejkernel.ops.sharding import varying_like


def unsupported(call: Call) -> list[str]:
    return []


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    return Config(chunk_of(dims.T, dims.N))


def search_space(call: Call) -> list[Config]:
    return [Config(chunk, group) for chunk in (16, 32, 64, 128) for group in (1, 8)]


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    return _chunked(call, config, call.arrays), {}


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    trained = {name: x for name, x in call.arrays.items() if ARRAYS[name].grad}
    outputs, pull = jax.vjp(lambda x: _chunked(call, config, call.arrays | x), trained)
    given = {name: cotangents.get(name, jnp.zeros_like(x)) for name, x in outputs.items()}
    return pull(given)[0]


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)


def _chunked(call: Call, config: Config, arrays: Arrays) -> Arrays:
    """The outputs of a call with these arrays."""
    B, T, H, _, D, Dv, N = dimensions(call)
    start = arrays.get("initial_state", jnp.zeros((B, N, H, D, Dv), jnp.float32))
    start = hidden_zeros(start)
    cu = arrays.get("cu_seqlens")
    layout = layout_of(T, cu, config.chunk)
    rows = layout.valid.shape[1]
    group = max(1, min(config.group, rows))

    @jax.checkpoint
    def step(state: jax.Array, x: tuple[Arrays, Any]) -> tuple[jax.Array, Any]:
        tile, flags = x
        return _group(call, None if cu is None else start, state, tile, flags)

    tokens = {name: in_groups(x, group) for name, x in _tiles(arrays, layout).items()}
    flags = in_groups(layout.first, group), in_groups(layout.sequence, group)
    state = varying_like(start[:, 0], (tokens, start))
    state, (out, after) = lax.scan(step, state, (tokens, flags))
    out, after = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], (out, after))
    out = layout.scatter(out).astype(arrays["value"].dtype)
    return _wanted(call, out, layout.final_states(start, state, after))


def _wanted(call: Call, out: jax.Array, state: jax.Array) -> Arrays:
    return ({"out": out} if call.spec.with_out else {}) | ({"state": state} if call.spec.with_state else {})


def _tiles(arrays: Arrays, layout: Layout) -> Arrays:
    """The arrays of tokens in chunks (B, rows, heads, chunk, ...), float32."""
    tokens = {name: x for name, x in arrays.items() if name not in ("initial_state", "cu_seqlens")}
    tiles = {name: layout.gather(x).astype(jnp.float32) for name, x in tokens.items()}
    return tiles | {name: jnp.maximum(tiles[name], chunks.LEAST_DECAY) for name in ("g", "gk") if name in tiles}


def _group(
    call: Call, starts: jax.Array | None, state: jax.Array, tile: Arrays, flags: Any
) -> tuple[jax.Array, tuple[jax.Array, Any]]:
    """The state after some chunks (group, B, ...), their outputs, and the state after each of them if packed."""
    x = {name: y.reshape(-1, *y.shape[2:]) for name, y in tile.items()}
    group, chunk, heads = tile["value"].shape[0], x["value"].shape[2], x["value"].shape[1]
    to_start, to_end = (m.astype(np.float32) for m in chunks.ends(chunk, False))
    q, k = (jnp.repeat(x[name], heads // x[name].shape[1], 1) for name in ("query", "key"))
    beta = x["beta"][..., None] if "beta" in x else jnp.ones((), jnp.float32)
    erase, write = x.get("erase_key", beta * k), x.get("write_gate", beta)
    decays = {"inner" if name == "gk" else name: x[name] for name in ("g", "gk") if name in x}
    inverse = unit_lower_inverse(pair_scores({"a": erase, "b": k} | decays, False))
    scores = pair_scores({"a": q, "b": k} | decays, False)
    scores += jnp.eye(chunk, dtype=jnp.float32) * (q * k).sum(-1)[..., None]
    keep = decayed(jnp.ones((*k.shape[:2], k.shape[3], 1), jnp.float32), decays, "inner", to_start[-1:], True)
    erase, reading = (decayed(y, decays, "inner", to_start) for y in (erase, q))
    writing = decayed(k, decays, "inner", to_end)

    def next_state(state: jax.Array, x: Any) -> tuple[jax.Array, Any]:
        (first, sequence), written, erase, inverse, writing, keep = x
        before = started(starts, state, first, sequence)
        written = product("bhij,bhjc->bhic", inverse, written - product("bhia,bhac->bhic", erase, before))
        after = keep * before + product("bhia,bhic->bhac", writing, written)
        return after, (before, written, None if starts is None else after)

    per_chunk = [y.reshape(group, -1, *y.shape[1:]) for y in (write * x["value"], erase, inverse, writing, keep)]
    state, (before, written, after) = lax.scan(next_state, state, (flags, *per_chunk))
    before, written = (y.reshape(-1, *y.shape[2:]) for y in (before, written))
    out = product("bhia,bhac->bhic", reading, before) + product("bhij,bhjc->bhic", scores, written)
    return state, ((call.spec.scale * out).reshape(group, -1, *out.shape[1:]), after)
