"""dot_product_attention is jax.nn's, argument by argument, and an attention_fn of Flax."""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax import dot_product
from ejkernel.modules import dot_product_attention, flash_attention
from ejkernel.ops import explain
from harness import evaluate, normal
from tolerances import assert_close

B, T, S, N, K, H = 2, 6, 9, 4, 2, 8
Q, KEY, VALUE = normal("q", (B, T, N, H)), normal("k", (B, S, K, H)), normal("v", (B, S, K, H))
ARRAYS = {"query": Q, "key": KEY, "value": VALUE}
COTANGENT = {"out": normal("dout", (B, T, N, H))}


def test_the_signature_begins_with_that_of_jax():
    ours, theirs = (inspect.signature(f).parameters for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert [(p.name, p.kind, p.default) for p in theirs.values()] == [
        (p.name, p.kind, p.default) for p in list(ours.values())[: len(theirs)]
    ]
    assert all(p.kind == p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])


def some(seed, shape):
    """A mask in which every query sees the first key."""
    return (np.random.default_rng(seed).random(shape) < 0.5) | (np.arange(shape[-1]) == 0)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bias": {"bias": normal("bias", (1, N, T, S))},
    "bias-matrix": {"bias": normal("bias", (T, S))},
    "bias-of-ints": {"bias": np.arange(S)},
    "mask": {"mask": some(0, (B, N, T, S))},
    "mask-of-keys": {"mask": some(1, (B, 1, 1, S))},
    "mask-of-heads": {"mask": some(2, (N, 1, S))},
    "mask-of-one-row": {"mask": some(3, (S,))},
    "mask-of-nothing": {"mask": np.ones((1, 1, 1, 1), bool)},
    "mask-and-causal": {"mask": some(4, (B, 1, T, S)), "is_causal": True, "bias": normal("bias", (B, 1, T, S))},
    "window": {"local_window_size": 2},
    "window-pair": {"local_window_size": (3, 1)},
    "window-and-causal": {"local_window_size": (2, 2), "is_causal": True},
    "window-before": {"local_window_size": (-0, 2)},
    "lengths": {"query_seq_lengths": jnp.array([3, 6]), "key_value_seq_lengths": jnp.array([9, 2])},
    "query-lengths": {"query_seq_lengths": jnp.array([3, 6])},
    "key-lengths": {"key_value_seq_lengths": jnp.array([1, 90]), "is_causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_one_of_jax(name):
    """With every gradient."""

    def function(a, attend, **options):
        return {"out": attend(**a, **options)}

    options = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in OPTIONS[name].items()}
    traced = {n: options.pop(n) for n in ("bias",) if n in options and options[n].dtype == jnp.float32}
    ours = evaluate(partial(function, attend=dot_product_attention, **options), ARRAYS | traced, COTANGENT)
    theirs = evaluate(partial(function, attend=jax.nn.dot_product_attention, **options), ARRAYS | traced, COTANGENT)
    assert_close(ours[0], theirs[0], kind="output")
    assert_close(ours[1], theirs[1], kind="gradient of")


