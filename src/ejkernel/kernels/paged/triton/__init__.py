"""Paged attention in Triton, for NVIDIA GPUs from sm_80 on: configs and launches of the kernels beside it.

Sequences with few query rows go to the decode kernel, which splits their keys over programs; the others go to the
prefill kernel, which splits their rows. A ragged call launches both, and on the device each sequence belongs to one.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.common.triton_launch import TritonLaunch
from ejkernel.kernels.common.triton_rules import DeviceFunction, Layouts, flat_operands, unsupported_operations
from ejkernel.kernels.paged.spec import Dimensions, dimensions
from ejkernel.ops import Call, Implementation

# query rows that a program of the decode kernel may hold: tokens times the query heads of a key head
MOST_ROWS = 128
# in float32, where they fill the shared memory of a program, by the padded head dim
_FLOAT32_ROWS = {"hopper": {64: 128, 128: 128, 256: 64}, "ampere": {64: 128, 128: 64, 256: 16}}


@dataclass(frozen=True)
class Config:
    """Tiles of both kernels.

    Attributes:
        splits: into how many the decode kernel splits a sequence's keys; more than one are merged by another kernel.
        least_keys: keys below which a split is not cut further.
        decode_tokens: in a ragged call, sequences with at most as many query tokens go to the decode kernel.
        decode_keys: keys per step of the decode kernel.
        decode_independent_warps: whether each warp of the decode kernel has keys of its own, at least 16 a step, and a
            running softmax over them; they merge after the last step. Costs registers for every row.
        prefill_rows: query rows (tokens times heads of a key head) of a prefill tile.
        prefill_keys: keys per step of the prefill kernel.
    """

    splits: int = 1
    least_keys: int = 256
    decode_tokens: int = 1
    decode_keys: int = 64
    decode_warps: int = 4
    decode_stages: int = 3
    decode_independent_warps: bool = False
    prefill_rows: int = 128
    prefill_keys: int = 64
    prefill_warps: int = 8
    prefill_stages: int = 2

    def __post_init__(self) -> None:
        config_ints(self, ("decode_keys", "prefill_rows", "prefill_keys"), 16, power_of_two=True)
        for name in ("decode_warps", "prefill_warps"):
            if getattr(self, name) not in (1, 2, 4, 8, 16):
                raise ValueError(f"{name}={getattr(self, name)!r} must be 1, 2, 4, 8 or 16")
        config_ints(self, ("splits", "least_keys"))
        config_ints(self, ("decode_tokens",), 0)
        if self.splits > 1024:
            raise ValueError(f"splits={self.splits} must be at most 1024")
        if self.decode_independent_warps and self.decode_keys < 16 * self.decode_warps:
            raise ValueError(
                f"decode_independent_warps needs 16 keys for each warp, not {self.decode_keys} for {self.decode_warps}"
            )


def unsupported(call: Call) -> list[str]:
    dims, cache = dimensions(call), _cache(call).dtype
    capability, on_gpu = call.target.capability, call.target.backend == "gpu"
    limits = {
        f"head_dim {max(dims.D, dims.Dv)}: at most 256": max(dims.D, dims.Dv) > 256,
        f"{call.target.arch}: needs sm_80 or newer": on_gpu and capability < 80,
        f"a {cache} cache on {call.target.arch}: needs sm_89 or newer": (
            on_gpu and capability < 89 and cache == jnp.float8_e4m3fn
        ),
        f"num_splits {call.spec.num_splits}: at most 1024": (call.spec.num_splits or 1) > 1024,
    }
    reasons = [reason for reason, holds in limits.items() if holds]
    return reasons + unsupported_operations(*call.spec.rules)


# multiprocessors of a chip, by architecture: what a launch has to fill
_CORES = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_103": 148}

# by the padded head dim. Decode (keys, warps, stages): two or three programs on a multiprocessor, which together have
# about 100 KB of keys and values on their way, hide the latency of its memory. Prefill (rows, keys, warps, stages).
_DECODE = {
    "hopper": {64: (128, 4, 3), 128: (64, 4, 4), 256: (32, 4, 3)},
    "ampere": {64: (64, 4, 2), 128: (32, 4, 3), 256: (16, 4, 3)},
    "float32": {64: (32, 4, 2), 128: (16, 4, 2), 256: (16, 8, 2)},
}
_PREFILL = {
    "hopper": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 8, 2)},
    "ampere": {64: (64, 32, 4, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2)},
    "float32": {64: (32, 32, 4, 1), 128: (16, 32, 4, 1), 256: (16, 16, 4, 1)},
}


def _width(dims: Dimensions) -> int:
    return power_of_two(max(dims.D, dims.Dv), 64)


def _generation(call: Call) -> str:
    return "hopper" if call.target.capability in (0, 90, 100, 103) else "ampere"  # 0: in the interpreter


def _most_rows(call: Call, dims: Dimensions) -> int:
    float32 = call["query"].dtype == jnp.float32
    return _FLOAT32_ROWS[_generation(call)][_width(dims)] if float32 else MOST_ROWS


def default_config(call: Call) -> Config:
    dims = dimensions(call)
    width = _width(dims)
    kind = "float32" if call["query"].dtype == jnp.float32 else _generation(call)
    narrow = _cache(call).dtype.itemsize == 1
    keys, warps, stages = _DECODE[kind][width]
    stages += 2 * narrow  # half the bytes: more steps on their way
    # and less time to wait for other warps
    independent = narrow and width <= 128 and _warps_may_be_independent(call, dims, keys, warps)
    if independent and "block_tables" in call and dims.L % keys and (kind, width) == ("hopper", 128):
        keys, stages, independent = 128, 3, False  # each step looks up the page of every key: fewer steps
    if _decode_rows(dims, call.spec.tokens or 1) > 32:
        keys, warps, stages = max(16, keys // 2), 8, min(stages, 2)
    rows, prefill_keys, prefill_warps, prefill_stages = _PREFILL[kind][width]
    return Config(
        splits=_splits(call, dims),
        decode_tokens=max(1, 16 // dims.G) if _most_rows(call, dims) >= dims.G else 0,
        decode_keys=keys,
        decode_warps=warps,
        decode_stages=stages,
        decode_independent_warps=independent,
        prefill_rows=rows,
        prefill_keys=prefill_keys,
        prefill_warps=prefill_warps,
        prefill_stages=prefill_stages,
    )


def _splits(call: Call, dims: Dimensions) -> int:
    """Enough programs to fill the chip twice over, each with at least 256 keys; one and a half times needs no merge."""
    cores, programs = _CORES.get(call.target.arch, 132), dims.B * dims.N * dims.Hkv
    wanted = 1 if 2 * programs >= 3 * cores else -(-2 * cores // programs)
    return max(1, min(wanted, -(-dims.S // 256), 128))


def _warps_may_be_independent(call: Call, dims: Dimensions, keys: int, warps: int) -> bool:
    """Whether warps can have keys of their own: enough of them, and a tile of rows that fits a warp's registers."""
    return keys >= 16 * warps and _decode_rows(dims, call.spec.tokens or 1) == 16


