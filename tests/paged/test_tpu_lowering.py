"""The TPU kernel lowers for a TPU on any machine; what comes out is compiled by libtpu in test_tpu_aot.py."""

from dataclasses import replace

import jax
import pytest

from ejkernel.kernels.paged import pallas_tpu
from ejkernel.kernels.paged.operations import probes
from ejkernel.ops import Target

V5E = Target("tpu", "tpu_v5_lite", "tpu")


@pytest.mark.parametrize("name", ["mixed batch (`ragged_page_attention`)", "int8 cache"])
def test_lowers(name):
    call = probes()[name].on(V5E)
    assert pallas_tpu.unsupported(call) == []
    config = pallas_tpu.default_config(call)
    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.arrays.items()}
    forward = jax.jit(lambda arrays: pallas_tpu.IMPLEMENTATION.forward(replace(call, arrays=arrays), config)[0])
    text = forward.trace(structs).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 1
