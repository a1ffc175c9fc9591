"""Other libraries with this one's attention: the examples, as their readers run them."""

import runpy
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """A function from the name of an example to what it defines."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "documents", raising=False)
    return lambda name: runpy.run_path(str(EXAMPLES / f"{name}.py"))


@pytest.mark.parametrize(("name", "steps"), [("train_flax", 32), ("train_equinox", 32), ("train_torch", 70)])
def test_training_on_packed_documents_learns_what_there_is(example, name, steps, capsys):
    module = example(name)
    final, best = module["main"](steps)
    # who does not look at the document's earlier tokens has to guess its steps every time: log(4)
    assert best < final < 0.5 * np.log(4)
    assert "no document sees another" in capsys.readouterr().out


def test_flax_modules_agree_with_their_own_attention(example):
    assert example("flax_attention_fn")["main"]() < 1e-5


def test_hooks_honour_segment_ids(example, capsys):
    assert example("attention_hooks")["main"]() < 1e-4
    assert "Levanter's call" in capsys.readouterr().out


def test_hooks_take_windows_caps_and_dense_masks(example):
    hooks = example("attention_hooks")
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (jax.random.normal(key, (1, 20, 4, 16)) for key in keys)
    ids = jnp.repeat(jnp.array([[1, 2]]), 10, axis=1)
    at = np.arange(20)
    seen = (at[:, None] >= at) & (at[:, None] - at < 4) & (at[:, None] // 10 == at // 10)
    right = jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(seen)[None, None])
    windowed = hooks["maxtext_attention"](q * 16**-0.5, k, v, ids, "prefill", sliding_window_size=4)
    np.testing.assert_allclose(windowed, right, atol=1e-5)
    with pytest.raises(ValueError, match="model_mode 'autoregressive': decoding is page_attention"):
        hooks["maxtext_attention"](q, k, v, ids, "autoregressive")


BATCH, QUERIES, KEYS, HEADS = 3, 7, 10, 4
I, J = np.arange(QUERIES)[:, None], np.arange(KEYS)
Q_IDS, K_IDS = (
    np.array([[0] * 4 + [5] * 3, [2] * 7, [0, 0, 1, 1, 1, -1, -1]]),
    np.array([[0, 5] * 5, [2] * 10, [0, 1] * 3 + [-1] * 4]),
)
OFFSETS = np.array([3, 0, 1])
DENSE = np.random.default_rng(0).random((BATCH, HEADS, QUERIES, KEYS)) < 0.5
# fields of Levanter's masks, and what they show of (B, heads, Q, K)
LEVANTER = {
    "causal": ({"is_causal": True}, I >= J),
    "causal-window": ({"is_causal": True, "sliding_window": 3}, (I >= J) & (I - J < 3)),
    "window": ({"sliding_window": 3}, (I >= J) & (I - J < 3)),
    "both-ways": ({"bidirectional_window": 2}, abs(I - J) <= 2),
    "offset": ({"is_causal": True, "causal_offset": 3}, I + 3 >= J),
    "offset-of-rows": ({"is_causal": True, "causal_offset": OFFSETS}, I + OFFSETS[:, None, None, None] >= J),
    "offset-window": ({"is_causal": True, "causal_offset": OFFSETS, "sliding_window": 4}, (I >= J) & (I - J < 4)),
    "not-causal-offset": ({"causal_offset": 3}, I + J >= 0),
    "segments": ({"segment_ids": (Q_IDS, K_IDS)}, (Q_IDS[..., None] == K_IDS[:, None])[:, None]),
    "explicit": ({"explicit_mask": DENSE[0, 0]}, DENSE[0, 0]),
    "explicit-batch": ({"explicit_mask": DENSE[:, 0], "is_causal": True}, DENSE[:, :1] & (I >= J)),
    "explicit-heads": ({"explicit_mask": DENSE, "bidirectional_window": 5}, DENSE & (abs(I - J) <= 5)),
}


def levanter_qkv() -> tuple[jax.Array, jax.Array, jax.Array]:
    shapes = (QUERIES, HEADS), (KEYS, 2), (KEYS, 2)
    keys = jax.random.split(jax.random.key(2), 3)
    return tuple(jax.random.normal(key, (BATCH, n, heads, 8)) for key, (n, heads) in zip(keys, shapes, strict=True))


def attention_under(seen: np.ndarray, q: jax.Array, k: jax.Array, v: jax.Array, **options) -> np.ndarray:
    """jax.nn's, with zeros for rows that see nothing."""
    seen = np.broadcast_to(seen, (BATCH, HEADS, QUERIES, KEYS))
    out = np.asarray(jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(seen), **options))
    return np.where(seen.any(-1).swapaxes(1, 2)[..., None], out, 0.0)


@pytest.mark.parametrize("name", LEVANTER)
def test_levanters_masks_of_more_keys_than_queries(example, name):
    hooks, (fields, seen) = example("attention_hooks"), LEVANTER[name]
    q, k, v = levanter_qkv()
    mask = hooks["AttentionMask"](**fields)
    np.testing.assert_allclose(hooks["levanter_attention"](q, k, v, mask), attention_under(seen, q, k, v), atol=1e-5)


def test_levanters_offsets_may_be_traced(example):
    hooks = example("attention_hooks")
    q, k, v = levanter_qkv()

    @jax.jit
    def attend(offset):
        return hooks["levanter_attention"](q, k, v, hooks["AttentionMask"](is_causal=True, causal_offset=offset))

    np.testing.assert_allclose(attend(OFFSETS), attention_under(LEVANTER["offset-of-rows"][1], q, k, v), atol=1e-5)
    np.testing.assert_allclose(attend(3), attention_under(I + 3 >= J, q, k, v), atol=1e-5)


def test_levanters_dense_masks_and_options(example):
    attend = example("attention_hooks")["levanter_attention"]
    q, k, v = levanter_qkv()
    for mask in (DENSE[0, 0], DENSE[:, 0], DENSE):
        seen = mask[:, None] if mask.ndim == 3 else mask
        np.testing.assert_allclose(attend(q, k, v, jnp.asarray(mask)), attention_under(seen, q, k, v), atol=1e-5)
    added = jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, QUERIES, KEYS)), jnp.float32)
    out = attend(q, k, v, added, bias=jnp.ones((1, HEADS, 1, KEYS)) * J, scaling_factor=0.5)
    expected = attention_under(np.ones(1, bool), q, k, v, scale=0.5, bias=added[:, None] + J)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert attend(q, k, v, None, attn_sink=jnp.full(HEADS, 30.0)).max() < 1e-6
    assert abs(attend(q, k, v, None, logits_soft_cap=1e-6) - v.mean(1).repeat(2, 1)[:, None]).max() < 1e-5
    with pytest.raises(ValueError, match=r"a mask must be \(Q, K\), .* got \(7,\)"):
        attend(q, k, v, jnp.ones(7, bool))


def test_levanters_window_of_grug_is_open_ahead(example):
    """`levanter.grug` has masks without offsets, whose windows alone do not hide later keys."""
    hooks = example("attention_hooks")
    q, k, v = levanter_qkv()
    mask = types.SimpleNamespace(is_causal=False, segment_ids=None, sliding_window=3)
    out = hooks["levanter_attention"](q, k, v, mask)
    np.testing.assert_allclose(out, attention_under(I - J < 3, q, k, v), atol=1e-5)
    mask.sliding_window = 0
    with pytest.raises(ValueError, match="sliding_window must be positive, got 0"):
        hooks["levanter_attention"](q, k, v, mask)
