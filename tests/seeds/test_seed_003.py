"""The page of seed 003: every function with the signature, the shapes and the meaning that it prints."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.paged import ragged
from harness import normal

B, S, H, HKV, D = 3, 20, 4, 2, 8
LENGTHS, STARTS = jnp.array([20, 7, 13]), jnp.array([0, 2, 12])
LOWEST = "mask_value=-2.381976426469702e+38"

SIGNATURES = {
    "get_mha_cost_estimate": "(shape_dtype)",
    "ragged_flash_attention_kernel": (
        "(lengths_ref, starts_ref, q_ref, k_ref, v_ref, o_ref, m_ref, l_ref, *, block_size, mask_value)"
    ),
    "ragged_gqa": f"(query, key, value, lengths, starts, *, block_size=256, {LOWEST})",
    "ragged_mha": f"(query, key, value, lengths, starts, *, block_size=256, {LOWEST})",
    "ragged_mqa": f"(q, k, v, lengths, starts, *, block_size=256, {LOWEST}, cost_estimate=None)",
    "reference_gqa": f"(q, k, v, lengths, starts, {LOWEST})",
    "reference_mha": f"(q, k, v, lengths, starts, *, {LOWEST})",
    "reference_mqa": f"(q, k, v, lengths, starts, *, {LOWEST})",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(ragged, name))
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)) == SIGNATURES[name]


# the queries and caches that each one's Parameters print
INPUTS = {
    "gqa": ((B, H, D), (B, S, HKV, D)),
    "mha": ((B, 1, H, D), (B, S, H, D)),
    "mqa": ((B, 1, D), (B, S, D)),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_shapes_and_numbers(kind):
    query_shape, cache_shape = INPUTS[kind]
    query, key, value = normal("q", query_shape), normal("k", cache_shape), normal("v", cache_shape)
    heads = 1 if kind == "mqa" else H
    o, m, l = getattr(ragged, f"ragged_{kind}")(query, key, value, LENGTHS, STARTS)
    # the output [batch, num_heads, head_dim], the max logit and softmax denominator [batch, num_heads, 1]
    assert (o.shape, m.shape, l.shape) == ((B, heads, D), (B, heads, 1), (B, heads, 1))
    rows, caches = np.asarray(query).reshape(B, heads, D), np.asarray(key).reshape(B, S, -1, D)
    values = np.asarray(value).reshape(B, S, -1, D)
    group = heads // caches.shape[2]
    for b in range(B):
        span = slice(int(STARTS[b]), int(LENGTHS[b]))
        for h in range(heads):
            logits = caches[b, span, h // group] @ rows[b, h]
            weights = np.exp(logits - logits.max())
            np.testing.assert_allclose(m[b, h, 0], logits.max(), rtol=1e-5)
            np.testing.assert_allclose(l[b, h, 0], weights.sum(), rtol=1e-5)
            right = weights @ values[b, span, h // group] / weights.sum()
            np.testing.assert_allclose(o[b, h], right, atol=1e-5)
    reference = getattr(ragged, f"reference_{kind}")(query, key, value, LENGTHS, STARTS)
    assert [x.shape for x in reference] == [(B, 1, heads, D), (B, 1, heads, 1), (B, 1, heads, 1)]
    for mine, theirs in zip((o, m, l), reference, strict=True):
        np.testing.assert_allclose(mine, theirs[:, 0], atol=1e-5, rtol=1e-5)


def test_cost_estimate():
    struct = jax.ShapeDtypeStruct
    query, cache = struct((B, 1, H, D), "float32"), struct((B, S, H, D), "float32")
    cost = ragged.get_mha_cost_estimate((query, cache, cache, struct((B,), "int32")))
    assert isinstance(cost, pl.CostEstimate)
    assert (cost.flops, cost.transcendentals) == (4 * B * H * S * D, B * H * S)
    assert cost.bytes_accessed >= 4 * 2 * B * S * H * D


@pytest.mark.parametrize("block_size", [8, 32])
def test_the_kernel_in_a_pallas_call(block_size):
    lengths, starts = jnp.array([20, 7, 13, 9]), jnp.array([0, 2, 12, 9])  # the last row sees nothing
    rows, width = len(lengths), 128
    q, k, v = normal("q", (rows, H, D)), normal("k", (rows, S, D)), normal("v", (rows, S, D))
    position = jnp.arange(S)[None, :, None]
    hidden = (position < starts[:, None, None]) | (position >= lengths[:, None, None])
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (k, v))

    def of_row(width):
        return pl.BlockSpec((None, H, width), lambda b, i, *_: (b, 0, 0))

    keys = pl.BlockSpec((None, block_size, D), lambda b, i, *_: (b, i, 0))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(rows, pl.cdiv(S, block_size)),
        in_specs=[of_row(D), keys, keys],
        out_specs=[of_row(D), of_row(width), of_row(width)],
    )
    kernel = partial(ragged.ragged_flash_attention_kernel, block_size=block_size, mask_value=ragged.MASK_VALUE)
    shapes = [jax.ShapeDtypeStruct((rows, H, n), "float32") for n in (D, width, width)]
    o, m, l = pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=shapes, interpret=True)(lengths, starts, q, k, v)
    right = ragged.ragged_mqa(q, k, v, lengths, starts)
    for mine, theirs in zip((o, m[..., :1], l[..., :1]), right, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5, rtol=1e-5)
    assert (m == m[..., :1]).all() and (l == l[..., :1]).all()
