"""What is particular to the TPU kernel: its memory arithmetic, its chunks, its exact sums and its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.common.pallas_tpu import CHIPS, chip_of
from ejkernel.kernels.linear import pallas_tpu
from ejkernel.kernels.linear.operations import RECURRENT_ATTENTION, _struct_call
from ejkernel.kernels.linear.pallas_tpu.tiles import Chunk, added
from ejkernel.kernels.linear.reference import reference
from ejkernel.kernels.linear.scans import Scan
from ejkernel.kernels.linear.spec import canonicalise
from ejkernel.ops import Target, interpret
from ejkernel.ops.dispatch import choose, run
from harness import normal
from tolerances import assert_close

TARGETS = {chip.name: Target("tpu", kind, "tpu") for kind, chip in CHIPS.items()}
INTERPRETED = Target("tpu", "interpreter", "tpu", interpreted=True)


def gated(D, **options):
    return _struct_call(B=1, H=2, D=D, Dv=D, gk=lambda: jnp.zeros((1, options["T"], 2, D)), **options)


# Memory ---------------------------------------------------------------------------------------------------------


def test_vmem_of_a_plain_call_by_hand():
    need = pallas_tpu.LINEAR.vmem_bytes(_struct_call(D=128, Dv=128).on(TARGETS["v5e"]), pallas_tpu.Config(128))
    square = 128 * 128
    copied = 2 * (4 * 2 * square + 4 * 2 * square)  # tokens, matrices
    assert need == copied + 4 * square + 4 * square * (8 + 4 + 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [64, 128, 256, 512])
@pytest.mark.parametrize("chip", TARGETS)
def test_defaults_fit_and_fill_the_matrix_unit(chip, D, dtype):
    call = gated(D, T=8192, dtype=dtype).on(TARGETS[chip])
    config = pallas_tpu.LINEAR.default_config(call)
    assert pallas_tpu.LINEAR.unsupported(call) == []
    assert pallas_tpu.LINEAR.vmem_bytes(call, config) <= chip_of(call.target).vmem_budget
    assert config.chunk == 128 or (chip == "v4" and D == 512)


def test_what_does_not_fit_is_refused_with_its_size():
    call = gated(2048, T=256).on(TARGETS["v4"])
    plan, explanation = choose(RECURRENT_ATTENTION, call, "pallas", None)
    assert plan is None
    assert "MiB of VMEM, v4 has 14.0" in explanation.refusals["pallas"][0]


def test_chunks_of_packed_sequences_must_fit_scalar_memory():
    call = _struct_call(B=1, T=2**20, cu_seqlens=lambda: jnp.zeros(3, jnp.int32)).on(TARGETS["v5e"])
    assert "scalar memory" in " ".join(pallas_tpu.LINEAR.unsupported_config(call, pallas_tpu.Config(16)))
    assert pallas_tpu.LINEAR.unsupported(call) == []


@pytest.mark.parametrize(("T", "N", "chunk"), [(1, 1, 16), (20, 1, 32), (4096, 1, 128), (4096, 256, 16)])
def test_chunks_are_no_longer_than_sequences(T, N, chunk):
    packed = {"cu_seqlens": lambda: jnp.zeros(N + 1, jnp.int32)} if N > 1 else {}
    assert pallas_tpu.LINEAR.default_config(_struct_call(B=1, T=T, **packed).on(TARGETS["v5e"])).chunk == chunk


@pytest.mark.parametrize("chunk", [8, 48, 64.0])
def test_a_chunk_must_fill_tiles(chunk):
    with pytest.raises(ValueError, match=r"chunk=.* must be a power of two from 16 on"):
        pallas_tpu.Config(chunk)


# Sums -----------------------------------------------------------------------------------------------------------


def test_sums_of_float32_are_not_rounded_to_bfloat16():
    x = normal("x", (32, 8)) * np.float32(2.0) ** np.arange(-16, 16, 4, dtype=np.float32)
    matrix = np.tri(32, dtype=np.float32)
    got = jax.jit(lambda m, x: added(m, x, (1, 0)))(jnp.asarray(matrix, jnp.bfloat16), x)
    right = matrix.astype(np.float64) @ np.asarray(x, np.float64)
    assert np.max(np.abs(got - right) / np.abs(x).max(0)) < 32 * np.finfo(np.float32).eps


@pytest.mark.parametrize("deferred", [False, True])
def test_matrices_of_a_scan_that_descends_are_reversed(deferred):
    up, down = (
        Chunk(32, deferred, descending, 1.0, by_channel=True, split=False, terms={}) for descending in (False, True)
    )
    assert list(up.matrices) == list(down.matrices)
    for name, matrix in up.matrices.items():
        np.testing.assert_array_equal(down.matrices[name], np.flip(matrix))


# The kernel -----------------------------------------------------------------------------------------------------


def arrays(T, sequences, D=8, Dv=12):
    shapes = {"query": (1, T, 2, D), "key": (1, T, 2, D), "value": (1, T, 2, Dv)}
    shapes["initial_state"] = (sequences, 2, D, Dv)
    gates = {"g": (1, T, 2), "g_gamma": (2,), "gk": (1, T, 2, D), "gv": (1, T, 2, Dv)}
    arrays = {name: normal(name, shape) for name, shape in shapes.items()}
    return arrays | {name: -jnp.abs(normal(name, shape)) for name, shape in gates.items()}


def results(given, platform, cu, **options):
    def attend(given):
        call = canonicalise(**given, cu_seqlens=cu, return_state=True, **options)
        if platform is None:
            return reference(call)
        return run(RECURRENT_ATTENTION, call, platform=platform, cfg={"chunk": 16})

    def both(given):
        outputs, pull = jax.vjp(attend, given)
        return outputs, pull({name: normal(name, x.shape) for name, x in outputs.items()})[0]

    with interpret():
        return jax.jit(both)(given)


def test_packed_sequences_without_tokens_and_padding_behind_them():
    """Chunks of nothing come first in a scan that descends, the forward's here, and last in those of the gradients."""
    cu = np.array([0, 0, 7, 7, 40, 40], np.int32)
    given = arrays(50, 5)
    poisoned = {n: x.at[:, 40:].set(jnp.nan) if x.shape[:2] == (1, 50) else x for n, x in given.items()}
    outputs, gradients = results(poisoned, "pallas", cu, reverse=True)
    exact, exact_gradients = results(given, None, cu, reverse=True)
    assert_close(outputs, exact, kind="output")
    assert_close(gradients, exact_gradients, kind="gradient")


