"""More tiles than a device has cores: who computes a tile, and in which order, changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from harness import cotangents_for, normal, with_gradients
from harness.checks import on_host

NAMES = ("query", "key", "value")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_head_is_the_same_among_many(D, causal, native):
    # 512 tiles of 128 rows go round 132 cores without much left over; a CPU is shown the same with less
    B, T, H = (4, 1024, 16) if native.device == "gpu" else (2, 256, 2)
    arrays = {name: normal(name, (B, T, H, D), jnp.bfloat16) for name in NAMES}
    options = native.options((128, 128), "bfloat16")

    def attend(x):
        return {"out": flash_attention(*(x[name] for name in NAMES), causal=causal, **options)}

    def definition(x):
        q, k, v = (x[name][0, :, 0].astype(jnp.float32) for name in NAMES)
        logits = q @ k.T * D**-0.5
        logits = jnp.where(jnp.tri(T, dtype=bool), logits, -jnp.inf) if causal else logits
        return {"out": (jax.nn.softmax(logits) @ v)[None, :, None]}

    cotangents = cotangents_for(attend, arrays, "bfloat16")
    many = jax.device_get(with_gradients(attend)(arrays, cotangents))
    defined = on_host(definition)
    for b, h in ((0, 0), (B - 1, H - 1), (B // 2, H // 2)):
        one = jax.tree.map(lambda x, b=b, h=h: x[b : b + 1, :, h : h + 1].astype(jnp.float32), (arrays, cotangents))
        for (path, x), y in zip(jax.tree.leaves_with_path(many), jax.tree.leaves(defined(*one)), strict=True):
            got, wanted = np.asarray(x[b, :, h], np.float32), np.asarray(y)[0, :, 0]
            # 16-bit weights: 2^-8 each, of sums whose largest entry is the measure
            worst = np.abs(got - wanted).max() / np.abs(wanted).max()
            assert worst < 0.02, f"batch {b}, head {h}, {jax.tree_util.keystr(path)}: {worst:.3f} of the largest entry"
