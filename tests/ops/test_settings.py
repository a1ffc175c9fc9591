"""Gradients that repeat to the bit, on request: what auto takes, what a forced platform says, and who may ask."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.softmax import cudnn, xla
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION, bucket
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import flash_attention
from ejkernel.ops import Target, TunedConfigs, deterministic
from ejkernel.ops import config as configs
from ejkernel.ops.dispatch import choose
from ejkernel.ops.settings import is_deterministic

Q = jnp.ones((1, 32, 2, 64), jnp.bfloat16)
H200 = Target("gpu", "nvidia_h200", "sm_90")


@pytest.fixture
def call(monkeypatch):
    """A call for an H200 on which cuDNN was measured to be the fastest, forward and backward."""
    call = canonicalise(Q, Q, Q).on(H200)
    where = "flash_attention", bucket(call)
    tuned = TunedConfigs().add(*where, "cudnn", None, 10.0, 30.0).add(*where, "triton", None, 20.0, 60.0)
    monkeypatch.setattr(configs, "tuned_sources", lambda target: [configs.Source("a test", target.kind, tuned)])
    monkeypatch.delenv("EJKERNEL_DETERMINISTIC", raising=False)
    return call


def backward_of(call, platform=None):
    plan, told = choose(FLASH_ATTENTION, call, platform, None)
    return (plan.gradient or plan).implementation, plan.no_gradient, told


def test_auto_takes_the_fastest_backward(call):
    implementation, _, told = backward_of(call)
    assert implementation is cudnn.IMPLEMENTATION and told.gradient is None


def test_on_request_auto_takes_one_that_repeats_and_says_what_it_costs(call):
    with deterministic():
        implementation, _, told = backward_of(call)
    assert implementation.deterministic and told.platform == "cudnn"
    (reason,) = told.avoided["cudnn"]
    assert "the same bits are asked for" in reason and "measured 20 us" in reason
    assert f"its gradient: {told.gradient.platform}" in str(told) and "triton 40 us" in told.gradient.reason


def test_a_forced_platform_has_no_gradient_then(call):
    assert backward_of(call, "cudnn")[1] is None
    with deterministic():
        assert "differ between runs" in backward_of(call, "cudnn")[1]
        assert backward_of(call, "triton")[1] is None


def test_the_error_of_a_forced_platform(monkeypatch):
    monkeypatch.setattr(xla.IMPLEMENTATION, "deterministic", False)
    q = jnp.ones((1, 4, 1, 4))
    with deterministic():
        assert flash_attention(q, q, q, platform="xla").shape == q.shape
        with pytest.raises(NotImplementedError, match="differ between runs, and the same bits are asked for"):
            jax.grad(lambda q: flash_attention(q, q, q, platform="xla").sum())(q)


def test_xla_makes_cudnn_repeat(call, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    assert is_deterministic() and backward_of(call, "cudnn")[1] is None
    assert backward_of(call)[0] is not cudnn.IMPLEMENTATION  # it is much slower then
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true --xla_gpu_deterministic_ops=false")
    assert not is_deterministic()


def test_who_may_ask(monkeypatch):
    monkeypatch.delenv("EJKERNEL_DETERMINISTIC", raising=False)
    assert not is_deterministic()
    monkeypatch.setenv("EJKERNEL_DETERMINISTIC", "1")
    assert is_deterministic()
    with deterministic(False):
        assert not is_deterministic()
    with pytest.raises(ZeroDivisionError), deterministic(False):
        _ = 1 / 0
    assert is_deterministic()
