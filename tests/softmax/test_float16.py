"""The range of float16."""

import jax.numpy as jnp
import pytest

from ejkernel.modules import flash_attention
from harness import PLATFORMS


@pytest.mark.parametrize("platform", [p for p in PLATFORMS if p.device == "cpu"], ids=lambda p: p.id)
def test_a_scale_that_would_take_queries_out_of_range(platform):
    large, small = jnp.full((1, 2, 1, 64), 100.0, jnp.float16), jnp.full((1, 2, 1, 64), 1e-3, jnp.float16)
    with platform.context():
        out = flash_attention(large, small, large, softmax_scale=1024.0, platform=platform.name)
    assert jnp.array_equal(out, large)
