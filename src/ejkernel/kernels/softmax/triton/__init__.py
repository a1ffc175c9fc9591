"""Softmax attention in Triton, for NVIDIA GPUs from sm_80 on: configs and launches of the kernels beside it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.expressions.nodes import Expression
from ejkernel.kernels.common.dropout import threshold
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.common.triton_launch import TritonLaunch, run_nan_safe
from ejkernel.kernels.common.triton_rules import DeviceFunction, flat_operands, layouts_of, unsupported_operations
from ejkernel.kernels.softmax.gradients import output_cotangent, row_terms, sink_gradient
from ejkernel.kernels.softmax.rules import operand_gradients, slopes
from ejkernel.kernels.softmax.schedule import Lists, Schedule, Side, by_index, in_order, plan
from ejkernel.kernels.softmax.spec import Spec, dimensions
from ejkernel.kernels.softmax.xla import table_gradients
from ejkernel.ops import Call, Implementation

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """One kernel's tile: queries, keys, warps and pipeline stages."""

    block_q: int
    block_k: int
    warps: int
    stages: int

    def __post_init__(self) -> None:
        config_ints(self, ("block_q", "block_k"), 16, power_of_two=True)
        if self.warps not in (1, 2, 4, 8, 16) or self.stages < 1:
            raise ValueError(f"warps={self.warps} must be 1, 2, 4, 8 or 16 and stages={self.stages} at least 1")


@dataclass(frozen=True)
class Config:
    """The tiles of the forward, dq and dk/dv kernels.

    With `dv`, dv is a launch of its own with that tile and `dkv` is the tile of dk: a product more, but the two sums of
    a wide head do not share the registers. `dbias` is the tile of a bias's gradient; without it, that of dq.
    """

    forward: Tile
    dq: Tile
    dkv: Tile
    dv: Tile | None = None
    dbias: Tile | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "dq", "dkv", "dv", "dbias"):
            if isinstance(getattr(self, name), dict):  # as a tuned file gives it
                object.__setattr__(self, name, Tile(**getattr(self, name)))


def unsupported(call: Call) -> list[str]:
    dims = dimensions(call)
    limits = {
        f"head_dim {max(dims.D, dims.Dv)}: at most 256": max(dims.D, dims.Dv) > 256,
        f"{call.target.arch}: needs sm_80 or newer": call.target.backend == "gpu" and call.target.capability < 80,
        f"precision {call.spec.precision}": isinstance(call.spec.precision, jax.lax.DotAlgorithmPreset),
    }
    return [reason for reason, holds in limits.items() if holds] + unsupported_operations(*call.spec.rules)


