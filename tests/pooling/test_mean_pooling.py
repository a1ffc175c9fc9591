"""Mean pooling on every platform against its definition; Triton in its interpreter."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.bridge import compile_launches
from ejkernel.kernels.pooling import reference
from ejkernel.kernels.pooling.spec import canonicalise
from ejkernel.modules.pooling import mean_pooling
from ejkernel.ops import explain, interpret
from harness.compilations import compiled_programs

pytestmark = pytest.mark.filterwarnings("error")

PLATFORMS = ("xla", "triton")

# id: (shape of x, cu_seqlens, chunk_size)
CASES = {
    "one token": ((1, 1, 1, 4), None, 32),
    "chunk of 1": ((2, 5, 1, 8), None, 1),
    "whole chunks": ((2, 64, 2, 16), None, 32),
    "odd length": ((2, 63, 2, 40), None, 32),
    "odd chunk": ((1, 129, 3, 16), None, 50),
    "chunk longer than the sequence": ((2, 40, 1, 16), None, 100),
    "no tokens": ((2, 0, 1, 16), None, 4),
    "packed": ((1, 100, 2, 16), (0, 33, 34, 100), 16),
    "packed with empty sequences and padding": ((1, 70, 2, 24), (0, 0, 7, 7, 50, 50), 8),
    "packed one sequence": ((1, 63, 1, 16), (0, 63), 32),
    "packed nothing": ((1, 5, 1, 16), (0,), 4),
}
cases = pytest.mark.parametrize("shape, cu_seqlens, chunk_size", CASES.values(), ids=CASES)
LOW_PRECISION = {name: CASES[name] for name in ("odd length", "packed")}
# not `platform`, which conftest.py gives to a test on this machine's own: these two run on every machine
on_platforms = pytest.mark.parametrize("chosen", PLATFORMS)


@pytest.fixture(autouse=True)
def in_interpreters():
    with interpret():
        yield


def normal(seed, shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def ends(cu_seqlens):
    return None if cu_seqlens is None else np.array(cu_seqlens, np.int32)


def value_and_gradient(function, x):
    """The result, and the gradient of its inner product with fixed numbers."""

    @jax.jit
    def both(x):
        out, pull = jax.vjp(function, x)
        return out, pull(normal(1, out.shape, out.dtype))[0]

    return both(x)


def assert_close(actual, exact, dtype):
    """One rounding to the dtype, and the float32 sum's own error."""
    actual, exact = np.asarray(actual, np.float64), np.asarray(exact, np.float64)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(actual, exact, rtol=eps, atol=8 * float(jnp.finfo("float32").eps))


@on_platforms
@cases
def test_forward_and_gradient(shape, cu_seqlens, chunk_size, chosen):
    check_forward_and_gradient(shape, cu_seqlens, chunk_size, "float32", chosen)


@on_platforms
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", LOW_PRECISION)
def test_low_precision(case, dtype, chosen):
    check_forward_and_gradient(*LOW_PRECISION[case], dtype, chosen)


def check_forward_and_gradient(shape, cu_seqlens, chunk_size, dtype, chosen):
    x = normal(0, shape, dtype)

    def definition(x):
        return reference.mean_pooling(canonicalise(x, ends(cu_seqlens), chunk_size=chunk_size)).astype(dtype)

    def function(x):
        return mean_pooling(x, ends(cu_seqlens), chunk_size=chunk_size, platform=chosen)

    expected, expected_gradient = value_and_gradient(definition, x)
    out, gradient = value_and_gradient(function, x)
    assert out.dtype == gradient.dtype == x.dtype and out.shape == expected.shape
    assert_close(out, expected, dtype)
    assert_close(gradient, expected_gradient, dtype)


def test_definition_is_a_loop_over_chunks():
    x, cu_seqlens = normal(0, (1, 20, 2, 3)), [0, 7, 7, 18]
    sequences = [x[0, a:b] for a, b in pairwise(cu_seqlens)]
    chunks = [tokens[i : i + 4].mean(0) for tokens in sequences for i in range(0, len(tokens), 4)]
    out = reference.mean_pooling(canonicalise(x, cu_seqlens, chunk_size=4))
    np.testing.assert_allclose(out[0], jnp.stack(chunks), rtol=1e-6, atol=1e-6)


