"""Block patterns on the softmax family: any size of block, one per key head, and data that no program depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax import triton
from ejkernel.kernels.softmax.spec import Band, Spec
from ejkernel.modules import blocksparse_attention, flash_attention
from ejkernel.ops import Call, interpret
from ejkernel.types import BlockPattern, MaskInfo
from tolerances import assert_close

T, H = 200, 4


def qkv(Hkv=H):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (1, T, heads, 16)) for key, heads in zip(keys, (H, Hkv, Hkv), strict=True)]


def dense(pattern):
    """The same attention through a mask of all pairs."""
    bq, bk = pattern.block_shape
    blocks = np.asarray(pattern.blocks).repeat(bq, -2).repeat(bk, -1)[..., :T, :T]
    return MaskInfo.from_attention_mask(jnp.asarray(blocks)[None] & np.tri(T, dtype=bool))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, (16, 64), (128, 32)])
def test_local_stride_in_blocks_of_any_size(block_size):
    blocks = -(-T // min(block_size if isinstance(block_size, tuple) else (block_size,)))
    pattern = BlockPattern.local_stride(
        H, blocks, local_blocks=1, vert_stride=2, num_dense_heads=1, block_size=block_size
    )
    q, k, v = qkv()
    expected = flash_attention(q, k, v, mask_info=dense(pattern))
    np.testing.assert_allclose(blocksparse_attention(q, k, v, block_mask=pattern), expected, atol=2e-6)


def test_lists_of_narrow_blocks_have_wider_sub_blocks_where_they_would_be_long(monkeypatch):
    def sub_block(T):
        pattern = jax.ShapeDtypeStruct((1, 32, T // 16, T // 16), bool)
        shapes = dict.fromkeys(("query", "key", "value"), jax.ShapeDtypeStruct((1, T, 32, 128), "bfloat16"))
        spec = Spec(scale=1.0, band=Band(None, 0), pattern_block=(16, 16))
        return triton.sub_block_keys(Call(spec, {**shapes, "pattern": pattern}), triton.Tile(64, 64, 4, 2))

    assert [sub_block(T) for T in (8192, 32768, 65536, 131072)] == [16, 16, 32, None]
    # and what they hold is found in them
    monkeypatch.setattr(triton, "_MOST_LISTED", 4 * 7 * 4)
    pattern = BlockPattern.local_stride(H, 13, local_blocks=1, vert_stride=4, block_size=16)
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv(Hkv=2))
    with interpret():
        out = blocksparse_attention(q, k, v, block_mask=pattern, platform="triton")
    naive = flash_attention(q, k, v, mask_info=dense(pattern))
    exact = flash_attention(*(x.astype(jnp.float32) for x in (q, k, v)), mask_info=dense(pattern))
    assert_close({"out": out}, {"out": exact}, {"out": naive}, "outputs")


def test_a_pattern_in_the_program_is_not_evaluated_by_the_compiler():
    """Which is slow enough at it to keep a user waiting for a minute."""
    pattern = BlockPattern.local_stride(H, 13, local_blocks=1, vert_stride=2, block_size=16)
    program = jax.jit(lambda q, k, v: blocksparse_attention(q, k, v, block_mask=pattern))
    assert " sort(" in program.lower(*qkv()).compile().as_text()


def test_a_pattern_per_key_head_serves_its_group():
    options = {"local_blocks": 1, "vert_stride": 8, "num_dense_heads": 1, "block_size": 16}
    pattern = BlockPattern.local_stride(H, 13, num_kv_heads=2, **options)
    # h counts key heads, the step follows from the query heads
    for h, q, k in np.ndindex(H, 13, 13):
        shown = q == k or (k + h // 2 * 2) % 8 == 0 or h // 2 == 1
        assert pattern.blocks[h, q, k] == (k <= q and shown)
    q, k, v = qkv(Hkv=2)
    expected = flash_attention(q, k, v, mask_info=dense(pattern))
    np.testing.assert_allclose(blocksparse_attention(q, k, v, block_mask=pattern), expected, atol=2e-6)


@pytest.mark.parametrize("platform", ["xla", "triton"])
def test_patterns_are_data(platform):
    """One program for every pattern of a size, forward and backward."""
    traced = []

    @jax.jit
    def step(q, pattern):
        traced.append(1)
        return jax.grad(lambda x: blocksparse_attention(x, x, x, block_mask=pattern, platform=platform).sum())(q)

    q = qkv()[0][:, :64]
    with interpret():
        for stride in (1, 2, 3):
            pattern = BlockPattern.local_stride(H, 4, 1, stride, block_size=16)
            on_device = BlockPattern(jnp.asarray(pattern.blocks), 16, H)
            result = step(q, on_device)
            expected = jax.grad(lambda x, p=pattern: flash_attention(x, x, x, mask_info=_mask(p)).sum())(q)
            np.testing.assert_allclose(result, expected, atol=1e-5)
    assert len(traced) == 1 and step._cache_size() == 1


def _mask(pattern):
    return MaskInfo.from_block_pattern(pattern, q_len=64).apply_causal()
