"""Every public operation in the modes of JAX that users and other test suites switch on: none changes an answer."""

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.experimental import checkify

from ejkernel import modules
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from ejkernel.ops.dispatch import run_locally
from harness import PLATFORMS, Platform
from harness.samples import SAMPLES, attention_mask
from tolerances import assert_close


@contextmanager
def strict_64_bits() -> Iterator[None]:
    """What matters while a program is traced; JAX's message says which of them it was."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


# these look at what a program reads and returns
WATCHING = {
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
}
# (mean pooling has no TPU kernel)
INTERPRETED = {
    "triton": ["packed", "bias-sinks-cap", "mean-pooling-packed", "page-tokens", "ragged-page", "packed-recurrent"]
}
INTERPRETED["pallas"] = ["packed", "bias-sinks-cap", "ragged-page"]
ONE_EACH = {sample.function: name for name, sample in SAMPLES.items()}.values()


def trace(name: str, platform: Platform = PLATFORMS[0]) -> Any:
    elsewhere = {"platform": platform.name, "cfg": None} if platform.interpreted else {}
    with platform.context():
        return jax.jit(partial(SAMPLES[name].run, **elsewhere)).trace(SAMPLES[name].given())


def by_sample(names: Iterable[str]) -> Any:
    """A parameter `name`; one worker takes all tests of a sample, so that it is compiled once outside all modes."""
    params = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]
    return pytest.mark.parametrize("name", params)


@cache
def outside(name: str) -> tuple[Callable[..., Any], list[jax.Array]]:
    """The program of a sample outside all modes, and its results."""
    program = trace(name).lower().compile()
    return program, program(SAMPLES[name].given())


def assert_same(results: list[jax.Array], expected: list[jax.Array]) -> None:
    assert [x.dtype for x in results] == [x.dtype for x in expected]
    assert_close(*({str(i): x for i, x in enumerate(xs)} for xs in (results, expected)))


def test_every_operation_is_here():
    others = {attention_mask.__name__, "ragged_mqa", "reference_mqa"}
    assert {sample.function.__name__ for sample in SAMPLES.values()} == {*modules.__all__, *others}


def check_strictly(name: str, platform: Platform) -> None:
    _, expected = outside(name)
    with strict_64_bits():
        results = trace(name, platform).lower().compile()(SAMPLES[name].given())
    assert_same(results, expected)


@by_sample(SAMPLES)
def test_strict_rules_and_64_bits(name):
    check_strictly(name, PLATFORMS[0])


@by_sample(SAMPLES)
def test_checks_by_strict_rules(name, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")
    with strict_64_bits():
        jax.eval_shape(checkify.checkify(SAMPLES[name].run), SAMPLES[name].given())


@pytest.mark.parametrize("platform", [p for p in PLATFORMS if p.interpreted], ids=lambda p: p.id)
def test_strict_rules_and_64_bits_around_kernels(platform):
    for name in INTERPRETED[platform.name]:
        check_strictly(name, platform)


@by_sample(SAMPLES)
def test_nothing_to_see(name):
    program, expected = outside(name)
    arrays = SAMPLES[name].given()
    for mode in WATCHING.values():
        with mode():
            results = program(arrays)
        assert_same(results, expected)


# make an array of their mask, or read lengths to know how many rows there are
SENDING = (*(name for name in SAMPLES if name.startswith("mask-of")), "mean-pooling-packed", "packed-native-sparse")


@by_sample(name for name in SAMPLES if name not in SENDING)
def test_outside_jit(name):
    """Where all arrays and masks lie on the device, nothing is sent to it; an lse of -inf is looked at by nobody."""
    sample = SAMPLES[name]
    arrays, options = sample.given(), sample.made()
    with jax.transfer_guard("disallow"), jax.debug_infs(True):
        results = jax.tree.leaves(sample.function(**arrays, **options))
    assert_same(results, outside(name)[1][: len(results)])


@by_sample(ONE_EACH)
def test_no_tracer_leaks(name):
    gc.freeze()  # JAX collects garbage after every trace: not among what was there before
    # in a mode of its own nothing that was traced before is found again
    with jax.check_tracer_leaks(True), jax.numpy_rank_promotion("warn"):
        trace(name)
    gc.unfreeze()


# step by step all takes long: gradients of one operation of each family, and nothing that is a step of another's
TRAINED_WITHOUT_JIT = ("sdpa", "mean-pooling-packed", "gla", "selected", "ring")
STEPS = ("select-blocks", "parts", "parts-defined")


@by_sample(name for name in ONE_EACH if name not in STEPS)
def test_without_jit(name):
    sample = SAMPLES[name]
    options = {"cfg": None} if "cfg" in sample.options else {}  # many tiles take long
    if name not in TRAINED_WITHOUT_JIT:
        sample = sample._replace(train=False)
    with jax.disable_jit(True):
        results = sample.run(sample.given(), **options)
    assert_same(results, outside(name)[1][: len(results)])


# Programs for GPUs, which need none to be made ------------------------------------------------------------------

HOPPER = Target("gpu", "nvidia_h200", "sm_90", cores=132)


def gradients(platform: str, query: jax.Array, key: jax.Array, dout: jax.Array) -> Any:
    """Through everything between a user and the kernels."""

    def attend(query: jax.Array, key: jax.Array) -> jax.Array:
        call = canonicalise(query, key, key, causal=True).on(HOPPER)
        return run_locally(FLASH_ATTENTION, call, platform, None)["out"]

    return jax.vjp(attend, query, key)[1](dout)


def lowered_for_gpus(platform: str) -> list[tuple[str, str]]:
    """The names of kernels in a program for CUDA, and the types of what they read and write."""
    query, key = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (2, 1))
    traced = jax.jit(partial(gradients, platform)).trace(query, key, query)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"stablehlo.custom_call @(\S+?)\(.*(: \(tensor.*)", text)


@pytest.mark.parametrize("platform", ["pallas", "cudnn"])
def test_kernels_for_gpus_lower_alike(platform, monkeypatch):
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)
    expected = lowered_for_gpus(platform)
    with strict_64_bits():
        assert lowered_for_gpus(platform) == expected
    assert len(expected) >= 2