def test_products_of_channels_are_not_rounded_as_bfloat16_is():
    """They are summed over a sequence to the gradient of a decay: the roundings of each add up."""
    x = {name: normal(name, (1, 32, 1, 8), "bfloat16") for name in ("a", "b", "c", "factor")}
    gates = {name: -jnp.abs(normal(name, (1, 32, 1, 8))) for name in ("inner", "outer")}

    def products(dtype):
        scan = Scan(**{name: x.astype(dtype) for name, x in x.items()}, **gates, with_out=False)
        return jax.jit(lambda: pallas_tpu.run_scan(pallas_tpu.Config(16), INTERPRETED, scan).products)()

    exact = products("float32")
    assert jnp.abs(products("bfloat16") - exact).max() < 2**-13 * jnp.abs(exact).max()


def test_only_what_is_wanted_is_computed():
    a, c = jnp.zeros((1, 32, 1, 8)), jnp.zeros((1, 32, 1, 16))
    scan = Scan(a, a, c, with_out=False, with_state=True)
    text = str(jax.make_jaxpr(lambda: pallas_tpu.run_scan(pallas_tpu.Config(16), INTERPRETED, scan))())
    assert text.count("dot_general") == 1  # the state's


@pytest.mark.parametrize("shape", [(1, 0, 2, 8), (0, 5, 2, 8)], ids=["no tokens", "no rows"])
def test_nothing_to_scan(shape):
    x = jnp.zeros(shape)
    start = normal("start", (shape[0], 1, 2, 8, 8))
    scan = Scan(x, x, x, start=start, with_state=True)
    result = pallas_tpu.run_scan(pallas_tpu.Config(16), INTERPRETED, scan)
    assert result.out.shape == shape
    np.testing.assert_array_equal(result.state, start)
