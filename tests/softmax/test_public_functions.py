"""attention, scaled_dot_product_attention and blocksparse_attention, in terms of each other and of jax.nn."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax import blocks
from ejkernel.modules import attention, blocksparse_attention, flash_attention, scaled_dot_product_attention
from ejkernel.types import BlockPattern, MaskInfo
from harness import evaluate, normal
from tolerances import assert_close

B, T, S, H, D = 2, 20, 28, 4, 8
Q, K, V = normal("q", (B, T, H, D)), normal("k", (B, S, 2, D)), normal("v", (B, S, 2, D))
TILES = {"block_q": 8, "block_k": 8}

flash = jax.jit(
    partial(flash_attention, cfg=TILES),
    static_argnames=("causal", "sliding_window", "logits_soft_cap", "softmax_scale", "return_lse", "dropout_prob"),
)


# attention ------------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"sliding_window": (3, 1)},
    "bias": {"bias": normal("bias", (H, T, S))},
    "sinks": {"softmax_aux": normal("sinks", (H, 2)), "causal": True},
    "mask": {"mask_info": MaskInfo(T, S).apply_kv_lengths(jnp.array([0, 13]))},
    "soft-cap-scale": {"logits_soft_cap": 1.0, "softmax_scale": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_flash_attention_with_weights(name):
    out, weights = attention(Q, K, V, **OPTIONS[name])
    assert_close({"out": out}, {"out": flash(Q, K, V, **OPTIONS[name])})
    assert weights.shape == (B, H, T, S) and weights.dtype == out.dtype == jnp.float32
    values = jnp.repeat(V, 2, axis=2)
    assert_close({"out": jnp.einsum("bhts,bshd->bthd", weights, values, precision="highest")}, {"out": out})


def test_weights_sum_to_one_without_sinks_and_to_less_with_them():
    np.testing.assert_allclose(attention(Q, K, V, causal=True)[1].sum(-1), 1.0, rtol=1e-5)
    with_sinks = attention(Q, K, V, softmax_aux=jnp.zeros(H))[1].sum(-1)
    assert float(with_sinks.max()) < 1.0


def test_hidden_keys_weigh_exactly_nothing():
    _, weights = attention(Q, K, V, causal=True)
    seen = np.arange(S) <= np.arange(T)[:, None] + S - T
    assert not np.any(np.asarray(weights)[:, :, ~seen])
    assert not np.any(attention(Q, K, V, **OPTIONS["mask"])[1][0])


@pytest.mark.parametrize("rng", [3, jax.random.key(3), jax.random.PRNGKey(3)], ids=["int", "key", "old-key"])
def test_dropout_of_attention(rng):
    out, weights = attention(Q, K, V, dropout_rng=rng, dropout_prob=0.5, deterministic=False)
    _, plain = attention(Q, K, V)
    kept = np.asarray(weights) > 0
    np.testing.assert_allclose(np.asarray(weights)[kept], 2 * np.asarray(plain)[kept], rtol=1e-5)
    assert 0.4 < kept.mean() < 0.6
    if isinstance(rng, int):
        assert_close({"out": out}, {"out": flash(Q, K, V, dropout_prob=0.5, dropout_seed=rng)})


def test_deterministic_switches_dropout_off():
    out, _ = attention(Q, K, V, dropout_rng=3, dropout_prob=0.5)
    assert_close({"out": out}, {"out": attention(Q, K, V)[0]})


def test_attention_dtype():
    out, weights = attention(Q, K, V, dtype=jnp.bfloat16)
    assert out.dtype == weights.dtype == jnp.bfloat16
    exact = attention(Q, K, V)[0]
    assert 0 < float(jnp.abs(out.astype(jnp.float32) - exact).max()) < 0.05
    with pytest.raises(TypeError, match="dtype=int32 is not supported; use one of float32"):
        attention(Q, K, V, dtype=jnp.int32)


def test_softmax_dtype_rounds_the_logits():
    out, _ = attention(Q, K, V, softmax_dtype=jnp.bfloat16)
    assert 0 < float(jnp.abs(out - attention(Q, K, V)[0]).max()) < 0.05


@pytest.mark.parametrize("function", [attention, scaled_dot_product_attention])
def test_init_bias_makes_the_bias_only_when_nothing_else_does(function):
    made = []

    def init_bias():
        made.append(1)
        return normal("made", (1, H, T, S))

    def first(**options):
        result = function(Q, K, V, **options)
        return {"out": result[0] if isinstance(result, tuple) else result}

    assert_close(first(init_bias=init_bias), first(bias=normal("made", (1, H, T, S))))
    assert made == [1]
    first(init_bias=init_bias, bias=normal("bias", (H, T, S)))
    first(init_bias=init_bias, mask_info=MaskInfo(T, S))
    assert made == [1]


def test_the_gradient_of_attention_is_that_of_flash_attention():
    arrays = {"query": Q, "key": K, "value": V}
    cotangents = {"out": normal("dout", (B, T, H, D))}
    ours = evaluate(lambda a: {"out": attention(**a, causal=True)[0]}, arrays, cotangents)
    theirs = evaluate(lambda a: {"out": flash_attention(**a, causal=True, cfg=TILES)}, arrays, cotangents)
    assert_close(ours[1], theirs[1])


# scaled_dot_product_attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [4, 2, 1])
def test_sdpa_is_jax_nn(causal, heads):
    k, v = (normal(name, (B, T, heads, D)) for name in "kv")
    expected = jax.nn.dot_product_attention(Q, k, v, is_causal=causal)
    assert_close({"out": scaled_dot_product_attention(Q, k, v, causal=causal)}, {"out": expected})


def test_sdpa_with_a_bias_a_scale_and_a_window_is_jax_nn():
    k, v, bias = normal("k", (B, T, H, D)), normal("v", (B, T, H, D)), normal("bias", (B, H, T, T))
    ours = scaled_dot_product_attention(Q, k, v, bias, softmax_scale=0.5, sliding_window=(3, 2))
    theirs = jax.nn.dot_product_attention(Q, k, v, bias, scale=0.5, local_window_size=(3, 2))
    assert_close({"out": ours}, {"out": theirs})


def test_sdpa_packed():
    q, k, v, cum = Q[0], K[0, :T], V[0, :T], jnp.array([0, 7, 15])
    ours = scaled_dot_product_attention(q, k, v, cum_seqlens_q=cum, causal=True)
    assert_close({"out": ours}, {"out": flash(q, k, v, cum_seqlens_q=cum, causal=True)})


def test_sdpa_takes_a_mask():
    mask = OPTIONS["mask"]["mask_info"]
    assert_close(
        {"out": scaled_dot_product_attention(Q, K, V, mask_info=mask)}, {"out": flash(Q, K, V, mask_info=mask)}
    )


# blocksparse_attention ------------------------------------------------------------------------------------------

BLOCKS = np.random.default_rng(3).random((H, 5, 7)) < 0.5


def dense(mask, bq=4, bk=4):
    return np.repeat(np.repeat(mask, bq, -2), bk, -1)


def masked(mask, causal=True, **options):
    """The same by a dense mask."""
    mask = np.broadcast_to(dense(mask), (*((1,) * (4 - mask.ndim)), *dense(mask).shape))
    return flash(Q, K, V, mask_info=MaskInfo.from_attention_mask(jnp.asarray(mask)), causal=causal, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", [BLOCKS[0], BLOCKS, np.stack([BLOCKS, ~BLOCKS])], ids=["shared", "heads", "batch"])
def test_blocksparse_is_a_dense_mask(mask, causal):
    out = jax.jit(partial(blocksparse_attention, block_size=4, causal=causal, cfg=TILES))(Q, K, V, block_mask=mask)
    assert_close({"out": out}, {"out": masked(mask, causal)})


def test_blocksparse_is_causal_unless_told_otherwise():
    out = blocksparse_attention(Q, K, V, block_mask=np.ones((5, 7), bool), block_size=4)
    assert_close({"out": out}, {"out": flash(Q, K, V, causal=True)})


def test_a_pattern_brings_its_size():
    pattern = BlockPattern.from_dense(BLOCKS, block_size=4)
    for size in (None, 4, (4, 4)):
        out = blocksparse_attention(Q, K, V, block_mask=pattern, block_size=size)
        assert_close({"out": out}, {"out": masked(BLOCKS)})


def test_a_pattern_made_of_numpy_works_under_jit():
    pattern = BlockPattern.local_stride(H, 7, 2, 3, block_size=4)

    @jax.jit
    def run(q, k, v):
        return blocksparse_attention(q, k, v, block_mask=pattern)

    assert_close({"out": run(Q, K, V)}, {"out": masked(np.asarray(pattern.dense)[:, :5])})


def test_a_callable_of_block_indices():
    def sees(b, h, i, j):
        return (i + j + h) % 2 == b

    b, h, i, j = np.ogrid[:B, :H, :5, :7]
    out = blocksparse_attention(Q, K, V, block_mask=sees, block_size=4)
    assert_close({"out": out}, {"out": masked(sees(b, h, i, j))})


def test_a_callable_may_use_python_numbers():
    out = blocksparse_attention(Q, K, V, block_mask=lambda b, h, i, j: True, block_size=(4, 7))
    assert_close({"out": out}, {"out": flash(Q, K, V, causal=True)})


def by_branches(b, h, i, j):
    """What only ints can do: a branch, a look-up, numbers beyond 32 bits."""
    if i < j:
        return h in {1, 3}
    return bool([1, 1, 0][i % 3]) and (i * 2**40 + j) % 3 > 0


def by_arrays(b, h, i, j):
    return jnp.where(i < j, (h == 1) | (h == 3), (jnp.array([1, 1, 0])[i % 3] == 1) & ((i * 2**16 + j) % 3 > 0))


@pytest.mark.parametrize("most", [2**17, 0], ids=["few-blocks", "many-blocks"])
@pytest.mark.parametrize("function", [by_branches, by_arrays], ids=["python", "arrays"])
def test_a_callable_in_plain_python_or_in_jax(monkeypatch, function, most):
    """2 ** 40 and 2 ** 16 leave the same remainder by 3."""
    monkeypatch.setattr(blocks, "_MOST_CALLS", most)
    expected = np.array([by_branches(*at) for at in np.ndindex(1, H, 5, 7)]).reshape(1, H, 5, 7)
    blocks_made = jax.jit(lambda: jnp.asarray(blocks.pattern_mask(Q, K, function, 4, None).pattern.blocks))()
    np.testing.assert_array_equal(blocks_made, np.broadcast_to(expected, (B, H, 5, 7)))


def test_a_callable_that_can_be_vectorised_is_called_once_for_many_blocks(monkeypatch):
    calls = []

    def sees(b, h, i, j):
        calls.append(i)
        return i >= j

    monkeypatch.setattr(blocks, "_MOST_CALLS", 0)
    out = blocksparse_attention(Q, Q, Q, block_mask=sees, block_size=4)
    assert len(calls) == 2  # the first with ints
    assert_close({"out": out}, {"out": flash(Q, Q, Q, causal=True)})


def test_a_callable_may_close_over_traced_values():
    out = jax.jit(
        lambda n: blocksparse_attention(Q, Q, Q, block_mask=lambda b, h, i, j: (i - j) < n, block_size=4, cfg=TILES)
    )(9)
    assert_close({"out": out}, {"out": flash(Q, Q, Q, causal=True)})


def test_a_pattern_without_a_size_takes_that_of_the_call():
    assert BlockPattern.from_dense(BLOCKS).block_size is None
    out = blocksparse_attention(Q, K, V, block_mask=BlockPattern.from_dense(BLOCKS), block_size=4)
    assert_close({"out": out}, {"out": masked(BLOCKS)})
    small = blocks.pattern_mask(Q, K, BlockPattern.sliding_blocks(7, 1), (4, 4), None)
    assert small.pattern.block_shape == (4, 4) and small.pattern.blocks.shape == (1, 1, 5, 7)
    assert blocks.pattern_mask(Q, K, BlockPattern.sliding_blocks(7, 1), None, None).pattern.block_shape == (64, 64)


def test_blocksparse_with_everything_else():
    extras = {"bias": normal("bias", (1, H, T, S)), "softmax_aux": normal("sinks", (H,))}
    options = {"sliding_window": 9, "logits_soft_cap": 2.0, "softmax_scale": 0.4, "return_lse": True}
    lengths = MaskInfo(T, S).apply_kv_lengths(jnp.array([20, 28]))
    got = blocksparse_attention(Q, K, V, block_mask=BLOCKS, block_size=4, mask_info=lengths, **extras, **options)
    mask = lengths & MaskInfo.from_attention_mask(jnp.asarray(dense(BLOCKS)[None]))
    expected = flash(Q, K, V, mask_info=mask, causal=True, **extras, **options)
    assert_close(dict(enumerate(got)), dict(enumerate(expected)))


def test_the_gradient_of_blocksparse():
    arrays = {"query": Q, "key": K, "value": V}
    cotangents = {"out": normal("dout", (B, T, H, D))}
    ours = evaluate(
        lambda a: {"out": blocksparse_attention(**a, block_mask=jnp.asarray(BLOCKS), block_size=4, cfg=TILES)},
        arrays,
        cotangents,
    )
    mask = MaskInfo.from_attention_mask(jnp.asarray(dense(BLOCKS)[None]))
    theirs = evaluate(
        lambda a: {"out": flash_attention(**a, mask_info=mask, causal=True, cfg=TILES)}, arrays, cotangents
    )
    assert_close(ours[1], theirs[1])
