"""Softmax attention on TPUs, in Pallas: which tiles, how much memory they take, and the launches.

VMEM of a kernel, in bytes, for tiles of q queries and k keys, inputs of e bytes, and head dimensions D and Dv rounded
up to whole sublanes. A block that the pipeline copies is there twice, and a row of lanes fills eight sublanes:

    forward   2 * (e * (q + k) * (D + Dv) + 32 * q)                       + scratch + tiles
    dq        2 * (e * (q + k) * (D + Dv) + e * q * D + 64 * q)           + scratch + tiles
    dk, dv    2 * (e * (q + k) * (D + Dv) + e * k * (D + Dv) + 64 * q)    + scratch + tiles

and as dq but for its output, the gradients of what a score function reads.

`scratch` is what the kernel keeps from tile to tile, as it asks for it. `tiles` is 4 * q * k for each tile of logits
alive at once: 3; 2 more in float32, whose products take several passes, 2 more with dropout, 1 more with a bias or a
dense mask, 1 more with a score function, and in its backward 3 where a derivative depends on the score. Blocks of bias,
masks, ids, and of what functions read are copied, hence there twice. The counts are the smallest round numbers not
below what libtpu allocates; see `vmem_bytes`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.checks.options import config_ints
from ejkernel.expressions.nodes import SCORE, Expression
from ejkernel.kernels.common.pallas_tpu import LANES, MIB, SMEM_BYTES, SUBLANES, chip_of, tile_bytes
from ejkernel.kernels.common.pallas_tpu_rules import unsupported_operations
from ejkernel.kernels.softmax.gradients import output_cotangent, row_terms, sink_gradient
from ejkernel.kernels.softmax.pallas_tpu import backward, forward
from ejkernel.kernels.softmax.pallas_tpu.tiles import Tiles, whole_block
from ejkernel.kernels.softmax.rules import operand_gradients, slopes
from ejkernel.kernels.softmax.spec import Spec, dimensions
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays


@dataclass(frozen=True)
class Config:
    """Tile sizes; on a TPU multiples of 128.

    Attributes:
        block_q: queries of a tile in the forward.
        block_k: keys of a tile in the forward.
        backward_block_q: queries of a tile in the backward; None: as in the forward.
        backward_block_k: keys of a tile in the backward; None: as in the forward.
    """

    block_q: int = 512
    block_k: int = 512
    backward_block_q: int | None = None
    backward_block_k: int | None = None

    def __post_init__(self) -> None:
        backward = [name for name in ("backward_block_q", "backward_block_k") if getattr(self, name) is not None]
        config_ints(self, ("block_q", "block_k", *backward), SUBLANES, multiple=SUBLANES)

    @property
    def forward(self) -> tuple[int, int]:
        return self.block_q, self.block_k

    @property
    def backward(self) -> tuple[int, int]:
        return self.backward_block_q or self.block_q, self.backward_block_k or self.block_k


def vmem_bytes(call: Call, config: Config) -> dict[str, int]:
    """Bytes of VMEM that each kernel needs for a call; the arithmetic is at the top of this file."""
    dims = dimensions(call)
    e = 2 if call["query"].dtype == jnp.bfloat16 else 4
    D, Dv = _up(dims.D, 4 * SUBLANES // e), _up(dims.Dv, 4 * SUBLANES // e)
    needs = {}
    for name in ("forward", "dq", "dkv", *(["dbias"] if "bias" in call else []), *_operand_kernels(call)):
        block_q, block_k = config.forward if name == "forward" else config.backward
        q, k = whole_block(block_q, dims.T), whole_block(block_k, dims.S)
        row = SUBLANES * 4 * q
        blocks = e * (q + k) * (D + Dv) + _mask_block_bytes(call, q, k)
        blocks += {"forward": row * (1 + 2 * call.spec.with_argmax), "dq": e * q * D + 2 * row}.get(name, 2 * row)
        keys = 4 * k * _up(dims.G, SUBLANES)
        blocks += {"dkv": e * k * (D + Dv), "dbias": 4 * q * k, "drow": row, "dcolumn": keys}.get(name, 0)
        live = 3 + 2 * (e == 4) + 2 * bool(call.spec.dropout) + ("bias" in call or "mask" in call)
        live += _tiles_of_rule(call.spec.rules.score, name != "forward")
        needs[name] = 2 * blocks + _scratch_bytes(name, call, q, k) + live * 4 * q * k
    return needs


def _scratch_bytes(name: str, call: Call, q: int, k: int) -> int:
    """Bytes of what a kernel keeps from tile to tile."""
    kept = forward.scratch(call, q) if name == "forward" else backward.scratch(name, call, q, k)
    return sum(tile_bytes(*shape_and_dtype) for shape_and_dtype in kept.values())


def _mask_block_bytes(call: Call, q: int, k: int) -> int:
    """Bytes of one copy of the blocks of bias, masks, ids, and what functions read."""
    sizes = {"bias": 4 * q * k, "mask": q * k, "pattern": 4 * SUBLANES * LANES * max(1, q // LANES)}
    sizes |= {"q_segments": 32 * q, "q_positions": 32 * q, "kv_segments": 32 * k, "kv_positions": 32 * k}
    for name in ("int_rows", "float_rows", "int_columns", "float_columns"):
        if name in call:
            sizes[name] = 4 * _up(call[name].shape[2], SUBLANES) * (q if name.endswith("_rows") else k)
    return sum(size for name, size in sizes.items() if name in call)


def _tiles_of_rule(rule: Expression | None, backward: bool) -> int:
    """How many tiles more are alive with a score function: in the backward its derivatives may be as long as itself."""
    if rule is None:
        return 0
    by_score, operands = slopes(rule)
    return 3 if backward and any(SCORE in slope.axes for slope in (by_score, *dict(operands).values())) else 1


def _operand_kernels(call: Call) -> list[str]:
    """The kernels for the gradients of a score function's operands."""
    rule = call.spec.rules.score
    read = [] if rule is None else [node.data[0] for node, _ in slopes(rule).operands]  # pyright: ignore
    kinds = {"drow": {"scalar", "row"}, "dcolumn": {"column"}}
    return [name for name, of in kinds.items() if of.intersection(read)]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _scalar_bytes(call: Call, config: Config) -> dict[str, int]:
    """Bytes of scalar memory that each kernel needs: most of all for its schedule."""
    shapes = tuple((name, x.shape, str(x.dtype)) for name, x in call.arrays.items())
    return _schedule_bytes(call.spec, shapes, config)


