"""The Triton kernels compile for real GPUs on a machine that has none: default tiles fit, and hot ones do not spill."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.bridge import TARGETS, CompileReport, collect_launches, compile_for
from ejkernel.kernels.softmax import triton
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from ejkernel.types import MaskInfo

HEAD_DIMS = (64, 128, 256)
# bytes that may spill. Two operands of 16 x 256 float32 fill the registers of a warp, and dq and dk have two.
SPILLS = {
    ("sm_90", "float32", 256): 600,
    ("sm_90", "bfloat16", 64): 24,
    ("sm_100", "bfloat16", 128): 64,
    ("sm_100", "bfloat16", 256): 64,
}


def default_launches(target: str, dtype: str, D: int, causal: bool):
    """The launches of forward and backward with default tiles, grouped heads; those that run only after a nan last."""
    q = jax.ShapeDtypeStruct((2, 1024, 4, D), dtype)
    k = jax.ShapeDtypeStruct((2, 1024, 2, D), dtype)

    def both(query, key, value):
        call = canonicalise(query, key, value, causal=causal).on(Target("gpu", target, target))
        assert triton.unsupported(call) == []
        config = triton.default_config(call)
        outputs, residuals = triton.forward(call, config)
        return triton.backward(call, residuals, outputs, config)

    launches = collect_launches(both, q, k, k)
    return sorted(launches, key=lambda pair: dict(pair[0].constexprs)["GUARD"])


def compiled(target: str, launch, operands) -> CompileReport:
    arguments = [*launch.fill(operands, operands[0]), *launch.outputs]
    return compile_for(target, launch.kernel, arguments, dict(launch.constexprs), launch.num_warps, launch.num_stages)


@pytest.mark.parametrize(
    ("target", "dtype", "causal"),
    [
        ("sm_80", "bfloat16", True),
        ("sm_90", "bfloat16", True),
        ("sm_90", "bfloat16", False),
        ("sm_90", "float16", True),
        ("sm_90", "float32", True),
        ("sm_100", "bfloat16", True),
    ],
)
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_defaults(target, dtype, causal, D):
    for launch, operands in default_launches(target, dtype, D, causal):
        careful = dict(launch.constexprs)["GUARD"]
        if careful and (target, dtype) not in (("sm_90", "bfloat16"), ("sm_100", "bfloat16")):
            break
        report = compiled(target, launch, operands)
        assert careful or report.spill_bytes <= SPILLS.get((target, dtype, D), 0), report
        # sm_86, sm_89 and sm_120 share the tiles of sm_80, and all share those of float32
        smaller = "sm_86" if target == "sm_80" or dtype == "float32" else target
        assert report.shared_bytes <= TARGETS[smaller], report
        assert not [problem for problem in report.problems if "spills" not in problem], report


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("D", [128, 256])
def test_bias_and_mask_fit(target, D):
    """Tiles of a bias and a dense mask are pipelined through shared memory as well."""
    q = jax.ShapeDtypeStruct((1, 256, 2, D), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 2, 256, 256), jnp.float32)
    mask = jax.ShapeDtypeStruct((1, 1, 256, 256), jnp.bool_)

    def both(query, bias, mask):
        options = {"mask_info": MaskInfo.from_attention_mask(mask), "dropout_prob": 0.1, "dropout_seed": 0}
        call = canonicalise(query, query, query, bias, **options).on(Target("gpu", target, target))
        config = triton.default_config(call)
        outputs, residuals = triton.forward(call, config)
        return triton.backward(call, residuals, outputs, config)

    smaller = "sm_86" if target == "sm_80" else target
    for launch, operands in collect_launches(both, q, bias, mask):
        if not dict(launch.constexprs).get("GUARD"):
            report = compiled(target, launch, operands)
            assert report.shared_bytes <= TARGETS[smaller], report


def test_reductions_after_products_compile_for_tensor_memory():
    """Triton 3.6 fails on some; the argmax and the gradient of a broadcast bias have forms the defaults do not have."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    target = Target("gpu", "nvidia_b200", "sm_100")

    def both(query, bias):
        call = canonicalise(query, query, query, bias=bias, normalize_output=False).on(target)
        config = triton.default_config(call)
        outputs, residuals = triton.forward(call, config)
        cotangents = {"out": outputs["out"], "lse": outputs["lse"]}
        return triton.backward(call, residuals, cotangents, config)

    for launch, operands in collect_launches(both, q, bias):
        if launch.kernel.__name__ in ("forward_kernel", "dbias_kernel"):
            assert compiled("sm_100", launch, operands).tensor_memory_columns > 0
