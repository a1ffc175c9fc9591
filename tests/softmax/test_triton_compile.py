"""The Triton kernels compile for real GPUs on a machine that has none: default tiles fit, and hot ones do not spill.

Compiling is slow: of the tiles that differ only in a head dim, those that come closest to a limit.
"""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.bridge import TARGETS, CompileReport, collect_launches, compile_for
from ejkernel.kernels.softmax import triton
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from ejkernel.types import BlockPattern, MaskInfo

B, T, H, HKV = 2, 1024, 4, 2
MORE = pytest.mark.cuda_aot_more
# what else a call has: more arrays, and options of them
KINDS = {
    "full": ((), dict),
    "causal": ((), lambda: {"causal": True}),
    "pattern": (
        (jax.ShapeDtypeStruct((B, H, T // 64, T // 64), bool), jax.ShapeDtypeStruct((B, T), "int32")),
        lambda cells, ids: {"causal": True, "mask_info": listed(cells) & MaskInfo.from_segments(ids)},
    ),
    "bias-and-mask": (
        (jax.ShapeDtypeStruct((1, H, T, T), "float32"), jax.ShapeDtypeStruct((B, 1, T, T), bool)),
        lambda bias, mask: {
            "bias": bias,
            "mask_info": MaskInfo.from_attention_mask(mask),
            "dropout_prob": 0.1,
            "dropout_seed": 0,
        },
    ),
}
# bytes that may spill. Two operands of 16 x 256 float32 fill the registers of a warp, and dq and dk have two.
SPILLS = {
    ("sm_90", "float32", 256): 600,
    ("sm_90", "bfloat16", 64): 32,
    ("sm_100", "bfloat16", 256): 64,
}


def listed(cells):
    return MaskInfo.from_block_pattern(BlockPattern.from_dense(cells, block_size=64), q_len=T, kv_len=T)


def default_launches(target: str, dtype: str, D: int, kind: str):
    """The launches of forward and backward with default tiles and grouped heads: fast ones, those after a nan."""
    arrays, options = KINDS[kind]

    def both(query, key, value, *more):
        call = canonicalise(query, key, value, **options(*more)).on(Target("gpu", target, target))
        assert triton.unsupported(call) == []
        config = triton.default_config(call)
        outputs, residuals = triton.IMPLEMENTATION.forward(call, config)
        return triton.IMPLEMENTATION.backward(call, residuals, outputs, config)

    key = jax.ShapeDtypeStruct((B, T, HKV, D), dtype)
    launches = collect_launches(both, jax.ShapeDtypeStruct((B, T, H, D), dtype), key, key, *arrays)
    nan_safe = [pair for pair in launches if dict(pair[0].constexprs)["C"].GUARD]
    return [pair for pair in launches if pair not in nan_safe], nan_safe


def compiled(target: str, launch, operands) -> CompileReport:
    arguments = [*launch.fill(operands, operands[0]), *launch.outputs]
    return compile_for(target, launch.kernel, arguments, dict(launch.constexprs), launch.num_warps, launch.num_stages)


def check_fits(report: CompileReport, dtype: str) -> None:
    # sm_86, sm_89 and sm_120 share the tiles of sm_80, and all share those of float32
    smaller = "sm_86" if report.target == "sm_80" or dtype == "float32" else report.target
    assert report.shared_bytes <= TARGETS[smaller], report
    assert not [problem for problem in report.problems if "spills" not in problem], report


@pytest.mark.parametrize(
    ("target", "dtype", "D", "kind"),
    [
        pytest.param("sm_80", "bfloat16", 128, "causal", marks=MORE),
        ("sm_80", "bfloat16", 256, "causal"),
        ("sm_90", "bfloat16", 64, "causal"),
        pytest.param("sm_90", "bfloat16", 64, "full", marks=MORE),  # causal has these loops too
        ("sm_90", "bfloat16", 128, "causal"),
        ("sm_90", "bfloat16", 256, "causal"),
        pytest.param("sm_90", "bfloat16", 256, "full", marks=MORE),
        pytest.param("sm_90", "float32", 256, "causal", marks=MORE),
        pytest.param("sm_100", "bfloat16", 64, "causal", marks=MORE),
        pytest.param("sm_100", "bfloat16", 256, "causal", marks=MORE),  # its largest launch is among the patterns
    ],
)
def test_defaults(target, dtype, D, kind):
    for launch, operands in default_launches(target, dtype, D, kind)[0]:
        report = compiled(target, launch, operands)
        assert report.spill_bytes <= SPILLS.get((target, dtype, D), 0), report
        check_fits(report, dtype)


@pytest.mark.parametrize(("target", "D"), [("sm_90", 256), pytest.param("sm_100", 64, marks=MORE)])
def test_those_after_a_nan_fit(target, D):
    for launch, operands in default_launches(target, "bfloat16", D, "causal")[1]:
        check_fits(compiled(target, launch, operands), "bfloat16")


@pytest.mark.parametrize(
    ("kind", "D", "kernels"),
    [
        ("pattern", 256, ("dkv_kernel",)),  # 201 KB
        ("bias-and-mask", 256, ("forward_kernel", "dbias_kernel")),  # 115 KB
        pytest.param("pattern", 256, (), marks=MORE),
        pytest.param("bias-and-mask", 256, (), marks=MORE),
        pytest.param("bias-and-mask", 128, (), marks=MORE),
    ],
)
def test_more_arrays_fit(kind, D, kernels):
    """Those of a bias or mask pass through shared memory as well; on smaller GPUs the tiles leave room enough.

    Of all launches, or of the last of some kernels: those that need the most, and that no other kind has.
    """
    launches, nan_safe = default_launches("sm_90", "bfloat16", D, kind)
    listed = [[dict(launch.constexprs)["C"].LISTS for launch, _ in some] for some in (launches, nan_safe)]
    assert any(listed[0]) and nan_safe and not any(listed[1])  # lists of the small tiles after a nan would be large
    assert ("dbias_kernel" in {launch.kernel.__name__ for launch, _ in launches}) == (kind == "bias-and-mask")
    some = {named(pair): pair for pair in launches if named(pair) in kernels}
    for launch, operands in some.values() if kernels else launches:
        check_fits(compiled("sm_90", launch, operands), "bfloat16")


@pytest.mark.parametrize(
    ("target", "dtype", "kernel"),
    [
        ("sm_80", "bfloat16", "dq_kernel"),  # 82 KB
        ("sm_80", "float32", "dq_kernel"),  # 80 KB
        ("sm_100", "bfloat16", "dkv_kernel"),  # 200 KB
    ],
)
def test_patterns_fit(target, dtype, kernel):
    """The launch that needs the most of forward, dq, dk and dv at head dims 64, 128 and 256, in blocks of 16 or 64.

    On sm_90 that is in the test above. sm_86 and sm_89 get the program of sm_80, and what compiles for sm_120 needs no
    more; the float32 one needs the same on all.
    """
    launches = [pair for pair in default_launches(target, dtype, 256, "pattern")[0] if named(pair) == kernel]
    check_fits(compiled(target, *launches[-1]), dtype)  # of dk and dv, dv


def named(pair) -> str:
    return pair[0].kernel.__name__


@pytest.mark.parametrize("letters", ["BHTS", "1HTS", "BHT1", "BH1S", "1H1S", "1111"])
def test_a_bias_gets_a_gradient_like_itself(letters):
    sizes = {"1": 1, "B": B, "H": H, "T": T, "S": T}
    bias = jax.ShapeDtypeStruct(tuple(sizes[letter] for letter in letters), jnp.bfloat16)

    def gradient(query, bias):
        call = canonicalise(query, query, query, bias=bias).on(Target("gpu", "sm_90", "sm_90"))
        lse = jnp.zeros((B, H, T))
        return triton.bias_gradient(call, {"out": query, "lse": lse}, {"out": query})

    gradient_type = jax.eval_shape(gradient, jax.ShapeDtypeStruct((B, T, H, 64), jnp.bfloat16), bias)
    assert (gradient_type.shape, gradient_type.dtype) == (bias.shape, bias.dtype)


def test_reductions_after_products_compile_for_tensor_memory():
    """Triton 3.6 fails on some; the argmax and the gradient of a broadcast bias have forms the defaults do not have."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    target = Target("gpu", "nvidia_b200", "sm_100")

    def both(query, bias):
        call = canonicalise(query, query, query, bias=bias, normalize_output=False).on(target)
        config = triton.default_config(call)
        outputs, residuals = triton.IMPLEMENTATION.forward(call, config)
        cotangents = {"out": outputs["out"], "lse": outputs["lse"]}
        return triton.IMPLEMENTATION.backward(call, residuals, cotangents, config)

    for launch, operands in collect_launches(both, q, bias):
        if launch.kernel.__name__ in ("forward_kernel", "dbias_kernel"):
            assert compiled("sm_100", launch, operands).tensor_memory_columns > 0
