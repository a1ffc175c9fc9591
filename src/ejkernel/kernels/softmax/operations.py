"""The operations built on the softmax family, and where their implementations live."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.sizes import rounded_sizes
from ejkernel.kernels.common.struct_call import struct_call
from ejkernel.kernels.softmax.spec import ARRAYS, OUTPUTS, canonicalise, dimensions
from ejkernel.ops import Call, Operation, Splits
from ejkernel.ops.operation import Arrays, random_arrays
from ejkernel.types import BlockPattern, MaskInfo

IMPLEMENTATIONS = {
    "xla": "ejkernel.kernels.softmax.xla",
    "triton": "ejkernel.kernels.softmax.triton",
    "pallas": {"sm_90": "ejkernel.kernels.softmax.mosaic_gpu", "tpu": "ejkernel.kernels.softmax.pallas_tpu"},
    "cudnn": "ejkernel.kernels.softmax.cudnn",
    "cute": "ejkernel.kernels.softmax.cute",
}


def bucket(call: Call) -> str:
    """The shape bucket of a call: its sizes rounded, and what changes the work."""
    dims = dimensions(call)
    sizes = rounded_sizes(zip("BTSHKDV", dims, strict=True))
    band = call.spec.band
    kind = "full" if band.lo is None and band.hi is None else "causal" if band.lo is None else "window"
    # a GPU's Mosaic copies by eights, and has other lengths copied into such first
    extras = ["ragged"] * (call.target.backend == "gpu" and (dims.T % 8 != 0 or dims.S % 8 != 0))
    extras += ["chunk"] * (call.spec.chunk is not None)
    extras += [name for name in ("q_segments", "mask", "pattern", "bias") if name in call]
    extras += [
        f"{name}_fn" for name, rule in zip(call.spec.rules._fields, call.spec.rules, strict=True) if rule is not None
    ]
    return "-".join([sizes, call["query"].dtype.name, kind, *extras])


def _struct_call(
    *,
    B: int = 2,
    T: int = 128,
    S: int = 128,
    H: int = 2,
    Hkv: int = 2,
    D: int = 64,
    Dv: int | None = None,
    dtype: str = "bfloat16",
    **options: Any,
) -> Call:
    shapes = [(B, T, H, D), (B, S, Hkv, D), (B, S, Hkv, Dv or D)]
    return struct_call(canonicalise, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), **options)


def _ids(length: int) -> jax.Array:
    return jnp.zeros((2, length), jnp.int32)


def _prefix(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j <= i) | (j < 32)


def _scaled_by_head(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * 2.0**-h


def _relative(table: jax.Array) -> Callable[..., Any]:
    return lambda score, b, h, i, j: score + table[jnp.clip(j - i, -4, 4) + 4, h]


def probes() -> dict[str, Call]:
    """One small call per feature."""
    lengths = partial(MaskInfo.from_lengths, jnp.array([100, 128]), q_len=128)
    return {
        "plain": _struct_call(),
        "causal": _struct_call(causal=True),
        "causal, T != S": _struct_call(S=256, causal=True),
        "sliding window": _struct_call(causal=True, sliding_window=32),
        "two-sided window": _struct_call(sliding_window=(16, 48)),
        "chunks": _struct_call(mask_info=lambda: MaskInfo(q_len=128, kv_len=128).apply_chunked(32)),
        "segments": _struct_call(mask_info=lambda: MaskInfo.from_segments(_ids(128))),
        "packed sequences": _struct_call(B=1, causal=True, cum_seqlens_q=lambda: jnp.array([0, 50, 128])),
        "explicit positions": _struct_call(
            mask_info=lambda: MaskInfo.from_segments(_ids(128), None, _ids(128), _ids(128)), causal=True
        ),
        "lengths": _struct_call(mask_info=lengths),
        "dense mask": _struct_call(mask_info=lambda: MaskInfo.from_attention_mask(jnp.ones((2, 1, 128, 128), bool))),
        "block pattern": _struct_call(
            mask_info=lambda: MaskInfo.from_block_pattern(BlockPattern.sliding_blocks(2, 1, block_size=64), q_len=128)
        ),
        "mask function": _struct_call(mask_fn=lambda: _prefix),
        "score function": _struct_call(score_fn=lambda: _scaled_by_head),
        "a table read by query and key": _struct_call(score_fn=lambda: _relative(jnp.zeros((9, 2)))),
        "ALiBi": _struct_call(alibi_slopes=lambda: jnp.ones(2)),
        "bias": _struct_call(bias=lambda: jnp.zeros((1, 2, 128, 128))),
        "sinks": _struct_call(softmax_aux=lambda: jnp.zeros(2)),
        "soft cap": _struct_call(logits_soft_cap=30.0),
        "dropout": _struct_call(dropout_prob=0.1, dropout_seed=0),
        "unnormalised output": _struct_call(normalize_output=False),
        "GQA": _struct_call(H=8),
        "lengths that divide nothing": _struct_call(T=129, S=1001),
        "head_dim 256": _struct_call(D=256),
        "head_dim 40": _struct_call(D=40),
        "Dv != D": _struct_call(Dv=32),
        "float16": _struct_call(dtype="float16"),
        "float32": _struct_call(dtype="float32"),
        "logits_dtype bfloat16": _struct_call(logits_dtype="bfloat16"),
    }


def example(call: Call) -> Arrays:
    """A call like this one in which nothing is padding and every position is the token's own."""
    positions = {name: call[name] for name in ("q_positions", "kv_positions") if name in call}
    counted = {n: jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape) for n, x in positions.items()}
    if "q_offsets" in call and counted:  # the ends of a sequence's queries and keys are aligned
        counted["q_positions"] += call["key"].shape[1] - call["query"].shape[1]
    lengths = {"q_offsets": call["query"].shape[1], "kv_offsets": call["key"].shape[1]}
    # one sequence of all tokens, as the segments say, and empty ones
    packed = {n: jnp.full(call[n].shape, size, jnp.int32).at[:, 0].set(0) for n, size in lengths.items() if n in call}
    return random_arrays(call) | counted | packed


