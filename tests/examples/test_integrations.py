"""Other libraries with this one's attention: the examples, as their readers run them."""

import runpy
import sys
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


@pytest.mark.parametrize(("name", "steps"), [("train_flax", 45), ("train_equinox", 45), ("train_torch", 90)])
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
    mask = hooks["AttentionMask"](is_causal=True, segment_ids=(ids, ids), sliding_window=4)
    np.testing.assert_allclose(hooks["levanter_attention"](q, k, v, mask), right, atol=1e-5)
    np.testing.assert_allclose(hooks["levanter_attention"](q, k, v, jnp.asarray(seen)), right, atol=1e-5)
    with pytest.raises(ValueError, match="model_mode 'autoregressive': decoding is page_attention"):
        hooks["maxtext_attention"](q, k, v, ids, "autoregressive")
