"""The operations of the native sparse family, and where their implementations live."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.sizes import power_of_two, rounded_sizes
from ejkernel.kernels.common.struct_call import struct_call
from ejkernel.kernels.native_sparse import selection
from ejkernel.kernels.native_sparse.block_table import block_table
from ejkernel.kernels.native_sparse.spec import ARRAYS, OUTPUTS, canonicalise, dimensions
from ejkernel.kernels.softmax.operations import of_nothing
from ejkernel.ops import Call, Dims, Operation, Splits
from ejkernel.ops.operation import Arrays, random_arrays


def bucket(call: Call) -> str:
    """The shape bucket of a call: its sizes rounded, and what changes the work."""
    dims = dimensions(call)
    named = {"B": dims.B, "T": dims.T, "S": dims.S, "H": dims.H, "Hkv": dims.Hkv, "D": dims.D, "V": dims.Dv}
    return f"{rounded_sizes(named.items())}-{call['query'].dtype.name}-{power_of_two(dims.K)}x{call.spec.block_size}"


def selection_bucket(call: Call) -> str:
    B, T, H, D = call["query"].shape
    N, Hkv = call["key"].shape[1:3]
    named = {"B": B, "T": T, "N": N, "H": H, "Hkv": Hkv, "D": D, "K": call.spec.count}
    return f"{rounded_sizes(named.items())}-{call['query'].dtype.name}"


def _struct_call(
    *, B: int = 2, T: int = 256, H: int = 4, Hkv: int = 2, D: int = 64, Dv: int = 64, K: int = 2,
    dtype: str = "bfloat16", **options: Any,
) -> Call:  # fmt: skip
    """A canonical call on shapes alone; an option given as a function is made inside."""
    struct = jax.ShapeDtypeStruct
    tokens = (struct(shape, dtype) for shape in ((B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, Dv)))
    return struct_call(canonicalise, *tokens, struct((B, T, Hkv, K), "int32"), **options)


def probes() -> dict[str, Call]:
    """One small call per feature."""
    return {
        "blocks of 64": _struct_call(),
        "blocks of 128": _struct_call(block_size=128),
        "blocks of 16": _struct_call(block_size=16),
        "single tokens": _struct_call(block_size=1, K=64),
        "blocks of 256": _struct_call(block_size=256),
        "a count for each query": _struct_call(block_counts=lambda: jnp.ones((2, 256, 2), jnp.int32)),
        "packed sequences": _struct_call(B=1, cu_seqlens=lambda: jnp.array([0, 50, 256])),
        "caches of some length": _struct_call(kv_lengths=lambda: jnp.array([100, 256])),
        "sinks": _struct_call(softmax_aux=lambda: jnp.zeros(4)),
        "mask function": _struct_call(mask_fn=lambda: lambda b, h, i, j: (i - j) % 3 == 0),
        "score function": _struct_call(score_fn=lambda: lambda score, b, h, i, j: score * 2.0**-h),
        "one query head to a key head": _struct_call(H=2),
        "64 query heads to a key head": _struct_call(H=64, Hkv=1),
        "lengths that divide nothing": _struct_call(T=129),
        "head_dim 256": _struct_call(D=256),
        "head_dim 40": _struct_call(D=40),
        "Dv != D": _struct_call(Dv=32),
        "float16": _struct_call(dtype="float16"),
        "float32": _struct_call(dtype="float32"),
    }


def selection_probes() -> dict[str, Call]:
    """One small call per feature."""

    def made(T: int = 256, H: int = 4, Hkv: int = 2, D: int = 64, dtype: str = "bfloat16", count: int = 16) -> Call:
        table = block_table(T, T, 16)
        shapes = {
            "query": ((2, T, H, D), dtype),
            "key": ((2, -(-T // 16), Hkv, D), dtype),
            "lse": ((2, H, T), "float32"),
        }
        arrays: dict[str, Any] = {name: jax.ShapeDtypeStruct(*x) for name, x in shapes.items()}
        arrays |= {"first_row": table.first_row, "own_block": table.own_block}
        return Call(selection.Spec(0.125, count), arrays)

    return {
        "16 blocks": made(),
        "2 blocks": made(count=2),
        "200 blocks": made(count=200),
        "lengths that divide nothing": made(T=129),
        "one query head to a key head": made(H=2),
        "head_dim 256": made(D=256),
        "float16": made(dtype="float16"),
        "float32": made(dtype="float32"),
    }


def example(call: Call) -> Arrays:
    """A call like this one: one sequence, whose queries have taken any of the blocks before them."""
    dims = dimensions(call)
    position = np.arange(dims.S - dims.T, dims.S, dtype=np.int32)
    starts = np.minimum(np.arange(dims.N) * call.spec.block_size, dims.S).astype(np.int32)
    draws = np.random.default_rng(0).random(call["indices"].shape)
    drawn = np.floor(draws * (position // call.spec.block_size + 1)[:, None, None]).astype(np.int32)
    drawn = np.sort(np.minimum(drawn, dims.N - 1), -1)
    again = np.concatenate([np.zeros_like(drawn[..., :1], bool), drawn[..., 1:] == drawn[..., :-1]], -1)
    arrays = random_arrays(call) | {"indices": jnp.asarray(np.where(again, -1, drawn))}
    arrays["starts"] = jnp.broadcast_to(jnp.asarray(starts), call["starts"].shape)
    arrays["limits"] = jnp.broadcast_to(jnp.asarray(position + 1), call["limits"].shape)
    return arrays


def selection_example(call: Call) -> Arrays:
    """A call like this one: one sequence, each of whose queries may choose among its blocks."""
    T, N = call["query"].shape[1], call["key"].shape[1]
    own_block = jnp.asarray(np.arange(T) * N // T, jnp.int32)
    arrays = random_arrays(call) | {"first_row": jnp.zeros(call["first_row"].shape, jnp.int32)}
    return arrays | {"own_block": jnp.broadcast_to(own_block, call["own_block"].shape)}


_splits = partial(
    Splits,
    free=("B", "H", "Hkv"),
    otherwise=dict.fromkeys(("T", "S"), "any query may select any block before it: split batch or heads"),
)

# a key head selects by all of its query heads
SPLITS = _splits(tied=(("H", "Hkv"),))

SELECTED_ATTENTION = Operation(
    name="selected_attention",
    arrays=ARRAYS,
    outputs=OUTPUTS,
    implementations={
        "xla": "ejkernel.kernels.native_sparse.xla",
        "triton": "ejkernel.kernels.native_sparse.triton",
    },
    preference={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("xla",)},
    bucket=bucket,
    splits=_splits(grouped=(("H", "Hkv"),)),
    example=example,
    probes=probes,
    of_nothing=of_nothing,
)

SELECT_BLOCKS = Operation(
    name="select_blocks",
    arrays=selection.ARRAYS,
    outputs=selection.OUTPUTS,
    implementations={
        "xla": "ejkernel.kernels.native_sparse.xla_selection",
        "triton": "ejkernel.kernels.native_sparse.triton.selection",
    },
    preference={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("xla",)},
    bucket=selection_bucket,
    splits=SPLITS,
    example=selection_example,
    probes=selection_probes,
    of_nothing=lambda arrays, zeros: {"indices": jnp.full_like(zeros["indices"], -1)},
    no_gradient="which blocks are selected is not differentiable; the compressed branch trains what selects them",
)

NATIVE_SPARSE_ATTENTION = Operation(
    name="native_sparse_attention",
    arrays={
        "query": Dims("B T H D", grad=True, broadcasts=False),
        "key": Dims("B S Hkv D", grad=True, broadcasts=False),
        "value": Dims("B S Hkv Dv", grad=True, broadcasts=False),
        "g_cmp": Dims("B T H", grad=True),
        "g_slc": Dims("B T H", grad=True),
        "g_swa": Dims("B T H", grad=True),
        "block_indices": Dims("B T Hkv K"),
        "block_counts": Dims("B T Hkv"),
        "compressed_key": Dims("B N Hkv D", grad=True),
        "compressed_value": Dims("B N Hkv Dv", grad=True),
        "cu_seqlens": Dims("B N+1"),
        "kv_lengths": Dims("B"),
        "window_size": Dims("B"),
    },
    outputs={"out": "B T H Dv"},
    implementations={},
    preference={},
    bucket=lambda call: "",
    splits=SPLITS,
    made_of=("selected_attention",),
)

OPERATIONS = (NATIVE_SPARSE_ATTENTION, SELECTED_ATTENTION, SELECT_BLOCKS)
