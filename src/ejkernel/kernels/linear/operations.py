"""The operations built on the linear family, and where their implementations live."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.packed_chunks import equal_lengths
from ejkernel.kernels.common.sizes import rounded_sizes
from ejkernel.kernels.common.struct_call import struct_call
from ejkernel.kernels.linear.delta.operations import DELTA_OPERATIONS
from ejkernel.kernels.linear.sharded import along_length
from ejkernel.kernels.linear.spec import ARRAYS, OUTPUTS, canonicalise, dimensions
from ejkernel.ops import Call, Operation, Splits
from ejkernel.ops.operation import Arrays, random_arrays

IMPLEMENTATIONS = {
    "xla": "ejkernel.kernels.linear.xla",
    "triton": "ejkernel.kernels.linear.triton",
    "pallas": {"tpu": "ejkernel.kernels.linear.pallas_tpu"},
}


def bucket(call: Call) -> str:
    """The shape bucket of a call: its sizes rounded, and what changes the work."""
    dims = dimensions(call)
    sizes = rounded_sizes(zip("BTHDVN", dims, strict=True))
    gates = [name for name in ("g", "g_gamma", "gk", "gv") if name in call]
    return "-".join([sizes, call["query"].dtype.name, *gates])


def _struct_call(
    *, B: int = 2, T: int = 128, H: int = 2, D: int = 64, Dv: int = 64, dtype: str = "bfloat16", **options: Any
) -> Call:
    structs = [jax.ShapeDtypeStruct((B, T, H, n), dtype) for n in (D, D, Dv)]
    return struct_call(canonicalise, *structs, **options)


def probes() -> dict[str, Call]:
    """One small call per feature."""
    return {
        "no decay": _struct_call(),
        "decay per head (`g_gamma`)": _struct_call(g_gamma=lambda: jnp.zeros(2)),
        "decay per token and head (`g`)": _struct_call(g=lambda: jnp.zeros((2, 128, 2))),
        "decay per key channel (`gk`)": _struct_call(gk=lambda: jnp.zeros((2, 128, 2, 64))),
        "decay per value channel (`gv`)": _struct_call(gv=lambda: jnp.zeros((2, 128, 2, 64))),
        "initial and final state": _struct_call(initial_state=lambda: jnp.zeros((2, 2, 64, 64)), return_state=True),
        "from the last token to the first": _struct_call(reverse=True),
        "segment ids": _struct_call(segment_ids=lambda: jnp.zeros((2, 128), int)),
        "packed sequences": _struct_call(B=1, cu_seqlens=lambda: jnp.array([0, 50, 128])),
        "one token": _struct_call(T=1),
        "lengths that divide nothing": _struct_call(T=129),
        "head_dim 256": _struct_call(D=256, Dv=256),
        "head_dim 40": _struct_call(D=40),
        "Dv != D": _struct_call(Dv=32),
        "float16": _struct_call(dtype="float16"),
        "float32": _struct_call(dtype="float32"),
    }


def example(call: Call) -> Arrays:
    """A call like this one with mild decays and sequences equally long."""
    arrays = random_arrays(call)
    gates = {name: -jnp.abs(arrays[name]) / 16 for name in ("g", "g_gamma", "gk", "gv") if name in call}
    arrays |= {name: x.astype(call[name].dtype) for name, x in gates.items()}
    if "cu_seqlens" in call:
        arrays["cu_seqlens"] = equal_lengths(call["cu_seqlens"].shape, call["query"].shape[1])
    return arrays


_family = partial(
    Operation,
    arrays=ARRAYS,
    outputs=OUTPUTS,
    implementations=IMPLEMENTATIONS,
    preference={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")},
    bucket=bucket,
    splits=Splits(free=("B", "H"), passed_on={"T": along_length}),
    example=example,
    probes=probes,
)

RECURRENT_ATTENTION = _family(name="recurrent_attention")
GLA_ATTENTION = _family(name="gla_attention")
LIGHTNING_ATTENTION = _family(name="lightning_attention")
MAMBA2_ATTENTION = _family(name="mamba2_attention", configs_of=RECURRENT_ATTENTION.name)

OPERATIONS = (RECURRENT_ATTENTION, GLA_ATTENTION, LIGHTNING_ATTENTION, MAMBA2_ATTENTION, *DELTA_OPERATIONS)