def of_nothing(arrays: Arrays, zeros: Arrays) -> Arrays:
    """Outputs without keys: those of rows that see nothing but their sinks."""
    sinks = arrays["sinks"][..., None] if "sinks" in arrays else jnp.float32(-jnp.inf)
    values = {"lse": sinks, "total": jnp.where(jnp.isneginf(sinks), 0.0, 1.0), "argmax": jnp.int32(-1)}
    return zeros | {n: jnp.broadcast_to(x, zeros[n].shape) for n, x in values.items() if n in zeros}


SPLITS = Splits(
    free=("B", "H", "Hkv"),
    grouped=(("H", "Hkv"),),
    otherwise=dict.fromkeys(("T", "S"), "ring_attention splits lengths"),
)

# where nothing near was measured; Hopper's by 28 odd calls on an H200 (docs/notes/hopper.md)
PREFERENCE = {
    "cpu": ("xla",),
    "gpu": ("cudnn", "cute", "pallas", "triton", "xla"),
    "sm_90": ("cute", "pallas", "cudnn", "triton", "xla"),
    "tpu": ("pallas", "xla"),
}

FLASH_ATTENTION = Operation(
    name="flash_attention",
    arrays=ARRAYS,
    outputs=OUTPUTS,
    implementations=IMPLEMENTATIONS,
    preference=PREFERENCE,
    bucket=bucket,
    splits=SPLITS,
    example=example,
    probes=probes,
    of_nothing=of_nothing,
)
BLOCKSPARSE_ATTENTION = replace(FLASH_ATTENTION, name="blocksparse_attention")
SCALED_DOT_PRODUCT_ATTENTION = replace(FLASH_ATTENTION, name="scaled_dot_product_attention")

# flash_attention's kernels and configs, and its own name in errors and explanations
DOT_PRODUCT_ATTENTION = replace(FLASH_ATTENTION, name="dot_product_attention", configs_of=FLASH_ATTENTION.name)

ATTENTION = replace(
    FLASH_ATTENTION,
    name="attention",
    outputs={"out": "B T H Dv", "weights": "B H T S"},
    implementations={"xla": "ejkernel.kernels.softmax.weights"},
    preference={},
    probes=dict,
    of_nothing=None,
)

OPERATIONS = (
    FLASH_ATTENTION,
    BLOCKSPARSE_ATTENTION,
    SCALED_DOT_PRODUCT_ATTENTION,
    DOT_PRODUCT_ATTENTION,
    ATTENTION,
)
