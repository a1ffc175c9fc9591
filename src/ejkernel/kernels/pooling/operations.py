"""The operation of the pooling family, and where its implementations live."""

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.common.packed_chunks import equal_lengths
from ejkernel.kernels.common.sizes import power_of_two
from ejkernel.kernels.pooling.spec import canonicalise
from ejkernel.ops import Call, Dims, Operation, Splits
from ejkernel.ops.operation import Arrays, random_arrays


def bucket(call: Call) -> str:
    """Tuned under the chunk and the width of a token; the length only decides how many programs there are."""
    _, _, H, D = call["x"].shape
    width = power_of_two(H * D)
    return f"{call['x'].dtype.name}/chunk{call.spec.chunk_size}/width{width}"


def probes() -> dict[str, Call]:
    """One small call per feature."""
    x = jnp.zeros((1, 8, 1, 4))
    return {
        "whole sequences": canonicalise(x, chunk_size=4),
        "packed sequences (`cu_seqlens`)": canonicalise(x, np.array([0, 3, 8]), chunk_size=4),
    }


def example(call: Call) -> Arrays:
    """A call like this one whose sequences are equally long."""
    arrays = random_arrays(call)
    if "cu_seqlens" in call:
        arrays["cu_seqlens"] = equal_lengths(call["cu_seqlens"].shape, call["x"].shape[1])
    return arrays


MEAN_POOLING = Operation(
    name="mean_pooling",
    arrays={"x": Dims("B T H D", grad=True, broadcasts=False), "cu_seqlens": Dims("B N")},
    outputs={"out": "B R H D"},
    implementations={"xla": "ejkernel.kernels.pooling.xla", "triton": "ejkernel.kernels.pooling.triton"},
    preference={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("xla",)},
    bucket=bucket,
    splits=Splits(free=("B", "H")),
    example=example,
    probes=probes,
)

OPERATIONS = (MEAN_POOLING,)
