"""A loop over layers, as models are written: each layer's attention runs once, and its gradients are right."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp

from ejkernel.modules import flash_attention
from harness import normal
from tolerances import assert_close

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


def gradients(weights, x, platform, looped):
    """By name, and the program that gave them."""
    compiled = jax.jit(jax.grad(partial(loss, platform=platform, looped=looped), argnums=(0, 1))).lower(weights, x)
    compiled = compiled.compile()
    return dict(zip(("weights", "x"), compiled(weights, x), strict=True)), compiled


def test_a_loop_runs_each_kernel_once(native):
    weights = normal("weights", (LAYERS, 4, H * D, H * D)).astype(jnp.bfloat16) / 16
    x = normal("x", (1, T, H * D)).astype(jnp.bfloat16)
    got, looped = gradients(weights, x, native.name, True)
    unrolled, one_by_one = gradients(weights, x, native.name, False)
    with jax.default_matmul_precision("highest"):
        exact, _ = gradients(weights.astype(jnp.float32), x.astype(jnp.float32), "xla", False)
    # a loop may be as wrong as layers one by one
    assert_close(got, exact, unrolled, "gradients")
    assert {name: LAYERS * count for name, count in calls_of(looped).items()} == dict(calls_of(one_by_one))
