"""The operations built on the delta rule, and where their implementations live."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.packed_chunks import equal_lengths
from ejkernel.kernels.common.sizes import rounded_sizes
from ejkernel.kernels.common.struct_call import struct_call
from ejkernel.kernels.linear.delta.sharded import along_length
from ejkernel.kernels.linear.delta.spec import ARRAYS, OUTPUTS, canonicalise, dimensions
from ejkernel.ops import Call, Operation, Splits
from ejkernel.ops.operation import Arrays, random_arrays

IMPLEMENTATIONS = {
    "xla": "ejkernel.kernels.linear.delta.xla",
    "triton": "ejkernel.kernels.linear.delta.triton",
    "pallas": {"tpu": "ejkernel.kernels.linear.delta.pallas_tpu"},
}


def bucket(call: Call) -> str:
    """The shape bucket of a call: its sizes rounded, and what changes the work."""
    B, T, H, Hk, D, Dv, N = dimensions(call)
    sizes = rounded_sizes(zip("BTHKDVN", (B, T, H, Hk, D, Dv, N), strict=True))
    given = [name for name in ("g", "gk", "erase_key", "write_gate") if name in call]
    return "-".join([sizes, call["query"].dtype.name, *given])


def _struct_call(
    *,
    B: int = 2,
    T: int = 128,
    H: int = 2,
    Hk: int = 2,
    D: int = 64,
    Dv: int = 64,
    dtype: str = "bfloat16",
    **options: Any,
) -> Call:
    structs = [jax.ShapeDtypeStruct((B, T, *size), dtype) for size in ((Hk, D), (Hk, D), (H, Dv))]
    defaults = {"g": lambda: jnp.zeros((B, T, H)), "beta": lambda: jnp.ones((B, T, H))}
    return struct_call(canonicalise, *structs, **(defaults | options))


def probes() -> dict[str, Call]:
    """One small call per feature."""
    return {
        "no decay": _struct_call(g=None),
        "decay per token and head": _struct_call(),
        "decay per key channel": _struct_call(g=lambda: jnp.zeros((2, 128, 2, 64))),
        "no beta": _struct_call(beta=None),
        "erase keys of one's own": _struct_call(erase_key=lambda: jnp.zeros((2, 128, 2, 64))),
        "write gates": _struct_call(write_gate=lambda: jnp.zeros((2, 128, 2, 64))),
        "value heads that share a key": _struct_call(H=4),
        "initial and final state": _struct_call(initial_state=lambda: jnp.zeros((2, 2, 64, 64)), return_state=True),
        "packed sequences": _struct_call(B=1, cu_seqlens=lambda: jnp.array([0, 50, 128])),
        "segment ids": _struct_call(segment_ids=lambda: jnp.zeros((2, 128), int)),
        "one token": _struct_call(T=1),
        "lengths that divide nothing": _struct_call(T=129),
        "head_dim 256": _struct_call(D=256, Dv=256),
        "head_dim 96 and 192": _struct_call(D=96, Dv=192),
        "float16": _struct_call(dtype="float16"),
        "float32": _struct_call(dtype="float32"),
    }


def example(call: Call) -> Arrays:
    """A call like this one with keys of length 1, mild decays and sequences equally long."""
    arrays = random_arrays(call)
    for name in ("query", "key", "erase_key"):
        if name in call:
            x = arrays[name].astype(jnp.float32)
            arrays[name] = (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(call[name].dtype)
    gates = {name: -jnp.abs(arrays[name]) / 16 for name in ("g", "gk") if name in call}
    gates |= {name: jax.nn.sigmoid(arrays[name]) for name in ("beta", "write_gate") if name in call}
    arrays |= {name: x.astype(call[name].dtype) for name, x in gates.items()}
    if "cu_seqlens" in call:
        arrays["cu_seqlens"] = equal_lengths(call["cu_seqlens"].shape, call["query"].shape[1])
    return arrays


def of_nothing(arrays: Arrays, zeros: Arrays) -> Arrays:
    """Without tokens states stay what they were."""
    return {name: arrays.get("initial_state", x) if name == "state" else x for name, x in zeros.items()}


_delta = partial(
    Operation,
    arrays=ARRAYS,
    outputs=OUTPUTS,
    implementations=IMPLEMENTATIONS,
    preference={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")},
    bucket=bucket,
    splits=Splits(free=("B", "H", "Hk"), grouped=(("H", "Hk"),), passed_on={"T": along_length}),
    example=example,
    probes=probes,
    of_nothing=of_nothing,
)

GATED_DELTA_RULE = _delta(name="gated_delta_rule")
KIMI_DELTA_ATTENTION = _delta(name="kimi_delta_attention")
GATED_DELTA_PRODUCT = _delta(name="gated_delta_product", configs_of=GATED_DELTA_RULE.name)
RWKV7_ATTENTION = _delta(name="rwkv7_attention", configs_of=GATED_DELTA_RULE.name)

DELTA_OPERATIONS = (GATED_DELTA_RULE, KIMI_DELTA_ATTENTION, GATED_DELTA_PRODUCT, RWKV7_ATTENTION)
