"""Functions, trees, chunks and traced options, against attention over each sequence by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from harness.paged import Case
from tolerances import assert_close

LENGTHS, N, H, MOST = (37, 5, 41), 3, 4, 64
MIXED = {"kind": "ragged", "queries": (1, 5, 30), "rows": 40}
EACH = {"queries": 4}
DRAW = np.random.default_rng(7)
SLOPES = jnp.asarray(2.0 ** -np.arange(1.0, H + 1), jnp.float32)
STARTS, KEYS = jnp.array([3, 0, 20]), jnp.asarray(DRAW.standard_normal((N, MOST)), jnp.float32)
BIAS = jnp.asarray(DRAW.standard_normal((H, 2 * MOST)), jnp.float32)
# drafts: each sees the sequence before them, itself, and those that it descends from
TREE = np.tril(DRAW.integers(0, 2, (N, 40, 40)) > 0) | np.eye(40, dtype=bool)
SMALL = TREE[:, :4, :4]


def tree(mask):
    """What `tree_mask` says."""
    n, mask, lens = mask.shape[-1], jnp.asarray(mask), jnp.array(LENGTHS)

    def seen(b, h, i, j):
        first = lens[b] - n
        return (j < first) | mask[b, jnp.maximum(i - first, 0), jnp.maximum(j - first, 0)]

    return seen


# options, and what they mean as (mask function, score function)
FUNCTIONS = {
    "alibi": ({"score_fn": lambda s, b, h, i, j: s - SLOPES[h] * (i - j)},) * 2,
    "score-of-heads-and-sequences": ({"score_fn": lambda s, b, h, i, j: jnp.where(h % 2, s, s * 2.0) + STARTS[b]},) * 2,
    "score-of-keys": ({"score_fn": lambda s, b, h, i, j: s + KEYS[b, j] + BIAS[h, i - j + MOST]},) * 2,
    "score-alone": ({"score_fn": lambda s, b, h, i, j: -jnp.abs(i - j) / 7.0},) * 2,
    "mask-of-sequences": ({"mask_fn": lambda b, h, i, j: (j >= STARTS[b]) & ((i - j) % (h + 1) == 0)},) * 2,
    "mask-of-nothing": ({"mask_fn": lambda b, h, i, j: j < 0},) * 2,
    "mask-as-options": (
        {"mask_fn": lambda b, h, i, j: (j <= i) & (i - j < 9) & (i // 16 == j // 16), "sliding_window": 10},
        {"mask_fn": lambda b, h, i, j: (i - j < 9) & (i // 16 == j // 16)},
    ),
    "chunk": ({"chunk_size": 7}, {"mask_fn": lambda b, h, i, j: i // 7 == j // 7}),
    "chunk-window-cap": (
        {"chunk_size": 24, "sliding_window": 9, "logits_soft_cap": 2.0, "score_fn": lambda s, b, h, i, j: s * 0.5},
        {
            "mask_fn": lambda b, h, i, j: (i // 24 == j // 24) & (i - j <= 9),
            "score_fn": lambda s, b, h, i, j: jnp.tanh(s / 2.0),
        },
    ),
    "tree": ({"tree_mask": SMALL}, {"mask_fn": tree(SMALL)}),
    "tree-of-40": (
        {"tree_mask": jnp.asarray(TREE[0]), "mask_fn": lambda b, h, i, j: j != 3},
        {"mask_fn": lambda b, h, i, j: tree(TREE[:1].repeat(N, 0))(b, h, i, j) & (j != 3)},
    ),
}
SHAPES = {
    "even": Case("even", lengths=LENGTHS, **EACH),
    "mixed": Case("mixed", lengths=LENGTHS, L=8, **MIXED),
    "decode": Case("decode", lengths=LENGTHS, options={"num_splits": 2}, L=4, sinks=1),
}


def expected(case, mask_fn=lambda b, h, i, j: True, score_fn=lambda s, b, h, i, j: s):
    """out (tokens, H, Dv) and lse (H, tokens), sequence by sequence, in float64."""
    arrays = case._arrays()
    query = np.asarray(arrays["queries" if case.kind == "ragged" else "query"], np.float64).reshape(-1, H, case.D)
    keys, values = (x for x in (case.sequences("key", case.D), case.sequences("value", case.D)))
    sinks = np.asarray(arrays["softmax_aux"], np.float64)[:, 0] if case.sinks else np.full(H, -np.inf)
    outs, logs = np.zeros_like(query), np.full((H, len(query)), -np.inf)

    def pairs(n, length, rows):
        axes = (n, np.arange(H)[:, None, None], np.arange(length - rows, length)[:, None], np.arange(length))
        return [jnp.asarray(x, jnp.int32) for x in np.broadcast_arrays(*axes)]

    at = 0
    for n, (length, rows) in enumerate(zip(LENGTHS, case.each, strict=True)):
        q, k, v = query[at : at + rows], *(np.repeat(x[n], H // case.Hkv, 1) for x in (keys, values))
        scores = np.einsum("thd,shd->hts", q, k) * case.D**-0.5
        b, h, i, j = pairs(n, length, rows)
        every = np.vectorize if False else lambda f: jax.vmap(jax.vmap(jax.vmap(f)))
        scores = np.asarray(every(score_fn)(jnp.asarray(scores, jnp.float32), b, h, i, j), np.float64)
        seen = np.asarray(every(lambda *a: jnp.asarray(mask_fn(*a), bool))(b, h, i, j)) & np.asarray(j <= i)
        scores = np.where(seen, scores, -np.inf)
        with np.errstate(divide="ignore"):
            lse = np.logaddexp.reduce(
                np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (H, rows, 1))], -1), -1
            )
        weights = np.exp(scores - np.where(np.isneginf(lse), 0.0, lse)[..., None])
        outs[at : at + rows], logs[:, at : at + rows] = np.einsum("hts,shd->thd", weights, v), lse
        at += rows
    return {"out": outs[None].astype(np.float32), "lse": logs[None].astype(np.float32)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, shape, platform):
    case, (options, meaning) = SHAPES[shape], FUNCTIONS[name]
    with platform.context():
        got = jax.jit(lambda a: case.run(a, platform, **options))(case.arrays())
    wanted = expected(case, **{k: v for k, v in meaning.items() if k in ("mask_fn", "score_fn")})
    assert_close(got, {n: wanted[n] for n in got}, None, "output")
