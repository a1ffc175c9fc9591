"""The Triton kernels compile for real GPUs on a machine that has none: they fit, and the hot ones hardly spill."""

import jax
import pytest

from ejkernel.bridge.compile import TARGETS, compile_launches
from ejkernel.kernels.native_sparse import triton
from ejkernel.kernels.native_sparse.block_table import block_table
from ejkernel.kernels.native_sparse.selection import selection_call
from ejkernel.kernels.native_sparse.spec import canonicalise
from ejkernel.kernels.native_sparse.triton import selection as triton_selection
from ejkernel.ops import Target

T = 4096


def struct(shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def reports(arch, H, D, dtype="bfloat16", block_size=64):
    """Forward and backward of one key head."""
    query, key, indices = struct((1, T, H, D), dtype), struct((1, T, 1, D), dtype), struct((1, T, 1, 16), "int32")

    def both(q, k, v, indices, dout):
        call = canonicalise(q, k, v, indices, block_size=block_size).on(Target("gpu", arch, arch))
        config = triton.default_config(call)
        _, residuals = triton.IMPLEMENTATION.forward(call, config)
        return triton.IMPLEMENTATION.backward(call, residuals, {"out": dout}, config)

    # the nan-safe launches, of which there are seldom any, come second and may spill
    kernels = compile_launches(both, query, key, key, indices, query, target=arch)
    return {report.kernel: report for report in reversed(kernels)}


@pytest.mark.parametrize(
    ("arch", "H", "D", "dtype"),
    [
        ("sm_90", 16, 128, "bfloat16"),
        ("sm_90", 4, 128, "bfloat16"),
        pytest.param("sm_86", 1, 256, "bfloat16", marks=pytest.mark.cuda_aot_more),
        pytest.param("sm_86", 16, 256, "float32", marks=pytest.mark.cuda_aot_more),
    ],
)
def test_fits(arch, H, D, dtype):
    """By queries for large groups and blocks larger than a tile, else by keys."""
    kernels, by_keys = reports(arch, H, D, dtype), H == 4
    assert {"dq_sum_kernel" if by_keys else "dq_kernel", "dkv_kernel", "sum_kernel"} <= set(kernels)
    for report in kernels.values():
        assert report.shared_bytes <= TARGETS[arch], report
        assert report.spill_bytes <= (1024 if by_keys else 256 if arch == "sm_90" else 4096), report


@pytest.mark.parametrize(("arch", "H", "count"), [("sm_90", 16, 16), ("sm_86", 1, 32)])
def test_selection_fits(arch, H, count):
    table = block_table(T, T, 64)

    def choose(q, k, lse):
        call = selection_call(q, k, lse, table, scale=0.1, count=count).on(Target("gpu", arch, arch))
        return triton_selection.forward(call, triton_selection.default_config(call))[0]

    arrays = struct((1, T, H, 128)), struct((1, T // 64, 1, 128)), struct((1, H, T), "float32")
    (report,) = compile_launches(choose, *arrays, target=arch)
    assert not report.problems, report
