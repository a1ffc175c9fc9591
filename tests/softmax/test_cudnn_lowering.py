"""The calls of cuDNN are those that JAX makes itself, lowered on a machine without a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.softmax import cudnn
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target, deterministic
from ejkernel.ops.dispatch import choose, run_here

HOPPER = Target("gpu", "nvidia_h200", "sm_90")
B, T, H, D = 4, 128, 4, 64

# our options, and those of JAX that mean the same
CASES = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"mask_type": fused.MaskType.CAUSAL}),
    "window": (
        {"causal": True, "sliding_window": (31, 0)},
        {"mask_type": fused.MaskType.CAUSAL, "sliding_window_length": 32},
    ),
    "scale": ({"softmax_scale": 0.5}, {"scale": 0.5}),
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """What JAX asks the GPU when a call is traced."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)


def structs(Hkv=H, dtype="bfloat16", sharding=None):
    q = jax.ShapeDtypeStruct((B, T, H, D), dtype, sharding=sharding)
    k = jax.ShapeDtypeStruct((B, T, Hkv, D), dtype, sharding=sharding)
    return q, k, k, q


def lower(function, arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """Every custom call: operands (those that are no arguments without their number), config, layouts and types."""
    return [re.sub(r"%\d+", "%", line) for line in re.findall(r"stablehlo.custom_call @(.*)", text)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("Hkv", [H, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("name", CASES)
def test_the_calls_are_those_of_jax(name, Hkv, dtype):
    """A JAX that calls cuDNN in another way shows here."""
    options, theirs = CASES[name]

    def ours(q, k, v, dout):
        call = canonicalise(q, k, v, **options).on(HOPPER)
        assert cudnn.unsupported(call) == []
        outputs, residuals = cudnn.forward(call, cudnn.Config())
        return outputs, cudnn.backward(call, residuals, {"out": dout}, cudnn.Config())

    def expected(q, k, v, dout):
        out, pull = jax.vjp(lambda *x: fused.dot_product_attention(*x, **{"scale": D**-0.5, **theirs}), q, k, v)
        return out, pull(dout)

    arrays = structs(Hkv, dtype)
    found = calls(lower(ours, arrays))
    assert len(found) == 2 and found == calls(lower(expected, arrays))


def gradients(q, k, v, dout):
    """As a user gets them: through the gradient and the vmap rule of the library."""

    def attend(q, k, v):
        return run_here(FLASH_ATTENTION, canonicalise(q, k, v, causal=True).on(HOPPER), "cudnn", None)["out"]

    return jax.vjp(attend, q, k, v)[1](dout)


def test_auto_does_not_train_on_cudnn_where_the_same_bits_are_asked_for():
    call = canonicalise(*(jnp.ones((B, T, H, D), jnp.bfloat16),) * 3).on(Target("gpu", "nvidia_a100", "sm_80"))
    plan, told = choose(FLASH_ATTENTION, call, None, None)  # nothing is measured: the first that can
    assert told.platform == "cudnn" and told.gradient is None
    assert plan is not None and plan.implementation is cudnn.IMPLEMENTATION and plan.gradient is None
    with deterministic():
        _, told = choose(FLASH_ATTENTION, call, None, None)
        plan, given = choose(FLASH_ATTENTION, call, None, {})
    assert told.platform == "cudnn" and told.gradient is not None and told.gradient.platform not in (None, "cudnn")
    assert "not cudnn for the gradient: its gradients differ between runs" in str(told)
    assert given.platform == "cudnn" and plan is not None and plan.gradient is not None


def test_vmap_folds_into_the_batch():
    folded = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in structs(2)]
    _, backward = calls(lower(jax.vmap(gradients), folded))
    assert backward.startswith("__cudnn$fmhaSoftmaxBackward(") and f"tensor<{3 * B}x{T}x{H}x{D}xbf16>" in backward


def test_jit_may_split_batch_and_heads():
    """The partitioner is given a rule for each call, not a call that it must gather for."""
    mesh = Mesh(np.asarray(jax.devices("cpu")[:4]).reshape(2, 2), ("dp", "tp"))
    found = calls(lower(gradients, structs(sharding=NamedSharding(mesh, P("dp", None, "tp")))))
    assert [line.split("(")[0] for line in found] == ["CustomSPMDPartitioning"] * 2
    assert all("sdy.sharding_rule" in line for line in found)
