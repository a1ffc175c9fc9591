"""What the operator classes add to the functions they call: precedence, caches, dtypes, meshes, refusals."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel import modules
from ejkernel.operators import (
    AttentionImpl,
    AttentionMetadata,
    AttentionRegistry,
    AutoRegressiveDecodeAttn,
    FlashAttn,
    PagedAttn,
    PartitionAxis,
    RingAttn,
    ScaledDotProductAttn,
    SplashAttn,
    VanillaAttn,
)
from ejkernel.ops import explain
from ejkernel.types import MaskInfo, PagedAttentionMetadata, PagedCacheView, TransformerCacheView
from harness import normal

B, T, H, HKV, D = 2, 6, 4, 2, 8
WHOLE = [FlashAttn, ScaledDotProductAttn, SplashAttn, VanillaAttn]


def qkv(T=T, S=T):
    return normal("q", (B, T, H, D)), normal("k", (B, S, HKV, D)), normal("v", (B, S, HKV, D))


def out(operator, *args, **kwargs):
    return operator(*args, **kwargs).attention_outputs


# Masks and biases ---------------------------------------------------------------------------------------------

MASK = np.array(normal("mask", (B, 1, T, T)) > -0.5)
BIAS = normal("bias", (H, T, T))


@pytest.mark.parametrize("kind", WHOLE)
def test_masks_broadcast(kind):
    q, k, v = qkv()
    attend = kind(AttentionMetadata())
    for mask in (MASK, MASK[:1], MASK[0, 0], MASK[:, :, :1], jnp.broadcast_to(MASK, (B, H, T, T))):
        whole = np.broadcast_to(mask, (B, mask.shape[1] if mask.ndim == 4 else 1, T, T))
        right = modules.flash_attention(q, k, v, mask_info=MaskInfo.from_attention_mask(whole))
        np.testing.assert_allclose(out(attend, q, k, v, mask, causal=False), right, atol=1e-5)
    ids = MaskInfo.from_segments([[1, 1, 1, 2, 2, -1]])
    right = modules.flash_attention(q, k, v, mask_info=ids)
    np.testing.assert_allclose(out(attend, q, k, v, ids, causal=False), right, atol=1e-5)


@pytest.mark.parametrize("kind", [FlashAttn, SplashAttn, VanillaAttn])
def test_a_bias_wins_over_a_mask_and_causality_still_holds(kind):
    q, k, v = qkv()
    right = modules.flash_attention(q, k, v, BIAS, causal=True)
    found = out(kind(AttentionMetadata()), q, k, v, mask=MASK, bias=BIAS, causal=True)
    np.testing.assert_allclose(found, right, atol=1e-5)


def test_sdpa_takes_both_and_a_bias_switches_causality_off():
    q, k, v = qkv()
    right = modules.flash_attention(q, k, v, BIAS, mask_info=MaskInfo.from_attention_mask(MASK))
    found = out(ScaledDotProductAttn(AttentionMetadata()), q, k, v, MASK, BIAS, causal=True)
    np.testing.assert_allclose(found, right, atol=1e-5)


@pytest.mark.parametrize("kind", WHOLE)
def test_init_bias_is_for_calls_with_neither(kind):
    q, k, v = qkv()
    attend = kind(AttentionMetadata())
    given = {"init_bias": lambda: BIAS, "causal": False}
    np.testing.assert_allclose(out(attend, q, k, v, **given), modules.flash_attention(q, k, v, BIAS), atol=1e-5)
    masked = out(attend, q, k, v, MASK, causal=False)
    np.testing.assert_array_equal(out(attend, q, k, v, MASK, **given), masked)


@pytest.mark.parametrize("kind", WHOLE)
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
    found = out(attend, q, k, v, causal=True, deterministic=False, dropout_rng=key)
    np.testing.assert_allclose(found, right, atol=1e-5)
    calm = out(attend, q, k, v, causal=True, deterministic=True, dropout_rng=key)
    np.testing.assert_allclose(calm, modules.flash_attention(q, k, v, causal=True), atol=1e-5)
    with pytest.raises(ValueError, match=r"dropout_prob=0\.4 needs dropout_(seed|rng)"):
        attend(q, k, v, causal=True, deterministic=False)


def test_dtypes():
    q, k, v = qkv()
    settings = AttentionMetadata(runtime_dtype=jnp.bfloat16, runtime_softmax_dtype=jnp.bfloat16)
    short = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    for kind in (FlashAttn, VanillaAttn):
        found = out(kind(settings), q, k, v)
        assert found.dtype == jnp.bfloat16
        right = modules.flash_attention(*short, logits_dtype=jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_allclose(found.astype(jnp.float32), right, atol=0.02)
    with pytest.raises(NotImplementedError, match="the softmax of ScaledDotProductAttn is float32, asked for bfloat16"):
        ScaledDotProductAttn(settings)(q, k, v)


# Caches -------------------------------------------------------------------------------------------------------


def contiguous(lengths=(7, 4), starts=(2, 0), room=10):
    cache = TransformerCacheView.create(B, room, HKV, D, dtype=jnp.float32, starts=list(starts))
    chunk = normal("k", (B, max(lengths), HKV, D)), normal("v", (B, max(lengths), HKV, D))
    return cache.append(*chunk, lengths=list(lengths))


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
    found = out(AutoRegressiveDecodeAttn(AttentionMetadata()), q, cache.key, cache.value, cache)
    np.testing.assert_allclose(found, by_row(q, cache), atol=1e-5)


@pytest.mark.parametrize("kind", WHOLE)
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
    found = out(FlashAttn(AttentionMetadata()), q, cache.key, cache.value, mask, causal=True, cache_view=cache)
    hidden = jnp.where(jnp.arange(10)[None, None, None] == 3, -1e30, 0.0)
    right = out(FlashAttn(AttentionMetadata()), q, cache.key, cache.value, bias=hidden, causal=True, cache_view=cache)
    np.testing.assert_allclose(found, right, atol=1e-5)


def paged():
    """Three sequences on eight pages of four tokens."""
    cache = PagedCacheView(normal("k", (8, 4, HKV, D)), normal("v", (8, 4, HKV, D)))
    return cache, np.array([9, 3, 6]), np.array([[5, 0, 2], [7, 1, 1], [3, 6, 4]])


def rows_of(cache, lens, tables, row):
    pages = [x[tables[row]].reshape(1, -1, HKV, D)[:, : lens[row]] for x in (cache.key_pages, cache.value_pages)]
    return pages


def test_pages_decode_prefill_and_mixed():
    cache, lens, tables = paged()
    attend = PagedAttn(AttentionMetadata())
    q = normal("q", (3, 1, H, D))
    found = out(attend, q, None, None, cache, PagedAttentionMetadata.create(lens, tables))
    for row in range(3):
        right = modules.flash_attention(q[row : row + 1], *rows_of(cache, lens, tables, row), causal=True)
        np.testing.assert_allclose(found[row : row + 1], right, atol=1e-5)
    chunk = normal("chunk", (1, 5, H, D))
    found = out(attend, chunk, None, None, cache, PagedAttentionMetadata.create(lens[:1], tables[:1]))
    right = modules.flash_attention(chunk, *rows_of(cache, lens, tables, 0), causal=True)
    np.testing.assert_allclose(found, right, atol=1e-5)
    packed = normal("packed", (1, 8, H, D))
    where = PagedAttentionMetadata.create(lens, tables, [0, 1, 4, 6], 3)
    found = out(attend, packed, None, None, cache, where)
    for row, (a, b) in enumerate(((0, 1), (1, 4), (4, 6))):
        right = modules.flash_attention(packed[:, a:b], *rows_of(cache, lens, tables, row), causal=True)
        np.testing.assert_allclose(found[:, a:b], right, atol=1e-5)
    assert found.shape == packed.shape and not np.any(found[:, 6:])


# Many devices -------------------------------------------------------------------------------------------------


def mesh(*shape, names):
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names), devices=jax.devices())


def test_calls_are_split_as_the_settings_say():
    q, k, v = qkv()
    settings = AttentionMetadata(mesh=mesh(2, 2, 2, names=("dp", "sp", "tp")))
    right = modules.flash_attention(q, k, v, causal=True)
    for kind in (FlashAttn, SplashAttn, ScaledDotProductAttn):
        found = out(kind(settings), q, k, v, causal=True)
        np.testing.assert_allclose(found, right, atol=1e-5)
        assert found.sharding.spec == P("dp", None, "tp", None)


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
        found = out(RingAttn(AttentionMetadata(mesh=devices, **settings)), q, k, v, **given)
        np.testing.assert_allclose(found, right, atol=1e-5)
        assert devices is None or "sp" in found.sharding.spec


def test_a_ring_goes_round_where_tokens_are_split():
    q = normal("q", (2, 16, H, D))
    attend = RingAttn(AttentionMetadata(sequence_axis_name="ring"))
    right = out(FlashAttn(AttentionMetadata()), q, q, q, causal=True)
    with jax.set_mesh(mesh(8, names=("ring",))):
        around = jax.jit(lambda q: out(attend, q, q, q))(q)
        assert around.sharding.spec == P(None, "ring")
    inside = jax.shard_map(
        lambda q: out(attend, q, q, q),
        mesh=mesh(8, names=("ring",)),
        in_specs=P(None, "ring"),
        out_specs=P(None, "ring"),
    )(q)
    for found in (around, inside):
        np.testing.assert_allclose(found, right, atol=1e-5)
    # one token, or lengths that do not divide: nothing goes round
    split = RingAttn(AttentionMetadata(mesh=mesh(8, names=("sp",))))
    for T in (1, 10):
        found = out(split, q[:, :T], q, q)
        np.testing.assert_allclose(found, out(FlashAttn(AttentionMetadata()), q[:, :T], q, q, causal=True), atol=1e-5)


def test_caches_are_split_as_the_settings_say():
    settings = AttentionMetadata(mesh=mesh(2, 2, 2, names=("dp", "sp", "tp")))
    cache, q = contiguous(), normal("q", (B, 1, H, D))
    found = out(AutoRegressiveDecodeAttn(settings), q, cache.key, cache.value, cache)
    np.testing.assert_allclose(found, by_row(q, cache), atol=1e-5)
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


# Settings -----------------------------------------------------------------------------------------------------


def test_settings_come_from_a_config():
    config = SimpleNamespace(attn_dtype=jnp.bfloat16, attn_softmax_dtype=jnp.float32, blocksize_k=64, platform="xla")
    settings = AttentionMetadata.from_config(config, 0.5, 0.1)
    assert settings == AttentionMetadata(
        jnp.bfloat16, jnp.float32, platform="xla", softmax_scale=0.5, dropout_prob=0.1, blocksize_k=64
    )


def test_block_sizes_are_the_tiles():
    told = explain(FlashAttn(AttentionMetadata(blocksize_q=16, blocksize_k=32)), *qkv())
    assert (told.config.block_q, told.config.block_k, told.config_source) == (16, 32, "use_config")
    assert explain(FlashAttn(AttentionMetadata()), *qkv()).config_source == "default"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "metal"}, "backend 'metal' is unknown; use one of cpu, gpu, cuda, rocm, tpu"),
        ({"platform": "mlx"}, "platform 'mlx' is unknown; use auto, xla"),
        ({"dropout_prob": 1.0}, r"dropout_prob=1\.0 must be at least 0 and below 1"),
        ({"runtime_dtype": jnp.int8}, "runtime_dtype int8 is not supported"),
        ({"blocksize_q": 0}, "blocksize_q=0 must be at least 1"),
        ({"blocksize_b": 4}, "blocksize_b=4: kernels take one row of the batch per tile, use 1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionMetadata(**settings)


# Refusals -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_honoured_raises():
    q, k, v = qkv(T=1)
    cache = contiguous()
    pages, lens, tables = paged()
    where = PagedAttentionMetadata.create(lens, tables)
    dropping = AttentionMetadata(dropout_prob=0.1)
    decode = AutoRegressiveDecodeAttn(AttentionMetadata())
    cases = [
        (lambda: decode(q, k, v, cache, mask=MASK, bias=BIAS), "cannot honour mask, bias: what is seen follows"),
        (lambda: AutoRegressiveDecodeAttn(dropping)(q, k, v, cache, deterministic=False), "has no dropout, asked"),
        (lambda: ScaledDotProductAttn(dropping)(q, k, v, deterministic=False), "or take FlashAttn"),
        (lambda: PagedAttn(AttentionMetadata())(q, k, v, pages, where, causal=False), "cannot honour causal"),
        (lambda: FlashAttn(AttentionMetadata())(q, k, v, cache_metadata=where), "pages are PagedAttn's"),
    ]
    for call, message in cases:
        with pytest.raises(NotImplementedError, match=message):
            call()


def test_wrong_kinds_raise():
    q, k, v = qkv(T=1)
    pages, _, _ = paged()
    with pytest.raises(TypeError, match="metadata must be an AttentionMetadata, got dict"):
        FlashAttn({})
    with pytest.raises(TypeError, match="unexpected keyword argument 'masks'"):
        FlashAttn(AttentionMetadata())(q, k, v, masks=None)
    with pytest.raises(TypeError, match="cache_view must be a TransformerCacheView, got PagedCacheView"):
        FlashAttn(AttentionMetadata())(q, k, v, cache_view=pages)
    with pytest.raises(TypeError, match="cache_view must be a TransformerCacheView, got NoneType"):
        AutoRegressiveDecodeAttn(AttentionMetadata())(q, k, v)
    with pytest.raises(TypeError, match="cache_metadata must be a PagedAttentionMetadata, got NoneType"):
        PagedAttn(AttentionMetadata())(q, k, v, pages)
    with pytest.raises(ValueError, match="k has 6 tokens and its cache_view 10"):
        FlashAttn(AttentionMetadata())(q, k, v, cache_view=contiguous())
    with pytest.raises(ValueError, match=r"mask \(1, 1, 1, 1, 1\) does not broadcast"):
        FlashAttn(AttentionMetadata())(q, k, v, np.ones((1, 1, 1, 1, 1), bool))


def test_registry():
    @AttentionRegistry.register
    class Mine(FlashAttn):
        @classmethod
        def get_impl_name(cls):
            return "mine", "my_own"

    try:
        assert AttentionRegistry.get("my_own") is Mine
        with pytest.raises(ValueError, match="attention 'mine' is Mine already"):

            @AttentionRegistry.register
            class Other(AttentionImpl):
                @classmethod
                def get_impl_name(cls):
                    return "mine"

    finally:
        for name in ("mine", "my_own"):
            del AttentionRegistry._operators[name]
    with pytest.raises(ValueError, match=r"unknown attention 'vanila'; did you mean 'vanilla'\?"):
        AttentionRegistry.get("vanila")
    with pytest.raises(ValueError, match="unknown attention 'xyz'; known: autoregressive_decodeattn, "):
        AttentionRegistry.get("xyz")


def test_modes():
    assert [AttentionImpl.get_mode(jnp.ones((2, n, 1, 1))) for n in (1, 2)] == ["decode", "prefill"]


def test_the_definition_has_no_kernel_of_a_platform():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(NotImplementedError, match="which XLA computes on every device; it has no platform 'cudnn'"):
        VanillaAttn(AttentionMetadata(platform="cudnn"))(x, x, x)
