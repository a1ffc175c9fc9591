"""Attention over selected blocks in Triton, for NVIDIA GPUs from sm_80 on: configs and launches of the kernels."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.common.triton_launch import TritonLaunch, run_nan_safe
from ejkernel.kernels.native_sparse.block_table import first_keys
from ejkernel.kernels.native_sparse.lists import Entries, entries, tiling
from ejkernel.kernels.native_sparse.spec import dimensions
from ejkernel.kernels.softmax.gradients import output_cotangent, row_terms, sink_gradient
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays

LOG2_E = 1.4426950408889634
# longer lists are not joined: finding the next block would look at all of them
_LONGEST_JOINED = 64


@dataclass(frozen=True)
class Config:
    """How a call is done.

    Attributes:
        order: of the forward. "queries": neighbouring queries attend to the union of their blocks, so that a key is
            loaded once for all of them. "keys": the queries that selected a block are gathered to it, and the outputs
            of a query's blocks are merged; it does no work for queries that do not share blocks.
        rows: of a tile, queries times the heads of a group (rounded up to a power of two).
        block_k: keys of a tile; in the forward by keys it is a block.
        segment: entries (a query and one of its blocks) for one program, by keys.
        warps: of every kernel.
        stages, backward_stages: of pipelines. A backward has twice the arrays in shared memory.
    """

    order: str = "queries"
    rows: int = 64
    block_k: int = 64
    segment: int = 128
    warps: int = 4
    stages: int = 3
    backward_stages: int = 2

    def __post_init__(self) -> None:
        config_ints(self, ("rows", "block_k"), 16, power_of_two=True)
        config_ints(self, ("segment", "stages", "backward_stages"))
        if self.order not in ("queries", "keys"):
            raise ValueError(f"order={self.order!r} must be 'queries' or 'keys'")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps={self.warps} must be 1, 2, 4, 8 or 16")


def unsupported(call: Call) -> list[str]:
    dims = dimensions(call)
    limits = {
        f"head_dim {max(dims.D, dims.Dv)}: at most 256": max(dims.D, dims.Dv) > 256,
        f"{dims.G} query heads to a key head: at most 128": dims.G > 128,
        f"a mask function: {call.spec.rules.mask}": call.spec.rules.mask is not None,
        f"a score function: {call.spec.rules.score}": call.spec.rules.score is not None,
        f"{call.target.arch}: needs sm_80 or newer": call.target.backend == "gpu" and call.target.capability < 80,
    }
    return [reason for reason, holds in limits.items() if holds]


def _whole_block(call: Call) -> int:
    """Keys of a tile that holds a block."""
    return power_of_two(call.spec.block_size, 16)


def unsupported_config(call: Call, config: Config) -> list[str]:
    too_large = config.order == "keys" and call.spec.block_size > 128
    return [f"order 'keys' takes blocks of at most 128 tokens, not {call.spec.block_size}"] if too_large else []


def default_config(call: Call) -> Config:
    """By queries where a group of heads fills most of a tile, else by keys: there queries fill it.

    Tiles are such that every kernel fits an sm_86; by keys a whole block must.
    """
    dims = dimensions(call)
    width = power_of_two(max(dims.D, dims.Dv)) * call["query"].dtype.itemsize
    tile = 64 if width <= 256 else 32 if width <= 512 else 16
    order = "queries" if dims.G >= 8 or call.spec.block_size > tile else "keys"
    stages = 2 if tile == 64 else 1
    # those with 99 KB of shared memory for a program
    small = call.target.capability in (86, 89, 120)
    return Config(order, tile, tile, stages=stages if small else stages + 1, backward_stages=stages)


def remark(call: Call, config: Config) -> str:
    """Which order, and why."""
    G = dimensions(call).G
    if config.order == "queries":
        shared = (
            f"{_queries(call, config)} neighbouring queries with their {G} heads attend to the union of their blocks"
        )
        return f"by queries: {shared}, which pays where heads fill a tile or neighbours choose alike"
    return f"by keys: a group of {G} would not fill a tile, so that the queries of a block do"


def search_space(call: Call) -> list[Config]:
    base = default_config(call)
    tiles = [(rows, keys, w, s) for rows in (32, 64, 128) for keys in (32, 64, 128) for w in (4, 8) for s in (1, 2, 3)]
    configs = [
        replace(base, order=order, rows=rows, block_k=keys, warps=w, stages=s, backward_stages=s)
        for order in ("queries", "keys")
        for rows, keys, w, s in tiles
    ]
    return [config for config in configs if not unsupported_config(call, config)]


def _queries(call: Call, config: Config) -> int:
    """Queries of a tile: as many as fill its rows, at most 32, for whom there are bits."""
    heads = power_of_two(dimensions(call).G)
    return max(1, min(32, config.rows // heads))


def _launch(call: Call, config: Config, grid: tuple[int, int], **tiles: Any) -> TritonLaunch:
    """What the kernels share; `tiles` are the constants that differ between orders."""
    from ejkernel.kernels.native_sparse.triton.tiles import Constants

    dims = dimensions(call)
    sinks = call.get("sinks")
    values = {
        "p_q": call["query"],
        "p_k": call["key"],
        "p_v": call["value"],
        "p_indices": call["indices"],
        "p_starts": call["starts"],
        "p_limits": call["limits"],
        "p_sinks": sinks,
        "T": dims.T,
        "S": dims.S,
        "N": dims.N,
        "scale": call.spec.scale,
    }
    constants = Constants(
        H=dims.H,
        HK=dims.Hkv,
        G=dims.G,
        GP=max(power_of_two(dims.G), 16 // tiles["BQ"]),  # a product has at least 16 rows
        D=dims.D,
        DV=dims.Dv,
        BD=power_of_two(dims.D, 16),
        BDV=power_of_two(dims.Dv, 16),
        K=dims.K,
        KP=power_of_two(dims.K),
        BS=call.spec.block_size,
        PRECISION="tf32x3" if call["query"].dtype == jnp.float32 else "tf32",
        STARTS_B=call["starts"].shape[0] > 1,
        LIMITS_B=call["limits"].shape[0] > 1,
        SINKS=sinks is not None,
        SINKS_B=sinks is not None and sinks.shape[0] > 1,
        **tiles,
    )
    return TritonLaunch(values, constants, grid, config.warps, config.stages)


def _run_nan_safe(kernel: Any, outputs: dict[str, Any], launch: TritonLaunch, **more: Any) -> list[jax.Array]:
    nan_safe = replace(launch, constants=replace(launch.constants, GUARD=True), stages=1)
    return run_nan_safe(kernel, outputs, launch, nan_safe, launch.grid[::-1], **more)


def _by_queries(call: Call, config: Config) -> tuple[TritonLaunch, Arrays]:
    """A launch over tiles of neighbouring queries, and the list of blocks of each of them."""
    dims = dimensions(call)
    if dims.K > _LONGEST_JOINED:
        launch = _launch(call, config, (dims.T, dims.B * dims.Hkv), BQ=1, BK=config.block_k, ENTRIES=dims.K)
        return launch, _blocks_of_each(call)
    queries = _queries(call, config)
    grid = -(-dims.T // queries), dims.B * dims.Hkv
    entries = min(queries * dims.K, dims.N)
    launch = _launch(call, config, grid, BQ=queries, BK=config.block_k, ENTRIES=entries, MEMBERS=queries > 1)
    return launch, _joined(launch)


def _joined(launch: TritonLaunch) -> Arrays:
    """The union of the blocks of each tile's queries."""
    from ejkernel.kernels.native_sparse.triton.tiles import union_kernel

    number = jax.ShapeDtypeStruct(launch.grid[::-1], jnp.int32)
    table = jax.ShapeDtypeStruct((*number.shape, launch.constants.ENTRIES), jnp.int32)
    lists = replace(launch, warps=1).run(union_kernel, [number, table, table])
    return dict(zip(("p_number", "p_list", "p_members"), lists, strict=True))


