"""Seed 002: the classes it prints, with their names, their methods and the arguments of these by place and by name."""

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
    found = AttentionRegistry.list_implementations()
    assert found == sorted(found) and set(found) >= {name for names, _ in CLASSES.values() for name in names}


@pytest.mark.parametrize("name", ["FlashAttn", "RingAttn", "ScaledDotProductAttn", "SplashAttn", "VanillaAttn"])
def test_one_line_calls_all_of_them(name):
    q, k, v = normal("q", (2, 6, 4, 8)), normal("k", (2, 6, 2, 8)), normal("v", (2, 6, 2, 8))
    everything = dict.fromkeys(KEYWORDS) | {"causal": True, "deterministic": True}
    found = made(name, softmax_scale=0.3)(q=q, k=k, v=v, **everything)
    assert isinstance(found, AttentionOutput)
    right = flash_attention(q, k, v, causal=True, softmax_scale=0.3)
    np.testing.assert_allclose(found.attention_outputs, right, atol=1e-5)
    assert (found.attention_weights is not None) == (name == "VanillaAttn")


@pytest.mark.parametrize("name", ["FlashAttn", "RingAttn", "ScaledDotProductAttn", "SplashAttn", "VanillaAttn"])
@pytest.mark.parametrize("which", ["native", "cpu"])
def test_what_the_seed_had_not_implemented_works(name, which):
    q = normal("q", (1, 5, 2, 8))
    found = getattr(made(name), f"forward_{which}")(q, q, q, causal=False).attention_outputs
    np.testing.assert_allclose(found, flash_attention(q, q, q), atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")
@pytest.mark.parametrize("which", ["gpu", "cuda", "rocm", "tpu"])
def test_a_forward_for_a_device_that_is_not_here_says_so(which):
    q = jnp.ones((1, 4, 2, 8))
    message = f"FlashAttn.forward_{which} needs a {which} device, and JAX has only cpu here"
    with pytest.raises(RuntimeError, match=message):
        getattr(made("FlashAttn"), f"forward_{which}")(q, q, q)
    with pytest.raises(RuntimeError, match=message):
        made("FlashAttn", backend=which)(q, q, q)
