"""Softmax attention on Hopper through Pallas Mosaic GPU: warp-specialised, pipelined wgmma.

A tile is 128 query rows of one head (at head dim 64 often 192); a program computes one, or one after another. Consumer
warpgroups compute, 64 rows each; a producer copies blocks of keys and values into a ring of `stages` in shared memory.
In a step a consumer issues the logits of its next block together with this block's weighted values, and does the
softmax of the former beside the latter. The block schedule gives each tile three runs of key blocks: masked, unmasked,
masked. Under a block pattern the runs are of entries of a list, unmasked then masked, and a block is made of sub-blocks
of 64 keys that need not be neighbours (see block_lists.py).

Registers of a consumer's thread (at most 232; 160 of three consumers): logits block_k/2, weights in 16 bits of this
block and the one before block_k/4 and in the logits' registers, output D/2. D64/block_k 128: 64+32+32, D128/128:
64+32+64, D256/64: 32+16+128.
Shared memory (227 KB): 128*D bytes of queries a consumer, as much for the output (up to D128; beyond, it takes the
queries' memory) and stages*2*block_k*D*2 of keys and values. D64/128/2: 48+64, D128/128/2: 64+128, D256/64/2: 64+128.

Files: forward.py; backward.py (dq; dk and dv) and backward_fused.py (all three), with what they share in
backward_tiles.py; scheduler.py (which tiles and blocks), block_lists.py (blocks of a pattern), masks.py (elements),
tiles.py (what all kernels share), warpgroups.py (producer and consumers), retry.py (nan), private_mosaic.py.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.checks.options import config_ints
from ejkernel.kernels.softmax.mosaic_gpu import backward, forward
from ejkernel.kernels.softmax.mosaic_gpu.backward import BIAS_STAGES
from ejkernel.kernels.softmax.mosaic_gpu.backward_fused import BLOCK_Q
from ejkernel.kernels.softmax.mosaic_gpu.block_lists import SUB_BLOCK
from ejkernel.kernels.softmax.mosaic_gpu.masks import Extent
from ejkernel.kernels.softmax.mosaic_gpu.private_mosaic import CAN_ADD_TO_INPUT
from ejkernel.kernels.softmax.mosaic_gpu.tiles import copied_bias, separate_outputs
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import PLATFORMS, Call, Implementation
from ejkernel.ops.operation import Arrays
from ejkernel.ops.settings import is_deterministic

HEAD_DIMS = (64, 96, 128, 192, 256)
SMEM_BYTES = 232448
# tiles of a core from which on they are sorted: at 31 that saved 5 to 7% of a forward on documents, less its sort
_TILES_WORTH_SORTING = 16
# by head dim and whether a causal mask is there, from which T on one backward kernel was faster than two
_LENGTHS_WORTH_FUSING = {(64, False): 2048, (64, True): 4096, (128, False): 2048, (128, True): 4096}
# how many more rows tiles of 192 may have than tiles of 128, without and with a causal mask: three consumers take 17%
# and 4% less time than two
_ROWS_WORTH_THREE_CONSUMERS = {False: 1.2, True: 1.04}


@dataclass(frozen=True)
class Config:
    """How a tile is computed; a consumer warpgroup owns 64 rows of queries (forward, dq) or keys (dk/dv).

    Attributes:
        block_k: forward, keys of a block.
        stages: forward, key and value blocks in flight.
        warpgroups: forward, consumers, each of 64 queries; three have 160 registers a thread.
        dq_block_k: keys of a block in the dq kernel.
        dq_stages: blocks in flight in the dq kernel, of keys and of values: they share one ring.
        dkv_block_q: queries of a block in the dk/dv kernel.
        dkv_stages: query blocks in flight in the dk/dv kernel.
        dkv_split: one consumer sums dv, the other dk, over the same 64 keys (for large head dims).
        fused: the backward is one kernel, which adds dq in any order (see backward_fused.py). Of the fields above it
            has `dkv_stages`, and blocks of 64 queries, at head dim 64 of 128.
        persistent: as many programs as cores, where there are more tiles.
        longest_first: where only the device knows how much a tile visits, these programs take tiles in
            longest-processing-time order, for which it sorts them.
    """

    block_k: int = 128
    stages: int = 2
    warpgroups: int = 2
    dq_block_k: int = 64
    dq_stages: int = 4
    dkv_block_q: int = 64
    dkv_stages: int = 2
    dkv_split: bool = False
    fused: bool = False
    persistent: bool = True
    longest_first: bool = False

    def __post_init__(self) -> None:
        config_ints(self, ("block_k", "dq_block_k", "dkv_block_q"), 64, multiple=64)
        for name, least in (("stages", 2), ("warpgroups", 2), ("dq_stages", 3), ("dkv_stages", 1)):
            config_ints(self, (name,), least)
        if self.warpgroups > 3:
            raise ValueError(f"warpgroups={self.warpgroups} must be 2 or 3")
        if self.longest_first and not self.persistent:
            raise ValueError("longest_first=True sorts tiles for as many programs as cores: it needs persistent=True")

    def shared_bytes(self, head_dim: int, bias_q: Extent = "", bias_k: Extent = "") -> dict[str, int]:
        """Shared memory of each kernel for 16-bit inputs: tiles, and what is small in whole kilobytes.

        What is copied of a bias differs where queries are the rows of a tile and where keys are.
        """

        def bias(kind: Extent, columns: int, rows: int = 128) -> int:
            return {"tile": 2 * rows * columns, "column": -(-4 * columns // 1024) * 1024}.get(kind, 0)

        row, outputs, queries = 2 * head_dim, 128 if separate_outputs(head_dim) else 0, 64 * self.warpgroups
        statistics = 4 * self.dkv_stages * self.dkv_block_q
        ring = 2 * self.dkv_stages * self.dkv_block_q
        sizes = {
            "forward": row * ((2 if outputs else 1) * queries + 2 * self.stages * self.block_k)
            + bias(bias_q, self.stages * self.block_k, queries)
            + _small_bytes(4 * queries, _nan_flag_bytes(self.stages, self.block_k)),
        }
        if self.fused:
            products = 2 * 2 * 128 * self.dkv_block_q + 4 * 128 * 64  # ds twice, dq
            nan_flags = _nan_flag_bytes(2 * self.dkv_stages + 2, self.dkv_block_q)
            return sizes | {"bwd": row * (2 * 128 + ring) + products + _small_bytes(statistics, statistics, nan_flags)}
        keys, gradients = (64, 0) if self.dkv_split else (128, 2 * outputs)
        exchange = 2 * 64 * self.dkv_block_q * 2 if self.dkv_split else 0
        return sizes | {
            "dq": row * (2 * 128 + outputs + self.dq_stages * self.dq_block_k)
            + bias(bias_q, BIAS_STAGES * self.dq_block_k)
            + _small_bytes(_nan_flag_bytes(self.dq_stages, self.dq_block_k)),
            "dkv": row * (2 * keys + gradients + ring)
            + bias(bias_k, self.dkv_stages * self.dkv_block_q)
            + exchange
            + _small_bytes(statistics, statistics, _nan_flag_bytes(2 * self.dkv_stages, self.dkv_block_q)),
        }


def _nan_flag_bytes(tiles: int, columns: int) -> int:
    """Bytes of the flags of a masked call, see `retry_scratch`."""
    return 2 * (4 + tiles) * max(64, columns)


def _small_bytes(*arrays: int) -> int:
    """Bytes of small arrays, each in whole kilobytes, of Mosaic's scratch for reductions and of the barriers."""
    return sum(-(-size // 1024) * 1024 for size in arrays) + 1024 + 256


def unsupported(call: Call) -> list[str]:
    """Why this implementation cannot do the call; empty if it can."""
    q, k, v = call["query"], call["key"], call["value"]
    spec, dims = call.spec, dimensions(call)
    reasons = []
    if call.target.capability != 90:
        reasons.append(f"needs a Hopper GPU (sm_90), not {call.target.arch}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"needs bfloat16 or float16 throughout, not {q.dtype}, {k.dtype}, {v.dtype}")
    if (most := max(dims.D, dims.Dv)) > HEAD_DIMS[-1]:
        reasons.append(f"head dim {most} is above {HEAD_DIMS[-1]}")
    elif most <= HEAD_DIMS[0] // 2:
        reasons.append(f"head dim {most}: half or more of the narrowest tiles, {HEAD_DIMS[0]}, would be zeros")
    if "bias" in call:
        reasons += [f"the gradient of a bias is a kernel of Triton's: {why}" for why in PLATFORMS["triton"].missing()]
    if "pattern" in call and any(size % SUB_BLOCK for size in spec.pattern_block):
        reasons.append(f"a block pattern needs blocks of multiples of {SUB_BLOCK}, not {spec.pattern_block}")
    if spec.pattern_by_position:
        reasons.append("a block pattern is read by index, not by position")
    if spec.rules.mask is not None:
        reasons.append(f"a mask function: {spec.rules.mask}")
    if spec.rules.score is not None:
        reasons.append(f"a score function: {spec.rules.score}")
    if spec.with_argmax:
        reasons.append("the argmax output is not implemented")
    if spec.logits_dtype != "float32":
        reasons.append(f"logits are computed in float32, not {spec.logits_dtype}")
    if spec.precision not in (None, lax.Precision.DEFAULT):
        reasons.append(f"precision {spec.precision} is not implemented: one tensor-core pass, f32 accumulation")
    return reasons


def tile_head_dim(call: Call) -> int:
    """The head dim that the kernels have for a call: zeros are added to others."""
    dims = dimensions(call)
    return next((D for D in HEAD_DIMS if max(dims.D, dims.Dv) <= D), HEAD_DIMS[-1])


def unsupported_config(call: Call, config: Config) -> list[str]:
    """Why a config does not fit the call."""
    D, bias_q, bias_k = tile_head_dim(call), copied_bias(call, "q"), copied_bias(call, "k")
    reasons = [
        f"its {kernel} kernel needs {size} bytes of shared memory, of {SMEM_BYTES}"
        for kernel, size in config.shared_bytes(D, bias_q, bias_k).items()
        if size > SMEM_BYTES
    ]
    blocks = {"block_k": config.block_k, "dq_block_k": config.dq_block_k, "dkv_block_q": config.dkv_block_q}
    if bias_q == "tile" and ("pattern" in call or "mask" in call):  # whose blocks are put together from sub-blocks
        reasons += [
            f"a bias of every pair under a pattern or dense mask needs {n}=64, not {b}"
            for n, b in blocks.items()
            if b != 64
        ]
    if 3 * config.block_k // 4 + D // 2 > (128 if config.warpgroups == 3 else 192):
        reasons.append(f"block_k={config.block_k} leaves no registers at head dim {D}")
    if config.warpgroups == 3 and D > 64:
        reasons.append(f"warpgroups=3 leaves no registers for head dim {D}: 64 at most")
    if config.warpgroups == 3 and ("pattern" in call or "mask" in call):
        reasons.append("warpgroups=3: the lists of a pattern or dense mask are for tiles of two times 64 queries")
    if config.dkv_split and bias_k == "tile":
        reasons.append("dkv_split=True leaves no room for a bias of 16-bit numbers")
    return reasons + (_unsupported_fused(call, config) if config.fused else [])


def _unsupported_fused(call: Call, config: Config) -> list[str]:
    """Why the backward cannot be one kernel. It does every other call of head dims 64 and 128 that two kernels do."""
    D, listed = tile_head_dim(call), "pattern" in call or "mask" in call
    block = BLOCK_Q.get(D, 64)
    limits = {
        "fused=True has no bias": "bias" in call,
        "fused=True has no dropout": call.spec.dropout > 0,
        f"fused=True is for head dims {' and '.join(map(str, BLOCK_Q))}, not {D}": D not in BLOCK_Q,
        "fused=True has no pattern and no dense mask at head dim 64": listed and D == 64,
        f"fused=True needs dkv_block_q={block} at head dim {D}, not {config.dkv_block_q}": config.dkv_block_q != block,
        "fused=True keeps the gradients of a key together: it needs dkv_split=False": config.dkv_split,
        f"fused=True needs JAX 0.11, not {jax.__version__}": not CAN_ADD_TO_INPUT,
        "fused=True adds gradients in any order, and the same bits are asked for": is_deterministic(),
    }
    return [reason for reason, holds in limits.items() if holds]


def _only_causal(call: Call) -> bool | None:
    """Whether a causal mask hides something, where nothing else does; None where something else does."""
    spec = call.spec
    masks = any(name in call for name in ("q_segments", "q_positions", "pattern", "mask")) or spec.chunk is not None
    return None if masks or spec.band.lo is not None else spec.band.hi is not None


def _fused_is_faster(call: Call) -> bool:
    """Whether one kernel was measured to be faster than two: long rows, whole tiles."""
    dims, causal = dimensions(call), _only_causal(call)
    least = None if causal is None else _LENGTHS_WORTH_FUSING.get((tile_head_dim(call), causal))
    long = least is not None and least <= dims.T and dims.T % 128 == 0 and dims.S % 128 == 0
    return long and CAN_ADD_TO_INPUT and "bias" not in call and not call.spec.dropout


def _three_are_faster(call: Call) -> bool:
    """Whether three consumers do head dim 64 faster than two, which compute fewer rows beyond the last query."""
    T, causal = dimensions(call).T, _only_causal(call)
    if causal is None or "bias" in call:
        return False
    rows = {size: -(-T // size) * size for size in (128, 192)}
    return rows[192] <= _ROWS_WORTH_THREE_CONSUMERS[causal] * rows[128]


def _longest_first_is_faster(call: Call) -> bool:
    """Whether longest-processing-time order is worth its sort: documents, and many tiles for each core."""
    dims, cores = dimensions(call), call.target.cores
    many = 0 < _TILES_WORTH_SORTING * cores <= dims.B * dims.H * -(-dims.T // 128)
    return many and "q_segments" in call and "pattern" not in call and "mask" not in call


def _fused(config: Config, D: int) -> Config:
    """The same config with a backward in one kernel."""
    return replace(config, fused=True, dkv_block_q=BLOCK_Q.get(D, 64), dkv_stages=2)


def default_config(call: Call) -> Config:
    """Tiles by head dim; see the budgets above and in backward."""
    D, in_order, bias = tile_head_dim(call), _longest_first_is_faster(call), copied_bias(call, "q")
    fused = _fused_is_faster(call) and not is_deterministic()
    listed = "pattern" in call or "mask" in call
    if D <= 64 and bias == "tile" and listed:
        return Config(64, stages=2, dq_block_k=64, dq_stages=4, dkv_block_q=64, dkv_stages=3)
    if D <= 64:
        consumers = 3 if _three_are_faster(call) else 2
        config = Config(128, warpgroups=consumers, dq_block_k=128, dq_stages=4, dkv_stages=3, longest_first=in_order)
        return _fused(config, D) if fused else config
    if 64 < D <= 128 and bias == "tile":  # whose tiles leave less room for others
        return Config(64, dq_block_k=64, dq_stages=5, dkv_block_q=64, dkv_stages=1, longest_first=in_order)
    if D <= 128:
        return Config(
            128, dq_block_k=64, dq_stages=6, dkv_block_q=64, dkv_stages=2, fused=fused, longest_first=in_order
        )
    stages = 4 if D == 192 else 3
    return Config(64, stages=2, dq_block_k=64, dq_stages=stages, dkv_block_q=64, dkv_stages=2, dkv_split=True)


def search_space(call: Call) -> list[Config]:
    """Configs worth timing that fit in shared memory and in the forward's registers."""
    base, D = default_config(call), tile_head_dim(call)
    alternatives = [replace(base, warpgroups=5 - base.warpgroups)]
    two = replace(base, fused=False, dkv_block_q=64, dkv_stages=3 if D <= 64 else 2)
    alternatives.append(two if base.fused else _fused(base, D))
    configs = [base, *(config for config in alternatives if not unsupported_config(call, config))]
    if any(name in call for name in ("q_segments", "q_positions", "pattern")):
        configs.append(replace(base, longest_first=not base.longest_first))
    for block_k in (64, 128, 256):
        for stages in (2, 3, 4):
            for persistent in (True, False):
                order = base.longest_first and persistent
                config = replace(base, block_k=block_k, stages=stages, persistent=persistent, longest_first=order)
                if config != base and not unsupported_config(call, config):
                    configs.append(config)
    return configs


def remark(call: Call, config: Config) -> str:
    """What the order of sums does to a gradient, or costs it."""
    if config.fused:
        return "its backward adds dq in any order: the same bits in every run are had with ejkernel.ops.deterministic()"
    if is_deterministic() and _fused_is_faster(call):
        return "its backward is two kernels, for the same bits in every run; one kernel takes up to a fifth less time"
    return ""


def _pad_head_dim(x: jax.Array, D: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, D - x.shape[3]))) if x.shape[3] < D else x


def _pad_call(call: Call) -> Call:
    arrays = {name: _pad_head_dim(call[name], tile_head_dim(call)) for name in ("query", "key", "value")}
    return replace(call, arrays=call.arrays | arrays)


def run_forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    """Output and log-sum-exp; both are all the backward pass keeps."""
    outputs = forward.forward(_pad_call(call), config)
    outputs["out"] = outputs["out"][..., : dimensions(call).Dv]
    return outputs, dict(outputs)


def run_backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    """Gradients of query, key, value, sinks and bias."""
    D = tile_head_dim(call)
    residuals, cotangents = (
        x | {"out": _pad_head_dim(x["out"], D)} if "out" in x else x for x in (residuals, cotangents)
    )
    gradients = backward.backward(_pad_call(call), residuals, cotangents, config)
    return {name: dx[..., : call[name].shape[3]] if dx.ndim == 4 else dx for name, dx in gradients.items()}


IMPLEMENTATION = Implementation(
    Config, unsupported, default_config, search_space, run_forward, run_backward, unsupported_config, remark=remark
)
