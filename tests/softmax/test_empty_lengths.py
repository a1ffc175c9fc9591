"""No queries or no keys: empty outputs, zeros with the lse of the sinks (or -inf), and gradients of zero."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.modules import (
    attention,
    blocksparse_attention,
    dot_product_attention,
    flash_attention,
    scaled_dot_product_attention,
)
from ejkernel.types import MaskInfo
from harness import PLATFORMS, normal

B, H, D, DV = 2, 4, 16, 8
LENGTHS = [(0, 12), (12, 0), (0, 0)]
OPTIONS = {
    "plain": lambda T, S: {},
    "causal": lambda T, S: {"causal": True, "sliding_window": 4},
    "bias": lambda T, S: {"bias": normal("bias", (1, H, T, S)), "logits_soft_cap": 3.0},
    "segments": lambda T, S: {"mask_info": MaskInfo.from_segments(jnp.zeros((B, T), int), jnp.zeros((B, S), int))},
    "mask": lambda T, S: {"mask_info": MaskInfo.from_attention_mask(jnp.ones((B, 1, T, S), bool))},
    "unnormalised": lambda T, S: {"normalize_output": False, "dropout_prob": 0.5, "dropout_seed": 1},
}


def qkv(T, S, B=B):
    shapes = (B, T, H, D), (B, S, 2, D), (B, S, 2, DV)
    return tuple(normal(name, shape) for name, shape in zip("qkv", shapes, strict=True))


# sinks with every other option, and with each of them at some lengths
CALLS = [
    (*lengths, bool((n + m) % 2), options)
    for (n, lengths), (m, options) in product(enumerate(LENGTHS), enumerate(OPTIONS))
]


@pytest.mark.parametrize("platform", [p for p in PLATFORMS if p.device == "cpu"], ids=lambda p: p.id)
@pytest.mark.parametrize(("T", "S", "sinks", "options"), CALLS)
def test_every_platform(T, S, sinks, options, platform):
    given = OPTIONS[options](T, S)
    floats = {"bias": given.pop("bias")} if "bias" in given else {}
    floats |= {"softmax_aux": normal("sinks", (H,))} if sinks else {}

    def attend(arrays):
        with platform.context():
            return flash_attention(**arrays, **given, platform=platform.name, return_lse=True)

    arrays = dict(zip(("query", "key", "value"), qkv(T, S), strict=True)) | floats
    (out, lse), pull = jax.vjp(jax.jit(attend), arrays)
    assert out.shape == (B, T, H, DV) and lse.shape == (B, H, T) and not np.any(out)
    expected = arrays["softmax_aux"][:, None] if sinks else -np.inf
    np.testing.assert_array_equal(lse, np.broadcast_to(expected, lse.shape))
    (gradients,) = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    for name, x in gradients.items():
        # each row's lse is its sink
        assert x.shape == arrays[name].shape and (x == (B * T if name == "softmax_aux" else 0)).all()


@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_other_public_functions(T, S):
    q, k, v = qkv(T, S)
    for function in (attention, scaled_dot_product_attention):
        out, *_ = jax.tree.leaves(function(q, k, v))
        assert out.shape == (B, T, H, DV) and not np.any(out)
    out = blocksparse_attention(q, k, v, block_mask=lambda b, h, i, j: True, block_size=8)
    assert out.shape == (B, T, H, DV) and not np.any(out)
    ours, theirs = (f(q, k, k) for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert ours.shape == theirs.shape and not np.any(ours)
    mask = jnp.ones((B, H, T, S), bool)
    assert dot_product_attention(q, k, k, mask=mask, is_causal=True).shape == theirs.shape


@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_under_transformations(T, S):
    q, k, v = qkv(T, S, 3)
    out = jax.vmap(lambda *x: flash_attention(*(y[None] for y in x), causal=True)[0])(q, k, v)
    assert out.shape == (3, T, H, DV) and not np.any(out)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("x",))
    spec = jax.sharding.PartitionSpec(None, None, "x")
    assert flash_attention(q, k, v, mesh=mesh, in_specs=(spec, spec, spec)).shape == out.shape
    assert explain(flash_attention, q, k, v).platform == "xla"
    packed = flash_attention(q[0], k[0], v[0], cum_seqlens_q=jnp.array([0, 0, T]), cum_seqlens_k=jnp.array([0, S, S]))
    assert packed.shape == (T, H, DV) and not np.any(packed)


def test_heads_and_head_dims_are_never_empty():
    q, k, v = qkv(4, 4)
    with pytest.raises(ValueError, match=r"query has an empty dimension: shape \(2, 4, 0, 16\)"):
        flash_attention(q[:, :, :0], k, v)