def search_space(call: Call) -> list[Config]:
    base, dims = default_config(call), dimensions(call)
    configs = [
        replace(
            base,
            splits=max(1, int(base.splits * more)),
            decode_keys=keys,
            decode_warps=warps,
            decode_stages=stages,
            decode_independent_warps=independent,
        )
        for more in (0.5, 1, 2, 4)
        for keys in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
        for independent in (False, True)
        if not independent or _warps_may_be_independent(call, dims, keys, warps)
    ]
    if call.spec.tokens is None or _decode_rows(dims, call.spec.tokens) > _most_rows(call, dims):
        tiles = [(r, k, w, s) for r in (64, 128) for k in (32, 64, 128) for w in (4, 8) for s in (1, 2, 3)]
        names = ("prefill_rows", "prefill_keys", "prefill_warps", "prefill_stages")
        configs += [replace(base, **dict(zip(names, tile, strict=True))) for tile in tiles]
    return configs


def _decode_rows(dims: Dimensions, tokens: int) -> int:
    return power_of_two(max(1, tokens * dims.G), 16)


def _cache(call: Call) -> Any:
    return call["kv_pages" if "kv_pages" in call else "key_pages"]


_OPTIONAL = {
    "INTERLEAVED": "kv_pages", "TABLE": "block_tables", "COUNTED": "num_seqs", "STARTS": "starts", "SINKS": "sinks",
    "K_SCALED": "k_scale", "V_SCALED": "v_scale",
}  # fmt: skip


