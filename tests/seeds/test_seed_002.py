"""Seed 002: the classes it prints, with their names, their methods and the arguments of these, positional or named."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import operators
from ejkernel.modules import flash_attention
from ejkernel.operators import AttentionImpl, AttentionMetadata, AttentionOutput, AttentionRegistry
from harness import normal

# class: the names it says it is registered under, and the arguments of its forward beside q, k and v, with defaults
CLASSES = {
    "AutoRegressiveDecodeAttn": (["autoregressive_decodeattn"], {"cache_view": None}),
    "FlashAttn": (["flash_attn2"], {"mask": None, "bias": None, "init_bias": None, "causal": False}),
    "PagedAttn": (["paged_attention"], {"cache_view": None, "cache_metadata": None}),
    "RingAttn": (
        ["ring"],
        {"mask": None, "bias": None, "init_bias": None, "deterministic": False, "dropout_rng": None, "causal": True},
    ),
    "ScaledDotProductAttn": (
        ["sdpa", "cudnn", "cuda_flash_attn2"],
        {"mask": None, "bias": None, "init_bias": None, "causal": False},
    ),
    "SplashAttn": (["splash"], {"mask": None, "causal": True, "cache_view": None}),
    "VanillaAttn": (
        ["vanilla"],
        {"mask": None, "bias": None, "init_bias": None, "deterministic": True, "dropout_rng": None},
    ),
}
KEYWORDS = {"mask", "bias", "init_bias", "causal", "deterministic", "dropout_rng", "cache_view", "cache_metadata"}
FORWARDS = ("native", "cpu", "gpu", "cuda", "rocm", "tpu")


def made(name, **settings):
    return getattr(operators, name)(AttentionMetadata(**settings))


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    names, arguments = CLASSES[name]
    operator = made(name)
    assert isinstance(operator, AttentionImpl) and operator.get_impl_metadata() == AttentionMetadata()
    for registered in names:
        assert AttentionRegistry.get(registered) is type(operator)
        assert type(AttentionRegistry.create(registered, AttentionMetadata())) is type(operator)
    assert {f"forward_{which}" for which in FORWARDS} <= set(dir(operator))
    parameters = inspect.signature(operator.forward_native).parameters
    by_place = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in by_place] == ["q", "k", "v", *arguments]
    assert {p.name: p.default for p in by_place[3:]} == arguments


def test_every_class_is_registered_once():
    names = AttentionRegistry.list_implementations()
    assert names == sorted(names) and set(names) >= {name for known, _ in CLASSES.values() for name in known}


@pytest.mark.parametrize("name", ["FlashAttn", "RingAttn", "ScaledDotProductAttn", "SplashAttn", "VanillaAttn"])
def test_one_line_calls_all_of_them(name):
    q, k, v = normal("q", (2, 6, 4, 8)), normal("k", (2, 6, 2, 8)), normal("v", (2, 6, 2, 8))
    everything = dict.fromkeys(KEYWORDS) | {"causal": True, "deterministic": True}
    output = made(name, softmax_scale=0.3)(q=q, k=k, v=v, **everything)
    assert isinstance(output, AttentionOutput)
    right = flash_attention(q, k, v, causal=True, softmax_scale=0.3)
    np.testing.assert_allclose(output.attention_outputs, right, atol=1e-5)
    assert (output.attention_weights is not None) == (name == "VanillaAttn")


@pytest.mark.parametrize("name", ["FlashAttn", "RingAttn", "ScaledDotProductAttn", "SplashAttn", "VanillaAttn"])
@pytest.mark.parametrize("which", ["native", "cpu"])
def test_what_the_seed_had_not_implemented_works(name, which):
    q = normal("q", (1, 5, 2, 8))
    output = getattr(made(name), f"forward_{which}")(q, q, q, causal=False).attention_outputs
    np.testing.assert_allclose(output, flash_attention(q, q, q), atol=1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_every_forward_shows_the_arguments_of_forward_native(name):
    operator = made(name)
    signature = inspect.signature(operator.forward_native)
    assert list(signature.parameters)[-1] == "ignore" and set(signature.parameters) > KEYWORDS | {"q", "k", "v"}
    for which in FORWARDS:
        assert inspect.signature(getattr(operator, f"forward_{which}")) == signature
        assert getattr(operator, f"forward_{which}").__qualname__ == f"{name}.forward_{which}"
        unbound = inspect.signature(getattr(type(operator), f"forward_{which}"))
        assert list(unbound.parameters) == ["self", *signature.parameters]
    assert inspect.signature(operator) == inspect.signature(operator.__call__) == signature


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")
@pytest.mark.parametrize("which", ["gpu", "cuda", "rocm", "tpu"])
def test_a_forward_for_an_absent_device_computes_where_jax_does(which):
    q = jnp.ones((1, 4, 2, 8))
    for call in (getattr(made("FlashAttn"), f"forward_{which}"), made("FlashAttn", backend=which)):
        output = call(q, q, q).attention_outputs
        assert output.devices() == q.devices()
        np.testing.assert_allclose(output, 1.0, rtol=1e-6)
