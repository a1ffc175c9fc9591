"""What the operator classes add to the functions they call: masks, caches, dtypes, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import modules
from ejkernel.operators import (
    AttentionMetadata,
    AutoRegressiveDecodeAttn,
    FlashAttn,
    PagedAttn,
    PartitionAxis,
    RingAttn,
    ScaledDotProductAttn,
    SplashAttn,
    VanillaAttn,
)
from ejkernel.types import MaskInfo, PagedAttentionMetadata
from harness import normal
from harness.operators import BIAS, HKV, MASK, B, D, H, T, contiguous, out, paged, qkv

# the classes over arrays of keys, on one device
OVER_ARRAYS = [FlashAttn, ScaledDotProductAttn, SplashAttn, VanillaAttn]


# Masks and biases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OVER_ARRAYS)
def test_masks_broadcast(kind):
    q, k, v = qkv()
    attend = kind(AttentionMetadata())
    for mask in (MASK, MASK[:1], MASK[0, 0], MASK[:, :, :1], jnp.broadcast_to(MASK, (B, H, T, T))):
        full_mask = np.broadcast_to(mask, (B, mask.shape[1] if mask.ndim == 4 else 1, T, T))
        right = modules.flash_attention(q, k, v, mask_info=MaskInfo.from_attention_mask(full_mask))
        np.testing.assert_allclose(out(attend, q, k, v, mask, causal=False), right, atol=1e-5)
    ids = MaskInfo.from_segments([[1, 1, 1, 2, 2, -1]])
    right = modules.flash_attention(q, k, v, mask_info=ids)
    np.testing.assert_allclose(out(attend, q, k, v, ids, causal=False), right, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, T])
def test_masks_of_padding_and_of_one_number(tokens):
    q, k, v = qkv(T=tokens, S=T)
    attend = FlashAttn(AttentionMetadata())
    real = np.arange(T) < np.array([[4], [6]])
    padding = MaskInfo.from_attention_mask(real[:, None, None, :]).with_lengths(tokens, T)
    right = modules.flash_attention(q, k, v, mask_info=padding)
    np.testing.assert_allclose(out(attend, q, k, v, real), right, atol=1e-5)
    everything = modules.flash_attention(q, k, v)
    for shape in ((), (1,), (1, 1), (1, 1, 1, 1)):
        np.testing.assert_allclose(out(attend, q, k, v, np.ones(shape, bool)), everything, atol=1e-5)
    assert not np.any(out(attend, q, k, v, np.zeros((1, 1, 1, 1), bool)))
    rows = np.array([True, False]).reshape(2, 1, 1, 1)
    for keys in (T, 1):  # one key, where a mask of one number says something of queries
        k1, v1 = k[:, :keys], v[:, :keys]
        all_keys = modules.flash_attention(q, k1, v1)
        np.testing.assert_allclose(out(attend, q, k1, v1, rows), jnp.where(rows, all_keys, 0), atol=1e-5)


def test_a_square_mask_of_as_many_rows_as_queries_is_refused():
    q = normal("q", (3, 3, H, D))
    with pytest.raises(ValueError, match=r"mask \(3, 3\) may be \(batch, kv_len\) or \(q_len, kv_len\)"):
        FlashAttn(AttentionMetadata())(q, q, q, np.ones((3, 3), bool))


@pytest.mark.parametrize("kind", [FlashAttn, SplashAttn, VanillaAttn])
def test_a_bias_wins_over_a_mask_and_causality_still_holds(kind):
    q, k, v = qkv()
    right = modules.flash_attention(q, k, v, BIAS, causal=True)
    result = out(kind(AttentionMetadata()), q, k, v, mask=MASK, bias=BIAS, causal=True)
    np.testing.assert_allclose(result, right, atol=1e-5)


def test_sdpa_takes_both_and_a_bias_switches_causality_off():
    q, k, v = qkv()
    right = modules.flash_attention(q, k, v, BIAS, mask_info=MaskInfo.from_attention_mask(MASK))
    result = out(ScaledDotProductAttn(AttentionMetadata()), q, k, v, MASK, BIAS, causal=True)
    np.testing.assert_allclose(result, right, atol=1e-5)


@pytest.mark.parametrize("kind", OVER_ARRAYS)
def test_init_bias_is_for_calls_with_neither(kind):
    q, k, v = qkv()
    attend = kind(AttentionMetadata())
    given = {"init_bias": lambda: BIAS, "causal": False}
    np.testing.assert_allclose(out(attend, q, k, v, **given), modules.flash_attention(q, k, v, BIAS), atol=1e-5)
    masked = out(attend, q, k, v, MASK, causal=False)
    np.testing.assert_array_equal(out(attend, q, k, v, MASK, **given), masked)


@pytest.mark.parametrize("kind", OVER_ARRAYS)
def test_gradients(kind):
    q, k, v = qkv()
    attend = kind(AttentionMetadata(softmax_scale=0.2))
    mine = jax.grad(lambda q, k, v: jnp.sin(out(attend, q, k, v, causal=True)).sum(), (0, 1, 2))(q, k, v)
    options = {"causal": True, "softmax_scale": 0.2}
    right = jax.grad(lambda q, k, v: jnp.sin(modules.flash_attention(q, k, v, **options)).sum(), (0, 1, 2))(q, k, v)
    for x, y in zip(mine, right, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


# Dropout and dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FlashAttn, SplashAttn, VanillaAttn])
def test_dropout(kind):
    q, k, v = qkv()
    attend = kind(AttentionMetadata(dropout_prob=0.4))
    key = jax.random.key(3)
    right = modules.flash_attention(q, k, v, causal=True, dropout_prob=0.4, dropout_seed=key)
    result = out(attend, q, k, v, causal=True, deterministic=False, dropout_rng=key)
    np.testing.assert_allclose(result, right, atol=1e-5)
    without_dropout = out(attend, q, k, v, causal=True, deterministic=True, dropout_rng=key)
    np.testing.assert_allclose(without_dropout, modules.flash_attention(q, k, v, causal=True), atol=1e-5)
    with pytest.raises(ValueError, match=rf"{kind.__name__}: dropout_prob=0\.4 needs dropout_rng"):
        attend(q, k, v, causal=True, deterministic=False)


def test_dtypes():
    q, k, v = qkv()
    settings = AttentionMetadata(runtime_dtype=jnp.bfloat16, runtime_softmax_dtype=jnp.bfloat16)
    short = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    for kind in (FlashAttn, VanillaAttn):
        result = out(kind(settings), q, k, v)
        assert result.dtype == jnp.bfloat16
        right = modules.flash_attention(*short, logits_dtype=jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_allclose(result.astype(jnp.float32), right, atol=0.02)
    with pytest.raises(NotImplementedError, match="the softmax of ScaledDotProductAttn is float32, asked for bfloat16"):
        ScaledDotProductAttn(settings)(q, k, v)


@pytest.mark.parametrize("kind", [*OVER_ARRAYS, RingAttn])
@pytest.mark.parametrize("settings", [{}, {"runtime_dtype": jnp.bfloat16}])
def test_integers_are_refused(kind, settings):
    arrays = dict(zip("qkv", qkv(), strict=True))
    for name in arrays:
        given = arrays | {name: jnp.ones(arrays[name].shape, jnp.int32)}
        with pytest.raises(TypeError, match=rf"{kind.__name__}: {name} has dtype int32; supported: float32"):
            kind(AttentionMetadata(**settings))(**given)
    with pytest.raises(TypeError, match=rf"{kind.__name__}: q must be an array, got list"):
        kind(AttentionMetadata(**settings))([[1.0]], arrays["k"], arrays["v"])


# Caches -------------------------------------------------------------------------------------------------------


def by_row(q, cache, causal=True):
    """The last tokens of each row over its valid ones, row by row."""
    rows = []
    for b in range(B):
        span = slice(int(cache.starts[b]), int(cache.index[b]))
        k, v = cache.key[b : b + 1, span], cache.value[b : b + 1, span]
        rows.append(modules.flash_attention(q[b : b + 1], k, v, causal=causal))
    return jnp.concatenate(rows)


def test_decoding_over_a_contiguous_cache():
    cache, q = contiguous(), normal("q", (B, 1, H, D))
    result = out(AutoRegressiveDecodeAttn(AttentionMetadata()), q, cache.key, cache.value, cache)
    np.testing.assert_allclose(result, by_row(q, cache), atol=1e-5)


@pytest.mark.parametrize("kind", OVER_ARRAYS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_all_classes_take_a_contiguous_cache(kind, tokens):
    cache, q = contiguous(), normal("q", (B, tokens, H, D))
    attend = jax.jit(
        lambda q, cache: out(kind(AttentionMetadata()), q, cache.key, cache.value, causal=True, cache_view=cache)
    )
    np.testing.assert_allclose(attend(q, cache), by_row(q, cache), atol=1e-5)


def test_a_mask_beside_a_cache_hides_more():
    cache, q = contiguous(), normal("q", (B, 2, H, D))
    mask = np.ones((B, 1, 1, 10), bool)
    mask[:, :, :, 3] = False
    result = out(FlashAttn(AttentionMetadata()), q, cache.key, cache.value, mask, causal=True, cache_view=cache)
    hidden = jnp.where(jnp.arange(10)[None, None, None] == 3, -1e30, 0.0)
    right = out(FlashAttn(AttentionMetadata()), q, cache.key, cache.value, bias=hidden, causal=True, cache_view=cache)
    np.testing.assert_allclose(result, right, atol=1e-5)


def rows_of(cache, lens, tables, row):
    pages = [x[tables[row]].reshape(1, -1, HKV, D)[:, : lens[row]] for x in (cache.key_pages, cache.value_pages)]
    return pages


def test_pages_decode_prefill_and_mixed():
    cache, lens, tables = paged()
    attend = PagedAttn(AttentionMetadata())
    q = normal("q", (3, 1, H, D))
    result = out(attend, q, None, None, cache, PagedAttentionMetadata.create(lens, tables))
    for row in range(3):
        right = modules.flash_attention(q[row : row + 1], *rows_of(cache, lens, tables, row), causal=True)
        np.testing.assert_allclose(result[row : row + 1], right, atol=1e-5)
    where = PagedAttentionMetadata.create(lens, tables)
    np.testing.assert_allclose(out(attend, q[:, 0], None, None, cache, where), result[:, 0], atol=1e-6)
    where = PagedAttentionMetadata.create(lens, tables, [0, 1, 2, 3])
    for decoded in (q, q[:, 0], q.reshape(1, 3, H, D)):
        again = out(attend, decoded, None, None, cache, where)
        assert again.shape == decoded.shape
        np.testing.assert_allclose(again.reshape(result.shape), result, atol=1e-5)
    chunk = normal("chunk", (1, 5, H, D))
    result = out(attend, chunk, None, None, cache, PagedAttentionMetadata.create(lens[:1], tables[:1]))
    right = modules.flash_attention(chunk, *rows_of(cache, lens, tables, 0), causal=True)
    np.testing.assert_allclose(result, right, atol=1e-5)
    packed = normal("packed", (1, 8, H, D))
    where = PagedAttentionMetadata.create(lens, tables, [0, 1, 4, 6], 3)
    result = out(attend, packed, None, None, cache, where)
    for row, (a, b) in enumerate(((0, 1), (1, 4), (4, 6))):
        right = modules.flash_attention(packed[:, a:b], *rows_of(cache, lens, tables, row), causal=True)
        np.testing.assert_allclose(result[:, a:b], right, atol=1e-5)
    assert result.shape == packed.shape and not np.any(result[:, 6:])


# Many devices -------------------------------------------------------------------------------------------------


def mesh(*shape, names):
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names), devices=jax.devices())


def test_calls_are_split_as_the_settings_say():
    q, k, v = qkv()
    settings = AttentionMetadata(mesh=mesh(2, 2, 2, names=("dp", "sp", "tp")))
    right = modules.flash_attention(q, k, v, causal=True)
    for kind in (FlashAttn, SplashAttn, ScaledDotProductAttn):
        result = out(kind(settings), q, k, v, causal=True)
        np.testing.assert_allclose(result, right, atol=1e-5)
        assert (*result.sharding.spec, None)[:4] == ("dp", None, "tp", None)


@pytest.mark.parametrize("extra", [{}, {"mask": "mask"}, {"bias": "bias"}, {"dropout": 0.3}])
def test_a_ring_gives_the_answers_of_one_device(extra):
    q, k, v = (normal(name, (2, 16, heads, D)) for name, heads in (("q", H), ("k", HKV), ("v", HKV)))
    given = {"causal": True, "deterministic": True}
    given |= {"mask": np.array(normal("mask", (2, 1, 16, 16)) > -0.5)} if "mask" in extra else {}
    given |= {"bias": normal("bias", (H, 16, 16))} if "bias" in extra else {}
    given |= {"deterministic": False, "dropout_rng": jax.random.key(2)} if "dropout" in extra else {}
    settings = {"dropout_prob": extra.get("dropout", 0.0), "softmax_scale": 0.3}
    right = out(FlashAttn(AttentionMetadata(**settings)), q, k, v, **given)
    for devices in (mesh(2, 4, names=("dp", "sp")), None):
        result = out(RingAttn(AttentionMetadata(mesh=devices, **settings)), q, k, v, **given)
        np.testing.assert_allclose(result, right, atol=1e-5)
        assert devices is None or "sp" in result.sharding.spec


def test_keys_travel_where_tokens_are_split():
    q = normal("q", (2, 16, H, D))
    attend = RingAttn(AttentionMetadata(sequence_axis_name="ring"))
    right = out(FlashAttn(AttentionMetadata()), q, q, q, causal=True)
    with jax.set_mesh(mesh(8, names=("ring",))):
        under_mesh = jax.jit(lambda q: out(attend, q, q, q))(q)
        assert under_mesh.sharding.spec == P(None, "ring")
    in_shard_map = jax.shard_map(
        lambda q: out(attend, q, q, q),
        mesh=mesh(8, names=("ring",)),
        in_specs=P(None, "ring"),
        out_specs=P(None, "ring"),
    )(q)
    for result in (under_mesh, in_shard_map):
        np.testing.assert_allclose(result, right, atol=1e-5)
    # one token, or lengths that the axis does not divide: no keys travel
    split = RingAttn(AttentionMetadata(mesh=mesh(8, names=("sp",))))
    for length in (1, 10):
        right = out(FlashAttn(AttentionMetadata()), q[:, :length], q, q, causal=True)
        np.testing.assert_allclose(out(split, q[:, :length], q, q), right, atol=1e-5)


def test_caches_are_split_as_the_settings_say():
    settings = AttentionMetadata(mesh=mesh(2, 2, 2, names=("dp", "sp", "tp")))
    cache, q = contiguous(), normal("q", (B, 1, H, D))
    result = out(AutoRegressiveDecodeAttn(settings), q, cache.key, cache.value, cache)
    np.testing.assert_allclose(result, by_row(q, cache), atol=1e-5)
    pages, lens, tables = paged()
    for q, where in (
        (normal("q", (3, 1, H, D)), PagedAttentionMetadata.create(lens, tables)),
        (normal("q", (1, 5, H, D)), PagedAttentionMetadata.create(lens[:1], tables[:1])),
        (normal("q", (1, 8, H, D)), PagedAttentionMetadata.create(lens, tables, [0, 1, 4, 6], 3)),
    ):
        one, many = (out(PagedAttn(s), q, None, None, pages, where) for s in (AttentionMetadata(), settings))
        np.testing.assert_allclose(many, one, atol=1e-5)
        assert "tp" in many.sharding.spec


@pytest.mark.parametrize(
    ("mode", "query", "key", "split_length", "expected"),
    [
        ("prefill", (4, 8, 4, 8), (4, 8, 2, 8), False, [("dp",), None, ("tp",), ("tp",)]),
        ("prefill", (4, 8, 4, 8), (4, 8, 2, 8), True, [("dp",), ("sp",), ("tp",), ("tp",)]),
        ("decode", (4, 1, 4, 8), (4, 8, 2, 8), True, [("dp",), None, ("tp",), ("tp",)]),
        ("prefill", (3, 8, 4, 8), (3, 8, 1, 8), False, [None, None, ("tp",), None]),
        ("prefill", (4, 8, 9, 8), (4, 8, 3, 8), False, [("dp",), None, None, None]),
    ],
)
def test_specs_by_mode(mode, query, key, split_length, expected):
    settings = AttentionMetadata(mesh=mesh(2, 2, 2, names=("dp", "sp", "tp")))
    batch, length, heads, kv_heads = expected
    q, k, v = settings.specs(mode, query, key, split_length=split_length)
    assert q == P(batch, length, heads, None)
    assert k == v == P(batch, ("sp",) if split_length else None, kv_heads, None)
    assert AttentionMetadata().specs(mode, query, key) is None


def test_axes_may_have_other_names():
    settings = AttentionMetadata(
        mesh=mesh(2, 4, names=("rows", "model")), partition_axis=PartitionAxis(batch_axis="rows", head_axis="model")
    )
    q, k, _ = settings.specs("prefill", (2, 8, 8, 8), (2, 8, 4, 8))
    assert q == k == P(("rows",), None, ("model",), None)