def _operands(call: Call) -> tuple[Layouts, dict[str, Any]]:
    """What mask and score functions read, (B|1, n) for each dtype: rows (number, T, H), then tables."""
    dims, arrays = dimensions(call), {}
    for name, x in call.arrays.items():
        if name in ("int_rows", "float_rows"):
            x = jnp.broadcast_to(x, (x.shape[0], dims.H, *x.shape[2:])).transpose(0, 2, 3, 1)
            arrays[name] = x.reshape(x.shape[0], 1, x.shape[1], dims.T * dims.H)
        elif name in ("int_tables", "float_tables"):
            arrays[name] = x[:, None]
    layouts, flat = flat_operands(arrays)
    strides = {f"s{name[1:]}": x.shape[2] if x is not None and x.shape[0] > 1 else 0 for name, x in flat.items()}
    return Layouts(*(layout._replace(row_index="o_row") for layout in layouts)), {**flat, **strides}


def _rule(expression: Any, layouts: Layouts) -> DeviceFunction | None:
    return None if expression is None else DeviceFunction(expression, layouts)


def _constants(call: Call, **tiles: Any) -> Any:
    """What a kernel of a call is compiled for; `tiles` are its own constants."""
    from ejkernel.kernels.paged.triton.tiles import Constants

    spec, dims, cache = call.spec, dimensions(call), _cache(call)
    paired = cache.dtype.itemsize == 1 and dims.D % 2 == dims.Dv % 2 == 0
    given: dict[str, Any] = {"PAIRED": paired, **tiles}
    least = 32 if paired else 16
    layouts, _ = _operands(call)
    return Constants(
        HK=dims.Hkv,
        G=dims.G,
        TOKENS=spec.tokens,
        L=dims.L,
        D=dims.D,
        DV=dims.Dv,
        BD=power_of_two(dims.D, least),
        BDV=power_of_two(dims.Dv, least),
        WINDOW=spec.window,
        TRACED_WINDOW="window" in call,
        SPAN=spec.chunk,
        MASK_RULE=_rule(spec.rules.mask, layouts),
        SCORE_RULE=_rule(spec.rules.score, layouts),
        HIDES=spec.hides,
        CAUSAL=spec.causal,
        CAPPED=spec.soft_cap is not None,
        **{constant: name in call for constant, name in _OPTIONAL.items()},
        NARROW=cache.dtype.itemsize == 1 and call["query"].dtype == jnp.bfloat16,
        PTX=call.target.capability > 0,  # 0: in the interpreter
        PRECISION="tf32x3" if call["query"].dtype == jnp.float32 else "tf32",
        **given,
    )


def _values(call: Call) -> dict[str, Any]:
    """What the kernels' parameters may be given, by name."""
    dims, scale, cap = dimensions(call), call.spec.scale, call.spec.soft_cap
    keys, values = ("kv_pages", "kv_pages") if "kv_pages" in call else ("key_pages", "value_pages")
    arrays = {"q": "query", "k": keys, "v": values, "table": "block_tables", "lens": "context_lens"}
    arrays |= {name: name for name in ("query_start", "num_seqs", "starts", "window", "sinks", "k_scale", "v_scale")}

    def stride(name: str) -> int:
        """Entries (of pages: tokens) in a row of the batch axis; 0 where an array broadcasts along it."""
        return math.prod(call[name].shape[1:3]) if name in call and call[name].shape[0] > 1 else 0

    return (
        {f"p_{parameter}": call.get(name) for parameter, name in arrays.items()}
        | {f"s_{parameter}": stride(name) for parameter, name in arrays.items()}
        | {letter: getattr(dims, letter) for letter in "TNPWSH"}
        | {"scale": scale, "soft_cap": cap or 1.0}
        | _operands(call)[1]
    )


