"""The delta rule's Triton kernels compile for real GPUs on a machine that has none, and what spills is stated."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.bridge import TARGETS
from ejkernel.bridge.compile import compile_launches
from ejkernel.kernels.linear.delta import triton
from ejkernel.kernels.linear.delta.operations import _struct_call
from ejkernel.ops import Call, Target

T, H = 512, 4


def reports(arch, *, g="token", D=128, backward=True, **options):
    """What the default forward and backward launch."""
    decays = {
        "g": lambda: jnp.zeros((1, T, H, D) if g == "channel" else (1, T, H)),
        "beta": lambda: jnp.ones((1, T, H)),
    }
    call = _struct_call(B=1, T=T, H=H, D=D, Dv=options.pop("Dv", D), **decays, **options).on(Target("gpu", arch, arch))
    assert triton.IMPLEMENTATION.unsupported(call) == []
    config = triton.IMPLEMENTATION.default_config(call)

    def both(arrays):
        mine = Call(call.spec, arrays, call.target)
        outputs, residuals = triton.forward(mine, config)
        return outputs, triton.backward(mine, residuals, outputs, config) if backward else None

    structs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.arrays.items()}
    return compile_launches(both, structs, target=arch)


CASES = {
    "hopper": ("sm_90", {}),
    "channels-hopper": ("sm_90", {"g": "channel"}),
    "olmo-hopper": ("sm_90", {"D": 96, "Dv": 192}),
    "ampere": ("sm_80", {}),
    "ada": ("sm_86", {"backward": False}),
    "float32": ("sm_90", {"dtype": "float32", "D": 64}),
    "blackwell": ("sm_100", {"backward": False}),
}
# bytes that may spill: with decays of channels, the pairs of every level have factors of their own
SPILLS = {"channels-hopper": 1000, "float32": 4000, "olmo-hopper": 1500}
ALL = 128


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.cuda_aot_more] * (n != "hopper")) for n in CASES])
def test_defaults_fit(name):
    arch, options = CASES[name]
    for report in reports(arch, **options):
        assert report.shared_bytes <= TARGETS["sm_86" if arch == "sm_80" else arch], report
        assert report.spill_bytes <= SPILLS.get(name, ALL), report
        assert not [problem for problem in report.problems if "spills" not in problem], report