@lru_cache(maxsize=256)
def _schedule_bytes(spec: Spec, shapes: tuple[Any, ...], config: Config) -> dict[str, int]:
    sizes: dict[str, int] = {}

    def measure(arrays: Any) -> None:
        sizes.update({name: tiles.scalar_bytes for name, tiles in kernels(Call(spec, arrays), config)})

    jax.eval_shape(measure, {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in shapes})
    return sizes


def kernels(call: Call, config: Config) -> Iterator[tuple[str, Tiles]]:
    """The kernels of a call's forward and backward, by name."""
    yield "forward", Tiles.of(call, *config.forward, "q")
    yield "dq", Tiles.of(call, *config.backward, "q")
    yield "dkv", Tiles.of(call, *config.backward, "k")
    if "bias" in call:
        yield "dbias", backward.BiasTiles.of_bias(call, *config.backward)


def unsupported(call: Call) -> list[str]:
    """Why a TPU cannot do the call; empty if it can."""
    if isinstance(call.spec.precision, jax.lax.DotAlgorithmPreset):
        return [f"precision {call.spec.precision}"]
    return unsupported_operations(*call.spec.rules) or unsupported_config(call, default_config(call))


def unsupported_config(call: Call, config: Config) -> list[str]:
    """Why a config does not fit the chip; empty if it does."""
    chip = chip_of(call.target)
    blocks = {size for pair in (config.forward, config.backward) for size in pair}
    reasons = []
    if not call.target.interpreted and any(size % LANES for size in blocks):
        reasons.append(f"blocks must be multiples of {LANES}")
    reasons += [
        f"{kernel} needs {need / MIB:.1f} MiB of VMEM, {chip.name} has {chip.vmem_budget / MIB:.1f}"
        for kernel, need in vmem_bytes(call, config).items()
        if need > chip.vmem_budget
    ]
    reasons += [
        f"{kernel} needs {need / 1024:.0f} KiB of scalar memory, {SMEM_BYTES // 2048} are to spare"
        for kernel, need in _scalar_bytes(call, config).items()
        if need > SMEM_BYTES // 2
    ]
    return [f"{config}: {reason}" for reason in reasons]


