"""A loop over layers, as models are written: each layer's attention runs once, and its gradients are right."""

import re
from collections import Counter

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention
from harness import normal

LAYERS, T, H, HKV, D = 3, 256, 4, 2, 64


def loss(weights, x, platform, looped):
    def layer(x, w):
        query, key, value = (
            (x @ w[n])[..., : heads * D].reshape(1, T, heads, D) for n, heads in enumerate((H, HKV, HKV))
        )
        out = flash_attention(query, key, value, causal=True, platform=platform)
        return x + out.reshape(x.shape) @ w[3], None

    if looped:
        x, _ = jax.lax.scan(layer, x, weights)
    else:
        for w in weights:
            x, _ = layer(x, w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def calls_of(compiled):
    """How often each kernel is called by name: XLA's own calls, such as those of matrix products, are not ours."""
    targets = re.findall(r'custom_call_target="([^"]+)"', compiled.as_text())
    return Counter(target for target in targets if not re.search(r"cublas|cutlass|__triton_gemm|Sharding", target))


def test_a_loop_runs_each_kernel_once(native):
    weights = normal("weights", (LAYERS, 4, H * D, H * D)).astype(jnp.bfloat16) / 16
    x = normal("x", (1, T, H * D)).astype(jnp.bfloat16)
    results, calls = [], []
    for looped in (True, False):
        gradient = jax.jit(jax.grad(lambda *args, looped=looped: loss(*args, native.name, looped), argnums=(0, 1)))
        compiled = gradient.lower(weights, x).compile()
        results.append(compiled(weights, x))
        calls.append(calls_of(compiled))
    for got, expected in zip(*results, strict=True):
        got, expected = got.astype(jnp.float32), expected.astype(jnp.float32)
        # in bfloat16, sums of three layers
        assert jnp.abs(got - expected).max() <= 2**-6 * jnp.abs(expected).max()
    assert {name: LAYERS * count for name, count in calls[0].items()} == dict(calls[1])
