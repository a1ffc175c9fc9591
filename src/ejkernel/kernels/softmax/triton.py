"""Softmax attention in Triton, for NVIDIA GPUs from sm_80 on: configs and launches of the kernels beside it."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.dropout import threshold
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.softmax.gradients import output_cotangent, row_terms, sink_gradient
from ejkernel.kernels.softmax.schedule import Lists, Side, plan
from ejkernel.kernels.softmax.spec import Spec, dimensions
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
    a wide head do not share the registers.
    """

    forward: Tile
    dq: Tile
    dkv: Tile
    dv: Tile | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "dq", "dkv", "dv"):
            if isinstance(getattr(self, name), dict):  # as a tuned file gives it
                object.__setattr__(self, name, Tile(**getattr(self, name)))


def unsupported(call: Call) -> list[str]:
    dims = dimensions(call)
    limits = {
        f"head_dim {max(dims.D, dims.Dv)}: at most 256": max(dims.D, dims.Dv) > 256,
        f"{call.target.arch}: needs sm_80 or newer": call.target.backend == "gpu" and call.target.capability < 80,
        f"precision {call.spec.precision}": isinstance(call.spec.precision, jax.lax.DotAlgorithmPreset),
    }
    return [reason for reason, holds in limits.items() if holds]


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
# a pattern's cells pass through it once: no room for a third stage of 256 columns beside them
_HOPPER_WITH_PATTERN = _HOPPER | {256: (((128, 32, 8, 3), (128, 32, 8, 2), (32, 128, 8, 2), (64, 128, 8, 2)),) * 2}
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
    tiles = [Tile(*tile) for tile in table[width][0 if _hides_anything(call) else 1]]
    if arrays and table is not _HOPPER_WITH_ARRAYS:
        tiles = [replace(tile, stages=1) for tile in tiles]
    return Config(*tiles)


def search_space(call: Call) -> list[Config]:
    base = default_config(call)
    tiles = [Tile(q, k, w, s) for q in (64, 128) for k in (32, 64, 128) for w in (4, 8) for s in (2, 3)]
    turned = {t: Tile(t.block_k, t.block_q, t.warps, t.stages) for t in tiles}
    backward = [replace(base, dq=t, dkv=turned[t], dv=turned[t] if base.dv else None) for t in tiles]
    return [replace(base, forward=t) for t in tiles] + backward


def _precision(call: Call) -> str:
    """How float32 is multiplied: JAX's names to Triton's. Left open, three passes of tf32 come close to float32."""
    if call["query"].dtype != jnp.float32:
        return "tf32"
    names = {jax.lax.Precision.DEFAULT: "tf32", jax.lax.Precision.HIGHEST: "ieee"}
    return names.get(call.spec.precision, "tf32x3")


def _strides(x: Any, dims: int) -> list[int]:
    """Row-major strides of an array whose axes of size 1 broadcast; zeros where it is absent."""
    if x is None:
        return [0] * dims
    strides = np.cumprod([1, *x.shape[:0:-1]])[::-1]
    return [0 if n == 1 else int(s) for n, s in zip(x.shape, strides, strict=True)]