# large tiles are faster; in this order, the first that fits
_BLOCKS = ((1024, 1024), (1024, 512), (512, 1024), (512, 512), (256, 512), (256, 256), (128, 256), (128, 128))


def default_config(call: Call) -> Config:
    """The largest tiles that fit in VMEM and do not waste most of their work on hidden pairs."""
    budget, most = chip_of(call.target).vmem_budget, _useful_block(call)
    blocks = [block for block in _BLOCKS if max(block) <= most]
    fitting = {
        kernel: next((b for b in blocks if vmem_bytes(call, Config(*b))[kernel] <= budget), _BLOCKS[-1])
        for kernel in vmem_bytes(call, Config())
    }
    backward = max((block for kernel, block in fitting.items() if kernel != "forward"), key=_BLOCKS.index)
    return Config(*fitting["forward"], *backward)


def _useful_block(call: Call) -> int:
    """The largest block worth taking: past what a query can see, a tile is mostly hidden pairs."""
    if "pattern" in call or "mask" in call:
        return 256
    S, (lo, hi) = dimensions(call).S, call.spec.band
    reach = min(S if lo is None or hi is None else hi - lo + 1, call.spec.chunk or S)
    most = 512 if "q_segments" in call or call.spec.rules.mask is not None else 1024
    return min(most, max(256, 1 << (reach - 1).bit_length()))


def search_space(call: Call) -> list[Config]:
    sizes = (128, 256, 512, 1024, 2048)
    configs = [Config(q, k) for q in sizes for k in sizes]
    return [config for config in configs if not unsupported_config(call, config)]


def run_forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    outputs = forward.run(_widened(call), *config.forward)
    outputs["out"] = outputs["out"].astype(call["query"].dtype)
    return outputs, {"out": outputs["out"], "lse": outputs["lse"]}


def run_backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    lse, delta = row_terms(residuals, cotangents)
    wide = _widened(call)
    rows = backward.Rows(output_cotangent(residuals, cotangents).astype(wide["query"].dtype), lse, delta)
    blocks = config.backward
    gradients = {"query": backward.dquery(wide, rows, *blocks)}
    gradients["key"], gradients["value"] = backward.dkey_dvalue(wide, rows, *blocks)
    if "bias" in call:
        gradients["bias"] = backward.dbias(wide, rows, *blocks)
    if call.spec.rules.score is not None:
        summed = partial(backward.operand_gradient, wide, rows, *blocks)
        gradients |= operand_gradients(call, summed, dict)  # there are no tables
    gradients = {name: x.astype(call[name].dtype) for name, x in gradients.items()}
    return gradients | sink_gradient(call, lse, delta)


def _widened(call: Call) -> Call:
    """float16 as float32: a TPU multiplies neither, but the latter holds the former exactly."""
    arrays = {n: x.astype(jnp.float32) if x.dtype == jnp.float16 else x for n, x in call.arrays.items()}
    return Call(call.spec, arrays, call.target)


IMPLEMENTATION = Implementation(
    Config,
    unsupported,
    default_config,
    search_space,
    run_forward,
    run_backward,
    unsupported_config=unsupported_config,
)
