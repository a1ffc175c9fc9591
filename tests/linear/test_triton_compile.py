"""The Triton kernels compile for real GPUs on a machine that has none: default cuts fit, and what spills is stated.

Compiling is slow: of the sizes and decays, those that come closest to a limit, and each kernel on each kind of GPU.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from ejkernel.bridge import TARGETS
from ejkernel.bridge.compile import compile_launches
from ejkernel.kernels.linear import triton
from ejkernel.kernels.linear.operations import _struct_call
from ejkernel.ops import Call, Target

B, H = 1, 4


def reports(arch, *gates, T=2048, D=128, constant=True, backward=True, **options):
    """What the default forward and backward launch; with `constant`, the decay of heads has no gradient."""
    shapes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, D), "gv": (B, T, H, D)}
    given = {name: lambda shape=shapes[name]: jnp.zeros(shape, jnp.bfloat16) for name in gates}
    call = _struct_call(B=B, T=T, H=H, D=D, Dv=D, **given, **options).on(Target("gpu", arch, arch))
    call = replace(call, spec=replace(call.spec, constant_gamma=constant))
    assert triton.unsupported(call) == []
    config = triton.default_config(call)

    def both(arrays):
        mine = Call(call.spec, arrays, call.target)
        outputs, residuals = triton.IMPLEMENTATION.forward(mine, config)
        return outputs, triton.IMPLEMENTATION.backward(mine, residuals, outputs, config) if backward else None

    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.arrays.items()}
    return compile_launches(both, structs, target=arch)


CASES = {
    "lightning-in-segments": ("sm_80", ("g_gamma",), {"T": 2048, "backward": False}),
    "gated": ("sm_86", ("gk",), {}),
    "gated-D256": ("sm_86", ("gk",), {"D": 256, "backward": False}),
    "float32": ("sm_86", ("g_gamma",), {"dtype": "float32", "backward": False}),
    "gated-hopper": ("sm_90", ("gk",), {}),
    "head-hopper": ("sm_90", ("g_gamma",), {"constant": False}),
    "decode-hopper": ("sm_90", ("g_gamma", "gk"), {"T": 1, "backward": False, "return_state": True}),
    "gated-blackwell": ("sm_100", ("gk",), {"backward": False}),
    "token-blackwell": ("sm_120", ("g", "g_gamma"), {"backward": False}),
}
# bytes that may spill: scans that also give what gradients of decays need hold two states more, and float32 three parts
# of every operand. All others stay below ALL.
SPILLS = {"gated": 2000, "gated-hopper": 500, "float32": 600}
ALL = 128


# the cuts that need the most on sm_86 are those of D256
LATER = ("gated",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.cuda_aot_more] * (name in LATER)) for name in CASES]
)
def test_defaults_fit(name):
    arch, gates, options = CASES[name]
    for report in reports(arch, *gates, **{"T": 512, **options}):
        # sm_86, sm_89 and sm_120 share the cuts of sm_80
        assert report.shared_bytes <= TARGETS["sm_86" if arch == "sm_80" else arch], report
        assert report.spill_bytes <= SPILLS.get(name, ALL), report
        assert not [problem for problem in report.problems if "spills" not in problem], report
