"""The kernels, in interpreters, and compiled for devices that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.bridge import compile_launches
from ejkernel.families import registered_families
from ejkernel.ops import explain, interpret, register_families
from ejkernel.ops.target import describe_device
from harness import normal
from toy_family import pallas_tpu, speed
from toy_family.checks import canonicalise, definition
from toy_family.operations import decayed_sum

BLOCK_SIZES = {"xla": "chunk", "triton": "block_d", "pallas": "block_t"}
PLATFORMS = pytest.mark.parametrize("platform", BLOCK_SIZES)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr("ejkernel.families._FAMILIES", [*registered_families()])
    register_families("toy_family")


def weighed(function, x, state, lengths):
    """Both outputs, each token with a weight of its own."""
    out, end = function(x, state, lengths)
    return (out * normal("w", out.shape)).sum() + (end * normal("v", end.shape)).sum()


def by_definition(x, state, lengths):
    return definition(canonicalise(x, state, lengths), jnp.float32)


def check(platform, x, state, lengths, **options):
    def ours(x, state, lengths):
        return decayed_sum(x, state, lengths, platform=platform, **options)

    for got, exact in zip(
        ours(x, state, lengths), by_definition(x, state, lengths), strict=True
    ):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
    ours_d, exact_d = (
        jax.grad(weighed, (1, 2))(f, x, state, lengths) for f in (ours, by_definition)
    )
    for got, exact in zip(ours_d, exact_d, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


@PLATFORMS
@pytest.mark.parametrize(("T", "D"), [(1, 3), (8, 3), (13, 70)])
def test_against_the_definition(platform, T, D):
    x, state = normal("x", (2, T, D)), normal("state", (2, D))
    with interpret():
        check(platform, x, state, jnp.array([T, T // 2]))


@PLATFORMS
def test_every_block_size(platform):
    x, state = normal("x", (2, 40, 20)), normal("state", (2, 20))
    with interpret():
        for size in (8, 32):
            check(platform, x, state, jnp.array([40, 17]), cfg={BLOCK_SIZES[platform]: size})


@PLATFORMS
def test_what_lies_past_a_length_is_not_read(platform):
    x, state = normal("x", (2, 8, 3)), normal("state", (2, 3))
    with interpret():
        lengths = jnp.array([8, 5])
        poisoned = x.at[1, 5:].set(jnp.nan)
        for got, exact in zip(
            decayed_sum(poisoned, state, lengths, platform=platform),
            by_definition(x, state, lengths),
            strict=True,
        ):
            np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


def test_what_times_it_runs(capsys):
    speed.main(1, 16, 8)
    copy, *lines = capsys.readouterr().out.splitlines()
    assert (
        "a copy takes" in copy
        and lines[0].startswith("xla: ")
        and "needs an NVIDIA GPU" in lines[1]
    )


@pytest.mark.gpu
def test_on_a_gpu():
    check(
        "triton",
        normal("x", (4, 1000, 100)),
        normal("state", (4, 100)),
        jnp.array([1000, 1, 0, 700]),
    )


def test_auto_takes_them_where_they_run():
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 8, 3), (2, 3))]
    lengths = jax.ShapeDtypeStruct((2,), "int32")
    assert explain(decayed_sum, *shapes, lengths, device="h200").platform == "triton"
    assert explain(decayed_sum, *shapes, lengths, device="v6e").platform == "pallas"
    wide = (
        jax.ShapeDtypeStruct((2, 8, 2**20), "float32"),
        jax.ShapeDtypeStruct((2, 2**20), "float32"),
    )
    told = explain(decayed_sum, *wide, lengths, device="v4")
    assert told.platform == "xla" and "bytes of VMEM" in told.refusals["pallas"][0]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_compiles_for_gpus_that_are_not_here(target):
    def step(x, state, lengths):
        return jax.grad(lambda x: decayed_sum(x, state, lengths, platform="triton")[0].sum())(x)

    x, state = (
        jax.ShapeDtypeStruct((2, 4096, 256), "float32"),
        jax.ShapeDtypeStruct((2, 256), "float32"),
    )
    reports = compile_launches(
        step, x, state, jax.ShapeDtypeStruct((2,), "int32"), target=target
    )
    assert {report.kernel for report in reports} == {"decayed_sum_kernel"}
    assert not [problem for report in reports for problem in report.problems]


@pytest.mark.tpu_aot
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v6e:2x2"])
def test_compiles_for_tpus_that_are_not_here(chip, tpu_devices):
    mesh = Mesh(np.array(tpu_devices(chip)[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = {"x": (2, 1000, 256), "state": (2, 256), "lengths": (2,)}
    structs = [
        jax.ShapeDtypeStruct(
            shape, "int32" if name == "lengths" else "float32", sharding=sharding
        )
        for name, shape in shapes.items()
    ]

    def step(*arrays):
        call = canonicalise(*arrays).on(describe_device(mesh.devices[0]))
        config = pallas_tpu.default_config(call)
        outputs, residuals = pallas_tpu.forward(call, config)
        return outputs, pallas_tpu.IMPLEMENTATION.backward(call, residuals, outputs, config)

    text = jax.jit(step).lower(*structs).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2
