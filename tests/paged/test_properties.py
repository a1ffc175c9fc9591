"""What must hold between calls: of pages and contiguous caches, of parts and the whole, of orders and schedules."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

from ejkernel.kernels.paged.calls import page_call, ragged_page_call
from ejkernel.kernels.paged.reference import reference
from ejkernel.modules import (
    cascade_attention,
    flash_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention,
)
from harness import normal
from harness.paged import CASES, Case, refused
from tolerances import assert_close

H, HKV, D, L = 4, 2, 16, 8


def cache(pages=24, heads=HKV):
    return normal("keys", (pages, L, heads, D)), normal("values", (pages, L, heads, D))


def table(N, W, pages=24, seed=0):
    return jnp.asarray(np.random.default_rng(seed).permutation(pages)[: N * W].reshape(N, W).astype(np.int32))


def gathered(pages, table, n):
    """The first n keys of one sequence, contiguous: (1, n, Hkv, D)."""
    return pages[table].reshape(1, -1, *pages.shape[2:])[:, :n]


def test_paged_is_contiguous():
    """Against softmax attention: the last tokens of a sequence, causal, with a window, sinks and a cap."""
    (key, value), rows, lens = cache(), table(2, 6), (41, 23)
    query, sinks = normal("query", (2, 5, H, D)), normal("sinks", (H,))
    options = {"sliding_window": (12, 0), "softmax_aux": sinks, "logits_soft_cap": 2.0, "return_lse": True}
    out, lse = jax.jit(lambda n: page_attention(query, key, value, n, rows, **options))(jnp.array(lens))
    for n, length in enumerate(lens):
        whole = gathered(key, rows[n], length), gathered(value, rows[n], length)
        expected = jax.jit(lambda *a: flash_attention(*a, causal=True, **options))(query[n : n + 1], *whole)
        assert_close({"out": out[n], "lse": lse[n]}, {"out": expected[0][0], "lse": expected[1][0]})


def test_order_of_pages_changes_nothing(platform):
    """The same bits, wherever the pages lie: plain, and with many splits."""
    if refused(platform):
        return
    (key, value), rows = cache(), table(3, 6)
    order = np.random.default_rng(1).permutation(24)
    moved = jnp.asarray(np.argsort(order)[np.asarray(rows)].astype(np.int32))
    query, lens = normal("query", (3, H, D)), jnp.array([48, 9, 30])
    with platform.context():
        run = jax.jit(lambda *a: page_attention(*a, num_splits=4, platform=platform.name))
        first, second = run(query, key, value, lens, rows), run(query, key[order], value[order], lens, moved)
    np.testing.assert_array_equal(first, second)


def test_splits_change_nothing(platform):
    if refused(platform):
        return
    (key, value), rows = cache(), table(2, 10)
    query, lens, sinks = normal("query", (2, 2, H, D)), jnp.array([77, 3]), normal("sinks", (H,))
    with platform.context():
        options = {"softmax_aux": sinks, "platform": platform.name, "return_lse": True}
        attend = jax.jit(
            lambda n: page_attention(query, key, value, lens, rows, num_splits=n, **options), static_argnums=0
        )
        outputs = [attend(n) for n in (1, 2, 7)]
    for out, lse in outputs[1:]:
        assert_close({"out": out, "lse": lse}, {"out": outputs[0][0], "lse": outputs[0][1]})


def test_a_mixed_batch_is_its_sequences_one_by_one(platform):
    if refused(platform):
        return
    (key, value), rows = cache(), table(3, 6)
    counts, lens = (7, 1, 20), (7, 40, 33)
    start = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
    query = normal("query", (sum(counts), H, D))
    pages = jnp.stack([key, value], 3).reshape(24, L, 2 * HKV, D)
    with platform.context():
        attend = jax.jit(lambda *a: ragged_page_attention(*a, 3, platform=platform.name))
        out = attend(query, pages, jnp.array(lens), rows, start)
        for n, (first, last) in enumerate(pairwise(start)):
            part = query[first:last]
            one = jax.jit(lambda *a: prefill_page_attention(*a, platform=platform.name))
            alone = one(part, key, value, lens[n], rows[n])
            assert_close({"out": out[first:last]}, {"out": alone})


def test_a_contiguous_cache_is_one_page():
    key, value = normal("keys", (3, 40, HKV, D)), normal("values", (3, 40, HKV, D))
    query, ends = normal("query", (3, H, D)), jnp.array([40, 0, 17])
    paged = page_attention(query, key, value, ends, jnp.arange(3)[:, None])
    assert_close({"out": ragged_decode_attention(query, key, value, jnp.zeros(3, int), ends)}, {"out": paged})


def test_a_prompt_in_chunks_is_the_prompt():
    (key, value), (row,) = cache(), table(1, 6)
    query = normal("query", (45, H, D))
    attend = jax.jit(prefill_page_attention)
    whole = attend(query, key, value, 45, row)
    parts = [
        attend(query[a:b], key, value, b, row) for a, b in ((0, 1), (1, 20), (20, 45))
    ]  # fmt: skip
    assert_close({"out": jnp.concatenate(parts)}, {"out": whole})


def test_own_nan_shows_and_hidden_nan_does_not(platform):
    """A NaN in the second sequence, at key 30: queries from there on are NaN, those before are as if it were not."""
    if refused(platform):
        return
    (key, value), rows = cache(), table(2, 6)
    query, lens = normal("query", (2, 6, H, D)), jnp.array([40, 33])
    bad = value.at[rows[1, 30 // L], 30 % L].set(jnp.nan)
    with platform.context():
        run = jax.jit(lambda v: page_attention(query, key, v, lens, rows, platform=platform.name))
        fine, outputs = run(value), run(bad)
    assert np.isnan(outputs[1, 3:]).all()  # their positions are 27, ..., 32
    np.testing.assert_array_equal(outputs[0], fine[0])
    np.testing.assert_array_equal(outputs[1, :3], fine[1, :3])


ROWS, PAGES, WIDTH = 24, 64, 14


@partial(jax.jit, static_argnums=(1, 2))
def any_call(arrays, window, tiles):
    """Both in one program: it is compiled once for all lengths."""
    out = ragged_page_attention(**arrays, sliding_window=window, cfg=dict(tiles))
    return out, reference(ragged_page_call(**arrays, sliding_window=window))["out"][0]


@settings(max_examples=60)
@given(st.data())
def test_any_ragged_batch(data):
    """Random counts and lengths."""
    counts = [data.draw(st.integers(0, 6), "queries") for _ in range(4)]
    lengths = [n + data.draw(st.integers(0, 34), "earlier keys") for n in counts]
    used = data.draw(st.integers(0, 4), "num_seqs")
    L = 3
    case = Case(
        "any",
        kind="ragged",
        lengths=tuple(lengths[:used]) or (0,),
        queries=tuple(counts[:used]) or (0,),
        rows=ROWS,
        padding=4 - max(used, 1),
        spare=PAGES - sum(-(-n // L) for n in lengths[:used]),
        width=WIDTH,
        L=L,
        D=8,
    )
    window, tiles = data.draw(st.sampled_from([(None, (2, 7)), (5, (4, 3))]), "window and tiles")
    out, expected = any_call(case.arrays(), window, tuple(zip(("block_q", "block_k"), tiles, strict=True)))
    assert_close({"out": out}, {"out": expected})


# Lengths are data -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["page", "ragged"])
def test_other_lengths_and_tables_compile_nothing(kind, platform):
    if refused(platform):
        return
    case = next(case for case in CASES if case.kind == kind)
    arrays = case.arrays()
    traces = []

    @jax.jit
    def run(arrays):
        traces.append(1)
        return case.run(arrays, platform)["out"]

    with platform.context():
        run(arrays)
        lens = arrays["context_lens"]
        run(arrays | {"context_lens": jnp.maximum(lens - 1, 0), "block_tables": arrays["block_tables"][::-1]})
    assert len(traces) == 1 and run._cache_size() == 1


def test_work_follows_the_longest_sequence_not_the_table():
    """The loop's condition is on data: a table for 2^20 keys costs 10 keys' work, so this ends at once."""
    W = 1 << 17
    rows = jnp.zeros((1, W), jnp.int32)
    key, value = cache()
    out = page_attention(normal("query", (1, H, D)), key, value, jnp.array([10]), rows.at[0, 1].set(1))
    expected = page_attention(normal("query", (1, H, D)), key, value, jnp.array([10]), jnp.array([[0, 1]]))
    assert_close({"out": out}, {"out": expected})


# Cascade --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3])
def test_cascade_is_the_plain_call(tokens):
    """Whole pages or not; 40 is more than the shortest sequence has, so part of it is left to the sequences."""
    rows = table(3, 6).at[:, :5].set(table(1, 5, seed=9))
    arrays = normal("query", (3, tokens, H, D)), *cache()
    options = {"softmax_aux": normal("sinks", (H,)), "logits_soft_cap": 3.0, "return_lse": True}
    plain = jax.jit(lambda lens: page_attention(*arrays, lens, rows, **options))
    shared = jax.jit(lambda lens, prefix: cascade_attention(*arrays, lens, rows, prefix, **options))
    for prefix in (0, 1, 16, 19, 40):
        lens = jnp.array([48, 0, 41 if prefix < 40 else 30])
        assert_close(*(dict(zip(("out", "lse"), x, strict=True)) for x in (shared(lens, prefix), plain(lens))))


def test_cascade_clamps_traced_lengths_like_the_plain_call():
    """A length beyond the table is the table's: the first query then stands before the end of the prefix."""
    arrays, rows, lens = (normal("query", (2, 3, H, D)), *cache()), table(2, 6), jnp.array([500, 500])
    rows = rows.at[1].set(rows[0])
    out = jax.jit(lambda lens: cascade_attention(*arrays, lens, rows, 48))(lens)
    assert_close({"out": out}, {"out": jax.jit(lambda lens: page_attention(*arrays, lens, rows))(lens)})


