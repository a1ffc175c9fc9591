"""The TPU kernel lowers for a TPU on any machine; what comes out is compiled by libtpu in test_tpu_aot.py."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.linear import pallas_tpu
from ejkernel.kernels.linear.operations import _struct_call, probes
from ejkernel.ops import Target

V5E = Target("tpu", "tpu_v5_lite", "tpu")

# scans of the forward and the backward: those of query, key and value, for `gv` the output's once more, and for
# `g_gamma` a tangent one
SCANS = {
    "no decay": 4,
    "decay per head (`g_gamma`)": 5,
    "decay per token and head (`g`)": 4,
    "decay per key channel (`gk`)": 4,
    "decay per value channel (`gv`)": 5,
    "initial and final state": 4,
    "from the last token to the first": 4,
    "packed sequences": 4,
    "one token": 4,
    "lengths that divide nothing": 4,
    "head_dim 256": 4,
    "head_dim 40": 4,
    "float16": 4,
    "float32": 4,
}


def scans(call):
    """How many the lowered forward and backward of a call have."""
    assert pallas_tpu.LINEAR.unsupported(call) == []
    config = pallas_tpu.LINEAR.default_config(call)

    def both(arrays):
        mine = replace(call, arrays=arrays)
        outputs, residuals = pallas_tpu.IMPLEMENTATION.forward(mine, config)
        return outputs, pallas_tpu.IMPLEMENTATION.backward(mine, residuals, outputs, config)

    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.arrays.items()}
    text = jax.jit(both).trace(structs).lower(lowering_platforms=("tpu",)).as_text()
    return text.count("@tpu_custom_call")


@pytest.mark.parametrize("name", SCANS)
def test_lowers_forward_and_backward(name):
    assert scans(probes()[name].on(V5E)) == SCANS[name]


def test_lowers_with_64_bits_and_strict_promotion():
    T, H, D = 200, 2, 64
    shapes = {"g": (1, T, H), "g_gamma": (H,), "gk": (1, T, H, D), "gv": (1, T, H, D)}
    given = {name: lambda shape=shape: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        call = _struct_call(B=1, T=T, H=H, D=D, cu_seqlens=lambda: jnp.zeros(3, jnp.int32), **given)
        assert scans(call.on(V5E)) == 6