class _Launch:
    """The arguments the kernels share, by name."""

    def __init__(self, call: Call, tile: Tile, side: Side | None, guard: bool = False):
        import triton.language as tl

        spec: Spec = call.spec
        dims = dimensions(call)
        bias, mask, pattern = call.get("bias"), call.get("mask"), call.get("pattern")
        rows, index, strides, lists = _schedule_arguments(call, tile, side)
        self.tile = tile
        self.dims = dims
        self.values: dict[str, Any] = {
            "p_q": call["query"],
            "p_k": call["key"],
            "p_v": call["value"],
            "p_bias": bias,
            "p_sinks": call.get("sinks"),
            "p_q_seg": call.get("q_segments"),
            "p_k_seg": call.get("kv_segments"),
            "p_q_pos": call.get("q_positions"),
            "p_k_pos": call.get("kv_positions"),
            "p_mask": mask,
            "p_pattern": pattern,
            "p_seeds": call.get("dropout_seeds"),
            "p_rows": rows,
            "p_index": index,
            "T": dims.T,
            "S": dims.S,
            "B": dims.B,
            "scale": spec.scale,
            "soft_cap": spec.soft_cap or 1.0,
            "keep_scale": 1.0 / (1.0 - spec.dropout),
            "threshold": int(threshold(spec.dropout)),
            **dict(zip(("s_bias_b", "s_bias_h", "s_bias_t", "s_bias_s"), _strides(bias, 4), strict=True)),
            **dict(zip(("s_mask_b", "s_mask_h", "s_mask_t", "s_mask_s"), _strides(mask, 4), strict=True)),
            **dict(zip(("s_pattern_b", "s_pattern_h", "s_pattern"), _strides(pattern, 4)[:3], strict=True)),
            "s_sinks_b": _strides(call.get("sinks"), 2)[0],
            "s_q_seg": _strides(call.get("q_segments"), 2)[0],
            "s_k_seg": _strides(call.get("kv_segments"), 2)[0],
            "s_q_pos": _strides(call.get("q_positions"), 2)[0],
            "s_k_pos": _strides(call.get("kv_positions"), 2)[0],
            **strides,
        }
        capped, rounded = spec.soft_cap is not None, spec.logits_dtype != "float32"
        pattern_q, pattern_k = spec.pattern_block or (None, None)
        self.constants = {
            "H": dims.H,
            "G": dims.G,
            "D": dims.D,
            "DV": dims.Dv,
            "BD": power_of_two(dims.D, 16),
            "BDV": power_of_two(dims.Dv, 16),
            "BQ": tile.block_q,
            "BK": tile.block_k,
            "LO": spec.band.lo,
            "HI": spec.band.hi,
            "CHUNK": spec.chunk,
            "SEGMENTS": "q_segments" in call,
            "POSITIONS": "q_positions" in call,
            "MASK": mask is not None,
            "PATTERN_Q": pattern_q,
            "PATTERN_K": pattern_k,
            "BIAS": bias is not None,
            "CAPPED": capped,
            "LOGITS": getattr(tl, spec.logits_dtype) if rounded else None,
            "PLAIN": bias is None and not capped and not rounded and spec.scale > 0,
            "SINKS": "sinks" in call,
            "DROPOUT": spec.dropout > 0,
            "ARGMAX": spec.with_argmax,
            "LISTS": lists,
            "TAIL_Q": dims.T % tile.block_q != 0,
            "GUARD": guard,
            "KEY": True,
            "VALUE": True,
            "PRECISION": _precision(call),
        }

    def run(self, kernel: Any, grid: tuple[int, ...], out_shape: Any, aliases: Any = None, **more: Any) -> Any:
        """Launch a kernel with the arguments its signature names."""
        from ejkernel.bridge import triton_call

        given = {**self.values, **self.constants, **more}
        constants = {p.name: given[p.name] for p in kernel.params if p.is_constexpr}
        values = {name: given[name] for name in kernel.arg_names if name in given and name not in constants}
        names = list(values)
        return triton_call(
            kernel,
            *values.values(),
            out_shape=out_shape,
            grid=grid,
            num_warps=self.tile.warps,
            num_stages=self.tile.stages,
            input_output_aliases={names.index(n): i for n, i in (aliases or {}).items()},
            **constants,
        )


def _hides_anything(call: Call) -> bool:
    """Whether a visited key can be hidden from a query, so that what it holds might leak as 0 * nan."""
    masks = ("q_segments", "q_positions", "mask", "pattern")
    return call.spec.band != (None, None) or call.spec.chunk is not None or any(name in call for name in masks)


def _run_twice(call: Call, tile: Tile, side: Side, kernel: Any, heads: int, outputs: dict[str, Any], **rows: Any):
    """A kernel's outputs: the fast launch, then the careful one over the blocks in which the first left a nan."""
    fast = _Launch(call, tile, side)
    n_rows = fast.values["n_rows"]
    absent = dict.fromkeys((f"p_old_{name}" for name in outputs), None)
    bad = jax.ShapeDtypeStruct((heads, n_rows), jnp.int32)
    unmarked = {"p_flags": None, "n_flags": 0, "flag_rows": 1}
    *results, flags = fast.run(kernel, (n_rows, heads), [*outputs.values(), bad], **rows, **absent, **unmarked)
    if not _hides_anything(call):
        return results
    careful = _Launch(call, Tile(min(tile.block_q, 32), min(tile.block_k, 32), 4, 1), side, guard=True)
    old = dict(zip(absent, results, strict=True))
    marked = {"p_flags": flags, "n_flags": n_rows, "flag_rows": tile.block_q if side == "q" else tile.block_k}
    unwritten = jax.ShapeDtypeStruct((1,), jnp.int32)
    grid = (careful.values["n_rows"], heads)
    aliases = {name: number for number, name in enumerate(old)}
    return careful.run(kernel, grid, [*outputs.values(), unwritten], aliases, **rows, **old, **marked)[:-1]


