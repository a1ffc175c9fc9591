"""The range of float16, and logits beyond all that is usual."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from harness import PLATFORMS, normal

ON_CPU = [p for p in PLATFORMS if p.device == "cpu"]


@pytest.mark.parametrize("platform", ON_CPU, ids=lambda p: p.id)
def test_a_scale_that_would_take_queries_out_of_range(platform):
    large, small = jnp.full((1, 2, 1, 64), 100.0, jnp.float16), jnp.full((1, 2, 1, 64), 1e-3, jnp.float16)
    with platform.context():
        out = flash_attention(large, small, large, softmax_scale=1024.0, platform=platform.name)
    assert jnp.array_equal(out, large)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("platform", ON_CPU, ids=lambda p: p.id)
def test_logits_of_1e12(platform, causal, dtype):
    """Each row is the value of its best key."""
    q, k, v = (normal(name, (1, 24, 2, 40), dtype) for name in ("query", "key", "value"))
    q, k = q * 1e4, k * 1e4

    def attend(q, k, v):
        with platform.context():
            return flash_attention(q, k, v, softmax_scale=499.7, causal=causal, platform=platform.name, return_lse=True)

    (out, lse), pull = jax.vjp(attend, q, k, v)
    logits = np.einsum("bthd,bshd->bhts", *(np.asarray(x, np.float64) for x in (q, k))) * 499.7
    logits = np.where(np.tri(24, dtype=bool) | (not causal), logits, -np.inf)
    assert logits.max() > 8e11
    best = np.asarray(v, np.float32)[0].swapaxes(0, 1)[np.arange(2)[:, None], logits[0].argmax(-1)]
    np.testing.assert_allclose(np.asarray(out, np.float32)[0].swapaxes(0, 1), best, rtol=1e-6)
    np.testing.assert_allclose(lse, logits.max(-1), rtol=1e-5)
    if platform.name == "xla":  # elsewhere a logit that is summed in another order may pass its lse, which costs an op
        for gradient in pull((jnp.ones_like(out), jnp.ones_like(lse))):
            assert not np.isnan(np.asarray(gradient, np.float32)).any()
