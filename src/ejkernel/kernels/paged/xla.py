"""Paged attention in plain XLA: tiles of query tokens loop over their own pages, side by side.

All tiles take their n-th step together, so the loop ends with the longest sequence there is, whatever the table could
hold. A step gathers one block of keys and values per tile; nothing of the cache is copied beyond that.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.online_softmax import (
    MASKED,
    OnlineSoftmax,
    merge,
    nothing_seen,
    online_finish,
    online_step,
    with_sinks,
)
from ejkernel.kernels.common.tiles import (
    capped,
    finite,
    matmul,
    nan_rows,
)
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
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays
from ejkernel.ops.sharding import varying_like
from ejkernel.types.segments import searched


@dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
        block_q: query tokens of one sequence per tile.
        block_k: keys per step of a tile; rounded to whole pages, or to a sub-page.
    """

    block_q: int = 64
    block_k: int = 256

    def __post_init__(self) -> None:
        config_ints(self, ("block_q", "block_k"))


def unsupported(call: Call) -> list[str]:
    return []


# cache elements that one step of all tiles gathers; a CPU gains nothing from large steps, and short sequences lose
_STEP = {"cpu": 1 << 20, "gpu": 1 << 23, "tpu": 1 << 23}


def default_config(call: Call) -> Config:
    dims, spec = dimensions(call), call.spec
    # ragged: about as many tokens as a sequence has on average, so that a batch of decodes wastes nothing
    tokens = spec.tokens or -(-dims.T // dims.N)
    block_q = min(128, 1 << (tokens - 1).bit_length())
    tiles = dims.B * _tile_count(spec, dims, block_q) * (spec.num_splits or 1)
    room = _STEP[call.target.backend] // (tiles * dims.Hkv * (dims.D + dims.Dv))
    return Config(block_q, min(1024, max(128, 1 << room.bit_length() >> 1)))


def search_space(call: Call) -> list[Config]:
    block_q = default_config(call).block_q
    return [Config(block_q, k) for k in (128, 256, 512, 1024, 2048)]


class _Tiles(NamedTuple):
    """The work: one entry per tile of query tokens and split of its keys."""

    sequence: jax.Array
    token: jax.Array  # its first query token
    position: jax.Array  # of that token in its sequence
    queries: jax.Array  # how many of its tokens are real
    low: jax.Array  # keys that any of them may see: from low to high
    high: jax.Array
    key: jax.Array  # first key of its first step
    steps: jax.Array  # of block_k keys


def forward(call: Call, config: Config) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    return by_row(call, partial(_one_row, call.spec, dimensions(call), config)), {}


def _tile_count(spec: Spec, dims: Dimensions, block_q: int) -> int:
    if spec.tokens is not None:
        return dims.N * -(-spec.tokens // block_q)
    return dims.T // block_q + dims.N


def _one_row(spec: Spec, dims: Dimensions, config: Config, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    block_q = min(config.block_q, dims.T)
    sub_page = _sub_page(dims.L, config.block_k)
    block_k = sub_page * max(1, min(config.block_k, dims.S) // sub_page)
    splits = spec.num_splits or 1
    rows = sequences(spec, dims, arrays)
    count = _tile_count(spec, dims, block_q)
    n, offset, tile_row = _tiling(spec, dims, rows, block_q, count)
    tiles = _tiles(spec, rows, arrays.get("window"), n, offset, block_q, block_k, sub_page, splits)
    state = _loop_over_keys(spec, dims, arrays, tiles, block_q, block_k, sub_page)
    state = merge(jax.tree.map(lambda x: x.reshape(splits, count, *x.shape[1:]), state))
    if "sinks" in arrays:
        state = with_sinks(state, jnp.tile(arrays["sinks"].reshape(dims.Hkv, dims.G), (1, block_q)))
    out, lse = online_finish(state)  # (tiles, Hkv, block_q * G, ...)
    if "v_scale" in arrays:
        out = out * arrays["v_scale"][:, None, None]
    top = jnp.where(state.running_sum == 0.0, -jnp.inf, state.running_max)

    def tokens(x: jax.Array, fill: float) -> jax.Array:
        """(tiles, Hkv, block_q * G, ...) to (T, H, ...), `fill` for tokens of no sequence."""
        x = x.reshape(count, dims.Hkv, block_q, dims.G, *x.shape[3:])
        x = jnp.moveaxis(x, 2, 1).reshape(count * block_q, dims.H, *x.shape[4:])
        return x.at[tile_row].get(mode="fill", fill_value=fill)

    lse, top = (tokens(x, -jnp.inf).swapaxes(0, 1) for x in (lse, top))
    return {"out": tokens(out, 0.0).astype(spec.out_dtype or arrays["query"].dtype), "lse": lse, "top": top}


def _sub_page(L: int, block_k: int) -> int:
    """Tokens of the largest sub-page, of which a page has a whole number, that fits into a block."""
    return next(tokens for tokens in range(min(L, block_k), 0, -1) if L % tokens == 0)


def _tiling(spec: Spec, dims: Dimensions, rows: Any, block_q: int, count: int) -> tuple[jax.Array, ...]:
    """Sequence and offset of each tile, and the row of each query token among the tiles' (past the end: none)."""
    token, tile = jnp.arange(dims.T), jnp.arange(count)
    if spec.tokens is not None:
        each = -(-spec.tokens // block_q)
        first, owner, n = jnp.arange(dims.N) * each, token // spec.tokens, tile // each
    else:
        # the tiles of sequence n start here; each has enough of them, and all fit into `count`
        first = rows.first // block_q + jnp.arange(dims.N)
        owner = searched(rows.first, token) - 1
        n = searched(first, tile) - 1
    within = token - rows.first[owner]
    tile_row = (first[owner] + within // block_q) * block_q + within % block_q
    return n, (tile - first[n]) * block_q, jnp.where(within < rows.queries[owner], tile_row, count * block_q)


def _tiles(
    spec: Spec,
    rows: Any,
    window: jax.Array | None,
    n: jax.Array,
    offset: jax.Array,
    block_q: int,
    block_k: int,
    sub_page: int,
    splits: int,
) -> _Tiles:
    """Every tile once per split: (splits * tiles,)."""
    queries = jnp.clip(rows.queries[n] - offset, 0, block_q)
    position = rows.length[n] - rows.queries[n] + offset
    low, high = rows.start[n], rows.length[n]
    if spec.causal:
        high = jnp.minimum(high, position + queries)
    if (first := lowest_keys(spec, position, window)) is not None:
        low = jnp.maximum(low, first)
    key = low // sub_page * sub_page
    steps = jnp.where(queries > 0, jnp.maximum(high - key, 0) + block_k - 1, 0) // block_k
    split_steps = -(-steps // splits)
    split = jnp.arange(splits)[:, None]
    tiles = _Tiles(
        sequence=n,
        token=rows.first[n] + offset,
        position=position,
        queries=queries,
        low=low,
        high=high,
        key=key + split * split_steps * block_k,
        steps=jnp.clip(steps - split * split_steps, 0, split_steps),
    )
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (splits, n.shape[0])).reshape(-1), tiles)


def _loop_over_keys(
    spec: Spec, dims: Dimensions, arrays: dict[str, jax.Array], tiles: _Tiles, block_q: int, block_k: int, sub_page: int
) -> OnlineSoftmax:
    """The running softmax of every tile, (tiles, Hkv, block_q * G), after all its keys."""
    Hkv, G, D, Dv = dims.Hkv, dims.G, dims.D, dims.Dv
    count = tiles.token.shape[0]
    tokens = jnp.minimum(tiles.token[:, None] + jnp.arange(block_q), dims.T - 1)
    query = arrays["query"][tokens].reshape(count, block_q, Hkv, G, D)
    query = jnp.moveaxis(query, 1, 2).reshape(count, Hkv, block_q * G, D)
    operands = {name: _by_tile(arrays[name], tokens, Hkv, G) for name in ("int_rows", "float_rows") if name in arrays}
    tables = {name: arrays[name] for name in ("int_tables", "float_tables") if name in arrays}
    scale = spec.scale * arrays.get("k_scale", jnp.ones(Hkv))
    table = page_ids(dims, arrays)
    precision = lax.Precision.HIGHEST if query.dtype == jnp.float32 else None

    def one_head(
        position: jax.Array, index: jax.Array, seen: jax.Array,
        state: OnlineSoftmax, query: jax.Array, key: jax.Array, value: jax.Array, scale: Any, operands: Arrays,
    ):  # fmt: skip
        logits = capped(matmul(query, key, (1, 1), precision) * scale, spec.soft_cap)
        read = row_operands(operands | tables)
        if spec.rules.score is not None:
            logits = read.value(spec.rules.score, position, index, logits)
        if spec.rules.mask is not None:
            seen &= read.value(spec.rules.mask, position, index)
        logits = jnp.where(seen, nan_rows(logits.T, value).T, MASKED)
        state, weights = online_step(state, logits)
        return state._replace(out=state.out + matmul(weights.astype(value.dtype), finite(value), (1, 0), precision))

    def one_tile(
        step: jax.Array, tile: _Tiles, state: OnlineSoftmax, query: jax.Array, operands: Arrays
    ) -> OnlineSoftmax:
        first = tile.key + step * block_k
        first_keys = first + jnp.arange(0, block_k, sub_page)
        slot = jnp.minimum(first_keys // dims.L, dims.W - 1)
        sub_pages = table[tile.sequence, slot] * (dims.L // sub_page) + first_keys % dims.L // sub_page
        key, value = read_pages(arrays, lambda pages: pages.reshape(-1, sub_page, *pages.shape[2:])[sub_pages])
        key, value = (x.reshape(block_k, Hkv, -1).swapaxes(0, 1).astype(query.dtype) for x in (key, value))
        position = tile.position + jnp.arange(block_q * G)[:, None] // G
        index = first + jnp.arange(block_k)
        seen = (tile.low <= index) & (index < tile.high) & (step < tile.steps)
        if spec.causal:
            seen &= index <= position
        if (low := lowest_keys(spec, position, arrays.get("window"))) is not None:
            seen &= index >= low
        return jax.vmap(partial(one_head, position, index, seen))(state, query, key, value, scale, operands)

    def body(loop: tuple[jax.Array, OnlineSoftmax]) -> tuple[jax.Array, OnlineSoftmax]:
        step, state = loop
        return step + 1, jax.vmap(partial(one_tile, step))(tiles, state, query, operands)

    start = nothing_seen((count, Hkv, block_q * G), Dv)
    last = tiles.steps.max()
    loop = varying_like((jnp.int32(0), start), (arrays, last))
    return lax.while_loop(lambda loop: loop[0] < last, body, loop)[1]


def _by_tile(x: jax.Array, tokens: jax.Array, Hkv: int, G: int) -> jax.Array:
    """Operands of rows (H|1, n, T) for the rows of tiles with these tokens: (tiles, Hkv, n, block_q * G)."""
    count, block_q = tokens.shape
    x = jnp.broadcast_to(x[:, :, tokens], (Hkv * G, x.shape[1], count, block_q))
    return jnp.einsum("hgnct->chntg", x.reshape(Hkv, G, *x.shape[1:])).reshape(count, Hkv, x.shape[1], block_q * G)


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward)
