"""Wrong input raises before any kernel starts, naming the argument, its value and what was needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from ejkernel.modules import (
    decode_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    write_interleaved_kv_pages,
    write_kv_pages,
)
from harness.paged import refused


def ones(*shape, dtype="float32"):
    return jnp.ones(shape, dtype)


CACHE = ones(6, 4, 2, 8)
PAGE = {
    "query": ones(2, 4, 8),
    "key_cache": CACHE,
    "value_cache": CACHE,
    "context_lens": np.array([9, 0]),
    "block_tables": np.array([[5, 0, 2], [99, -7, 99]]),
}
RAGGED = {
    "queries": ones(7, 4, 8),
    "kv_pages": ones(6, 4, 4, 8),
    "context_lens": np.array([9, 3, -1]),
    "block_tables": np.array([[5, 0, 2], [1, 99, 99], [99, 99, 99]]),
    "query_start_loc": np.array([0, 1, 4, -5]),
    "num_seqs": 2,
}
PREFILL = {
    "query": ones(3, 4, 8),
    "key_cache": CACHE,
    "value_cache": CACHE,
    "context_len": 7,
    "page_indices": np.array([1, 4]),
}
DECODE = {
    "query": ones(2, 4, 8),
    "key_buffer": ones(24, 2, 8),
    "value_buffer": ones(24, 2, 8),
    "req_to_tokens": np.array([[5, 0], [23, 1]]),
    "seq_lens": np.array([2, 1]),
}
WHOLE = {
    "query": ones(2, 4, 8),
    "key": ones(2, 5, 2, 8),
    "value": ones(2, 5, 2, 8),
    "sequence_start": np.array([0, 1]),
    "sequence_end": np.array([5, 4]),
}
WRITE = {
    "key_cache": CACHE,
    "value_cache": CACHE,
    "key": ones(3, 2, 8),
    "value": ones(3, 2, 8),
    "slots": np.array([0, -1, 23]),
}
RIGHT = {
    "page": (page_attention, PAGE),
    "ragged": (ragged_page_attention, RAGGED),
    "prefill": (prefill_page_attention, PREFILL),
    "decode": (decode_attention, DECODE),
    "whole": (ragged_decode_attention, WHOLE),
    "write": (write_kv_pages, WRITE),
}

WRONG = {
    # arrays
    "query-list": ("page", {"query": [1.0]}, TypeError, "query must be an array, got list"),
    "query-float64": ("page", {"query": np.ones((2, 4, 8))}, TypeError, "query has dtype float64; supported: float32"),
    "query-int": ("page", {"query": ones(2, 4, 8, dtype="int32")}, TypeError, "query has dtype int32"),
    "query-rank": ("page", {"query": ones(8)}, ValueError, r"query must be \(batch, heads, head_dim\) or .*\(8,\)"),
    "query-empty": ("page", {"query": ones(2, 0, 8)}, ValueError, r"query has an empty dimension: shape \(2, 0, 8\)"),
    "heads": ("page", {"query": ones(2, 3, 8)}, ValueError, "query heads H=3 must be a multiple of key heads Hkv=2"),
    "head-dim": ("page", {"query": ones(2, 4, 16)}, ValueError, r"head_dim of key_cache \(6, 4, 2, 8\) .* 16"),
    "cache-rank": ("page", {"key_cache": ones(6, 4, 8)}, ValueError, r"key_cache must be \(pages, page_size, key"),
    "cache-dtype": ("page", {"key_cache": ones(6, 4, 2, 8, dtype="bfloat16")}, TypeError,
                    "key_cache has dtype bfloat16, query has float32: .* float8_e4m3fn, float8_e5m2, int8"),
    "cache-uint8": ("page", {"key_cache": ones(6, 4, 2, 8, dtype="uint8")}, TypeError, "key_cache has dtype uint8"),
    "caches-differ": ("page", {"value_cache": ones(7, 4, 2, 8)}, ValueError, r"\(6, 4, 2, 8\) and .*\(7, 4, 2, 8\)"),
    "cache-dtypes-differ": ("page", {"value_cache": ones(6, 4, 2, 8, dtype="int8")}, TypeError, "value_cache int8"),
    "odd-rows": ("ragged", {"kv_pages": ones(6, 4, 3, 8)}, ValueError, "even number of rows, not 3"),
    "three-caches": ("ragged", {"kv_pages": (CACHE,) * 3}, ValueError, r"the pair \(key_pages, value_pages\), got 3"),
    "pair-rank": ("ragged", {"kv_pages": (CACHE, ones(6, 4, 8))}, ValueError, "value_pages of kv_pages must be"),
    # lengths and tables
    "lens-shape": ("page", {"context_lens": np.array([1, 2, 3])}, ValueError, r"context_lens \(3,\) .* sequence: 2"),
    "lens-float": ("page", {"context_lens": np.array([1.0, 2.0])}, TypeError, "context_lens must hold integers"),
    "lens-rank": ("page", {"context_lens": np.array([[1, 2]])}, ValueError, "context_lens must have 1 dimensions"),
    "lens-long": ("page", {"context_lens": np.array([0, 13])}, ValueError, r"from 0 to 12, .*\(row 1: 13\)"),
    "lens-negative": ("page", {"context_lens": np.array([-1, 3])}, ValueError, r"from 0 to 12, .*\(row 0: -1\)"),
    "table-none": ("page", {"block_tables": None}, TypeError, "block_tables is needed"),
    "table-rows": ("page", {"block_tables": [[0, 1, 2], [0]]}, ValueError, "block_tables must have rows of one length"),
    "table-empty": ("page", {"block_tables": np.ones((2, 0), int)}, ValueError, "at least one page per sequence"),
    "lens-none": ("page", {"context_lens": None}, TypeError, "context_lens is needed, got None"),
    "start-none": ("whole", {"sequence_start": None}, TypeError, "sequence_start is needed, got None"),
    "table-shape": ("page", {"block_tables": np.ones((3, 3), int)}, ValueError, r"block_tables \(3, 3\) .* 2 seq"),
    "table-high": ("page", {"block_tables": np.array([[0, 6, 1], [0, 0, 0]])}, ValueError,
                   r"page ids from 0 to 5 in the slots that are used \(row 0: 6\)"),
    "table-negative": ("page", {"block_tables": np.array([[0, -1, 1], [0, 0, 0]])}, ValueError, r"\(row 0: -1\)"),
    "starts": ("ragged", {"query_start_loc": np.array([0, 1])}, ValueError, r"query_start_loc \(2,\) .* sequences: 4"),
    "starts-late": ("ragged", {"query_start_loc": np.array([1, 1, 4, 4])}, ValueError, r"start at 0.*\(row 0: 1\)"),
    "starts-falling": ("ragged", {"query_start_loc": np.array([0, 4, 1, 4])}, ValueError, r"decrease.*\(row 2: 1\)"),
    "starts-past": ("ragged", {"query_start_loc": np.array([0, 1, 9, 9])}, ValueError, r"the 7 query.*\(row 2: 9\)"),
    "queries-of-no-key": ("ragged", {"query_start_loc": np.array([0, 1, 6, 6])}, ValueError,
                          r"context_lens must count the queries of the sequence too.*\(row 1: 3\)"),
    "num-seqs": ("ragged", {"num_seqs": 4}, ValueError, r"num_seqs must be from 0 to 3 \(row 0: 4\)"),
    "num-seqs-many": ("ragged", {"num_seqs": np.array([1, 2])}, ValueError, "num_seqs must be one number"),
    "chunk-length": ("prefill", {"context_len": np.array([7])}, ValueError, "context_len must have 0 dimensions"),
    "chunk-table": ("prefill", {"page_indices": np.array([[1, 4]])}, ValueError, "page_indices must have 1 dimensions"),
    "page-size": ("decode", {"page_size": 5}, ValueError, "24 tokens, which pages of page_size=5 do not divide"),
    "page-size-0": ("decode", {"page_size": 0}, ValueError, "page_size=0 must be at least 1"),
    "token": ("decode", {"req_to_tokens": np.array([[5, 24], [0, 0]])}, ValueError, r"from 0 to 23.*\(row 0: 24\)"),
    "two-tokens": ("whole", {"query": ones(2, 2, 4, 8)}, ValueError, "one token per sequence"),
    "batches": ("whole", {"query": ones(3, 4, 8)}, ValueError, "sequence_end .* sequence: 3"),
    "end": ("whole", {"sequence_end": np.array([6, 4])}, ValueError, r"to 5, what the cache holds.*\(row 0: 6\)"),
    "start": ("whole", {"sequence_start": np.array([-1, 4])}, ValueError, r"sequence_start .* 0 to 5 \(row 0: -1\)"),
    # options
    "scale-bool": ("page", {"softmax_scale": True}, TypeError, "softmax_scale must be a number, got True"),
    "scale": ("page", {"softmax_scale": "big"}, TypeError, "softmax_scale must be a number, got 'big'"),
    "cap": ("page", {"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap=0.0 must be positive"),
    "window": ("page", {"sliding_window": -1}, ValueError, "sliding_window=-1 must not be negative"),
    "sinks": ("page", {"softmax_aux": ones(3, 2)}, ValueError, r"softmax_aux \(3, 2\) must be"),
    "splits": ("page", {"num_splits": 0}, ValueError, "num_splits=0 must be at least 1"),
    "splits-float": ("page", {"num_splits": 2.0}, TypeError, "num_splits must be an int, got float: 2.0"),
    "k-scale": ("page", {"k_scale": ones(4)}, ValueError, r"k_scale must be a scalar or \(key heads,\) = \(2,\)"),
    "k-scale-text": ("page", {"k_scale": "big"}, TypeError, "k_scale must be a number or numbers, got <U3"),
    "v-scale": ("page", {"v_scale": np.array([True, False])}, TypeError, "v_scale must be a number"),
    "lse": ("page", {"return_lse": 1}, TypeError, "return_lse must be True or False"),
    "platform": ("page", {"platform": "cuda"}, ValueError, "platform 'cuda' is unknown"),
    "cfg": ("page", {"platform": "xla", "cfg": {"block": 3}}, ValueError, r"unknown fields \['block'\]"),
    "cfg-value": ("page", {"platform": "xla", "cfg": {"block_k": 0}}, ValueError, "block_k=0 must be an int from 1 on"),
    # writes
    "slot": ("write", {"slots": np.array([0, 24, 1])}, ValueError, r"slots must be below 24.*\(row 1: 24\)"),
    "slot-twice": ("write", {"slots": np.array([3, -1, 3])}, ValueError, r"slots must not come twice \(row 0: 3\)"),
    "slots-float": ("write", {"slots": np.array([0.0])}, TypeError, "slots must hold integers"),
    "rows": ("write", {"key": ones(2, 2, 8)}, ValueError, r"key \(2, 2, 8\) must be .* \(3, 2, 8\)"),
    "write-dtype": ("write", {"key": ones(3, 2, 8, dtype="int8")}, TypeError, "key has dtype int8"),
    "write-scale": ("write", {"k_scale": ones(3)}, ValueError, "k_scale must be a scalar or"),
    "write-scale-bool": ("write", {"v_scale": True}, TypeError, "v_scale must be a number or numbers, got bool"),
    "write-pages": ("write", {"value_cache": ones(5, 4, 2, 8)}, ValueError, "caches must have the same pages"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    kind, changes, error, message = WRONG[name]
    function, right = RIGHT[kind]
    with pytest.raises(error, match=message):
        function(**{**right, **changes})


@pytest.mark.parametrize("kind", RIGHT)
def test_the_right_input_is_taken(kind):
    """Garbage included, where it must not matter."""
    function, right = RIGHT[kind]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(function(**right)))


def test_interleaved_rows():
    pages = ones(1, 2, 4, 8)
    wrong = {
        r"value \(1, 2, 4\) must be .* = \(1, 2, 8\)": (pages, ones(1, 2, 8), ones(1, 2, 4)),
        r"key \(1, 4, 8\) must be .* = \(1, 2, 8\)": (pages, ones(1, 4, 8), ones(1, 4, 8)),
        r"key must be \(tokens, heads, head_dim\), got shape \(2, 8\)": (pages, ones(2, 8), ones(2, 8)),
        "key must be an array, got list": (pages, [1.0], [1.0]),
        "key has dtype int8": (pages, ones(1, 2, 8, dtype="int8"), ones(1, 2, 8, dtype="int8")),
        r"kv_pages \(1, 2, 3, 8\) must hold pairs": (ones(1, 2, 3, 8), ones(1, 1, 8), ones(1, 1, 8)),
    }
    for message, arrays in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            write_interleaved_kv_pages(*arrays, [0], k_scale=1.0, v_scale=1.0)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64", "uint64"])
def test_integers_of_any_width(dtype):
    """A window wider than the dtype, and ids that an unsigned subtraction would hide."""
    given = {**PAGE, "context_lens": np.array([9, 3], dtype), "sliding_window": 1000}
    with pytest.raises(ValueError, match=r"\(row 1: 99\)"):
        page_attention(**given)
    tables = given["block_tables"].clip(0, 5)
    expected = page_attention(**{**given, "context_lens": [9, 3], "block_tables": tables})
    np.testing.assert_array_equal(page_attention(**{**given, "block_tables": tables.astype(dtype)}), expected)


def test_numpy_caches_are_written():
    arrays = {name: np.asarray(x) for name, x in WRITE.items()}
    for rewritten, expected in zip(write_kv_pages(**arrays), write_kv_pages(**WRITE), strict=True):
        np.testing.assert_array_equal(rewritten, expected)
    pages, rows = np.ones((6, 4, 4, 8), np.float32), np.zeros((1, 2, 8), np.float32)
    assert not write_interleaved_kv_pages(pages, rows, rows, [5])[1, 1].any()


def test_windows_free_the_pages_before_them():
    table = np.array([[99, 0, 2], [0, 0, 0]])
    with pytest.raises(ValueError, match=r"\(row 0: 99\)"):
        page_attention(**PAGE | {"block_tables": table})
    assert np.isfinite(page_attention(**PAGE | {"block_tables": table}, sliding_window=4)).all()


# Values on the device -------------------------------------------------------------------------------------------

OUT_OF_RANGE = {
    "long": ({"context_lens": [40, 3]}, {"context_lens": [12, 3]}, r"from 0 to 12.*row 0"),
    "negative": ({"context_lens": [9, -3]}, {"context_lens": [9, 0]}, r"from 0 to 12.*row 1"),
    "page": (
        {"block_tables": [[5, 77, 2], [0, 0, 0]]},
        {"block_tables": [[5, 5, 2], [0, 0, 0]]},
        r"from 0 to 5.*row 0",
    ),
}


def on_device(changes):
    arrays = {**PAGE, **{name: np.array(x) for name, x in changes.items()}}
    numbers = jax.random.normal(jax.random.key(0), (6, 4, 2, 8))
    return {name: jnp.asarray(x) for name, x in (arrays | {"key_cache": numbers, "value_cache": numbers}).items()}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_traced_values_are_clamped(name, platform):
    wrong, clamped, _ = OUT_OF_RANGE[name]
    if refused(platform):
        return
    with platform.context():
        run = jax.jit(lambda a: page_attention(**a, platform=platform.name))
        np.testing.assert_array_equal(run(on_device(wrong)), run(on_device(clamped)))


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_checks_of_device_values(name, monkeypatch):
    wrong, _, message = OUT_OF_RANGE[name]
    page_attention(**on_device(wrong))
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")
    with pytest.raises(ValueError, match=message):
        page_attention(**on_device(wrong))


def test_checks_under_jit_go_through_checkify(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")
    run = checkify.checkify(jax.jit(lambda a: page_attention(**a)))
    error, _ = run(on_device({"context_lens": [3, 13]}))
    with pytest.raises(checkify.JaxRuntimeError, match=r"context_lens must be from 0 to 12.*row 1"):
        error.throw()
    error, _ = run(on_device({}))
    error.throw()


def test_traced_slots_past_the_end_are_left_out():
    key, _ = jax.jit(write_kv_pages)(**jax.tree.map(jnp.asarray, WRITE | {"slots": np.array([24, -1, 500])}))
    np.testing.assert_array_equal(key, CACHE)


# Gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["query", "key_cache"])
def test_there_is_no_gradient_and_the_error_says_what_to_use(argument):
    with pytest.raises(NotImplementedError, match="has no gradient: train with flash_attention"):
        jax.grad(lambda x: page_attention(**PAGE | {argument: x}).sum())(PAGE[argument])


def test_a_gradient_that_is_stopped_passes():
    stopped = jax.tree.map(jax.lax.stop_gradient, PAGE | {"context_lens": jnp.array([9, 0])})
    gradient = jax.grad(lambda x: (x * page_attention(**stopped)).sum())(ones(2, 4, 8))
    assert np.isfinite(gradient).all()
