"""The Triton kernels compile for real GPUs on a machine that has none: they fit, and the hot ones do not spill."""

import jax
import jax.numpy as jnp
import pytest

from ejkernel.bridge.compile import compile_launches
from ejkernel.kernels.softmax import triton
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target

SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448}


def reports(target: str, D: int, **options):
    q = jax.ShapeDtypeStruct((2, 1024, 4, D), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, 1024, 2, D), jnp.bfloat16)

    def both(query, key, value):
        call = canonicalise(query, key, value, **options).on(Target("gpu", target, target))
        config = triton.default_config(call)
        outputs, residuals = triton.forward(call, config)
        return triton.backward(call, residuals, outputs, config)

    return compile_launches(both, q, k, k, target=target)


@pytest.mark.parametrize(("target", "D"), [(t, D) for t in SHARED_BYTES for D in (64, 128, 256)])
def test_fits(target, D):
    for report in reports(target, D, causal=True):
        assert report.shared_bytes <= SHARED_BYTES[target], report


@pytest.mark.parametrize("D", [64, 128])
def test_the_fast_forward_does_not_spill(D):
    fast = [r for r in reports("sm_90", D) if r.kernel == "forward_kernel"]
    assert fast and all(r.spill_bytes == 0 for r in fast), fast


def test_newer_chips_are_refused_with_the_reason():
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    found = []
    jax.eval_shape(lambda q: found.append(canonicalise(q, q, q).on(Target("gpu", "nvidia_b200", "sm_100"))), q)
    assert "fails to compile" in " ".join(triton.unsupported(found[0]))
