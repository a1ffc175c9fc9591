"""The TPU kernels lower for a TPU on any machine; what comes out is compiled by libtpu in test_tpu_aot.py."""

import jax
import pytest

from ejkernel.kernels.softmax import pallas_tpu
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from ejkernel.types import BlockPattern, MaskInfo

V5E = Target("tpu", "tpu_v5_lite", "tpu")
T, H, HKV, D = 512, 4, 2, 128


def masks(kind, ids):
    if kind == "segments":
        return MaskInfo.from_segments(ids)
    return MaskInfo.from_block_pattern(BlockPattern.sliding_blocks(T // 64, 1, block_size=64), q_len=T)


@pytest.mark.parametrize("kind", ["segments", "pattern"])
def test_lowers_forward_and_backward(kind):
    def both(query, key, value, ids):
        options = {"mask_info": masks(kind, ids), "logits_soft_cap": 20.0, "dropout_prob": 0.1, "dropout_seed": 0}
        call = canonicalise(query, key, value, causal=True, **options).on(V5E)
        assert pallas_tpu.unsupported(call) == []
        config = pallas_tpu.default_config(call)
        outputs, residuals = pallas_tpu.IMPLEMENTATION.forward(call, config)
        return outputs, pallas_tpu.IMPLEMENTATION.backward(call, residuals, outputs, config)

    query, key = (jax.ShapeDtypeStruct((2, T, heads, D), "bfloat16") for heads in (H, HKV))
    ids = jax.ShapeDtypeStruct((2, T), "int32")
    text = jax.jit(both).trace(query, key, key, ids).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3  # forward, dq, dk and dv
