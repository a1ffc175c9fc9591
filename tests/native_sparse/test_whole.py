"""Native sparse attention as a whole: its branches together, and what must hold of them."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.native_sparse import whole
from ejkernel.kernels.native_sparse.reference import native_sparse
from ejkernel.modules import (
    flash_attention,
    mean_pooling,
    native_sparse_attention,
    select_blocks,
    selected_attention,
)
from ejkernel.ops import explain, interpret
from harness import check, normal

B, T, H, HKV, D = 2, 70, 4, 2, 16
OPTIONS = {"block_size": 8, "block_counts": 5, "window_size": 20}


def arrays(T=T, S=None, B=B, gates=("g_cmp", "g_slc", "g_swa"), H=H, Hkv=HKV):
    S = S or T
    shapes = {"query": (B, T, H, D), "key": (B, S, Hkv, D), "value": (B, S, Hkv, D)}
    shapes |= dict.fromkeys(gates, (B, T, H))
    return {name: normal(name, shape) for name, shape in shapes.items()}


def compressed(S, B=B, Hkv=HKV, size=8):
    shape = (B, -(-S // size), Hkv, D)
    return {"compressed_key": normal("ck", shape), "compressed_value": normal("cv", shape)}


CU = np.array([0, 0, 7, 7, 50, 51, 64])
SELECTED = {"block_size": 8, "block_counts": 5}

# id: (arrays, options)
CASES = {
    "three-branches": (arrays(), OPTIONS),
    "selected-only": (arrays(gates=("g_slc",)), SELECTED),
    "compressed-only": (arrays(gates=("g_cmp",)), {"block_size": 8}),
    "window-only": (arrays(gates=("g_swa",)), {"window_size": 20}),
    "mqa": (arrays(Hkv=1, B=1), OPTIONS),
    "every-block": (arrays(T=33), OPTIONS | {"block_counts": 16}),
    "packed": (arrays(B=1), OPTIONS | {"cu_seqlens": CU}),
    "cache": (arrays(T=3, S=70), OPTIONS),
    "cache-lengths": (arrays(T=3, S=70), OPTIONS | {"kv_lengths": np.array([1, 62])}),
    "learned-compression": (arrays() | compressed(T), OPTIONS),
    "counts": (arrays(), OPTIONS | {"block_counts": np.arange(B * T * HKV).reshape(B, T, HKV) % 7}),
    "indices-count": (
        arrays(gates=()),
        {"block_size": 8, "block_counts": 2, "block_indices": np.arange(B * T * HKV * 3).reshape(B, T, HKV, 3) % 9},
    ),
    "indices": (
        arrays(gates=()),
        {"block_size": 8, "block_indices": np.arange(B * T * HKV * 3).reshape(B, T, HKV, 3) % 9},
    ),
}


def call(given, options, function=native_sparse_attention, **how):
    given = dict(given)
    if "compressed_key" in given:
        given["compressed"] = given.pop("compressed_key"), given.pop("compressed_value")
    return function(**given, **options, **how)


def run_here(options, platform, given):
    with interpret():
        return {"out": call(given, options, platform=platform)}


def defined(options, given, dtype):
    return {"out": native_sparse(call(given, options, whole.canonicalise), dtype)}


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    given, options = CASES[name]
    check(partial(run_here, options, "xla"), partial(defined, options), given)


@pytest.mark.parametrize("name", ["three-branches", "packed"])
def test_interpreted(name):
    given, options = CASES[name]
    check(partial(run_here, options, "triton"), partial(defined, options), given)


def test_is_the_sum_of_its_branches():
    given = arrays()
    q, k, v = (given[name] for name in ("query", "key", "value"))
    out = native_sparse_attention(**given, **OPTIONS)
    indices = select_blocks(q, mean_pooling(k, chunk_size=8), 5, block_size=8)
    window = flash_attention(q, k, v, causal=True, sliding_window=(19, 0))
    picked = selected_attention(q, k, v, indices, block_size=8)
    parts = given["g_slc"][..., None] * picked + given["g_swa"][..., None] * window
    from_compressed = native_sparse_attention(q, k, v, given["g_cmp"], block_size=8)
    np.testing.assert_allclose(out, parts + from_compressed, atol=1e-5)


@pytest.mark.parametrize("platform", ["xla", "triton"])
@pytest.mark.parametrize("order", ["queries", "keys"])
def test_all_blocks_are_causal_attention(platform, order):
    given = arrays(gates=(), T=50)
    every = np.broadcast_to(np.arange(7), (B, 50, HKV, 7))
    cfg = {"order": order, "rows": 16} if platform == "triton" else None
    with interpret():
        out = selected_attention(**given, block_indices=every, block_size=8, platform=platform, cfg=cfg)
    np.testing.assert_allclose(out, flash_attention(**given, causal=True), atol=2e-6)


@pytest.mark.parametrize("count", [0, 2, 16, 40])
@pytest.mark.parametrize("given", [True, False], ids=["given", "selected"])
def test_an_int_counts_as_an_array_of_it_does(count, given):
    tokens = arrays(gates=("g_slc",))
    blocks = {"block_indices": np.arange(B * T * HKV * 20).reshape(B, T, HKV, 20) % 9} if given else {}
    out = native_sparse_attention(**tokens, **blocks, block_counts=count, block_size=8)
    each = np.full((B, T, HKV), count)
    right = native_sparse_attention(**tokens, **blocks, block_counts=each, block_size=8)
    np.testing.assert_allclose(out, right, atol=1e-5)
    unlimited = native_sparse_attention(**tokens, **blocks, block_size=8)
    assert (count >= 16) == np.allclose(out, unlimited, atol=1e-5)


def test_packed_equals_separate():
    given, options = CASES["packed"]
    packed = call(given, options)
    for start, end in pairwise(CU):
        if start < end:
            alone = call({name: x[:, start:end] for name, x in given.items()}, OPTIONS)
            np.testing.assert_allclose(packed[:, start:end], alone, atol=1e-5)
    np.testing.assert_array_equal(packed[:, 64:], 0)


def test_decoding_equals_prefill():
    """One token at a time against a cache, whose compressed keys are kept too."""
    given = arrays()
    whole_out = native_sparse_attention(**given, **OPTIONS)
    kept = mean_pooling(given["key"], chunk_size=8), mean_pooling(given["value"], chunk_size=8)

    @jax.jit
    def step(t, compressed):
        one = {
            name: x if name in ("key", "value") else jax.lax.dynamic_slice_in_dim(x, t, 1, 1)
            for name, x in given.items()
        }
        lengths = jnp.full(B, t + 1)
        return native_sparse_attention(**one, **OPTIONS, kv_lengths=lengths, compressed=compressed)

    for t in (0, 7, 8, 40, 69):
        np.testing.assert_allclose(step(t, kept)[:, 0], whole_out[:, t], atol=1e-5)


def test_the_future_changes_nothing():
    given = arrays()
    before = native_sparse_attention(**given, **OPTIONS)
    changed = {name: x.at[:, 40:].set(jnp.nan) for name, x in given.items()}
    np.testing.assert_array_equal(native_sparse_attention(**changed, **OPTIONS)[:, :40], before[:, :40])


def test_explain_shows_every_call():
    told = explain(native_sparse_attention, **arrays(), **OPTIONS)
    names = [call.operation for call in told.calls]
    assert names == [
        "mean_pooling",
        "mean_pooling",
        "flash_attention",
        "select_blocks",
        "selected_attention",
        "flash_attention",
    ]
    forced = explain(native_sparse_attention, **arrays(), **OPTIONS, platform="triton")
    assert forced.platform is None and "needs an NVIDIA GPU" in str(forced.calls[0])


@pytest.mark.parametrize(("heads", "order"), [(16, "by queries: 4 neighbouring"), (1, "by keys: a group of 1 would")])
def test_explain_says_which_order_and_why(heads, order):
    tokens = [jax.ShapeDtypeStruct((1, 512, n, 64), "bfloat16") for n in (heads, 1, 1)]
    indices = jax.ShapeDtypeStruct((1, 512, 1, 4), "int32")
    assert order in str(explain(selected_attention, *tokens, indices, device="h200"))


def test_leading_dimensions():
    given = arrays()
    out = native_sparse_attention(**given, **OPTIONS)
    one = native_sparse_attention(**{name: x[0] for name, x in given.items()}, **OPTIONS)
    np.testing.assert_allclose(one, out[0], atol=1e-5)
    nested = {name: x.reshape(1, 2, *x.shape[1:]) for name, x in given.items()}
    np.testing.assert_allclose(native_sparse_attention(**nested, **OPTIONS)[0], out, atol=1e-5)


def test_lengths_that_are_traced_compile_once():
    given, options = CASES["packed"]
    options = {name: x for name, x in options.items() if name != "cu_seqlens"}
    attend = jax.jit(lambda given, cu: native_sparse_attention(**given, **options, cu_seqlens=cu))
    for cu in (CU, np.array([0, 10, 20, 30, 40, 50, 70])):
        expected = native_sparse_attention(**given, **options, cu_seqlens=cu)
        np.testing.assert_allclose(attend(given, jnp.asarray(cu)), expected, atol=1e-5)
    assert attend._cache_size() == 1


G3 = jnp.zeros((B, T, H))
ERRORS = {
    "nothing": ({}, ValueError, "nothing to attend to: give g_cmp, g_slc, g_swa or block_indices"),
    "gate": ({"g_cmp": jnp.zeros((B, T, 3))}, ValueError, r"g_cmp \(2, 70, 3\) must be .* \(2, 70, 4\)"),
    "window": ({"g_swa": G3}, ValueError, "g_swa weighs the window branch: give window_size"),
    "indices": ({"block_indices": np.zeros((B, T, 3, 2), int)}, ValueError, r"block_indices \(2, 70, 3, 2\) must be"),
    "index-floats": ({"block_indices": np.zeros((B, T, 2, 2))}, TypeError, "block_indices must hold integers"),
    "counts": ({"g_slc": G3, "block_counts": np.zeros((B, T, 3), int)}, ValueError, r"block_counts \(2, 70, 3\)"),
    "counts-negative": ({"g_slc": G3, "block_counts": -1}, ValueError, "block_counts=-1 must be at least 0"),
    "cu": ({"g_slc": G3, "cu_seqlens": [0, 70]}, ValueError, "packs sequences into one row"),
    "both": ({"g_slc": G3, "cu_seqlens": [0, 70], "kv_lengths": [3, 4]}, ValueError, "not both"),
    "lengths": ({"g_slc": G3, "kv_lengths": [3, 71]}, ValueError, r"kv_lengths must lie in \[0, 70\]"),
    "compressed": ({"g_slc": G3, "compressed": (G3,)}, TypeError, "compressed must be a pair"),
    "compressed-rows": (
        {"g_slc": G3, "compressed": (jnp.zeros((B, 4, 2, D)),) * 2}, ValueError, r"each block: \(2, 2, 2, 16\)"
    ),
    "block-size": ({"g_slc": G3, "block_size": 0}, ValueError, "block_size=0 must be at least 1"),
    "config": ({"g_slc": G3, "block_counts": 1, "cfg": {"block": 1}}, (TypeError, ValueError), "block"),
    "platform": ({"g_slc": G3, "block_counts": 1, "platform": "pallas"}, NotImplementedError, "pallas"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        native_sparse_attention(**arrays(gates=()), **options)


def test_more_queries_than_keys():
    given = arrays(gates=("g_slc",))
    with pytest.raises(ValueError, match="70 queries are the last tokens of only 60 keys"):
        native_sparse_attention(**given | {name: given[name][:, :60] for name in ("key", "value")})


def test_packed_sequences_that_are_all_empty():
    query, key, gate = jnp.ones((1, 8, 2, 8)), jnp.ones((1, 8, 1, 8)), jnp.ones((1, 8, 2))
    cu = jnp.array([0, 0, 0])
    out = native_sparse_attention(query, key, key, gate, gate, cu_seqlens=cu, block_size=4, block_counts=4)
    assert out.shape == query.shape and not out.any()