def test_cascade_on_the_kernels(platform):
    if refused(platform):
        return
    key, value = (x.astype(jnp.bfloat16) for x in cache())
    rows = table(2, 6).at[:, :4].set(table(1, 4, seed=9))
    query, lens = normal("query", (2, H, D), "bfloat16"), jnp.array([48, 35])
    with platform.context():
        out = jax.jit(lambda *a: cascade_attention(*a, 30, platform=platform.name))(query, key, value, lens, rows)

    @jax.jit
    def defined(*arrays):
        return [{"out": reference(page_call(*arrays), dtype)["out"][0]} for dtype in ("float32", "bfloat16")]

    assert_close({"out": out}, *defined(query, key, value, lens, rows))


def test_cascade_refuses_a_prefix_beyond_the_table():
    key, value = cache()
    query, rows = normal("query", (2, H, D)), np.asarray(table(2, 6))
    with pytest.raises(ValueError, match=r"prefix_len must be from 0 to 48.*49"):
        cascade_attention(query, key, value, np.array([48, 40]), rows, 49)


def test_cascade_refuses_rows_that_begin_otherwise(monkeypatch):
    """Host values always, those on a device when asked; beyond the prefix, and in empty rows, pages are anything."""
    key, value = cache()
    query, lens = normal("query", (3, H, D)), np.array([0, 48, 40])
    rows = np.array([[9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 5, 6], [1, 2, 3, 8, 9, 10]])
    expected = page_attention(query, key, value, lens, rows)
    assert_close({"out": cascade_attention(query, key, value, lens, rows, 24)}, {"out": expected})
    with pytest.raises(ValueError, match=r"the same pages in every row for the first prefix_len keys \(row 2: 8\)"):
        cascade_attention(query, key, value, lens, rows, 25)
    on_device = query, key, value, jnp.asarray(lens), jnp.asarray(rows)
    assert cascade_attention(*on_device, 25).shape == query.shape
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")
    with pytest.raises(ValueError, match=r"prefix_len keys \(row 2: 8\)"):
        cascade_attention(*on_device, 25)
    checked, _ = checkify.checkify(jax.jit(cascade_attention))(*on_device, 25)
    with pytest.raises(checkify.JaxRuntimeError, match=r"prefix_len keys \(row 2\)"):
        checked.throw()