def test_starts_are_aligned_on_every_platform(platform):
    """More keys than queries, and a window that begins before the first key."""
    q, k = normal("q", (1, 16, 2, 64), "bfloat16"), normal("k", (1, 24, 2, 64), "bfloat16")
    options = {"is_causal": True, "local_window_size": (9, 0)}
    attend = partial(dot_product_attention, platform=platform.name, **options)
    with platform.context():
        if reasons := explain(dot_product_attention, q, k, k, **options).refusals.get(platform.name):
            with pytest.raises(NotImplementedError, match=re.escape(reasons[0])):
                attend(q, k, k)
            return
        out = jax.jit(attend)(q, k, k)
    wide = [x.astype(jnp.float32) for x in (q, k, k)]
    exact = jax.nn.dot_product_attention(*wide, **options)
    naive = jax.nn.dot_product_attention(q, k, k, **options)
    assert_close({"out": out}, {"out": exact}, {"out": naive})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_residual(dtype):
    arrays = [x.astype(dtype) for x in ARRAYS.values()]
    (out, lse), (their_out, their_lse) = (
        attend(*arrays, is_causal=True, return_residual=True)
        for attend in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert (lse.shape, lse.dtype) == (their_lse.shape, their_lse.dtype) == ((B, T, N), dtype)
    if dtype == "float32":
        assert_close({"out": out, "lse": lse}, {"out": their_out, "lse": their_lse})
    assert not jax.grad(lambda q: dot_product_attention(q, *arrays[1:], return_residual=True)[1].sum())(arrays[0]).any()


def test_one_sequence_without_a_batch_axis():
    one = [x[0] for x in ARRAYS.values()]
    mask = jnp.asarray(some(0, (N, T, S)))
    for options in ({"mask": mask, "is_causal": True}, {"key_value_seq_lengths": jnp.array([4])}):
        ours = dot_product_attention(*one, return_residual=True, **options)
        theirs = jax.nn.dot_product_attention(*one, return_residual=True, **options)
        assert_close(dict(enumerate(ours)), dict(enumerate(theirs)))
    mixed = dot_product_attention(one[0], KEY[:1], VALUE[:1])
    assert_close({"out": mixed}, {"out": jax.nn.dot_product_attention(one[0], KEY[:1], VALUE[:1])})


def test_lists_and_numpy_are_arrays_too():
    query = np.asarray(Q)[0, :, :1].tolist()
    ours = dot_product_attention(query, query, query, mask=[True] * T)
    assert_close({"out": ours}, {"out": jax.nn.dot_product_attention(*[jnp.asarray(query)] * 3)})


def test_a_traced_scale_has_a_gradient():
    def total(scale, attend):
        return jnp.square(attend(Q, KEY, VALUE, scale=scale)).sum()

    ours, theirs = (
        jax.jit(jax.value_and_grad(partial(total, attend=attend)))(0.4)
        for attend in (dot_product_attention, jax.nn.dot_product_attention)
    )
    assert_close(dict(enumerate(ours)), dict(enumerate(theirs)))


def test_a_row_that_sees_nothing_is_zero():
    mask = jnp.asarray(some(0, (B, 1, T, S))).at[1, 0, 2].set(False)
    out, lse = dot_product_attention(Q, KEY, VALUE, mask=mask, return_residual=True)
    assert not out[1, 2].any() and jnp.isneginf(lse[1, 2]).all() and jnp.isfinite(lse[0]).all()


def test_implementations_are_platforms():
    assert explain(dot_product_attention, Q, KEY, VALUE, implementation="xla").reason == "forced by platform="
    assert explain(dot_product_attention, Q, KEY, VALUE, platform="xla").reason == "forced by platform="
    assert explain(dot_product_attention, Q, KEY, VALUE).platform == "xla"
    assert explain(dot_product_attention, Q, KEY, VALUE).operation == "dot_product_attention"
    with pytest.raises(NotImplementedError, match="dot_product_attention: platform 'cudnn' cannot do this call"):
        dot_product_attention(Q, KEY, VALUE, implementation="cudnn")


def test_what_our_cudnn_refuses_is_left_to_jax(monkeypatch):
    """Named, it was asked for; a dropout that JAX would ignore is refused."""
    monkeypatch.setattr(dot_product, "target_of", lambda arrays: type("Target", (), {"backend": "gpu"}))
    theirs = jax.nn.dot_product_attention
    seen = []

    def spy(*, implementation, **given):
        seen.append(implementation)
        return theirs(**given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    bias = OPTIONS["bias"]
    ours = dot_product_attention(Q, KEY, VALUE, **bias, implementation="cudnn")
    assert seen == ["cudnn"]
    assert_close({"out": ours}, {"out": theirs(Q, KEY, VALUE, **bias)})
    with pytest.raises(NotImplementedError, match="cannot do this call"):
        dot_product_attention(Q, KEY, VALUE, dropout_rate=0.5, dropout_rng=jax.random.key(0), implementation="cudnn")
    with pytest.raises(NotImplementedError, match="cannot do this call"):
        dot_product_attention(Q, KEY, VALUE, **bias, precision="highest", implementation="cudnn")


WRONG = {
    "implementation": ({"implementation": "flash"}, ValueError, "implementation='flash' is unknown; use None, 'xla'"),
    "both": ({"implementation": "xla", "platform": "xla"}, ValueError, "give implementation='xla' or platform='xla'"),
    "mask-dtype": ({"mask": jnp.ones((1, 1, T, S))}, ValueError, "mask must be bool, True where .* bias is for"),
    "mask-shape": ({"mask": jnp.ones((1, 1, T, 4), bool)}, ValueError, r"mask \(1, 1, 6, 4\) does not broadcast"),
    "mask-rank": ({"mask": jnp.ones((1, 1, 1, T, S), bool)}, ValueError, "mask .* does not broadcast"),
    "mask-heads": ({"mask": jnp.ones((1, 3, T, S), bool)}, ValueError, "3 heads, query has 4"),
    "bias-shape": ({"bias": jnp.ones((T, 4))}, ValueError, r"bias \(1, 1, 6, 4\) does not broadcast"),
    "lengths": ({"query_seq_lengths": jnp.ones(3, int)}, ValueError, r"query_seq_lengths must be int32 \(2,\)"),
    "float-lengths": ({"key_value_seq_lengths": jnp.ones(2)}, ValueError, "key_value_seq_lengths must be int32"),
    "window": ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size=.1, 2, 3. must be an int or a pair"),
    "heads": ({"key": normal("k", (B, S, 3, H))}, ValueError, "must have the length and heads of key"),
    "ints": ({"query": jnp.ones((B, T, N, H), int)}, TypeError, "query has dtype int32; it must be a float"),
    "module": ({"module": object()}, ValueError, "module must be None: the weights"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    changes, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        dot_product_attention(**{**ARRAYS, **changes})


# Flax: what `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention` pass to an attention_fn ----------------

FLAX = {
    "mask": None,
    "dropout_rng": None,
    "dropout_rate": 0.0,
    "broadcast_dropout": True,
    "deterministic": True,
    "dtype": None,
    "precision": None,
    "module": None,
    "is_causal": False,
}


def test_what_flax_passes():
    """Several batch dimensions, and masks of ones and zeros in float32."""
    q, k = normal("q", (2, 3, T, N, H)), normal("k", (2, 3, S, N, H))
    mask = jnp.asarray(some(0, (2, 3, 1, T, S)), jnp.float32)
    ours = dot_product_attention(q, k, k, **FLAX | {"mask": mask})
    theirs = jax.nn.dot_product_attention(
        *(x.reshape(6, *x.shape[2:]) for x in (q, k, k)), mask=mask.reshape(6, 1, T, S) > 0
    )
    assert_close({"out": ours}, {"out": theirs.reshape(q.shape)})


def test_the_dtype_of_flax():
    ours = dot_product_attention(Q, KEY, VALUE, **FLAX | {"dtype": jnp.bfloat16})
    assert ours.dtype == jnp.bfloat16
    expected = dot_product_attention(*(x.astype(jnp.bfloat16) for x in (Q, KEY, VALUE)))
    np.testing.assert_array_equal(ours, expected)


def test_dropout_as_flax_asks_for_it():
    """Of the values of one key: what is left of its weight shows which queries dropped it."""
    ones, rng = jnp.ones((B, T, N, H)), jax.random.key(0)
    options = FLAX | {"dropout_rate": 0.5, "dropout_rng": rng, "deterministic": False}
    shared = np.asarray(dot_product_attention(ones, ones, ones, **options))
    assert shared.std() > 0 and (shared == shared[:1, :, :1]).all()
    apart = np.asarray(dot_product_attention(ones, ones, ones, **options | {"broadcast_dropout": False}))
    assert (apart[0] != apart[1]).any() and (apart[:, :, 0] != apart[:, :, 1]).any()
    np.testing.assert_array_equal(apart, flash_attention(ones, ones, ones, dropout_prob=0.5, dropout_seed=rng))
    off = dot_product_attention(ones, ones, ones, **options | {"deterministic": True})
    np.testing.assert_allclose(off, 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5 needs dropout_rng"):
        dot_product_attention(ones, ones, ones, **options | {"dropout_rng": None})
