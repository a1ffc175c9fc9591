"""Paged attention on TPUs, in Pallas: how calls are cut into tiles and blocks, and what that takes of the memories.

VMEM in bytes, for tiles of t query tokens and blocks of k keys; e bytes per number of the cache, c of the matmuls
(2 or 4), heads and head_dim rounded up to whole registers (`_tiled_bytes`):

    pages     2 * k * Hkv * (D + Dv) * e         two buffers, each a block of keys and values of all heads
    tokens    t * H * (2 * D + Dv) * c           two buffers of queries, one of outputs
    rows      t * H * (D * c + Dv * 4 + 2 * 512) queries as rows; sum, maximum and total of the running softmax
    heads     k * Hkv * (D + Dv) * c             a block with heads first, where each head is multiplied on its own
    logits    4 * 4 * rows * columns             float32 logits, weights and masks of a matmul, alive at once; one more
                                                 for a mask function, and for a score function
    read      t * H * 128 * 4 * 3                 for each dtype of what functions read: two buffers, and as rows
    operands  columns * (D + Dv) * (c + 4)       its keys and values as they are multiplied, and in float32
    queries   4 * t * H * D                      in float32, before they become rows
    state     4 * rows * (Dv + 256)              sum, maximum and total of one matmul, while they are replaced

    scales    8 * t * H * 128                    those of keys and values and the sinks, by row, where there are any

A float8 cache takes 4 bytes more per operand on its way. A float32 matmul is made of bfloat16 ones: 6 bytes more for
each number it reads (operands, weights and queries), and queries are held once more before they become rows.

SMEM: 4 bytes per entry of the page table and per sequence, 16 per tile.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.online_softmax import merge, online_finish, state_of
from ejkernel.kernels.common.pallas_tpu import LANES, MIB, SMEM_BYTES, SUBLANES, chip_of, launch
from ejkernel.kernels.common.pallas_tpu_rules import unsupported_operations
from ejkernel.kernels.paged.pallas_tpu.kernel import Blocks, Kernel, Rows, divided
from ejkernel.kernels.paged.spec import Dimensions, Spec, dimensions, sequences
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays


@dataclass(frozen=True)
class Config:
    """Tile sizes.

    Attributes:
        block_q: query tokens of a tile at most.
        block_k: keys of a block; rounded down to whole pages, or to a sub-page.
        joined_rows: tiles with at most so many query rows (tokens times heads) multiply all key heads at once.
    """

    block_q: int = 32
    block_k: int = 512
    joined_rows: int = 128

    def __post_init__(self) -> None:
        config_ints(self, ("block_q", "block_k"))
        config_ints(self, ("joined_rows",), 0)


# How a call is cut -------------------------------------------------------------------------------------------


def _page_names(call: Call) -> tuple[str, ...]:
    return ("kv_pages",) if "kv_pages" in call else ("key_pages", "value_pages")


def _heads_first(call: Call) -> bool:
    """Whether pages are handed over as (heads, tokens, head_dim).

    A tile of memory is 8 rows, or 4, 2 or 1 of whole 32-bit words. Where the heads do not fill such tiles XLA itself
    keeps the tokens next to the head_dim, so that this order is there already and the other one would be a copy.
    """
    pages = call[_page_names(call)[0]]
    _, _, L, heads, _ = pages.shape
    fills_tiles = heads % SUBLANES == 0 or (heads in (1, 2, 4) and heads * pages.dtype.itemsize >= 4)
    return not fills_tiles and L % SUBLANES == 0


def _blocks(dims: Dimensions, block_k: int, heads_first: bool) -> Blocks:
    L = dims.L
    if block_k >= L:
        return Blocks(L, L, min(block_k // L, dims.W))
    if heads_first:  # tokens lie in tiles of memory, which a sub-page must not cut
        sub_pages = [n for n in range(32, block_k + 1, 32) if L % n == 0]
        return Blocks(L, sub_pages[-1] if sub_pages else L, 1)
    return Blocks(L, block_k, 1)


def _rows(spec: Spec, dims: Dimensions, config: Config, heads_first: bool) -> tuple[Rows, ...]:
    """Where lengths are the device's to know, single tokens get rows of their own."""
    most = min(config.block_q, spec.tokens or dims.T)

    def of(tokens: int) -> Rows:
        joined = dims.Hkv == 1 or tokens * dims.H <= config.joined_rows
        return Rows(tokens, joined and not heads_first, dims)

    return (of(1), of(most)) if spec.tokens is None and most > 1 else (of(most),)