@on_platforms
def test_packed_equals_separate(chosen):
    x, lengths = normal(0, (1, 90, 2, 16)), (33, 1, 56)
    starts = np.cumsum([0, *lengths])
    packed = mean_pooling(x, starts, chunk_size=16, platform=chosen)
    separate = [mean_pooling(x[:, a:b], chunk_size=16, platform=chosen) for a, b in pairwise(starts)]
    assert_close(packed, jnp.concatenate(separate, 1), "float32")


@on_platforms
def test_traced_lengths_give_the_most_rows_and_zeros_after(chosen):
    x, cu_seqlens = normal(0, (1, 40, 1, 16)), jnp.array([0, 3, 20, 35])
    exact = jax.jit(lambda x: mean_pooling(x, cu_seqlens, chunk_size=8, platform=chosen))(x)

    def function(x, cu_seqlens):
        return mean_pooling(x, cu_seqlens, chunk_size=8, platform=chosen)

    out = jax.jit(function)(x, cu_seqlens)
    rows = exact.shape[1]
    assert rows == 6 and out.shape[1] == (40 + 3 * 7) // 8
    assert_close(out[:, :rows], exact, "float32")
    np.testing.assert_array_equal(out[:, rows:], 0)
    # what comes back to the rows past the last chunk goes nowhere, NaN included
    dout = normal(1, out.shape)
    gradient = jax.jit(lambda x, c, d: jax.vjp(lambda x: function(x, c), x)[1](d)[0])
    np.testing.assert_array_equal(
        gradient(x, cu_seqlens, dout.at[:, rows:].set(jnp.nan)), gradient(x, cu_seqlens, dout.at[:, rows:].set(0))
    )


@on_platforms
def test_nan_stays_in_its_chunk(chosen):
    cu_seqlens = np.array([0, 10, 30])
    clean = normal(0, (1, 40, 2, 16))
    poisoned = clean.at[:, 12].set(jnp.nan).at[:, 30:].set(jnp.nan)

    def function(x):
        return mean_pooling(x, cu_seqlens, chunk_size=8, platform=chosen)

    expected, _ = value_and_gradient(function, clean)
    out, gradient = value_and_gradient(function, poisoned)
    assert np.isnan(out[:, 2]).all()
    np.testing.assert_array_equal(np.delete(out, 2, axis=1), np.delete(expected, 2, axis=1))
    assert np.isfinite(gradient).all() and (gradient[:, 30:] == 0).all()


@on_platforms
@pytest.mark.parametrize("packed", [False, True])
def test_jit_and_vmap_equal_a_loop(packed, chosen):
    x = normal(0, (3, 1, 20, 2, 8))
    cu_seqlens = np.array([0, 9, 18]) if packed else None

    def function(x):
        return mean_pooling(x, cu_seqlens, chunk_size=4, platform=chosen)

    gradient = jax.grad(lambda x: (function(x) ** 2).sum())
    for f in (function, gradient):
        assert_close(jax.jit(jax.vmap(f))(x), jnp.stack([jax.jit(f)(row) for row in x]), "float32")
    assert_close(jax.vmap(function)(x), jnp.stack([function(row) for row in x]), "float32")


@on_platforms
def test_vmap_over_lengths(chosen):
    x, cu_seqlens = normal(0, (1, 20, 1, 8)), jnp.array([[0, 9, 18], [0, 0, 20]])

    def function(x, cu_seqlens):
        return mean_pooling(x, cu_seqlens, chunk_size=4, platform=chosen)

    loop = jnp.stack([jax.jit(function)(x, c) for c in cu_seqlens])
    assert_close(jax.jit(jax.vmap(function, (None, 0)))(x, cu_seqlens), loop, "float32")


@pytest.mark.parametrize("block_t, block_w", [(1, 16), (4, 64), (64, 32)])
def test_every_tile_gives_the_same(block_t, block_w):
    x = normal(0, (1, 50, 3, 16))
    function = lambda **p: value_and_gradient(lambda x: mean_pooling(x, chunk_size=20, **p), x)  # noqa: E731
    out, gradient = function(platform="triton", cfg={"block_t": block_t, "block_w": block_w, "num_warps": 2})
    expected, expected_gradient = function(platform="xla")
    assert_close(out, expected, "float32")
    assert_close(gradient, expected_gradient, "float32")