def _blocks_of_each(call: Call) -> Arrays:
    """The blocks of each query, as they are given."""
    indices = jnp.moveaxis(call["indices"], 2, 1)
    first = first_keys(call["starts"], indices, -1)
    last = jnp.where(indices >= 0, jnp.arange(1, indices.shape[-1] + 1, dtype=jnp.int32), 0).max(-1)
    B, Hkv, T, K = indices.shape
    last = last.reshape(B * Hkv, T)
    return {"p_number": last, "p_list": first.reshape(B * Hkv, T, K), "p_members": last}


class _ByKeys:
    """A launch over tiles of keys, and the entries that selected each of them."""

    def __init__(self, call: Call, config: Config, block_k: int, **constants: Any):
        dims = dimensions(call)
        self.entries: Entries = entries(call, block_k, config.segment)
        self.lists = {"p_order": self.entries.order, "p_items": self.entries.items}
        self.items, heads = self.entries.items.shape[2], dims.B * dims.Hkv
        queries, tiles = _queries(call, config), tiling(dims.N, call.spec.block_size, block_k).tiles
        self.launch = _launch(call, config, (self.items, heads), BQ=queries, BK=block_k, **constants)
        self.over_queries = replace(self.launch, grid=(-(-dims.T // queries), heads))
        self.over_keys = replace(self.launch, grid=(tiles, heads))


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def run_forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    from ejkernel.kernels.native_sparse.triton.forward import forward_kernel, merge_kernel, partial_kernel

    dims, dtype = dimensions(call), call["query"].dtype
    out = jax.ShapeDtypeStruct((dims.B, dims.T, dims.H, dims.Dv), dtype)
    lse = jax.ShapeDtypeStruct((dims.B, dims.H, dims.T), jnp.float32)
    if config.order == "queries":
        launch, lists = _by_queries(call, config)
        results = _run_nan_safe(forward_kernel, {"out": out, "lse": lse}, launch, **lists)
    else:
        by_keys = _ByKeys(call, config, _whole_block(call))
        rows = (dims.B, dims.Hkv, dims.T * dims.K, dims.G)
        each = {"out": jax.ShapeDtypeStruct((*rows, dims.Dv), dtype), "lse": jax.ShapeDtypeStruct(rows, jnp.float32)}
        partial, partial_lse = _run_nan_safe(partial_kernel, each, by_keys.launch, **by_keys.lists)
        results = by_keys.over_queries.run(merge_kernel, [out, lse], p_partial=partial, p_partial_lse=partial_lse)
    outputs = dict(zip(("out", "lse"), results, strict=True))
    return outputs, outputs


def run_backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    from ejkernel.kernels.native_sparse.triton.backward import dkv_kernel, dq_kernel, dq_sum_kernel, sum_kernel

    dims = dimensions(call)
    config = replace(config, stages=config.backward_stages)
    lse, delta = row_terms(residuals, cotangents)
    # as queries are: the heads of a group beside each other
    terms = {"p_lse": (lse * LOG2_E).swapaxes(1, 2), "p_delta": delta.swapaxes(1, 2)}
    rows = {"p_dout": output_cotangent(residuals, cotangents), **terms}
    in_partials = config.order == "keys"
    block_k = _whole_block(call) if in_partials else min(_whole_block(call), config.block_k)
    by_keys = _ByKeys(call, config, block_k, DQ_PARTIALS=in_partials)
    sums = (dims.B, dims.Hkv, by_keys.items, block_k)
    shapes = {name: jax.ShapeDtypeStruct((*sums, n), jnp.float32) for name, n in (("dk", dims.D), ("dv", dims.Dv))}
    # nothing is written to the one element of the other order
    entries = (dims.B, dims.Hkv, dims.T * dims.K, dims.G, dims.D) if in_partials else (1,)
    shapes["dq"] = jax.ShapeDtypeStruct(entries, call["query"].dtype)
    dkey, dvalue, dquery = _run_nan_safe(dkv_kernel, shapes, by_keys.launch, **by_keys.lists, **rows)
    if in_partials:
        dquery = by_keys.over_queries.run(dq_sum_kernel, _like(call["query"]), p_partial=dquery)
    else:
        launch, lists = _by_queries(call, config)
        (dquery,) = _run_nan_safe(dq_kernel, {"dq": _like(call["query"])}, launch, **lists, **rows)
    dkey, dvalue = by_keys.over_keys.run(
        sum_kernel,
        [_like(call["key"]), _like(call["value"])],
        # what lies behind packed sequences is in no block
        aliases={"p_old_dk": 0, "p_old_dv": 1},
        p_old_dk=jnp.zeros_like(call["key"]),
        p_old_dv=jnp.zeros_like(call["value"]),
        p_partial_dk=dkey,
        p_partial_dv=dvalue,
        p_first_item=by_keys.entries.first_item,
        n_items=by_keys.items,
    )
    return {"query": dquery, "key": dkey, "value": dvalue} | sink_gradient(call, lse, delta)


IMPLEMENTATION = Implementation(
    Config, unsupported, default_config, search_space, run_forward, run_backward, unsupported_config, remark=remark
)