def _tile_count(spec: Spec, dims: Dimensions, block_q: int) -> int:
    if spec.tokens is not None:
        return dims.B * dims.N * -(-spec.tokens // block_q)
    return dims.B * (dims.T // block_q + dims.N + 1)


def _kernel(call: Call, config: Config) -> Kernel:
    spec, dims = call.spec, dimensions(call)
    heads_first = _heads_first(call)
    names = _page_names(call)
    # at least two: Mosaic takes more memory to cut rows of one number
    read = {name: max(2, call[name].shape[2]) for name in ("int_rows", "float_rows") if name in call}
    rows, cores = _rows(spec, dims, config, heads_first), chip_of(call.target).cores
    tiles = _tile_count(spec, dims, rows[-1].tokens)
    return Kernel(
        spec=spec,
        dims=dims,
        rows=rows,
        blocks=_blocks(dims, config.block_k, heads_first),
        heads_first=heads_first,
        paired=len(names) == 1,
        batched=tuple(call[name].shape[0] > 1 for name in names),
        scaled=any(name in call for name in ("sinks", "k_scale", "v_scale")),
        read=read,
        cache=call[names[0]].dtype,
        dtype=jnp.float32 if call["query"].dtype == jnp.float16 else call["query"].dtype,
        tiles=tiles,
        splits=spec.num_splits or max(1, cores // tiles),
        cores=cores,
    )


# What fits ---------------------------------------------------------------------------------------------------


def _tiled_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array in VMEM: its last dimension fills lanes, the one before it sublanes."""
    *major, rows, columns = shape
    itemsize = jnp.dtype(dtype).itemsize
    tile = max(4 // itemsize, min(SUBLANES, 1 << (rows - 1).bit_length()))
    return math.prod(major) * _up(rows, tile) * _up(columns, LANES) * itemsize


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def vmem_bytes(call: Call, config: Config) -> int:
    """Bytes of VMEM a call needs; the arithmetic is at the top of this file."""
    kernel, dims = _kernel(call, config), dimensions(call)
    held = sum(_tiled_bytes(*buffer) for buffer in kernel.buffers().values())
    exact = kernel.dtype == jnp.float32
    bfloat16_parts = 6 if exact else 0
    float8 = jnp.dtype(kernel.cache).itemsize == 1 and jnp.issubdtype(kernel.cache, jnp.floating)
    operand = jnp.dtype(kernel.dtype).itemsize + 4 + (4 if float8 else 0) + bfloat16_parts
    for rows in kernel.rows:
        columns = _up(kernel.blocks.size * kernel.columns_per_key(rows), LANES)
        count, D = _up(rows.count, SUBLANES), _up(dims.D, LANES)
        held += (4 + sum(rule is not None for rule in call.spec.rules)) * 4 * count * columns
        held += operand * columns * sum(_up(width, LANES) for width in kernel.widths)
        held += (8 if exact else 4) * _up(rows.heads * rows.count, SUBLANES) * D
        held += 4 * count * (_up(dims.Dv, LANES) + 2 * LANES)
        held += bfloat16_parts * count * (columns + D)
        held += kernel.scaled * 2 * _tiled_bytes((rows.heads, rows.count, 3), jnp.float32)
    return held


def smem_bytes(call: Call, config: Config) -> int:
    """Bytes of scalar memory: the page table, what is known per sequence, and the tiles."""
    dims = dimensions(call)
    entries = sum(call[name].size for name in ("block_tables", "context_lens", "starts", "window") if name in call)
    return 4 * (entries + 4 * _kernel(call, config).tiles) + 4 * dims.B


def unsupported(call: Call) -> list[str]:
    """Why a TPU cannot do the call; empty if it can."""
    reasons = []
    if call[_page_names(call)[0]].dtype == jnp.float16:
        reasons.append("a float16 cache: a TPU has no float16 to load, use bfloat16")
    return reasons + unsupported_operations(*call.spec.rules) + unsupported_config(call, default_config(call))


def unsupported_config(call: Call, config: Config) -> list[str]:
    """Why a config does not fit the chip; empty if it does."""
    chip, reasons = chip_of(call.target), []
    if (need := vmem_bytes(call, config)) > chip.vmem_budget:
        reasons.append(f"{config}: needs {need / MIB:.1f} MiB of VMEM, {chip.name} has {chip.vmem_budget / MIB:.1f}")
    if (need := smem_bytes(call, config)) > SMEM_BYTES // 2:
        dims = dimensions(call)
        reasons.append(
            f"a page table of {dims.B} x {dims.N} x {dims.W} entries, with the tiles of {config}: needs "
            f"{need / 1024:.0f} KiB of scalar memory, {SMEM_BYTES // 2048} are to spare; larger pages need less"
        )
    return reasons


# bytes of keys and values in a block from which on a copy takes so long that its start does not matter
_BLOCK_BYTES = 2 * MIB
# query rows of a key head that keep the matrix unit busy while the next block arrives
_HEAD_ROWS = 512


def default_config(call: Call) -> Config:
    """Blocks of 2 MiB and tiles of 512 rows per key head, halved until they fit."""
    dims, spec = dimensions(call), call.spec
    itemsize = call[_page_names(call)[0]].dtype.itemsize
    token = dims.Hkv * (_up(dims.D, LANES) + _up(dims.Dv, LANES)) * itemsize
    block_k = max(128, min(2048, 1 << (_BLOCK_BYTES // token).bit_length() - 1))
    tokens = spec.tokens or dims.T
    config = Config(min(tokens, max(1, _HEAD_ROWS // dims.G)), block_k)
    budget = chip_of(call.target).vmem_budget
    for name, least in (("block_k", 128), ("block_q", 8), ("block_k", 16), ("block_q", 1)):
        while vmem_bytes(call, config) > budget and getattr(config, name) > least:
            config = replace(config, **{name: getattr(config, name) // 2})
    return config


def search_space(call: Call) -> list[Config]:
    most = call.spec.tokens or dimensions(call).T
    queries = sorted({min(most, q) for q in (1, 8, 16, 32, 64, 128)})
    configs = [Config(q, k, rows) for q in queries for k in (128, 256, 512, 1024, 2048) for rows in (0, 64, 128, 256)]
    return [config for config in configs if not unsupported_config(call, config)]


# The launch --------------------------------------------------------------------------------------------------


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    kernel, dims = _kernel(call, config), dimensions(call)
    B, T, H, Dv = dims.B, dims.T, dims.H, dims.Dv
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    scalars = _scalars(call, kernel)
    arrays = {"query": (call["query"].reshape(B * T, H, dims.D).astype(kernel.dtype), anywhere)}
    for i, name in enumerate(_page_names(call)):
        pages = call[name].reshape(-1, *call[name].shape[2:])
        arrays[f"pages_{i}"] = (pages.swapaxes(1, 2) if kernel.heads_first else pages, anywhere)
    for name, n in kernel.read.items():
        rows = jnp.broadcast_to(call[name], (B, H, call[name].shape[2], T))
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, n - rows.shape[2]), (0, 0)))
        arrays[name] = (rows.transpose(0, 3, 1, 2).reshape(B * T, H, n), anywhere)
    if kernel.scaled:
        for v, rows in enumerate(kernel.rows):
            arrays[f"by_row_{v}"] = _by_row(call, kernel, rows)
    shapes = {"out": ((Dv,), kernel.out_dtype), "stats": ((2,), jnp.float32)}
    structs = {n: jax.ShapeDtypeStruct((kernel.splits * B * T, H, *shapes[n][0]), shapes[n][1]) for n in kernel.written}

    def paged_attention(given: Any, *refs: Any) -> None:
        kernel.paged_attention(dict(zip(scalars, given, strict=True)), *refs)

    results = launch(
        paged_attention,
        target=call.target,
        grid=(kernel.cores, -(-kernel.tiles * kernel.splits // kernel.cores)),
        scalars=list(scalars.values()),
        arrays=arrays,
        outputs={name: (struct, anywhere) for name, struct in structs.items()},
        scratch=kernel.scratch(),
        cost=cost(call),
        parallel=1,
        copies=True,
        bounds_checks=False,  # they take three times as long as what starts a copy, and page ids are clamped
    )
    splits = {name: x.reshape(kernel.splits, B, T, H, -1) for name, x in results.items()}
    outputs = _merged(**splits) if kernel.splits > 1 else {"out": splits["out"][0], **_stats(splits.get("stats"))}
    return outputs | {"out": outputs["out"].astype(call.spec.out_dtype or call["query"].dtype)}, {}


def _stats(stats: jax.Array | None) -> Arrays:
    """lse and top, (B, H, T) each, of one split."""
    return {} if stats is None else {n: stats[0, ..., i].swapaxes(1, 2) for i, n in enumerate(("lse", "top"))}


def _merged(out: jax.Array, stats: jax.Array) -> Arrays:
    """One answer of the splits of the keys, which are the leading axis."""
    joined = merge(state_of(out, stats[..., 0]))
    B, T, H, Dv = joined.out.shape
    out, lse = jax.vmap(online_finish)(jax.tree.map(lambda x: x.reshape(B * T, H, *x.shape[3:]), joined))
    stats = jnp.stack([lse.reshape(B, T, H), stats[..., 1].max(0)], -1)
    return {"out": out.reshape(B, T, H, Dv), **_stats(stats[None])}


def _scalars(call: Call, kernel: Kernel) -> dict[str, jax.Array]:
    """What lies in scalar memory, flat; sequences are numbered through the batch."""
    B = kernel.dims.B
    scalars: dict[str, jax.Array] = {}
    scalars |= zip(("sequence", "token", "count", "ahead"), _tiles(call, kernel), strict=True)
    for name in ("context_lens", "starts", "block_tables", "window"):
        if name in call:
            scalars[name] = jnp.broadcast_to(call[name], (B, *call[name].shape[1:])).reshape(-1)
    if call.spec.tokens is None:
        # tokens of no sequence belong to one more, which has no keys
        scalars |= {name: jnp.pad(scalars[name], (0, 1)) for name in ("context_lens", "starts") if name in scalars}
    return {name: x.astype(jnp.int32) for name, x in scalars.items()}


def _tiles(call: Call, kernel: Kernel) -> list[jax.Array]:
    """Of each tile its sequence, its first token, how many, and where that token is behind the sequence's last."""
    spec, dims, most = kernel.spec, kernel.dims, kernel.tokens
    B, T, N = dims.B, dims.T, dims.N
    if spec.tokens is not None:
        each = -(-spec.tokens // most)
        tile = jnp.arange(B * N * each)
        offset = tile % each * most
        count = jnp.minimum(most, spec.tokens - offset)
        return [tile // each, tile // each * spec.tokens + offset, count, offset - spec.tokens]

    def one_row(b: jax.Array, arrays: dict[str, jax.Array]) -> list[jax.Array]:
        rows = sequences(spec, dims, arrays)
        owned = jnp.max(jnp.where(rows.queries > 0, rows.first + rows.queries, 0))
        first, queries = jnp.append(rows.first, owned), jnp.append(rows.queries, T - owned)
        tiles, tile, n = -(-queries // most), jnp.arange(kernel.tiles // B), jnp.arange(N + 1)
        # dense, for that is one fusion: a search and its gathers would be a dozen launches
        begins = jnp.sum(jnp.where(n < n[:, None], tiles, 0), 1)
        owner = (begins <= tile[:, None]) & (tile[:, None] < begins + tiles)
        sequence, token, length, begin = (jnp.sum(jnp.where(owner, x, 0), 1) for x in (n, first, queries, begins))
        offset = (tile - begin) * most
        count = jnp.clip(length - offset, 0, most)
        return [jnp.where(sequence == N, B * N, b * N + sequence), b * T + token + offset, count, offset - length]

    names = ("context_lens", "starts", "query_start", "num_seqs")
    arrays = {n: jnp.broadcast_to(call[n], (B, *call[n].shape[1:])) for n in names if n in call}
    return [x.reshape(-1) for x in jax.vmap(one_row)(jnp.arange(B), arrays)]


def _by_row(call: Call, kernel: Kernel, rows: Rows) -> tuple[jax.Array, pl.BlockSpec]:
    """Scale, factor of the values and sink of each query row, (batch, heads, rows, 3)."""
    dims = kernel.dims
    k_scale = jnp.repeat(call.arrays.get("k_scale", jnp.ones((1, dims.Hkv))), dims.G, axis=1) * kernel.spec.scale
    v_scale = jnp.repeat(call.arrays.get("v_scale", jnp.ones((1, dims.Hkv))), dims.G, axis=1)
    sinks = call.arrays.get("sinks", jnp.full((1, dims.H), -jnp.inf))
    by_row = jnp.stack(jnp.broadcast_arrays(k_scale, v_scale, sinks), -1).astype(jnp.float32)
    many = by_row.shape[0]
    by_row = jnp.tile(by_row.reshape(many, rows.heads, -1, 3), (1, 1, rows.tokens, 1))

    def index(core: Any, i: Any, sequence: Any, *_: Any) -> tuple[Any, ...]:
        tile = jnp.minimum(divided(i * kernel.cores + core, kernel.splits), kernel.tiles - 1)
        return jnp.minimum(divided(sequence[tile], dims.N), many - 1), 0, 0, 0

    return by_row, pl.BlockSpec((None, rows.heads, rows.count, 3), index)


def cost(call: Call) -> pl.CostEstimate:
    """What the caller says, or else of sequences as long as their tables, which is all that shapes tell.

    Keys and values are read once, for two products.
    """
    if call.spec.cost is not None:
        return pl.CostEstimate(**call.spec.cost._asdict())
    dims, query = dimensions(call), call["query"]
    token = dims.Hkv * (dims.D + dims.Dv) * call[_page_names(call)[0]].dtype.itemsize
    written = dims.B * dims.T * dims.H * dims.Dv
    pairs = dims.B * dims.T * dims.H * dims.S
    return pl.CostEstimate(
        flops=2 * pairs * (dims.D + dims.Dv),
        transcendentals=pairs,
        bytes_accessed=dims.B * dims.N * dims.S * token + (query.size + written) * query.dtype.itemsize,
    )


IMPLEMENTATION = Implementation(
    Config, unsupported, default_config, search_space, forward, unsupported_config=unsupported_config
)
