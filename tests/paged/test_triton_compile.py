"""The Triton kernels compile for real GPUs on a machine that has none: they fit, and the hot ones do not spill."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.bridge.compile import TARGETS, compile_launches
from ejkernel.kernels.paged import triton
from ejkernel.kernels.paged.calls import page_call, ragged_page_call
from ejkernel.kernels.paged.operations import page_structs
from ejkernel.ops import Target

H200 = Target("gpu", "nvidia_h200", "sm_90")
MORE = pytest.mark.cuda_aot_more


def struct(shape, dtype="int32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def reports(target: Target, call_for, *arrays):
    def run(*arrays):
        call = call_for(*arrays).on(target)
        return triton.IMPLEMENTATION.forward(call, triton.default_config(call))[0]

    return {report.kernel: report for report in compile_launches(run, *arrays, target=target.arch)}


def mixed(target: Target, D: int, cache: str):
    """Decodes and some prefills: decode, merge and prefill kernels."""
    arrays = struct((300, 8, D), "bfloat16"), struct((512, 16, 4, D), cache)
    return reports(target, ragged_page_call, *arrays, struct((8,)), struct((8, 64)), struct((9,)), struct(()))


def decode(L: int, cache: str):
    caches = [struct((512, L, 2, 128), cache)] * 2
    arrays = struct((8, 8, 128), "bfloat16"), *caches, struct((8,)), struct((8, 64))
    return reports(H200, page_call, *arrays)["decode_kernel"]


@pytest.mark.parametrize(
    ("arch", "D", "cache"),
    [
        ("sm_80", 128, "bfloat16"),
        pytest.param("sm_80", 128, "int8", marks=MORE),
        pytest.param("sm_90", 128, "bfloat16", marks=MORE),  # what is below needs more
        ("sm_90", 256, "bfloat16"),
        ("sm_100", 128, "bfloat16"),
    ],
)
def test_a_mixed_batch_fits(arch, D, cache):
    kernels = mixed(Target("gpu", arch, arch), D, cache)
    assert set(kernels) == {"decode_kernel", "merge_kernel", "prefill_kernel"}
    for report in kernels.values():
        # sm_86, sm_89 and sm_120 share the tiles of sm_80
        assert report.shared_bytes <= TARGETS["sm_86" if arch == "sm_80" else arch], report
        assert not report.problems, report


@pytest.mark.parametrize(("arch", "G"), [("sm_86", 32), pytest.param("sm_90", 64, marks=MORE), ("sm_90", 128)])
def test_many_query_heads_in_float32_fit(arch, G):
    """Their rows fill the shared memory; those that do not fit one program are shared among several, as in prefill."""
    caches = [struct((512, 16, 2, 256), "float32")] * 2
    arrays = struct((8, 2 * G, 256), "float32"), *caches, struct((8,)), struct((8, 64))
    for report in reports(Target("gpu", arch, arch), page_call, *arrays).values():
        assert report.shared_bytes <= TARGETS[arch], report


def test_functions_do_not_spill():
    slopes, tree = jnp.ones(8), np.ones((8, 4, 4), bool)
    functions = {"score_fn": lambda score, b, h, i, j: score - slopes[h] * (i - j), "tree_mask": tree}
    arrays = struct((8, 4, 8, 128), "bfloat16"), *[struct((512, 64, 2, 128), "bfloat16")] * 2, struct((8,))
    report = reports(H200, partial(page_call, chunk_size=512, **functions), *arrays, struct((8, 64)))["decode_kernel"]
    assert not report.problems


def test_decode_streams_the_cache():
    """16 bytes at a time, asynchronously, and the next step is on its way while one is computed."""
    report = decode(16, "bfloat16")
    assert not report.problems
    assert len(re.findall(r"cp\.async\.cg", report.ptx)) >= 64
    assert not re.search(r"cp\.async\.ca", report.ptx)
    assert re.search(r"cp\.async\.wait_group\s+[2-9]", report.ptx)
    # two programs on a multiprocessor: with four stages as fast as three with three
    assert report.registers <= 168 and 2 * (report.shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(
    ("cache", "L"),
    [
        ("float8_e4m3fn", 64),
        ("float8_e4m3fn", 16),
        ("int8", 64),
        ("int8", 16),
        ("float8_e5m2", 64),
        pytest.param("float8_e5m2", 16, marks=MORE),
    ],
)
def test_decode_of_8_bits_moves_no_single_byte(cache, L):
    """Pages of 16 have steps of twice the keys, and warps that are not independent: they exchange their weights."""
    reads, conversions = {64: (8, 64), 16: (32, 128)}[L]
    report = decode(L, cache)
    assert report.spill_bytes <= 16 and all("spills" in problem for problem in report.problems), report
    # keys, values and exchanged weights, in the loops over full and masked blocks; the queries stay in registers
    assert len(re.findall(r"ldmatrix\S+x4", report.ptx)) == 2 * reads
    assert not re.search(r"(ld|st)\.shared\S*[bsu]8", report.ptx)
    assert not re.search(r"cp\.async\.ca", report.ptx)
    converted = len(re.findall(r"cvt\.rn\.f16x2\.e4m3x2", report.ptx))
    assert converted == (2 * conversions if cache == "float8_e4m3fn" else 0)


@pytest.mark.parametrize("cache", ["float8_e4m3fn", pytest.param("int8", marks=MORE)])
def test_prefill_of_8_bits_multiplies_all_columns_at_once(cache):
    report = mixed(H200, 128, cache)["prefill_kernel"]
    assert not report.problems, report
    # values, in both loops: 64 keys, 16 at a time
    assert len(re.findall(r"wgmma\.mma_async\S+m64n128k16\.f32\.f16\.f16", report.ptx)) == 2 * 4


@pytest.mark.parametrize(
    ("arch", "options", "reason"),
    [
        ("sm_80", {"cache": "float8_e4m3fn"}, "a float8_e4m3fn cache on sm_80: needs sm_89 or newer"),
        ("sm_75", {}, "sm_75: needs sm_80 or newer"),
        ("sm_90", {"D": 320}, "head_dim 320: at most 256"),
        ("sm_90", {"num_splits": 2000}, "num_splits 2000: at most 1024"),
    ],
)
def test_what_is_refused(arch, options, reason):
    assert reason in " ".join(triton.unsupported(page_structs(**options).on(Target("gpu", arch, arch))))