def _schedule_arguments(call: Call, tile: Tile, side: Side | None) -> tuple[Any, Any, dict[str, int], bool]:
    """The schedule's arrays, their strides, and whether it is made of lists; a kernel without one has side None."""
    if side is None:
        return None, None, {}, False
    schedule = plan(call, tile.block_q, tile.block_k, side)
    lists = isinstance(schedule, Lists)
    rows = jnp.asarray(schedule.number if lists else schedule.bounds)
    Bs, Hs, n, _ = rows.shape
    index = schedule.index if lists else None
    strides = {
        "s_rows_b": Hs * n if Bs > 1 else 0,
        "s_rows_h": n if Hs > 1 else 0,
        "s_index": 0 if index is None else index.shape[-1],
        "n_rows": n,
    }
    return rows, index, strides, lists


def forward(call: Call, config: Config) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    from ejkernel.kernels.softmax.triton_fwd import forward_kernel

    B, T, _, H, *_, Dv = dimensions(call)
    shapes = {
        "out": jax.ShapeDtypeStruct((B, T, H, Dv), call["query"].dtype),
        "lse": jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        "total": jax.ShapeDtypeStruct((B, H, T if call.spec.with_argmax else 1), jnp.float32),
        "argmax": jax.ShapeDtypeStruct((B, H, T if call.spec.with_argmax else 1), jnp.int32),
    }
    found = dict(zip(shapes, _run_twice(call, config.forward, "q", forward_kernel, B * H, shapes), strict=True))
    residuals = {name: found[name] for name in ("out", "lse")}
    return found if call.spec.with_argmax else residuals, residuals


def backward(call: Call, residuals: Any, cotangents: Any, config: Config) -> dict[str, jax.Array]:
    from ejkernel.kernels.softmax.triton_bwd import dbias_kernel, dkv_kernel, dq_kernel

    lse, delta = row_terms(residuals, cotangents)
    tiles = [config.dq, config.dkv] + ([config.dv] if config.dv else [])
    rows = {
        "p_dout": output_cotangent(residuals, cotangents),
        **_padded_rows(lse, delta, max(tile.block_q for tile in tiles)),
    }
    query, key, value = (jax.ShapeDtypeStruct(call[n].shape, call[n].dtype) for n in ("query", "key", "value"))
    B, _, _, H, Hkv, *_ = dimensions(call)
    (dquery,) = _run_twice(call, config.dq, "q", dq_kernel, B * H, {"dq": query}, **rows)
    key_value = partial(_run_twice, call, side="k", kernel=dkv_kernel, heads=B * Hkv, **rows)
    if config.dv is None:
        dkey, dvalue = key_value(config.dkv, outputs={"dk": key, "dv": value})
    else:
        unwritten = jax.ShapeDtypeStruct((1,), value.dtype)
        dkey, _ = key_value(config.dkv, outputs={"dk": key, "dv": unwritten}, VALUE=False)
        _, dvalue = key_value(config.dv, outputs={"dk": unwritten, "dv": value}, KEY=False)
    gradients = {"query": dquery, "key": dkey, "value": dvalue} | sink_gradient(call, lse, delta)
    if "bias" in call:
        gradients["bias"] = _bias_gradient(call, config, rows, dbias_kernel)
    return gradients


def _padded_rows(lse: jax.Array, delta: jax.Array, block: int) -> dict[str, Any]:
    """lse in units of log2 and delta, to the end of the last block: loads of them need no mask and are aligned."""
    pad = ((0, 0), (0, 0), (0, -lse.shape[-1] % block))
    lse, delta = jnp.pad(lse * LOG2_E, pad, constant_values=jnp.inf), jnp.pad(delta, pad)
    return {"p_lse": lse, "p_delta": delta, "s_row": lse.shape[-1]}


def _bias_gradient(call: Call, config: Config, rows: dict[str, jax.Array], kernel: Any) -> jax.Array:
    bias = call["bias"]
    launch = _Launch(call, config.dq, None)
    Bb, Hb, Tb, Sb = bias.shape
    tiles_q, tiles_k = -(-Tb // config.dq.block_q), -(-Sb // config.dq.block_k)
    sizes = {"n_bias_b": Bb, "n_bias_h": Hb, "n_bias_t": Tb, "n_bias_s": Sb}
    shape = jax.ShapeDtypeStruct(bias.shape, jnp.float32)
    return launch.run(kernel, (tiles_q, tiles_k, Bb * Hb), shape, **rows, **sizes).astype(bias.dtype)


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward, backward)