# (forward, dq, dk/dv) or (forward, dq, dk, dv) by the padded head dim, each (block_q, block_k, warps, stages). The
# first row is for calls that hide something (causal, windows, segments): smaller query blocks waste less on partly
# hidden tiles. Four warps multiply 64 rows (of queries; of keys in dk and dv) and eight 128: with fewer, they repeat
# each other's work.
_HOPPER = {
    64: (((64, 64, 4, 3), (64, 64, 4, 3), (64, 128, 8, 3)), ((128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3))),
    128: (((64, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 2)), ((128, 64, 8, 3), (128, 64, 8, 3), (64, 128, 8, 2))),
    256: (
        ((128, 32, 8, 3), (128, 32, 8, 3), (32, 128, 8, 3), (64, 128, 8, 2)),
        ((128, 64, 8, 2), (128, 32, 8, 3), (32, 128, 8, 3), (32, 128, 8, 3)),
    ),
}
# for calls with a bias or a dense mask: their tiles are pipelined through shared memory too
_HOPPER_WITH_ARRAYS = {
    64: (((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),) * 2,
    128: (((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),) * 2,
    256: (((64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 1), (32, 64, 4, 2)),) * 2,
}
# of a bias's gradient, where it differs from that of dq: of q, k, v and dout, larger tiles read less
_HOPPER_BIAS = {128: Tile(128, 64, 8, 2)}
# for calls with a pattern: rows are short, and small tiles share a core
_HOPPER_WITH_PATTERN = {
    64: (((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),) * 2,
    128: (((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2)),) * 2,
    256: (((128, 32, 8, 3), (128, 32, 8, 2), (32, 128, 8, 2), (64, 128, 8, 2)),) * 2,
}
# compiled, never timed: they fit the tensor memory and hardly spill
_BLACKWELL = {
    64: (((128, 64, 8, 3), (128, 64, 8, 2), (32, 128, 4, 3)),) * 2,
    128: (((128, 64, 8, 3), (128, 64, 8, 2), (64, 128, 8, 2)),) * 2,
    256: (((128, 32, 8, 2), (128, 64, 8, 1), (64, 128, 8, 1), (64, 128, 8, 2)),) * 2,
}
# elsewhere: sm_80 has 163 KB of shared memory for a program, sm_86, sm_89 and sm_120 have 99: one table for the smaller
_AMPERE = {
    64: (((128, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2)),) * 2,
    128: (((128, 32, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2)),) * 2,
    256: (((64, 16, 4, 2), (64, 16, 4, 2), (16, 64, 4, 1), (32, 64, 4, 1)),) * 2,
}
_FLOAT32 = {
    64: (((64, 32, 4, 2), (32, 32, 8, 1), (32, 32, 8, 1)),) * 2,
    128: (((32, 32, 8, 2), (16, 32, 8, 1), (16, 16, 8, 1)),) * 2,
    256: (((16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),) * 2,
}


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    width = power_of_two(max(dims.D, dims.Dv), 64)
    tables = {0: _HOPPER, 90: _HOPPER, 100: _BLACKWELL, 103: _BLACKWELL}  # 0: in the interpreter
    table = _FLOAT32 if call["query"].dtype == jnp.float32 else tables.get(call.target.capability, _AMPERE)
    arrays = "bias" in call or "mask" in call
    if table is _HOPPER and (arrays or "pattern" in call):
        table = _HOPPER_WITH_ARRAYS if arrays else _HOPPER_WITH_PATTERN
    tiles = [Tile(*tile) for tile in table[width][0 if hides_anything(call) else 1]]
    if arrays and table is not _HOPPER_WITH_ARRAYS:
        tiles = [replace(tile, stages=1) for tile in tiles]
    return Config(*tiles, dbias=_HOPPER_BIAS.get(width) if table is _HOPPER_WITH_ARRAYS else None)


# entries of four bytes; a list of tiles may have more, one of sub-blocks is one of wider sub-blocks then
_MOST_LISTED = 2**26


def sub_block_keys(call: Call, tile: Tile) -> int | None:
    """How many keys lie together where a tile is put together from blocks of a pattern narrower than it is.

    A sub-block may be several blocks, so that lists, which have an entry for each, stay within `_MOST_LISTED`.
    """
    # the index of a maximum is counted from the first key of a tile whose keys lie together
    if "pattern" not in call or "mask" in call or call.spec.with_argmax:
        return None
    B, H, _, _ = call["pattern"].shape
    dims, width = dimensions(call), call.spec.pattern_block[1]
    while B * H * -(-dims.T // tile.block_q) * -(-dims.S // width) > _MOST_LISTED:
        width *= 2
    return width if 16 <= width < tile.block_k and tile.block_k % width == 0 else None


def search_space(call: Call) -> list[Config]:
    base = default_config(call)
    tiles = [Tile(q, k, w, s) for q in (64, 128) for k in (32, 64, 128) for w in (4, 8) for s in (2, 3)]
    swapped = {t: Tile(t.block_k, t.block_q, t.warps, t.stages) for t in tiles}
    backward = [replace(base, dq=t, dkv=swapped[t], dv=swapped[t] if base.dv else None) for t in tiles]
    return [replace(base, forward=t) for t in tiles] + backward


def _precision(call: Call) -> str:
    """How float32 is multiplied: JAX's names to Triton's. Left open, three passes of tf32 come close to float32."""
    if call["query"].dtype != jnp.float32:
        return "tf32"
    names = {jax.lax.Precision.DEFAULT: "tf32", jax.lax.Precision.HIGHEST: "ieee"}
    return names.get(call.spec.precision, "tf32x3")


def _axes(x: Any, letters: str) -> int:
    """Which axes of size above 1 an array has, as `tiles.py` says it in bits."""
    from ejkernel.kernels.softmax.triton import tiles

    if x is None:
        return 0
    bits = {"B": tiles.AXIS_B, "H": tiles.AXIS_H, "T": tiles.AXIS_T, "S": tiles.AXIS_S}
    return tiles.PRESENT.value + sum(bits[a].value for a, n in zip(letters, x.shape, strict=True) if n > 1)


def _strides(x: Any, n: int) -> tuple[int, int]:
    """How far apart batches and heads of n elements are in an array (B|1, H|1, ...); 0 where it broadcasts."""
    B, H = (1, 1) if x is None else x.shape[:2]
    return H * n if B > 1 else 0, n if H > 1 else 0


def arguments(call: Call, rows: Any, index: Any, order: Any = None, operands: Any = None) -> dict[str, Any]:
    """What the kernels share, by the names of their parameters; `rows`, `index` and `order` are of the schedule.

    Arrays are taken by their shapes alone: they may be of JAX, of PyTorch, or descriptions of either; where they are
    not of JAX, the operands of functions are given flat.
    """
    spec: Spec = call.spec
    pattern = call.get("pattern")
    operands = flat_operands(call.arrays)[1] if operands is None else operands
    ints, floats = operands["p_ints"], operands["p_floats"]
    cells = 0 if pattern is None else pattern.shape[2] * pattern.shape[3]
    row_strides = _strides(rows, 0 if rows is None else rows.shape[2])
    return {
        "p_q": call["query"],
        "p_k": call["key"],
        "p_v": call["value"],
        "p_bias": call.get("bias"),
        "p_sinks": call.get("sinks"),
        "p_q_seg": call.get("q_segments"),
        "p_k_seg": call.get("kv_segments"),
        "p_q_pos": call.get("q_positions"),
        "p_k_pos": call.get("kv_positions"),
        "p_mask": call.get("mask"),
        "p_pattern": pattern,
        **operands,
        "p_seeds": call.get("dropout_seeds"),
        "p_rows": rows,
        "p_index": index,
        "p_order": order,
        "T": call["query"].shape[1],
        "S": call["key"].shape[1],
        "B": call["query"].shape[0],
        # not in the constants: dk/dv would keep what follows from them in registers, which it lacks
        **dict(zip(("s_rows_b", "s_rows_h"), row_strides, strict=True)),
        **dict(zip(("s_order_b", "s_order_h"), _strides(order, 0 if order is None else order.shape[2]), strict=True)),
        **dict(zip(("s_pattern_b", "s_pattern_h"), _strides(pattern, cells), strict=True)),
        **dict(zip(("s_ints_b", "s_ints_h"), _strides(ints, 0 if ints is None else ints.shape[2]), strict=True)),
        **dict(
            zip(("s_floats_b", "s_floats_h"), _strides(floats, 0 if floats is None else floats.shape[2]), strict=True)
        ),
        "scale": spec.scale,
        "soft_cap": spec.soft_cap or 1.0,
        "keep_scale": 1.0 / (1.0 - spec.dropout),
        "threshold": int(threshold(spec.dropout)),
    }


def _launch(call: Call, tile: Tile, heads: int, schedule: Schedule, order: Any = None, **more: Any) -> TritonLaunch:
    """One program for each row of a schedule and each head; `more` are constants."""
    rows, index = _arrays(schedule)
    made = constants(call, tile, LISTS=index is not None, **more)
    return TritonLaunch(arguments(call, rows, index, order), made, (rows.shape[2], heads), tile.warps, tile.stages)


def _arrays(schedule: Schedule) -> tuple[Any, Any]:
    """Its rows, and the lists if it is made of such."""
    if isinstance(schedule, Lists):
        return schedule.number, schedule.index
    return jnp.asarray(schedule.bounds), None


def constants(call: Call, tile: Tile, **more: Any) -> Any:
    """What the kernels of a call are compiled for."""
    import triton.language as tl

    from ejkernel.kernels.softmax.triton.tiles import Constants

    spec: Spec = call.spec
    dims = dimensions(call)
    capped, rounded = spec.soft_cap is not None, spec.logits_dtype != "float32"
    layouts, (seen, scores) = layouts_of(call.arrays), spec.rules
    slope = None if scores is None else slopes(scores).score
    pattern_q, pattern_k = spec.pattern_block or (None, None)
    pattern_rows, pattern_columns = call["pattern"].shape[2:] if spec.pattern_by_position else (None, None)
    return Constants(
        H=dims.H,
        HK=dims.Hkv,
        G=dims.G,
        D=dims.D,
        DV=dims.Dv,
        BD=power_of_two(dims.D, 16),
        BDV=power_of_two(dims.Dv, 16),
        BQ=tile.block_q,
        BK=tile.block_k,
        LO=spec.band.lo,
        HI=spec.band.hi,
        CHUNK=spec.chunk,
        Q_SEGMENTS=_axes(call.get("q_segments"), "BT"),
        K_SEGMENTS=_axes(call.get("kv_segments"), "BS"),
        Q_POSITIONS=_axes(call.get("q_positions"), "BT"),
        K_POSITIONS=_axes(call.get("kv_positions"), "BS"),
        MASK=_axes(call.get("mask"), "BHTS"),
        PATTERN_Q=pattern_q,
        PATTERN_K=pattern_k,
        PATTERN_ROWS=pattern_rows,
        PATTERN_COLUMNS=pattern_columns,
        BIAS=_axes(call.get("bias"), "BHTS"),
        SINKS=_axes(call.get("sinks"), "BH"),
        CAPPED=capped,
        LOGITS=getattr(tl, spec.logits_dtype) if rounded else None,
        PLAIN="bias" not in call and not capped and not rounded and scores is None and spec.scale > 0,
        MASK_RULE=None if seen is None else DeviceFunction(seen, layouts),
        SCORE_RULE=None if scores is None else DeviceFunction(scores, layouts),
        SCORE_SLOPE=None if slope is None else DeviceFunction(slope, layouts),
        DROPOUT=spec.dropout > 0,
        ARGMAX=spec.with_argmax,
        TAIL_Q=dims.T % tile.block_q != 0,
        PRECISION=_precision(call),
        **more,
    )


def hides_anything(call: Call) -> bool:
    """Whether a visited key can be hidden from a query, so that what it holds might leak as 0 * nan."""
    masks = ("q_segments", "q_positions", "mask", "pattern")
    if call.spec.rules.mask is not None:
        return True
    return call.spec.band != (None, None) or call.spec.chunk is not None or any(name in call for name in masks)


def scheduled(call: Call, tile: Tile, side: Side, xp: Any = jnp) -> tuple[Schedule, Any]:
    """The schedule of a tile, and the order of the sub-blocks of keys where these are rows and come in sub-blocks."""
    width = sub_block_keys(call, tile)
    if width is None or side == "q":
        return plan(call, tile.block_q, width or tile.block_k, side, xp), None
    return in_order(call, tile.block_q, tile.block_k, width, xp)


def nan_safe_tile(tile: Tile, sub_block: int | None) -> Tile:
    """That of the launch over the blocks in which a fast one left a nan."""
    return Tile(min(tile.block_q, 32), min(tile.block_k, 32, sub_block or 32), 4, 1)


def flag_rows(tile: Tile, side: Side, sub_block: int | None) -> int:
    """How many queries or keys a mark stands for that a fast launch leaves where it met a nan."""
    return tile.block_q if side == "q" else sub_block or tile.block_k


def _run(
    call: Call, tile: Tile, side: Side, kernel: Any, heads: int, outputs: dict[str, Any], rows: Any = None, **more: Any
) -> list[jax.Array]:
    """A kernel's outputs, whatever hidden values are. `rows` are more arguments of the kernel, `more` its constants."""
    width = sub_block_keys(call, tile)
    flagged, length = flag_rows(tile, side, width), call["query" if side == "q" else "key"].shape[1]
    fast = _launch(call, tile, heads, *scheduled(call, tile, side), SUB_BLOCK=width, **more)
    nan_safe = None
    if hides_anything(call):
        slow = nan_safe_tile(tile, width)
        # it visits more blocks than it must: a tighter schedule would be computed in every call, and rarely be used
        schedule = by_index(call, slow.block_q, slow.block_k, side)
        nan_safe = _launch(call, slow, heads, schedule, GUARD=True, FLAG_ROWS=flagged, **more)
    return run_nan_safe(kernel, outputs, fast, nan_safe, (heads, -(-length // flagged)), **(rows or {}))


def run_forward(call: Call, config: Config) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    from ejkernel.kernels.softmax.triton.forward import forward_kernel

    B, T, _, H, *_, Dv = dimensions(call)
    shapes = {
        "out": jax.ShapeDtypeStruct((B, T, H, Dv), call["query"].dtype),
        "lse": jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        "total": jax.ShapeDtypeStruct((B, H, T if call.spec.with_argmax else 1), jnp.float32),
        "argmax": jax.ShapeDtypeStruct((B, H, T if call.spec.with_argmax else 1), jnp.int32),
    }
    outputs = dict(zip(shapes, _run(call, config.forward, "q", forward_kernel, B * H, shapes), strict=True))
    residuals = {name: outputs[name] for name in ("out", "lse")}
    return outputs if call.spec.with_argmax else residuals, residuals


def run_backward(call: Call, residuals: Any, cotangents: Any, config: Config) -> dict[str, jax.Array]:
    from ejkernel.kernels.softmax.triton.backward import dkv_kernel, dq_kernel

    lse, delta = row_terms(residuals, cotangents)
    block = max(tile.block_q for tile in (config.dq, config.dkv, config.dv, config.dbias) if tile)
    rows = _row_arrays(call, output_cotangent(residuals, cotangents), lse, delta, block)
    query, key, value = (jax.ShapeDtypeStruct(call[n].shape, call[n].dtype) for n in ("query", "key", "value"))
    B, _, _, H, Hkv, *_ = dimensions(call)
    (dquery,) = _run(call, config.dq, "q", dq_kernel, B * H, {"dq": query}, rows, ROW_BLOCK=block)
    key_value = partial(_run, call, side="k", kernel=dkv_kernel, heads=B * Hkv, rows=rows, ROW_BLOCK=block)
    if config.dv is None:
        dkey, dvalue = key_value(config.dkv, outputs={"dk": key, "dv": value})
    else:
        unwritten = jax.ShapeDtypeStruct((1,), value.dtype)
        dkey, _ = key_value(config.dkv, outputs={"dk": key, "dv": unwritten}, VALUE=False)
        _, dvalue = key_value(config.dv, outputs={"dk": unwritten, "dv": value}, KEY=False)
    gradients = {"query": dquery, "key": dkey, "value": dvalue} | sink_gradient(call, lse, delta)
    if "bias" in call:
        gradients["bias"] = _bias_gradient(call, config.dbias or config.dq, rows, block)
    if call.spec.rules.score is not None:
        summed = partial(_operand_gradient, call, config.dq, rows, block)
        gradients |= operand_gradients(call, summed, partial(table_gradients, call, residuals, cotangents))
    return gradients


def _operand_gradient(
    call: Call, tile: Tile, rows: dict[str, Any], block: int, of_keys: bool, slope: Expression
) -> jax.Array:
    """Of each (batch, head), what a derivative of the score function by an operand sums to for each query or key."""
    from ejkernel.kernels.softmax.triton.backward import operand_kernel

    B, T, S, H, *_ = dimensions(call)
    made = DeviceFunction(slope, layouts_of(call.arrays))
    tile = replace(tile, block_q=min(tile.block_q, block))
    schedule = plan(call, tile.block_q, tile.block_k, "k" if of_keys else "q")
    launch = _launch(call, tile, B * H, schedule, ROW_BLOCK=block, OPERAND_SLOPE=made, OF_KEYS=of_keys)
    return launch.run(operand_kernel, jax.ShapeDtypeStruct((B, H, S if of_keys else T), jnp.float32), **rows)


def _row_arrays(call: Call, dout: jax.Array, lse: jax.Array, delta: jax.Array, block: int) -> dict[str, Any]:
    """dout; lse in a kernel's units and delta, to the end of the last block: loads need no mask and are aligned."""
    if "bias" not in call:
        lse *= LOG2_E
    pad = ((0, 0), (0, 0), (0, -lse.shape[-1] % block))
    return {"p_dout": dout, "p_lse": jnp.pad(lse, pad, constant_values=jnp.inf), "p_delta": jnp.pad(delta, pad)}


def bias_gradient(call: Call, residuals: Any, cotangents: Any) -> jax.Array:
    """By a kernel of its own, which every platform's forward may be followed by."""
    config = default_config(call)
    tile = config.dbias or config.dq
    rows = _row_arrays(call, output_cotangent(residuals, cotangents), *row_terms(residuals, cotangents), tile.block_q)
    return _bias_gradient(call, tile, rows, tile.block_q)


def _bias_gradient(call: Call, tile: Tile, rows: dict[str, jax.Array], block: int) -> jax.Array:
    from ejkernel.kernels.softmax.triton.backward import dbias_kernel

    bias, dims = call["bias"], dimensions(call)
    shape, dtype = bias.shape, bias.dtype
    if 1 in shape[2:]:  # little is owned: each batch and head has programs of its own, and all are summed after
        shape, dtype = (dims.B, dims.H, *((1, dims.S) if shape[2] == 1 else (dims.T, 1))), jnp.float32
        call = replace(call, arrays=call.arrays | {"bias": jnp.broadcast_to(bias, shape)})
    grid = shape[0] * shape[1], -(-shape[2] // tile.block_q), -(-shape[3] // tile.block_k)
    made = constants(call, tile, LISTS=False, ROW_BLOCK=block)
    launch = TritonLaunch(arguments(call, None, None), made, grid, tile.warps, tile.stages)
    gradient = launch.run(dbias_kernel, jax.ShapeDtypeStruct(shape, dtype), **rows)
    broadcast_axes = tuple(axis for axis in range(4) if bias.shape[axis] < shape[axis])
    return gradient.sum(broadcast_axes, keepdims=True).astype(bias.dtype)


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, run_forward, run_backward)
