"""The reference, and so every convention, against attention written out pair by pair in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.common.dropout import head_seeds, keep
from ejkernel.kernels.softmax.reference import reference, visible
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.types import BlockPattern, MaskInfo
from harness import normal

B, T, S, H, HKV, D, DV = 2, 5, 7, 4, 2, 3, 6
Q, K, V = normal("q", (B, T, H, D)), normal("k", (B, S, HKV, D)), normal("v", (B, S, HKV, DV))


def anything(b, h, i, j):
    return True


def pair_by_pair(q, k, v, *, sees=anything, scale=None, bias=None, cap=None, sinks=None, kept=None):
    """out (B, T, H, Dv) and lse (B, H, T): the definition, one logit at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, H, D = q.shape
    S, Hkv, Dv = k.shape[1], k.shape[2], v.shape[3]
    out, lse = np.zeros((B, T, H, Dv)), np.full((B, H, T), -np.inf)
    for b, h, i in np.ndindex(B, H, T):
        logits = []
        for j in range(S):
            x = (D**-0.5 if scale is None else scale) * q[b, i, h] @ k[b, j, h * Hkv // H]
            x = x if bias is None else x + np.broadcast_to(bias, (B, H, T, S))[b, h, i, j]
            x = x if cap is None else cap * np.tanh(x / cap)
            logits.append(x if sees(b, h, i, j) else -np.inf)
        every = np.concatenate([logits, [] if sinks is None else np.asarray(sinks, np.float64)[h]])
        if np.isneginf(every).all():
            continue
        lse[b, h, i] = np.logaddexp.reduce(every)
        p = np.exp(np.asarray(logits) - lse[b, h, i])
        p = p if kept is None else p * kept[b, h, i]
        out[b, i, h] = p @ v[b, :, h * Hkv // H]
    return out, lse


def agree(expected, q=Q, k=K, v=V, **options):
    call = canonicalise(q, k, v, **options)
    outputs = reference(call)
    np.testing.assert_allclose(outputs["out"], expected[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(outputs["lse"], expected[1], rtol=2e-5, atol=2e-6)


AHEAD = S - T  # query i stands at i + S - T

CHESS = BlockPattern.from_dense([[1, 0, 1], [0, 1, 0]], block_size=3)

RULES = {
    "plain": ({}, anything),
    "causal": ({"causal": True}, lambda b, h, i, j: j <= i + AHEAD),
    "window-2": ({"sliding_window": 2}, lambda b, h, i, j: i + AHEAD - 2 <= j <= i + AHEAD + 2),
    "window-(3,1)": ({"sliding_window": (3, 1)}, lambda b, h, i, j: i + AHEAD - 3 <= j <= i + AHEAD + 1),
    "window-(1,None)": ({"sliding_window": (1, None)}, lambda b, h, i, j: j >= i + AHEAD - 1),
    "window-(None,0)": ({"sliding_window": (None, 0)}, lambda b, h, i, j: j <= i + AHEAD),
    "window-list": ({"sliding_window": [0, 2]}, lambda b, h, i, j: i + AHEAD <= j <= i + AHEAD + 2),
    "window-numpy": ({"sliding_window": np.int64(1)}, lambda b, h, i, j: abs(i + AHEAD - j) <= 1),
    "causal-window": ({"causal": True, "sliding_window": 1}, lambda b, h, i, j: i + AHEAD - 1 <= j <= i + AHEAD),
    "causal-mask": ({"mask_info": MaskInfo(T, S).apply_causal(1)}, lambda b, h, i, j: j <= i + AHEAD + 1),
    "narrowest-wins": (
        {"mask_info": MaskInfo(T, S).apply_causal(2), "causal": True},
        lambda b, h, i, j: j <= i + AHEAD,
    ),
    "chunks": (
        {"mask_info": MaskInfo(T, S).apply_chunked(3)},
        lambda b, h, i, j: (i + AHEAD) // 3 == j // 3,
    ),
    "kv-lengths": (
        {"mask_info": MaskInfo(T, S).apply_kv_lengths(jnp.array([0, 4]))},
        lambda b, h, i, j: j < (0, 4)[b],
    ),
    "lengths": (
        {"mask_info": MaskInfo.from_lengths(jnp.array([2, 5]), jnp.array([7, 3]), q_len=T, kv_len=S), "causal": True},
        lambda b, h, i, j: i < (2, 5)[b] and j < (7, 3)[b] and j <= i + AHEAD,
    ),
    "segments": (
        {"mask_info": MaskInfo.from_segments([0, 1, 1, -1, 2], [1, 0, 0, 2, -1, 1, 3])},
        lambda b, h, i, j: (0, 1, 1, -1, 2)[i] == (1, 0, 0, 2, -1, 1, 3)[j] >= 0,
    ),
    "positions-causal": (
        {
            "mask_info": MaskInfo.from_segments([0] * T, [0] * S, [4, 0, 9, 2, 2], [5, 1, 0, 8, 2, 3, 7]),
            "causal": True,
        },
        lambda b, h, i, j: (5, 1, 0, 8, 2, 3, 7)[j] <= (4, 0, 9, 2, 2)[i],
    ),
    "dense": (
        {"mask_info": MaskInfo.from_attention_mask(np.arange(B * H * T * S).reshape(B, H, T, S) % 3 == 0)},
        lambda b, h, i, j: (((b * H + h) * T + i) * S + j) % 3 == 0,
    ),
    "pattern": (
        {"mask_info": MaskInfo.from_block_pattern(CHESS, q_len=T, kv_len=S)},
        lambda b, h, i, j: (i // 3 + j // 3) % 2 == 0,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_masks(rule):
    options, sees = RULES[rule]
    agree(pair_by_pair(Q, K, V, sees=sees), **options)


@pytest.mark.parametrize("rule", RULES)
def test_visible_is_what_mask_info_says(rule):
    options, sees = RULES[rule]
    seen = np.broadcast_to(visible(canonicalise(Q, K, V, **options)), (B, H, T, S))
    expected = np.array([sees(*index) for index in np.ndindex(B, H, T, S)]).reshape(B, H, T, S)
    np.testing.assert_array_equal(seen, expected)


def test_causal_with_more_queries_than_keys():
    expected = pair_by_pair(Q, K[:, :2], V[:, :2], sees=lambda b, h, i, j: j <= i + 2 - T)
    agree(expected, k=K[:, :2], v=V[:, :2], causal=True)
    assert np.isneginf(expected[1][:, :, :3]).all() and np.isfinite(expected[1][:, :, 3:]).all()


def test_scale():
    agree(pair_by_pair(Q, K, V, scale=1.7), softmax_scale=1.7)


@pytest.mark.parametrize("shape", [(B, H, T, S), (H, 1, S), (T, S), (S,), (B, 1, T, 1), ()])
def test_bias_broadcasts(shape):
    bias = normal("bias", shape)
    agree(pair_by_pair(Q, K, V, bias=bias), bias=bias)


def test_bias_is_added_after_the_scale_and_before_the_cap():
    bias = normal("bias", (H, T, S))
    agree(pair_by_pair(Q, K, V, bias=bias, scale=0.3, cap=0.5), bias=bias, softmax_scale=0.3, logits_soft_cap=0.5)


def test_the_mask_comes_after_the_cap():
    sees = RULES["causal"][1]
    agree(pair_by_pair(Q, K, V, sees=sees, cap=0.5), logits_soft_cap=0.5, causal=True)


@pytest.mark.parametrize("shape", [(H,), (H, 3), (1, 6)])
def test_sinks_join_the_denominator_once(shape):
    sinks = normal("sinks", shape)
    by_head = np.asarray(sinks)[:, None] if shape == (H,) else np.broadcast_to(sinks, (H, shape[-1]))
    agree(pair_by_pair(Q, K, V, sinks=by_head), softmax_aux=sinks)


def test_sinks_are_not_capped_and_not_masked():
    sinks = 5.0 * normal("sinks", (H,))
    sees = RULES["kv-lengths"][1]
    expected = pair_by_pair(Q, K, V, sees=sees, sinks=np.asarray(sinks)[:, None], cap=0.5)
    agree(expected, softmax_aux=sinks, logits_soft_cap=0.5, **RULES["kv-lengths"][0])
    np.testing.assert_allclose(expected[1][0], np.broadcast_to(np.asarray(sinks)[:, None], (H, T)), rtol=1e-6)


def test_dropout_scales_what_is_kept_and_leaves_lse():
    kept = keep(head_seeds(jnp.uint32(3), B, H)[:, :, None, None], jnp.arange(T)[:, None], jnp.arange(S)[None], 0.4)
    agree(pair_by_pair(Q, K, V, kept=np.asarray(kept) / 0.6), dropout_prob=0.4, dropout_seed=3)


def test_dropout_keeps_its_share():
    seeds = head_seeds(jnp.uint32(0), 2, 3)
    for probability in (0.1, 0.5, 0.9):
        kept = keep(seeds[:, :, None, None], jnp.arange(100)[:, None], jnp.arange(200)[None], probability)
        share = np.asarray(kept).mean((2, 3))
        # 20,000 draws: 5 standard deviations
        np.testing.assert_allclose(share, 1 - probability, atol=5 * np.sqrt(probability * (1 - probability) / 20_000))


def test_dropout_bits_differ_by_seed_batch_head_query_and_key():
    queries, keys = jnp.arange(64)[:, None], jnp.arange(64)[None]
    seeds = [head_seeds(jnp.uint32(seed), 2, 2)[:, :, None, None] for seed in (0, 1)]
    bits = [np.asarray(keep(seed, queries, keys, 0.5)) for seed in seeds]
    rows = np.concatenate([x.reshape(-1, 64) for x in bits])
    columns = np.concatenate([x.swapaxes(2, 3).reshape(-1, 64) for x in bits])
    assert len(np.unique(rows, axis=0)) == len(rows) and len(np.unique(columns, axis=0)) == len(columns)


@pytest.mark.parametrize("seed", [0, -1, 2**40 + 5, np.int64(3), jnp.uint32(3), jax.random.key(3)], ids=str)
def test_dropout_seeds(seed):
    first = canonicalise(Q, K, V, dropout_prob=0.5, dropout_seed=seed)["dropout_seeds"]
    again = canonicalise(Q, K, V, dropout_prob=0.5, dropout_seed=seed)["dropout_seeds"]
    assert first.shape == (B, H) and first.dtype == jnp.uint32
    np.testing.assert_array_equal(first, again)


def test_dropout_seed_may_be_an_old_style_key():
    key = jax.random.PRNGKey(3)
    seeds = canonicalise(Q, K, V, dropout_prob=0.5, dropout_seed=key)["dropout_seeds"]
    assert seeds.shape == (B, H)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_dtype_rounds_the_logits(dtype):
    logits = canonicalise(Q, K, V, logits_dtype=dtype)
    exact = reference(canonicalise(Q, K, V))["lse"]
    error = np.abs(reference(logits)["lse"] - exact).max()
    assert 0 < error < 4 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("logits_dtype", [jnp.float32, "float32", np.dtype("float32"), jnp.dtype("float32")])
def test_logits_dtype_spellings(logits_dtype):
    assert canonicalise(Q, K, V, logits_dtype=logits_dtype).spec.logits_dtype == "float32"


def test_packed_sequences_align_their_own_ends():
    q, k, v = Q[0], K[0], V[0]
    call = canonicalise(q, k, v, cum_seqlens_q=[0, 2, 4], cum_seqlens_k=[0, 3, 6], causal=True)
    sees = lambda b, h, i, j: i < 4 and j < 6 and i // 2 == j // 3 and j % 3 <= i % 2 + 1  # noqa: E731
    expected = pair_by_pair(q[None], k[None], v[None], sees=sees)
    outputs = reference(call)
    np.testing.assert_allclose(outputs["out"], expected[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(outputs["lse"], expected[1], rtol=2e-5, atol=2e-6)
