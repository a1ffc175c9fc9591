"""Cache views: what they hold after updates, that updates are in place, and what they refuse."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.modules import flash_attention, page_attention, ragged_decode_attention
from ejkernel.types import MaskInfo, PageAllocator, PagedAttentionMetadata, PagedCacheView, TransformerCacheView

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


# Contiguous -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5))
def test_appending_chunks_is_appending_to_lists(chunks):
    S, T = 8, 3
    cache = TransformerCacheView.create(2, S, 1, 1, value_dim=2, dtype=jnp.float32)
    rows: list[list[float]] = [[], []]
    append = jax.jit(TransformerCacheView.append)
    for number, lengths in enumerate(chunks):
        tokens = 10.0 * (number + 1) + jnp.arange(2 * T).reshape(2, T, 1, 1)
        cache = append(cache, tokens, jnp.concatenate([tokens, -tokens], 3), jnp.asarray(lengths))
        for row, new, count in zip(rows, tokens[..., 0, 0].tolist(), lengths, strict=True):
            row += new[:count]
            del row[S:]
    assert cache.index.tolist() == cache.lengths.tolist() == [len(row) for row in rows]
    expected = [row + [0.0] * (S - len(row)) for row in rows]
    assert cache.key[..., 0, 0].tolist() == expected
    assert cache.value[..., 0, 0].tolist() == expected and (-cache.value[..., 0, 1]).tolist() == expected


def test_appending_under_strict_rules():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        tokens = jnp.ones((2, 3, 1, 1), jnp.float32)
        cache = TransformerCacheView.create(2, 4, 1, 1, dtype=jnp.float32).append(tokens, tokens)
    assert cache.index.dtype == jnp.int32 and cache.index.tolist() == [3, 3]


def test_decoding_over_an_appended_cache_is_attention_over_its_tokens():
    B, S, H, Hkv, D = 2, 12, 4, 2, 8
    key, value, query = normal(0, B, 9, Hkv, D), normal(1, B, 9, Hkv, D), normal(2, B, 1, H, D)
    cache = TransformerCacheView.create(B, S, Hkv, D, dtype=jnp.float32, starts=[0, 2])
    cache = cache.append(key[:, :7], value[:, :7]).append(key[:, 7:8], value[:, 7:8]).append(key[:, 8:], value[:, 8:])
    got = ragged_decode_attention(query, cache.key, cache.value, cache.starts, cache.index)
    hidden = MaskInfo.from_attention_mask((jnp.arange(9) >= cache.starts[:, None])[:, None, None])
    np.testing.assert_allclose(got, flash_attention(query, key, value, mask_info=hidden), atol=1e-5)
    assert cache.lengths.tolist() == [9, 7]


@pytest.mark.parametrize("dtype", DTYPES)
def test_appended_numbers_are_those_of_the_pages(dtype):
    tokens = 300 * normal(0, 1, 4, 2, 8)  # beyond int8 and float8_e4m3fn
    contiguous = TransformerCacheView.create(1, 4, 2, 8, dtype=dtype).append(tokens, -tokens)
    pages = PagedCacheView.create(1, 4, 2, 8, dtype=dtype).write(tokens[0], -tokens[0], np.arange(4))
    assert contiguous.key.dtype == dtype
    for a, b in ((contiguous.key, pages.key_pages), (contiguous.value, pages.value_pages)):
        assert jnp.isfinite(a.astype(jnp.float32)).all()
        np.testing.assert_array_equal(a.astype(jnp.float32), b.astype(jnp.float32))


def test_a_row_is_emptied_for_the_next_sequence():
    cache = TransformerCacheView.create(2, 4, 1, 1, dtype=jnp.float32).append(
        jnp.ones((2, 3, 1, 1)), jnp.ones((2, 3, 1, 1))
    )
    cache = replace(cache, index=cache.index.at[1].set(0)).append(jnp.full((2, 1, 1, 1), 2.0), jnp.ones((2, 1, 1, 1)))
    assert cache.key[..., 0, 0].tolist() == [[1, 1, 1, 2], [2, 1, 1, 0]] and cache.index.tolist() == [4, 1]


def test_layers_are_scanned_and_vmapped():
    cache = jax.vmap(lambda _: TransformerCacheView.create(2, 4, 1, 8, dtype=jnp.float32))(jnp.arange(3))
    assert cache.key.shape == (3, 2, 4, 1, 8)
    tokens = normal(0, 3, 2, 1, 1, 8)

    def layer(_, x):
        cache, token = x
        return None, cache.append(token, token)

    _, scanned = jax.lax.scan(layer, None, (cache, tokens))
    jax.tree.map(np.testing.assert_array_equal, scanned, jax.vmap(TransformerCacheView.append)(cache, tokens, tokens))
    np.testing.assert_array_equal(scanned.key[:, :, 0], tokens[:, :, 0])


def test_a_full_cache_drops_what_does_not_fit_and_says_so_on_request(monkeypatch):
    cache = TransformerCacheView.create(2, 4, 1, 1, dtype=jnp.float32, starts=[0, 1])
    cache = cache.append(jnp.ones((2, 3, 1, 1)), jnp.ones((2, 3, 1, 1)), [1, 3])
    more = jnp.full((2, 2, 1, 1), 5.0)
    assert cache.append(more, more).key[..., 0, 0].tolist() == [[1, 5, 5, 0], [1, 1, 1, 5]]
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")
    with pytest.raises(ValueError, match=r"must fit into the 4 of the cache; its index is \(row 1: 3\)"):
        cache.append(more, more)


# Pages ------------------------------------------------------------------------------------------------------


def test_a_copied_page_is_read_like_the_original():
    allocator, cache = PageAllocator(6, 4), PagedCacheView.create(6, 4, 2, 8, dtype=jnp.float32)
    prompt = allocator.allocate()
    key, value = normal(0, 6, 2, 8), normal(1, 6, 2, 8)
    cache = cache.write(key, value, allocator.extend(prompt, 6).slots)
    answers = [allocator.fork(prompt), allocator.fork(prompt, 5)]
    for number, answer in enumerate(answers):
        slots, copy = allocator.extend(answer, 1)
        assert copy is not None
        token = normal(number + 2, 1, 2, 8)
        cache = cache.copy_pages([copy[0], 0], [copy[1], -1]).write(token, token, slots)
    query, everyone = normal(9, 3, 4, 8), [prompt, *answers]
    lens, tables = allocator.context_lens(everyone), allocator.block_tables(everyone, 3)
    got = page_attention(query, cache.key_pages, cache.value_pages, lens, tables)
    for row, one_query, (shared, new) in zip(got, query, ((6, None), (6, 2), (5, 3)), strict=True):
        extra = [] if new is None else [normal(new, 1, 2, 8)]
        keys, values = (jnp.concatenate([x[:shared], *extra])[None] for x in (key, value))
        np.testing.assert_allclose(row, flash_attention(one_query[None, None], keys, values)[0, 0], atol=1e-5)


def test_views_of_numpy_arrays_are_updated():
    ones = np.ones((2, 3, 1, 1), np.float32)
    assert PagedCacheView(ones, 2 * ones).copy_pages([0], [1]).value_pages.tolist() == (2 * ones).tolist()
    assert not PagedCacheView(ones, ones).write(0 * ones[0], 0 * ones[0], [0, 1, 2]).key_pages[0].any()
    rows = TransformerCacheView(ones, ones, np.zeros(2, np.int32), np.array([0, 2], np.int32))
    assert rows.append(0 * ones[:, :1], ones[:, :1]).key[..., 0, 0].tolist() == [[0, 1, 1], [1, 1, 0]]


def test_copies_read_before_they_write():
    pages = jnp.arange(4.0).reshape(4, 1, 1, 1)
    swapped = jax.jit(PagedCacheView.copy_pages)(
        PagedCacheView(pages, -pages), jnp.array([0, 1, 9]), jnp.array([1, 0, -1])
    )
    assert swapped.key_pages.ravel().tolist() == [1, 0, 2, 3] and swapped.value_pages.ravel().tolist() == [
        -1,
        0,
        -2,
        -3,
    ]


def test_metadata_stays_on_the_host_and_passes_through_jit():
    given = PagedAttentionMetadata.create([20, 5], [[3, 1], [7, 0]], [0, 1, 6], 2)
    leaves = jax.tree.leaves(given)
    assert len(leaves) == 4 and all(isinstance(x, np.ndarray) and x.dtype == np.int32 for x in leaves)
    back = jax.jit(lambda m: m)(given)
    assert isinstance(back, PagedAttentionMetadata) and back.query_start_loc.tolist() == [0, 1, 6]
    assert jax.tree.leaves(PagedAttentionMetadata.create([1], [[0]]).num_seqs) == []


# In place ---------------------------------------------------------------------------------------------------

TOKENS = 4 * 256  # of a cache, in either layout
# a scatter may be a loop of slice updates
IN_PLACE = {"parameter", "bitcast", "fusion", "scatter", "get-tuple-element", "dynamic-update-slice"}
UPDATES = {
    "append": (
        lambda cache, new: cache.append(*new),
        lambda dtype: TransformerCacheView.create(4, 256, 2, 128, dtype=dtype),
        lambda dtype: [jnp.zeros((4, 3, 2, 128), dtype)] * 2,
    ),
    "append-ragged": (
        lambda cache, new: cache.append(*new),
        lambda dtype: TransformerCacheView.create(4, 256, 2, 128, dtype=dtype),
        lambda dtype: [*[jnp.zeros((4, 3, 2, 128), dtype)] * 2, jnp.zeros(4, jnp.int32)],
    ),
    "write": (
        lambda cache, new: cache.write(*new),
        lambda dtype: PagedCacheView.create(16, 64, 2, 128, dtype=dtype),
        lambda dtype: [*[jnp.zeros((5, 2, 128), dtype)] * 2, jnp.arange(5)],
    ),
    "copy_pages": (
        lambda cache, new: cache.copy_pages(*new),
        lambda dtype: PagedCacheView.create(16, 64, 2, 128, dtype=dtype),
        lambda dtype: [jnp.arange(2), jnp.arange(2) + 5],
    ),
}


def operations_on_the_cache(hlo: str) -> set[str]:
    """The instructions of a compiled program whose result is as large as a cache."""
    found = set()
    for line in hlo.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?[\w.\-]+ = \w+\[([\d,]+)\]\S* ([\w\-]+)\(", line)
        if match and math.prod(map(int, match[1].split(","))) >= TOKENS * 2 * 128:
            found.add(match[2])
    return found


@pytest.mark.parametrize("dtype", ["float32", "int8"])  # what XLA scatters on a CPU as it is
@pytest.mark.parametrize("update", UPDATES)
def test_updates_of_a_donated_cache_copy_nothing(update, dtype):
    function, cache, new = UPDATES[update]
    compiled = jax.jit(function, donate_argnums=0).lower(cache(dtype), new("float32")).compile()
    hlo = compiled.as_text()
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", hlo)
    assert aliases and all(f"{{{number}}}: ({number}, " in aliases[1] for number in (0, 1))
    assert operations_on_the_cache(hlo) <= IN_PLACE


def test_a_copy_of_the_cache_would_be_found():
    function, cache, new = UPDATES["append"]
    hlo = jax.jit(function).lower(cache("float32"), new("float32")).compile().as_text()  # not donated
    assert "input_output_alias" not in hlo and "copy" in operations_on_the_cache(hlo)


def test_a_donated_cache_stays_where_it_is():
    cache = TransformerCacheView.create(4, 256, 2, 128, dtype=jnp.float32)
    place = cache.key.unsafe_buffer_pointer()
    token = jnp.ones((4, 1, 2, 128))
    step = jax.jit(TransformerCacheView.append, donate_argnums=0)
    for _ in range(3):
        cache = step(cache, token, token)
    assert cache.key.unsafe_buffer_pointer() == place and cache.index.tolist() == [3] * 4


# Mistakes ---------------------------------------------------------------------------------------------------


def contiguous(**fields) -> TransformerCacheView:
    return replace(TransformerCacheView.create(2, 4, 1, 8, dtype=jnp.float32), **fields)


def pages() -> PagedCacheView:
    return PagedCacheView.create(4, 2, 1, 8, dtype="float32")


def pair(*shape, dtype=jnp.float32) -> list[jax.Array]:
    return [jnp.ones(shape, dtype)] * 2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: TransformerCacheView.create(0, 4, 1, 8), "batch_size=0 must be at least 1"),
        (lambda: TransformerCacheView.create(2, 4, 1, 8, dtype="int32"), "a cache has dtype .*; got int32"),
        (lambda: TransformerCacheView.create(2, 4, 1, 8, starts=[0]), r"starts must have shape \(2,\)"),
        (lambda: TransformerCacheView.create(2, 4, 1, 8, starts=[0, 5]), r"starts must lie in \[0, 4\]"),
        (lambda: contiguous().append(*pair(2, 1, 2, 8)), r"takes key \(2, T, 1, 8\) and value .* got \(2, 1, 2, 8\)"),
        (lambda: contiguous().append(*pair(2, 1, 8)), r"expected \(B, T, Hkv, D\)"),
        (lambda: contiguous().append([1.0], [1.0]), "key must be an array, got list"),
        (lambda: contiguous().append(*pair(2, 5, 1, 8)), "5 tokens do not fit into a cache of 4"),
        (lambda: contiguous().append(jnp.ones((2, 1, 1, 8)), jnp.ones((2, 2, 1, 8))), "may differ in the last"),
        (lambda: contiguous().append(*pair(2, 1, 1, 8, dtype=int)), "must be float32, .*; got int"),
        (lambda: contiguous().append(*pair(2, 1, 1, 8), [2, 0]), r"lengths must lie in \[0, 1\]"),
        (lambda: contiguous().append(*pair(2, 1, 1, 8), [1]), r"lengths must have shape \(2,\)"),
        (lambda: contiguous(index=jnp.int32(0)).append(*pair(2, 1, 1, 8)), r"index .* must have shape \(2,\)"),
        (lambda: contiguous(value=jnp.ones((2, 4, 1, 8), "int8")).append(*pair(2, 1, 1, 8)), "key has dtype float32"),
        (lambda: pages().copy_pages([0], [4]), r"targets must be page ids below 4 \(row 0: 4\)"),
        (lambda: pages().copy_pages([7], [1]), r"sources must be from 0 to 3 \(row 0: 7\)"),
        (lambda: pages().copy_pages([0, 1], [1]), r"sources \(2,\) and targets \(1,\) must both be \(N,\)"),
        (lambda: pages().write(*pair(1, 1, 8), [8]), "slots must be below 8"),
        (lambda: PagedAttentionMetadata.create([[1]], [[0]]), r"context_lens must have shape \(N,\)"),
        (lambda: PagedAttentionMetadata.create([1.0], [[0]]), "context_lens must hold integers"),
        (lambda: PagedAttentionMetadata.create([1], [[0]], [0]), r"query_start_loc must have shape \(N \+ 1,\)"),
        (lambda: PagedAttentionMetadata.create([1], [[0]], [0, 1], [1, 2]), "num_seqs must be one number"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
