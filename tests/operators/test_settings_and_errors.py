"""The settings of operators, what they refuse or ignore, and their registry."""

import inspect
import re
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.operators import (
    AttentionImpl,
    AttentionMetadata,
    AttentionRegistry,
    AutoRegressiveDecodeAttn,
    FlashAttn,
    PagedAttn,
    RingAttn,
    ScaledDotProductAttn,
    SplashAttn,
    VanillaAttn,
)
from ejkernel.ops import explain
from ejkernel.types import MaskInfo, PagedAttentionMetadata
from harness import normal
from harness.operators import BIAS, MASK, D, H, contiguous, out, paged, qkv

# Settings -----------------------------------------------------------------------------------------------------


def test_settings_come_from_a_config():
    config = SimpleNamespace(attn_dtype=jnp.bfloat16, attn_softmax_dtype=jnp.float32, blocksize_k=64, platform="xla")
    settings = AttentionMetadata.from_config(config, 0.5, 0.1)
    assert settings == AttentionMetadata(
        jnp.bfloat16, jnp.float32, platform="xla", softmax_scale=0.5, dropout_prob=0.1, blocksize_k=64
    )


def test_a_config_may_have_a_scale_or_none():
    assert AttentionMetadata.from_config(SimpleNamespace()) == AttentionMetadata()
    config = SimpleNamespace(softmax_scale=0.25, dropout_prob=0.3)
    assert AttentionMetadata.from_config(config) == AttentionMetadata(softmax_scale=0.25)
    assert AttentionMetadata.from_config(config, 0.5, 0.1) == AttentionMetadata(softmax_scale=0.5, dropout_prob=0.1)


def test_block_sizes_are_the_tiles():
    plan = explain(FlashAttn(AttentionMetadata(blocksize_q=16, blocksize_k=32)), *qkv())
    assert (plan.config.block_q, plan.config.block_k, plan.config_source) == (16, 32, "use_config")
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
    with pytest.raises(TypeError, match="cache_view must be a TransformerCacheView, got PagedCacheView"):
        FlashAttn(AttentionMetadata())(q, k, v, cache_view=pages)
    with pytest.raises(TypeError, match="cache_view must be a TransformerCacheView, got NoneType"):
        AutoRegressiveDecodeAttn(AttentionMetadata())(q, k, v)
    with pytest.raises(TypeError, match="cache_metadata must be a PagedAttentionMetadata, got NoneType"):
        PagedAttn(AttentionMetadata())(q, k, v, pages)
    with pytest.raises(ValueError, match="k has 6 tokens and its cache_view 10"):
        FlashAttn(AttentionMetadata())(q, k, v, cache_view=contiguous())
    for shape in ((1, 1, 1, 1, 1), (3, 6), (2, 5), (3, 1, 1, 6)):
        message = rf"FlashAttn: mask {re.escape(str(shape))} does not broadcast to .* = \(2, 4, 1, 6\)"
        with pytest.raises(ValueError, match=message):
            FlashAttn(AttentionMetadata())(q, k, v, np.ones(shape, bool))


def test_errors_are_in_the_words_of_the_class_that_was_called():
    q, k, v = qkv()
    cache, lens, _ = paged()
    where = PagedAttentionMetadata.create(lens, np.full((3, 3), 99))
    token = normal("q", (3, 1, H, D))
    splash, ring = SplashAttn(AttentionMetadata()), RingAttn(AttentionMetadata(platform="cudnn"))
    cases = [
        (lambda: splash(q, k[..., :4], v), ValueError, r"SplashAttn: head_dim of k \(.*\) must be that of q \(.*\): 8"),
        (lambda: splash(q, k, v[:, :3]), ValueError, r"SplashAttn: v \(.*\) must have the length and heads of k"),
        (lambda: splash(q, k, v, MaskInfo(3, 3)), ValueError, r"SplashAttn: mask is for lengths"),
        (lambda: splash(q, k), TypeError, r"SplashAttn.forward_native\(\) missing 1 required .*'v'"),
        (lambda: ring(q, k, v), NotImplementedError, "RingAttn: flash_attention: platform 'cudnn' cannot do this call"),
        (
            lambda: PagedAttn(AttentionMetadata())(token, None, None, cache, where),
            ValueError,
            "PagedAttn: cache_metadata.block_tables must",
        ),
        (
            lambda: PagedAttn(AttentionMetadata())(token[None], None, None, cache, where),
            ValueError,
            r"PagedAttn: q must be \(1, tokens",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


def test_unknown_keywords_are_named_once_for_each_class():
    class Mine(SplashAttn):
        pass

    class Other(RingAttn):
        pass

    q, k, v = qkv(T=1)
    right = out(SplashAttn(AttentionMetadata()), q, k, v)
    for kind in (Mine, Other):
        attend = kind(AttentionMetadata())
        message = f"{kind.__name__} does not know head_mask, segment_ids, and ignores what is given there"
        with pytest.warns(UserWarning, match=message) as caught:
            result = attend(q, k, v, head_mask=None, segment_ids=3)
        assert [warning.filename for warning in caught] == [__file__]
        np.testing.assert_array_equal(result.attention_outputs, right)
        attend.forward_tpu(q, k, v, segment_ids=4)  # warnings are errors in tests


def test_a_class_may_have_a_forward_of_its_own():
    class Mine(FlashAttn):
        def forward_tpu(self, q, k, v):
            return "mine"

    class Heir(Mine):
        def forward_native(self, q, k, v, scale=None):
            return super().forward_native(q, k, v)

    assert Heir(AttentionMetadata(backend="tpu"))(1, 2, 3) == "mine"
    assert str(inspect.signature(Heir(AttentionMetadata()).forward_cuda)) == "(q, k, v, scale=None)"


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
