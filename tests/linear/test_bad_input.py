"""Wrong input raises before anything runs, and says what was given and what was needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.linear.xla import Config
from ejkernel.modules import gla_attention, lightning_attention, recurrent_attention

B, T, H, D, DV = 2, 6, 3, 4, 5
Q, K, V = jnp.zeros((B, T, H, D)), jnp.zeros((B, T, H, D)), jnp.zeros((B, T, H, DV))
LAYER = {"layer_idx": 0, "num_layers": 2}
ONE = (Q[:1], K[:1], V[:1])

ERRORS = {
    "rank": ((Q[0, 0], K, V), {}, ValueError, r"query must have 4 dimensions, got shape \(3, 4\).*layout"),
    "no-array": (("q", K, V), {}, TypeError, "query must be an array, got str"),
    "a-list": (([1.0], K, V), {}, TypeError, "query must be an array, got list"),
    "integers": ((Q.astype(int), K, V), {}, TypeError, "query has dtype int32; supported: float32, bfloat16, float16"),
    "float64": ((np.zeros(Q.shape), K, V), {}, TypeError, "query has dtype float64; supported"),
    "dtypes": ((Q, K.astype("bfloat16"), V), {}, TypeError, "key has dtype bfloat16, query has float32"),
    "key": ((Q, K[:, :, :2], V), {}, ValueError, r"key \(2, 6, 2, 4\) must have the shape of query \(2, 6, 3, 4\)"),
    "grouped": ((Q, K[:, :, :1], V), {}, ValueError, r"key has 1 heads, query has 3.*jnp.repeat\(key, 3, -2\)"),
    "value": ((Q, K, V[:, :5]), {}, ValueError, r"value \(2, 5, 3, 5\) must have the batch, length and heads of query"),
    "swapped": ((Q, K, V.swapaxes(1, 2)), {}, ValueError, r"layout is \(batch, length, heads, head_dim\)"),
    "empty-heads": ((Q[:, :, :0], K[:, :, :0], V[:, :, :0]), {}, ValueError, "query has an empty dimension"),
    "empty-dim": ((Q[..., :0], K[..., :0], V), {}, ValueError, "query has an empty dimension"),
    "g": ((Q, K, V, Q[:, 0]), {}, ValueError, r"g has shape \(2, 3, 4\), needed \(2, 6, 3\)"),
    "g-integers": ((Q, K, V, jnp.zeros((B, T, H), int)), {}, TypeError, "g has dtype int32"),
    "g-per-channel": ((Q, K, V, V), {}, ValueError, r"g has shape \(2, 6, 3, 5\), needed \(2, 6, 3, 4\)"),
    "g_gamma": ((Q, K, V), {"g_gamma": jnp.zeros(4)}, ValueError, r"g_gamma has shape \(4,\), needed \(3,\)"),
    "gk": ((Q, K, V), {"gk": V}, ValueError, r"gk has shape \(2, 6, 3, 5\), needed \(2, 6, 3, 4\)"),
    "gv": ((Q, K, V), {"gv": Q}, ValueError, r"gv has shape \(2, 6, 3, 4\), needed \(2, 6, 3, 5\)"),
    "state": ((Q, K, V), {"initial_state": jnp.zeros((B, H, DV, D))}, ValueError,
              r"initial_state has shape \(2, 3, 5, 4\), needed \(2, 3, 4, 5\)"),
    "state-packed": (ONE, {"initial_state": jnp.zeros((1, H, D, DV)), "cu_seqlens": [0, 2, 6]}, ValueError,
                     r"initial_state has shape \(1, 3, 4, 5\), needed \(2, 3, 4, 5\)"),
    "cu-batch": ((Q, K, V), {"cu_seqlens": [0, 6]}, ValueError, r"packs sequences into one row; query \(2, 6, 3, 4\)"),
    "cu-falls": (ONE, {"cu_seqlens": [0, 5, 3]}, ValueError, r"never decrease.*\(row 2: 3\)"),
    "cu-too-long": (ONE, {"cu_seqlens": [0, 7]}, ValueError, "end within the 6 tokens"),
    "cu-none": (ONE, {"cu_seqlens": [0]}, ValueError, r"cu_seqlens must have shape \(sequences \+ 1,\), got \(1,\)"),
    "cu-floats": (ONE, {"cu_seqlens": [0.0, 6.0]}, TypeError, "cu_seqlens must hold integers"),
    "cu-rank": (ONE, {"cu_seqlens": [[0, 6]]}, ValueError, r"cu_seqlens must have 1 dimensions, got shape \(1, 2\)"),
    "scale": ((Q, K, V), {"softmax_scale": 0}, ValueError, "softmax_scale=0.0 must not be 0"),
    "scale-small": ((Q, K, V), {"softmax_scale": 1e-39}, ValueError, "softmax_scale=1e-39 must .* within float32"),
    "scale-text": ((Q, K, V), {"softmax_scale": "small"}, TypeError, "softmax_scale must be a number, got 'small'"),
    "gate-of-some": ((Q, K, V, jnp.zeros((B, 2, H))), {}, ValueError, r"needed \(2, 6, 3\), where any size may be 1"),
    "gamma-text": ((Q, K, V), {"g_gamma": "strong"}, TypeError, "g_gamma must be an array, got str"),
    "gamma-flag": ((Q, K, V), {"g_gamma": True}, TypeError, "g_gamma must be an array, got bool"),
    "reverse": ((Q, K, V), {"reverse": 1}, TypeError, "reverse must be"),
    "return_state": ((Q, K, V), {"return_state": None}, TypeError, "return_state must be"),
    "platform": ((Q, K, V), {"platform": "cudnn"}, NotImplementedError, "platforms that could: xla"),
    "no-platform": ((Q, K, V), {"platform": "abacus"}, ValueError, "abacus"),
    "config": ((Q, K, V), {"platform": "xla", "cfg": {"chunk": 3}}, ValueError, "chunk=3 must be a power of two"),
    "config-field": ((Q, K, V), {"platform": "xla", "cfg": {"block": 3}}, (TypeError, ValueError), "block"),
    "unknown": ((Q, K, V), {"causal": True}, TypeError, "causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    arguments, options, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        recurrent_attention(*arguments, **options)


def test_a_traced_scale_is_one_number():
    with pytest.raises(TypeError, match=r"softmax_scale must be a number, got float32 of shape \(3,\)"):
        jax.jit(lambda scale: recurrent_attention(Q, K, V, softmax_scale=scale))(jnp.ones(3))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"layer_idx": 2, "num_layers": 2}, ValueError, "layer_idx=2 must be below num_layers=2"),
        ({"layer_idx": -1, "num_layers": 2}, ValueError, "layer_idx=-1 must be at least 0"),
        ({"layer_idx": 0, "num_layers": 0}, ValueError, "num_layers=0 must be at least 1"),
        ({"layer_idx": 0.5, "num_layers": 2}, TypeError, "layer_idx must be an int"),
        ({"layer_idx": 0}, TypeError, "num_layers"),
    ],
)
def test_layers(options, kind, message):
    with pytest.raises(kind, match=message):
        lightning_attention(Q, K, V, **options)


@pytest.mark.parametrize("query", [Q[0, 0], Q[0, 0, 0], jnp.float32(1.0)], ids=lambda x: f"rank{x.ndim}")
def test_rank_of_lightning(query):
    with pytest.raises(ValueError, match="query must have 4 dimensions"):
        lightning_attention(query, K, V, **LAYER)


def test_lightning_without_heads():
    with pytest.raises(ValueError, match="query has an empty dimension"):
        lightning_attention(Q[:, :, :0], K[:, :, :0], V[:, :, :0], **LAYER)


def test_gla_has_no_other_decays():
    with pytest.raises(TypeError, match="gv"):
        gla_attention(Q, K, V, gv=V)


def test_traced_lengths_are_clamped():
    """They cannot be looked at: nothing outside is read, and what comes back is finite."""
    attend = jax.jit(lambda cu: recurrent_attention(*ONE, cu_seqlens=cu, return_state=True))
    for cu in ([0, 9, 99], [0, 5, 3], [-4, 2, 6]):
        assert all(np.isfinite(x).all() for x in attend(jnp.array(cu)))


def test_configs():
    assert Config().chunk == 64
    with pytest.raises(ValueError, match="chunk='64' must be a power of two"):
        Config("64")  # pyright: ignore[reportArgumentType]
