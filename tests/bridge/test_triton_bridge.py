"""Triton from JAX: interpreted on a CPU, and compiled for GPUs that are not there, in one process."""

import gc
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from jax._src.lib import gpu_triton

from ejkernel.bridge import TARGETS, collect_launches, compile_for, compile_launches, triton_call
from ejkernel.bridge.private_jax_triton import imported_jax_triton

pytestmark = pytest.mark.filterwarnings("error")

FLOATS = ("float32", "bfloat16", "float16")
INTS = ("int8", "uint8", "int32", "uint32")

SCALE = tl.constexpr(3)


def struct(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def normal(seed, shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@triton.jit
def axpy_kernel(p_x, p_y, a, n, p_out, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(p_out + o, a * tl.load(p_x + o, mask=m) + tl.load(p_y + o, mask=m), mask=m)


@triton.jit
def tripled(x):
    return SCALE * x


@triton.jit
def shifted(x, OFFSET: tl.constexpr):
    y = tripled(x)
    return y + OFFSET


@triton.jit
def nested_kernel(p_x, p_out, n, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    for i in range(tl.cdiv(n, BLOCK)):
        # the loop's index has a type, as in compiled code
        o_i = i.to(tl.int64) * BLOCK + o
        b_x = tl.load(p_x + o_i, mask=o_i < n, other=0)
        tl.store(p_out + o_i, shifted(b_x, OFFSET), mask=o_i < n)


@triton.jit
def statistics_kernel(p_x, p_max, p_min, p_sum, p_softmax, p_cumsum, R: tl.constexpr, C: tl.constexpr):
    o_r, o_c = tl.arange(0, R), tl.arange(0, C)
    # [R, C]
    b_x = tl.load(p_x + o_r[:, None] * C + o_c)
    tl.store(p_max + o_r, tl.max(b_x, axis=1))
    tl.store(p_min + o_r, tl.min(b_x, axis=1))
    tl.store(p_sum + o_r, b_x.sum(axis=1))
    b_e = tl.exp(b_x - tl.max(b_x, 1, keep_dims=True))
    tl.store(p_softmax + o_r[:, None] * C + o_c, b_e / tl.sum(b_e, 1)[:, None])
    tl.store(p_cumsum + o_r[:, None] * C + o_c, tl.cumsum(b_x, 1))


@triton.jit
def matmul_kernel(p_a, p_b, p_out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BK)
    # [M, N]
    b_acc = tl.zeros([M, N], tl.float32)
    for i_k in tl.range(0, K, BK):
        b_a = tl.load(p_a + o_m[:, None] * K + i_k + o_k)
        b_b = tl.load(p_b + (i_k + o_k)[:, None] * N + o_n)
        b_acc += tl.dot(b_a, b_b, input_precision="ieee")
    tl.store(p_out + o_m[:, None] * N + o_n, b_acc.to(p_out.dtype.element_ty))


@triton.jit
def flagged_kernel(p_x, p_bias, p_out, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o)
    if HAS_BIAS:
        b_x += tl.load(p_bias + o)
    tl.store(p_out + o, b_x)


@triton.jit
def copy_kernel(p_x, p_out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, tl.load(p_x + o).to(p_out.dtype.element_ty))


@triton.jit
def increment_kernel(p_x, step, p_out, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, tl.load(p_x + o) + step)


@triton.jit
def accumulate_kernel(p_bias, p_old, step, scale, p_out, p_rest, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o, scale * tl.load(p_out + o) + step)
    tl.store(p_rest + o, o)


@triton.jit
def half_written_kernel(p_out, n, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_out + o + SHIFT, o.to(p_out.dtype.element_ty), mask=o < n)


def axpy(x, y, a=2.0, block=32):
    return triton_call(axpy_kernel, x, y, a, x.size, out_shape=struct(x), grid=(-(-x.size // block),), BLOCK=block)


@pytest.mark.parametrize("dtype", FLOATS + INTS)
@pytest.mark.parametrize("n", [1, 63, 129])
def test_vector_kernel_matches_numpy(dtype, n):
    x, y = (jnp.asarray(np.random.default_rng(i).integers(0, 40, n), dtype) for i in (0, 1))
    a = 2.0 if dtype in FLOATS else 2
    out = axpy(x, y, a)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(
        np.asarray(out, np.float32), 2 * np.asarray(x, np.float32) + np.asarray(y, np.float32)
    )


def test_int64_and_bool_arrays():
    with jax.enable_x64(True):
        x = jnp.arange(8, dtype=jnp.int64) + 2**40
        out = triton_call(increment_kernel, x, 2**35, out_shape=struct(x), grid=1, BLOCK=8)
        np.testing.assert_array_equal(out, np.arange(8) + 2**40 + 2**35)
    flags = jnp.asarray([True, False] * 4)
    out = triton_call(nested_kernel, flags, out_shape=struct(flags), grid=1, n=8, OFFSET=0, BLOCK=8)
    np.testing.assert_array_equal(out, flags)


def test_inside_jit_with_other_operations():
    x, y = normal(0, 100), normal(1, 100)
    out = jax.jit(lambda x, y: axpy(jnp.sin(x), axpy(x, y)) * 2)(x, y)
    np.testing.assert_allclose(out, 2 * (2 * np.sin(x) + 2 * x + y), rtol=1e-6)


def test_helpers_call_helpers_and_globals():
    x = normal(0, 50)
    out = triton_call(nested_kernel, x, out_shape=struct(x), grid=1, n=50, OFFSET=7, BLOCK=16)
    np.testing.assert_allclose(out, 3 * x + 7, rtol=1e-6)


def test_reductions_and_scans():
    x = normal(0, (8, 16))
    row = jax.ShapeDtypeStruct((8,), x.dtype)
    most, least, total, softmax, cumsum = triton_call(
        statistics_kernel, x, out_shape=(row, row, row, struct(x), struct(x)), grid=1, R=8, C=16
    )
    np.testing.assert_array_equal(most, x.max(1))
    np.testing.assert_array_equal(least, x.min(1))
    np.testing.assert_allclose(total, x.sum(1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(softmax, jax.nn.softmax(x), rtol=1e-6)
    np.testing.assert_allclose(cumsum, np.cumsum(x, 1), rtol=1e-5, atol=1e-6)


def test_max_of_nothing_but_nan_is_nan_without_a_warning():
    x = normal(0, (8, 16)).at[3].set(jnp.nan).at[4, 5].set(jnp.nan)
    row = jax.ShapeDtypeStruct((8,), x.dtype)
    most = triton_call(statistics_kernel, x, out_shape=(row, row, row, struct(x), struct(x)), grid=1, R=8, C=16)[0]
    assert np.isnan(most[3]) and most[4] == np.nanmax(x[4])


@pytest.mark.parametrize("dtype", FLOATS)
def test_dot_accumulates_in_float32(dtype):
    a, b = normal(0, (16, 64), dtype), normal(1, (64, 32), dtype)
    out = triton_call(
        matmul_kernel, a, b, out_shape=jax.ShapeDtypeStruct((16, 32), jnp.float32), grid=1, M=16, N=32, K=64, BK=16
    )
    np.testing.assert_allclose(out, np.asarray(a, np.float64) @ np.asarray(b, np.float64), rtol=1e-5, atol=1e-5)


def test_bfloat16_rounds_to_nearest_even():
    bits = np.random.default_rng(0).integers(0, 2**32, 256, np.uint64).astype(np.uint32)
    # exact ties too, towards even and away from it
    bits[:64] = (bits[:64] & 0xFFFF0000) | 0x8000
    x = np.nan_to_num(bits.view(np.float32), nan=1.0, posinf=1.0, neginf=1.0)
    out = triton_call(copy_kernel, x, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), grid=1, BLOCK=256)
    np.testing.assert_array_equal(out, x.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("bias", [None, 1.0])
def test_absent_array(bias):
    x = normal(0, 16)
    bias = None if bias is None else jnp.full(16, bias)
    out = triton_call(flagged_kernel, x, bias, out_shape=struct(x), grid=1, HAS_BIAS=bias is not None, BLOCK=16)
    np.testing.assert_array_equal(out, x if bias is None else x + 1)


def test_grid_as_function_of_constexprs_and_empty_grid():
    x = normal(0, 64)
    out = triton_call(axpy_kernel, x, x, 1.0, 64, out_shape=struct(x), grid=lambda m: (64 // m["BLOCK"],), BLOCK=16)
    np.testing.assert_allclose(out, 2 * x)
    empty = jnp.zeros((0,))
    assert axpy(empty, empty).shape == (0,)
    np.testing.assert_array_equal(
        triton_call(axpy_kernel, x, x, 1.0, 64, out_shape=struct(x), grid=(0,), BLOCK=16), np.zeros(64)
    )


@pytest.mark.parametrize("dtype", [*FLOATS, "int32"])
def test_unwritten_output_is_poisoned(dtype):
    out = triton_call(half_written_kernel, out_shape=jax.ShapeDtypeStruct((16,), dtype), grid=1, n=8, SHIFT=0, BLOCK=16)
    np.testing.assert_array_equal(np.asarray(out[:8], np.float32), np.arange(8))
    untouched = np.asarray(out[8:], np.float32)
    assert np.isnan(untouched).all() if dtype in FLOATS else (untouched > 1e9).all()


def accumulate(x):
    outputs = struct(x), jax.ShapeDtypeStruct((8,), "int32")
    options = {"grid": 1, "input_output_aliases": {1: 0}, "BLOCK": 8}
    return triton_call(accumulate_kernel, None, x, 1.5, 1.0, out_shape=outputs, **options)


def test_aliased_output_starts_as_the_input():
    x = jnp.arange(16.0)
    original = np.array(x)
    (out, untouched), kept = jax.jit(lambda x: (accumulate(x), x))(x)
    np.testing.assert_array_equal(out[:8], original[:8] + 1.5)
    np.testing.assert_array_equal(out[8:], original[8:])
    np.testing.assert_array_equal(untouched, np.arange(8))
    np.testing.assert_array_equal(kept, original)


def test_writing_out_of_bounds_is_an_error():
    with pytest.raises(Exception, match="half_written_kernel wrote outside of p_out"):
        jax.block_until_ready(
            triton_call(
                half_written_kernel, out_shape=jax.ShapeDtypeStruct((16,), "float32"), grid=1, n=8, SHIFT=16, BLOCK=16
            )
        )


def test_wrong_arguments_are_named():
    x = normal(0, 16)
    with pytest.raises(TypeError, match=r"missing constexprs \['BLOCK'\], unknown constexprs \['BLOK'\]"):
        triton_call(axpy_kernel, x, x, 1.0, 16, out_shape=struct(x), grid=1, BLOK=16)
    with pytest.raises(TypeError, match=r"must be a @triton\.jit function"):
        triton_call(len, x, out_shape=struct(x), grid=1)
    with pytest.raises(TypeError, match="must be an array, a scalar or None, not str"):
        triton_call(axpy_kernel, x, "x", 1.0, 16, out_shape=struct(x), grid=1, BLOCK=16)
    with pytest.raises(ValueError, match="65535"):
        triton_call(axpy_kernel, x, x, 1.0, 16, out_shape=struct(x), grid=(1, 2**16), BLOCK=16)
    with pytest.raises(ValueError, match="must map an array argument"):
        triton_call(axpy_kernel, x, x, 1.0, 16, out_shape=struct(x), grid=1, input_output_aliases={2: 0}, BLOCK=16)


def test_neither_derivative_nor_vmap():
    x = normal(0, 16)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda x: axpy(x, x).sum())(x)
    with pytest.raises(NotImplementedError, match="no vmap"):
        jax.vmap(lambda x: axpy(x, x))(x[None])


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_compile_and_interpret_in_one_process(target):
    pointers = {"p_x": "*bf16", "p_y": "*bf16", "a": "fp32", "n": "i32", "p_out": "*bf16"}
    before = compile_for(target, axpy_kernel, pointers, {"BLOCK": 1024})
    test_helpers_call_helpers_and_globals()
    after = compile_for(target, axpy_kernel, pointers, {"BLOCK": 512})
    for report in (before, after):
        assert report.target == target and report.kernel == "axpy_kernel"
        assert 0 < report.registers <= 255 and report.spill_bytes == 0 and not report.problems
    test_reductions_and_scans()


def test_arrays_are_taken_to_be_aligned():
    x = jax.ShapeDtypeStruct((1024,), "float32")
    report = compile_for("sm_90", flagged_kernel, [x, x, x], {"HAS_BIAS": True, "BLOCK": 1024})
    assert "ld.global.v4" in report.ptx and "st.global.v4" in report.ptx


@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
def test_shared_memory_and_spills_are_reported(target):
    arrays = [jax.ShapeDtypeStruct((1,), "float16")] * 3
    wide = compile_for(target, matmul_kernel, arrays, {"M": 128, "N": 256, "K": 512, "BK": 128}, 8, 4)
    assert wide.shared_bytes > TARGETS[target] and any("shared memory" in p for p in wide.problems)
    # an accumulator of 512 registers per thread
    spilling = compile_for(target, matmul_kernel, arrays, {"M": 128, "N": 128, "K": 64, "BK": 32}, num_warps=1)
    assert spilling.spill_bytes > 0 and any("spills" in p for p in spilling.problems)


def test_launches_of_a_function_are_found_and_compiled():
    def function(x):
        def body(carry, _):
            return axpy(carry, x), None

        return jax.lax.scan(body, jax.jit(lambda x: axpy(x, x, 1))(x), None, length=3)[0]

    x = jax.ShapeDtypeStruct((100,), "bfloat16")
    launches = collect_launches(function, x)
    assert [launch.kernel.__name__ for launch, _ in launches] == ["axpy_kernel"] * 2
    # scale 1 compiles to a constant, scale 2.0 to a float argument
    assert len(compile_launches(function, x, target="sm_90")) == 2


def test_unknown_target():
    with pytest.raises(ValueError, match="'sm_75' is unknown"):
        compile_for("sm_75", axpy_kernel, {}, {})


class RecordedCall:
    """A call of a kernel as jax-triton gives it to JAX."""

    parameters: ClassVar[list] = []

    def __init__(self, kernel, x, y, z, parameters):
        self.parameters.append(parameters)

    def to_proto(self, name, metadata):
        return b""


def pretend_a_gpu(monkeypatch):
    """Let jax-triton lower for a GPU that is not there."""
    stand_ins = {
        "get_compute_capability": lambda device: 90,
        "get_serialized_metadata": None,
        "create_array_parameter": lambda zeroed_bytes, alignment: "array",
        "create_scalar_parameter": lambda value, type_: (value, type_),
        "TritonKernel": lambda *_: None,
        "TritonKernelCall": RecordedCall,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(gpu_triton, name, stand_in, raising=False)
    monkeypatch.setattr(RecordedCall, "parameters", [])


def lowered_for_a_gpu(function, x, monkeypatch):
    """The program's custom call, and the parameters its kernel would be launched with."""
    pretend_a_gpu(monkeypatch)
    text = jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @triton.*", text)
    before, after = text.split(call)
    assert all("stablehlo.optimization_barrier" in side for side in (before, after))
    (parameters,) = RecordedCall.parameters
    return call, parameters


def test_jax_triton_is_given_pointers_and_scalars(monkeypatch):
    """As JAX lowers it for a GPU, with any jax-triton."""
    x = jax.ShapeDtypeStruct((16,), "float32")
    call, parameters = lowered_for_a_gpu(lambda x: axpy(x, x), x, monkeypatch)
    assert parameters == ["array", "array", (2.0, "fp32"), (16, "i32"), "array"]
    assert "output_operand_alias<" not in call


def test_jax_triton_is_given_aliases(monkeypatch):
    """The first output starts as the input; jax-triton 0.3 wants a pointer to each, 0.4 one to both."""
    x = jax.ShapeDtypeStruct((16,), "float32")
    call, parameters = lowered_for_a_gpu(accumulate, x, monkeypatch)
    # a scalar 1 is a constant
    assert parameters == ["array", "array", (1.5, "fp32"), "array", "array"]
    assert re.findall(r"output_operand_alias<output_tuple_indices = \[(\d+)\]", call) == ["0"]
    (operand,) = re.findall(r"operand_index = (\d+)", call)
    operands = re.findall(r"%\w+", call.split(")")[0])
    # the array itself behind its barrier, and no other operand is it
    assert operands[int(operand)] == "%0" and operands.count("%0") == 1


def test_programs_are_lowered_in_several_threads(monkeypatch):
    """Python switches between threads that parse where it collects garbage."""
    pretend_a_gpu(monkeypatch)
    x = jax.ShapeDtypeStruct((16,), "float32")

    def lower(n):
        def function(x):
            return axpy(x, x, block=2 ** (n % 8), a=float(n))

        return jax.jit(function).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(10)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all("custom_call @triton" in text for text in pool.map(lower, range(16)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


FAKE_JAX_TRITON = """
import os, time
os.environ["TRITON_CACHE_DIR"] = ""
time.sleep(0.2)
"""


@pytest.mark.parametrize("kept", ["/some/where", None])
def test_the_cache_folder_stays_where_it_is_in_every_thread(kept, monkeypatch, tmp_path):
    (tmp_path / "jax_triton.py").write_text(FAKE_JAX_TRITON)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_triton", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", kept or "")
    if kept is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: imported_jax_triton(), range(4)))
    assert os.environ.get("TRITON_CACHE_DIR") == kept
    del sys.modules["jax_triton"]


@pytest.mark.gpu
def test_on_a_gpu():
    x, y = normal(0, 1000), normal(1, 1000)
    np.testing.assert_allclose(jax.jit(axpy)(x, y), 2 * x + y, rtol=1e-6)
    out = triton_call(flagged_kernel, x[:16], None, out_shape=struct(x[:16]), grid=1, HAS_BIAS=False, BLOCK=16)
    np.testing.assert_array_equal(out, x[:16])
    test_aliased_output_starts_as_the_input()