X = jnp.zeros((2, 8, 1, 4))
ERRORS = {
    "rank": ((X[0, 0],), {}, ValueError, r"its shape is \(1, 4\)"),
    "dtype": ((X.astype(jnp.int32),), {}, TypeError, "x has dtype int32; supported"),
    "chunk 0": ((X,), {"chunk_size": 0}, ValueError, "chunk_size=0 must be at least 1"),
    "chunk 2.5": ((X,), {"chunk_size": 2.5}, TypeError, "chunk_size must be an int, got float: 2.5"),
    "packed batch": ((X, np.array([0, 8])), {}, ValueError, r"x must be \(1, tokens"),
    "cu rank": ((X[:1], np.zeros((1, 2), int)), {}, ValueError, r"must have 1 dimensions, got shape \(1, 2\)"),
    "cu dtype": ((X[:1], np.array([0.0, 8.0])), {}, TypeError, "cu_seqlens must hold integers"),
    "cu falls": ((X[:1], [0, 5, 3]), {}, ValueError, r"never decrease.*\(row 2: 3\)"),
    "cu starts late": ((X[:1], [1, 8]), {}, ValueError, "must start at 0"),
    "cu too long": ((X[:1], [0, 9]), {}, ValueError, "end within the 8 tokens"),
    "config": ((X,), {"platform": "triton", "cfg": {"block_t": 3}}, ValueError, "block_t=3 must be a power of two"),
    "platform": ((X,), {"platform": "cudnn"}, NotImplementedError, "platforms that could: xla, triton"),
}


@pytest.mark.parametrize("args, options, kind, message", ERRORS.values(), ids=ERRORS)
def test_errors(args, options, kind, message):
    with pytest.raises(kind, match=message):
        mean_pooling(*args, **options)


def test_explain():
    assert explain(mean_pooling, X, chunk_size=4).platform == "xla"


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_forward_and_backward_compile_without_spills(target):
    def step(x):
        return jax.grad(lambda x: (mean_pooling(x, platform="triton").astype(jnp.float32) ** 2).sum())(x)

    reports = compile_launches(step, jax.ShapeDtypeStruct((2, 4096, 32, 128), "bfloat16"), target=target)
    assert [r.kernel for r in reports] == ["pooling_fwd_kernel", "pooling_bwd_kernel"]
    assert not [problem for report in reports for problem in report.problems]
    assert all("global.v4" in report.ptx for report in reports)


@on_platforms
@pytest.mark.parametrize("differentiated", [False, True])
def test_new_lengths_compile_nothing(chosen, differentiated):
    """Outside of jit. Another number of rows is another shape of the result: that is cut off, which is all."""
    x = normal(0, (1, 40, 1, 16))

    def pool(x, cu_seqlens):
        return mean_pooling(x, np.array(cu_seqlens), chunk_size=8, platform=chosen)

    def run(*cu_seqlens):
        out, pull = jax.vjp(lambda x: pool(x, cu_seqlens), x) if differentiated else (pool(x, cu_seqlens), None)
        return out.shape[1], pull and jax.block_until_ready(pull(out))

    assert run(0, 16, 40)[0] == 5
    with compiled_programs() as names:
        assert run(0, 24, 40)[0] == run(0, 8, 36)[0] == 5
    assert names == []
    with compiled_programs() as names:
        assert run(0, 12, 40)[0] == 6
    assert all("slice" in name or "pad" in name or "iota" in name for name in names), names


@pytest.mark.gpu
@cases
def test_on_a_gpu(shape, cu_seqlens, chunk_size):
    check_forward_and_gradient(shape, cu_seqlens, chunk_size, "bfloat16", "triton")


@pytest.mark.parametrize("x64", [False, True])
def test_float64_is_refused(x64):
    with jax.enable_x64(x64), pytest.raises(TypeError, match="x has dtype float64; supported: float32"):
        mean_pooling(np.ones((1, 4, 1, 1)), chunk_size=2)