_OLD = ("p_old_out", "p_old_lse", "p_old_max")


def _run_over(old: Any, launch: TritonLaunch, kernel: Any, shapes: Any, **more: Any) -> Any:
    """The outputs of a kernel, written into the `old` ones if there are any."""
    aliases = {name: number for number, name in enumerate(_OLD)} if old else None
    return launch.run(kernel, shapes, aliases=aliases, **dict(zip(_OLD, old or (None,) * 3, strict=True)), **more)


def forward(call: Call, config: Config) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    dims, spec = dimensions(call), call.spec
    shapes = [
        jax.ShapeDtypeStruct((dims.B, dims.T, dims.H, dims.Dv), spec.out_dtype or call["query"].dtype),
        jax.ShapeDtypeStruct((dims.B, dims.H, dims.T), jnp.float32),
        jax.ShapeDtypeStruct((dims.B, dims.H, dims.T), jnp.float32),
    ]
    tokens = config.decode_tokens if spec.tokens is None else spec.tokens
    decodes = 0 < tokens * dims.G <= _most_rows(call, dims)
    results = None
    if spec.tokens is None or not decodes:
        results = _prefill(call, config, shapes, tokens if decodes else 0)
    if decodes:
        results = _decode(call, config, shapes, tokens, results)
    return dict(zip(("out", "lse", "top"), results, strict=True)), {}


def _prefill(call: Call, config: Config, shapes: Any, decoded: int) -> Any:
    """Outputs of the sequences with more than `decoded` query tokens, and zeros where no sequence is."""
    from ejkernel.kernels.paged.triton.prefill import prefill_kernel

    dims, rows = dimensions(call), config.prefill_rows
    tiles = dims.T * dims.G // rows + dims.N + 1
    if call.spec.tokens is not None:
        tiles = dims.N * -(-call.spec.tokens * dims.G // rows)
    constants = _constants(
        call,
        BR=rows,
        BK=config.prefill_keys,
        DECODE_TOKENS=decoded,
        SEARCH=dims.N.bit_length(),
        PAIRED=False,  # wgmma takes float16 from shared memory anyway, and products would be halved
    )
    grid = (dims.B * tiles * dims.Hkv,)
    launch = TritonLaunch(_values(call), constants, grid, config.prefill_warps, config.prefill_stages)
    return launch.run(prefill_kernel, shapes, n_tiles=tiles)


def _decode(call: Call, config: Config, shapes: Any, tokens: int, old: Any) -> Any:
    """Outputs of the sequences with at most `tokens` query tokens, put among the `old` ones if there are any."""
    from ejkernel.kernels.paged.triton.decode import decode_kernel, merge_kernel

    dims, spec = dimensions(call), call.spec
    splits, rows = spec.num_splits or config.splits, tokens * dims.G
    padded_splits = power_of_two(splits, 16)
    constants = _constants(
        call,
        BR=_decode_rows(dims, tokens),
        BK=config.decode_keys,
        DECODE_TOKENS=tokens,
        SEVERAL=tokens > 1 or spec.rules.mask is not None,
        GROUPS=config.decode_warps if config.decode_independent_warps else 1,
        SPLITS=splits,
        LEAST=-(-config.least_keys // config.decode_keys) if spec.num_splits is None else 1,
        BS=padded_splits,
        CHUNK=min(16, padded_splits),
    )
    grid = (dims.B * dims.N * dims.Hkv * splits,)
    launch = TritonLaunch(_values(call), constants, grid, config.decode_warps, config.decode_stages)
    if splits == 1:
        return _run_over(old, launch, decode_kernel, shapes)
    sizes = (dims.B, dims.N, dims.Hkv, splits, rows)
    partial = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*sizes, dims.Dv), sizes, sizes)]
    partial = _run_over(None, launch, decode_kernel, partial)
    merge = replace(launch, grid=(dims.B * dims.N * dims.Hkv * rows,), warps=4, stages=1)
    given = dict(zip(("p_splits", "p_sums", "p_maxima"), partial, strict=True))
    return _run_over(old, merge, merge_kernel, shapes, **given)


IMPLEMENTATION = Implementation(Config, unsupported, default_config, search_space, forward)
