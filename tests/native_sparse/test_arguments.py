"""What callers may give: nothing is ignored, shapes with one meaning are taken, other numbers compile nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import mean_pooling, native_sparse_attention, select_blocks, selected_attention
from ejkernel.ops import interpret
from harness import normal
from harness.compilations import compiled_programs

B, T, H, HKV, D = 1, 40, 4, 2, 16
Q, K, V = (normal(name, (B, T, heads, D)) for name, heads in (("query", H), ("key", HKV), ("value", HKV)))
GATE = normal("gate", (B, T, H))
INDICES = np.arange(B * T * HKV * 3).reshape(B, T, HKV, 3) % 5
PAIR = (jnp.zeros((B, 5, HKV, D)),) * 2

IGNORED = {
    "config of no branch": ({"g_cmp": GATE, "cfg": {"bogus": 1}}, "cfg={'bogus': 1} is of the selected branch"),
    "config of a window": ({"g_swa": GATE, "window_size": 4, "cfg": {"block_q": 8}}, "give g_slc or block_indices"),
    "window": ({"g_cmp": GATE, "window_size": 20}, "window_size=20 is of the window branch: give its gate, g_swa"),
    "counts": ({"g_cmp": GATE, "block_counts": 3}, "block_counts is of the selected branch: give its gate, g_slc"),
    "compressed": ({"block_indices": INDICES, "compressed": PAIR}, "compressed is of the compressed branch"),
    "compressed, gated": ({"block_indices": INDICES, "g_slc": GATE, "compressed": PAIR}, "give g_cmp, or g_slc alone"),
    "compressed, window": ({"g_swa": GATE, "window_size": 4, "compressed": PAIR}, "give g_cmp, or g_slc alone"),
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_would_be_ignored_is_refused(name):
    options, message = IGNORED[name]
    with pytest.raises(ValueError, match=message):
        native_sparse_attention(Q, K, V, block_size=8, **options)


@pytest.mark.parametrize("count", [2, 16], ids=["some blocks", "every block"])
def test_a_config_is_taken_whatever_is_selected(count):
    """Where every block is selected too, although causal attention would do."""
    options = {"g_slc": GATE, "block_size": 8, "block_counts": count}
    with pytest.raises((TypeError, ValueError), match="bogus"):
        native_sparse_attention(Q, K, V, **options, cfg={"bogus": 1})
    given = native_sparse_attention(Q, K, V, **options, cfg={"block_q": 8})
    np.testing.assert_allclose(given, native_sparse_attention(Q, K, V, **options), atol=1e-5)


COUNTS = np.arange(T) % 4
SHAPES = {
    "queries": COUNTS,
    "key heads broadcast": COUNTS[None, :, None],
    "without batch": np.stack([COUNTS, COUNTS], -1),
    "traced": jnp.asarray(COUNTS),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [selected_attention, native_sparse_attention])
def test_counts_broadcast(function, shape):
    def attend(counts):
        return function(Q, K, V, block_indices=INDICES, block_size=8, block_counts=counts)

    attend = jax.jit(attend) if shape == "traced" else attend
    right = function(Q, K, V, block_indices=INDICES, block_size=8, block_counts=np.tile(COUNTS[:, None], HKV)[None])
    np.testing.assert_allclose(attend(SHAPES[shape]), right, atol=1e-6)


def test_counts_of_nested_batches():
    q, k, v, indices = (jnp.stack([x, x])[None] for x in (Q[0], K[0], V[0], jnp.asarray(INDICES[0])))
    counts = np.stack([COUNTS, COUNTS // 2])[None, :, :, None]
    out = selected_attention(q, k, v, indices, counts, block_size=8)
    for n in range(2):
        one = selected_attention(q[0, n], k[0, n], v[0, n], indices[0, n], counts[0, n, :, 0], block_size=8)
        np.testing.assert_allclose(out[0, n], one, atol=1e-6)


@pytest.mark.parametrize("shape", [(T + 1,), (HKV,), (B, T, 3), (2, T, HKV), (T, 1, HKV), (B, T)])
def test_counts_that_fit_nothing(shape):
    with pytest.raises(
        ValueError, match=r"block_counts .* must be a number, \(40,\), or \(batch, length, key heads or 1\)"
    ):
        selected_attention(Q, K, V, INDICES, np.ones(shape, int), block_size=8)


@pytest.mark.parametrize("lengths", [{"cu_seqlens": np.array([0, 9, 30])}, {"kv_lengths": np.array([25])}], ids=str)
def test_padding_is_zero_whatever_its_gates_are(lengths):
    """Padding is behind packed sequences, and before the tokens of a short cache."""
    padded = slice(30, None) if "cu_seqlens" in lengths else slice(None, T - 25)
    gates = GATE.at[:, padded].set(jnp.nan)

    def attend(gates):
        out = native_sparse_attention(
            Q, K, V, gates, gates, g_swa=gates, window_size=4, block_size=8, block_counts=2, **lengths
        )
        return (out**2).sum(), out

    (_, out), gradient = jax.value_and_grad(attend, has_aux=True)(gates)
    np.testing.assert_array_equal(out[:, padded], 0)
    np.testing.assert_array_equal(gradient[:, padded], 0)
    assert not jnp.isnan(out).any() and not jnp.isnan(gradient).any()


OTHER_LENGTHS = [np.array(cu, np.int32) for cu in ([0, 9, 17, 40], [0, 1, 16, 32], [0, 0, 39, 40], [0, 5, 5, 5])]
PACKED = {
    "all branches": lambda cu: native_sparse_attention(
        Q, K, V, GATE, GATE, None, 3, cu, g_swa=GATE, block_size=8, window_size=5
    ),
    "every block": lambda cu: native_sparse_attention(Q, K, V, None, GATE, None, 16, cu, block_size=8),
    "indices": lambda cu: native_sparse_attention(Q, K, V, None, GATE, INDICES, 2, cu, block_size=8),
    "selected": lambda cu: selected_attention(Q, K, V, INDICES, None, cu, block_size=8, return_lse=True),
}


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", PACKED)
def test_other_lengths_compile_nothing(name, on_device):
    as_array = jnp.asarray if on_device else np.asarray
    first, *others = (as_array(cu) for cu in OTHER_LENGTHS)
    jax.block_until_ready(PACKED[name](first))
    with compiled_programs() as names:
        for lengths in others:
            jax.block_until_ready(PACKED[name](lengths))
    assert not names


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_other_lengths_of_caches_compile_nothing(on_device):
    as_array = jnp.asarray if on_device else np.asarray
    compressed = mean_pooling(K, chunk_size=8)

    def attend(length):
        lengths = as_array(np.array([length]))
        q, gate = Q[:, :2], GATE[:, :2]
        select_blocks(q, compressed, 4, kv_lengths=lengths, block_size=8)
        selected_attention(q, K, V, INDICES[:, :2], kv_lengths=lengths, block_size=8)
        return native_sparse_attention(
            q, K, V, gate, gate, None, 4, g_swa=gate, kv_lengths=lengths, block_size=8, window_size=5
        )

    jax.block_until_ready(attend(7))
    with compiled_programs() as names:
        jax.block_until_ready([attend(length) for length in (1, 8, 40)])
    assert not names


def test_compressed_of_packed_sequences_has_the_blocks_there_are():
    """Or the most there can be, which is what `mean_pooling` gives for lengths that are traced."""
    cu = np.array([0, 9, 17, 40], np.int32)
    options = {"cu_seqlens": cu, "block_size": 8}
    exact = mean_pooling(K, cu, chunk_size=8), mean_pooling(V, cu, chunk_size=8)
    assert exact[0].shape[1] == 6
    traced = jax.jit(lambda cu: (mean_pooling(K, cu, chunk_size=8), mean_pooling(V, cu, chunk_size=8)))(cu)
    assert traced[0].shape[1] == 7
    out = native_sparse_attention(Q, K, V, GATE, **options)
    for compressed in (exact, tuple(x[:, :5] for x in exact), traced):
        given = native_sparse_attention(Q, K, V, GATE, **options, compressed=compressed)
        # the last block is whole in none of them but may be left out: nobody sees it
        np.testing.assert_allclose(given, out, atol=1e-6)
        if compressed[0].shape[1] > 5:
            chosen = select_blocks(Q, compressed[0], 4, **options)
            np.testing.assert_array_equal(chosen, select_blocks(Q, exact[0], 4, **options))
    with pytest.raises(ValueError, match=r"key of compressed .* must have a row for each block: \(1, 6, 2, 16\)"):
        native_sparse_attention(Q, K, V, GATE, **options, compressed=tuple(x[:, :4] for x in exact))
    with interpret(), pytest.raises(ValueError, match="a row for each of the 6 blocks of 40 tokens"):
        select_blocks(Q, exact[0][:, :3], 4, **options)


SCALED = {
    "selected": lambda scale: selected_attention(Q, K, V, INDICES, block_size=8, softmax_scale=scale),
    "all branches": lambda scale: native_sparse_attention(
        Q, K, V, GATE, GATE, None, 3, g_swa=GATE, block_size=8, window_size=5, softmax_scale=scale
    ),
    "blocks": lambda scale: select_blocks(Q, mean_pooling(K, chunk_size=8), 4, block_size=8, softmax_scale=scale),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_may_be_traced(name):
    traced = jax.jit(SCALED[name])
    for scale in (0.3, -1.2):
        np.testing.assert_allclose(traced(jnp.float32(scale)), SCALED[name](scale), atol=1e-5)
    with pytest.raises(TypeError, match="softmax_scale must be a number, got float32 of shape"):
        traced(jnp.ones(4))


def test_a_traced_scale_is_trained():
    def total(scale):
        return (SCALED["all branches"](scale) ** 2).sum()

    step = 1e-2
    slope = (total(0.3 + step) - total(0.3 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(total)(0.3), slope, rtol=1e-2)
