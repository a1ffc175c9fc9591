"""Functions, trees, chunks and traced options, against attention over each sequence by itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    cascade_attention,
    decode_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
)
from harness import by_case, normal
from harness.compilations import compiled_programs
from harness.paged import Case, check_case
from tolerances import assert_close

LENGTHS, H, MOST = (37, 5, 41), 4, 64
N = len(LENGTHS)
DRAW = np.random.default_rng(7)
SLOPES = jnp.asarray(2.0 ** -np.arange(1.0, H + 1), jnp.float32)
STARTS = jnp.array([3, 9, 20])  # the second sequence sees nothing from there on
KEYS, BIAS = (jnp.asarray(DRAW.standard_normal(shape), jnp.float32) for shape in ((N, MOST), (H, 2 * MOST)))
# drafts: each sees itself and some of those before
TREE = np.tril(DRAW.integers(0, 2, (N, 40, 40)) > 0) | np.eye(40, dtype=bool)

EVEN, DECODE = {"queries": 4}, {"L": 4, "sinks": 1}
MIXED = {"kind": "ragged", "queries": (1, 5, 30), "rows": 40, "L": 8}


def case(id, shape, **options):
    return Case(id, lengths=LENGTHS, **shape, options=options)


def tree(mask, b, i, j):
    """What `tree_mask` says."""
    n = mask.shape[-1]
    first = jnp.array(LENGTHS)[b] - n
    return (j < first) | jnp.asarray(mask)[b, jnp.maximum(i - first, 0), jnp.maximum(j - first, 0)]


def alibi(score, b, h, i, j):
    return jnp.where(h % 2, score, score * 2.0) - SLOPES[h] * (i - j) * STARTS[b]


def tables(score, b, h, i, j):
    return score + KEYS[b, j] + BIAS[h, i - j + MOST]


def dilated(b, h, i, j):
    return (j >= STARTS[b]) & ((i - j) % (h + 1) == 0)


def near(b, h, i, j):
    return (j <= i) & (i - j < 9) & (i // 16 == j // 16)


def even(b, h, i, j):
    return j % 2 == 0


def fading(score, b, h, i, j):
    return -i / (j + 1.0)


# cases, and what their options mean as (mask function, score function)
CASES = {
    case("alibi", EVEN, score_fn=alibi): (None, alibi),
    case("tables", MIXED, score_fn=tables): (None, tables),
    case("dilated", {"L": 4}, num_splits=2, mask_fn=dilated, score_fn=fading): (dilated, fading),
    case("options-in-a-mask", MIXED, sliding_window=10, mask_fn=near): (near, None),
    case(
        "chunk-window-cap-score", MIXED, chunk_size=24, sliding_window=9, logits_soft_cap=2.0,
        score_fn=lambda s, b, h, i, j: s * 0.5,
    ): (lambda b, h, i, j: (i // 24 == j // 24) & (i - j <= 9), lambda s, b, h, i, j: jnp.tanh(s / 2.0)),
    case("chunk", DECODE, chunk_size=7): (lambda b, h, i, j: i // 7 == j // 7, None),
    case("tree", EVEN, tree_mask=TREE[:, :4, :4]): (lambda b, h, i, j: tree(TREE[:, :4, :4], b, i, j), None),
    case("tree-of-40", MIXED, tree_mask=jnp.asarray(TREE[0]), mask_fn=lambda b, h, i, j: j != 3): (
        lambda b, h, i, j: tree(TREE[:1].repeat(N, 0), b, i, j) & (j != 3),
        None,
    ),
}  # fmt: skip


def expected(case, mask_fn, score_fn):
    """out (tokens, H, Dv) and lse (H, tokens), sequence by sequence."""
    arrays = case._arrays()
    query = np.asarray(arrays["queries" if case.kind == "ragged" else "query"], np.float64).reshape(-1, H, case.D)
    keys, values = case.sequences("key", case.D), case.sequences("value", case.D)
    sinks = np.asarray(arrays["softmax_aux"], np.float64) if case.sinks else np.full((H, 1), -np.inf)
    out, lse, at = np.zeros_like(query), np.full((H, len(query)), -np.inf), 0
    for n, (length, rows) in enumerate(zip(LENGTHS, case.each, strict=True)):
        tokens = slice(at, at := at + rows)
        key, value = (np.repeat(x[n], H // case.Hkv, 1) for x in (keys, values))
        scores = np.einsum("thd,shd->hts", query[tokens], key) * case.D**-0.5
        i = np.arange(length - rows, length)[:, None]
        axes = [
            jnp.asarray(x) for x in np.broadcast_arrays(np.int32(n), np.arange(H)[:, None, None], i, np.arange(length))
        ]
        if score_fn is not None:
            scores = np.asarray(score_fn(jnp.asarray(scores, jnp.float32), *axes), np.float64)
        seen = np.asarray(axes[3] <= axes[2]) & (True if mask_fn is None else np.asarray(mask_fn(*axes)))
        scores = np.concatenate([np.where(seen, scores, -np.inf), np.broadcast_to(sinks[:, None], (H, rows, 1))], -1)
        lse[:, tokens] = np.logaddexp.reduce(scores, -1)
        weights = np.exp(scores - np.where(np.isneginf(lse[:, tokens]), 0.0, lse[:, tokens])[..., None])
        out[tokens] = np.einsum("hts,shd->thd", weights[..., :-1], value)
    return {"out": out[None].astype(np.float32), "lse": lse[None].astype(np.float32)}


@by_case(CASES)
def test_definition(case):
    exact, _ = case.expected()
    wanted = expected(case, *CASES[case])
    assert_close({name: exact[name] for name in wanted}, wanted, None, "output")


@by_case(case for case in CASES if case.id not in ("options-in-a-mask", "chunk", "tree"))
def test_platforms(case, platform):
    check_case(case, platform)


# The other functions ----------------------------------------------------------------------------------------------

QUERY, PAGES = normal("query", (N, H, 16)), normal("pages", (12, 8, 2, 16))
LENS, TABLE = jnp.array(LENGTHS), jnp.asarray(DRAW.permutation(18).reshape(N, 6) % 12)


def test_every_function_takes_them():
    """One token of each sequence; where there is one sequence alone, it is the first."""
    options = {"mask_fn": lambda b, h, i, j: j % 5 != b, "score_fn": alibi, "return_lse": True}
    exact = page_attention(QUERY, PAGES, PAGES, LENS, TABLE, **options)
    flat, whole = PAGES.reshape(96, 2, 16), PAGES[TABLE].reshape(N, 48, 2, 16)
    found = {
        "decode": decode_attention(QUERY, flat, flat, TABLE, LENS, page_size=8, **options),
        "contiguous": ragged_decode_attention(QUERY, whole, whole, jnp.zeros(N, int), LENS, **options),
    }
    out, lse = prefill_page_attention(QUERY[:1], PAGES, PAGES, LENS[0], TABLE[0], **options)
    found["prefill"] = (jnp.concatenate([out, exact[0][1:]]), jnp.concatenate([lse.T, exact[1][1:]]))
    same = TABLE.at[:, :2].set(TABLE[0, :2]), jnp.array([37, 18, 41])
    shared = page_attention(QUERY, PAGES, PAGES, same[1], same[0], **options)
    cascaded = cascade_attention(QUERY, PAGES, PAGES, same[1], same[0], 13, **options)
    pairs = {name: (x, exact) for name, x in found.items()} | {"cascade": (cascaded, shared)}
    for name, (got, wanted) in pairs.items():
        assert_close({name: got[0], "lse": got[1]}, {name: wanted[0], "lse": wanted[1]})


# Transforms -------------------------------------------------------------------------------------------------------


def attend(slopes, **options):
    score = lambda s, b, h, i, j: s - slopes[h] * (i - j)  # noqa: E731
    return page_attention(QUERY, PAGES, PAGES, LENS, TABLE, score_fn=score, **options)


def test_traced_options_and_vmap():
    options = {"sliding_window": jnp.array([5, 0, 30]), "logits_soft_cap": jnp.array([2.0, 0.5, 9.0])}
    slopes = jnp.stack([SLOPES, SLOPES * 3, -SLOPES])
    got = jax.jit(jax.vmap(lambda x, o: attend(x, **o)))(slopes, options)
    each = [
        attend(x, **{name: o[n].item() for name, o in options.items()}, chunk_size=MOST) for n, x in enumerate(slopes)
    ]
    assert_close({"out": got}, {"out": jnp.stack(each)})
    nothing = jax.jit(lambda w: attend(SLOPES, sliding_window=(w, None)))(-3)
    assert not nothing.any()


def test_other_values_compile_nothing():
    def run(seed, lens):
        draw = np.random.default_rng(seed)
        bias, mask = jnp.asarray(draw.random((N, MOST)), jnp.float32), draw.random((N, 8, 8)) < 0.5
        score = lambda s, b, h, i, j: s + bias[b, j]  # noqa: E731
        return page_attention(QUERY, PAGES, PAGES, lens, TABLE, score_fn=score, tree_mask=jnp.asarray(mask))

    lens = [LENS - n for n in range(3)]
    jax.block_until_ready(run(0, lens[0]))
    with compiled_programs() as names:
        jax.block_until_ready([run(n, lens[n]) for n in (1, 2)])
    assert not names


def test_many_devices():
    mesh = jax.make_mesh((N, 2), ("dp", "tp"), devices=jax.devices("cpu")[: 2 * N])
    specs = {"query": P("dp", "tp"), "key_cache": P(None, None, "tp"), "value_cache": P(None, None, "tp")}
    options = {"score_fn": tables, "mask_fn": dilated}
    arrays = QUERY, PAGES, PAGES, LENS, TABLE
    split = jax.jit(lambda *a: page_attention(*a, **options, mesh=mesh, in_specs=specs))(*arrays)
    assert_close({"out": split}, {"out": jax.jit(lambda *a: page_attention(*a, **options))(*arrays)})
    with pytest.raises(ValueError, match="mask_fn, score_fn and tree_mask that depend on positions"):
        page_attention(*arrays, **options, mesh=mesh, in_specs={"key_cache": P("tp"), "value_cache": P("tp")})


# What is not seen is not read, and bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True], ids=["chunk", "traced-window"])
def test_what_lies_before_is_not_looked_at(traced, platform, monkeypatch):
    """Pages before a chunk or a window may be freed: their slots lead nowhere, and keys in them may be nan."""
    lens, whole = jnp.array([37, 45]), jnp.arange(12).reshape(2, 6)
    freed = 3 if traced else 4  # 37 - 1 - 12 is in the fourth page of 8, 32 in the fifth
    keys, table = PAGES.at[whole[:, :freed]].set(jnp.nan), whole.at[:, :freed].set(10**9)
    keys = keys if traced else keys.at[:, 1::2].set(jnp.nan)  # which a mask function hides

    def run(keys, table, window, platform):
        options: dict[str, Any] = {"sliding_window": window} if traced else {"chunk_size": 32, "mask_fn": even}
        return page_attention(QUERY[:2], keys, keys, lens, table, platform=platform, **options)

    with platform.context():
        got = jax.jit(run, static_argnums=3)(keys, table, 12, platform.name)
    assert_close({"out": got}, {"out": run(PAGES, whole, 12, "xla")})
    if platform.name == "xla":
        monkeypatch.setenv("EJKERNEL_CHECKS", "1")
        error, _ = checkify.checkify(jax.jit(run, static_argnums=3))(keys, table, 12, "xla")
        error.throw()


BAD = {
    "chunk_size=0 must be at least 1": {"chunk_size": 0},
    r"tree_mask \(3, 4\) must be \(sequences, n, n\) with 3 sequences": {"tree_mask": np.ones((N, 4), bool)},
    r"mask_fn\(b, h, i, j\)": {"mask_fn": lambda b, h, i, j: 1.0},
    "score_fn must be a function, got int": {"score_fn": 3},
    "tree_mask must hold only 0 and 1": {"tree_mask": np.full((2, 2), 2)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message):
    with pytest.raises((TypeError, ValueError), match=message):
        page_attention(QUERY, PAGES, PAGES, LENS, TABLE, **BAD[message])
