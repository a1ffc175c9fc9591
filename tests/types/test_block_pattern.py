"""BlockPattern against its rules written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types import DIMS, BlockPattern, format_shape


def local_stride_rule(H, n, local, stride, homo, dense_heads, offset):
    out = np.zeros((H, n, n), bool)
    step = max(1, stride // H)
    for h, q, k in np.ndindex(H, n, n):
        column = (k + (0 if homo else h) * step + offset) % stride == 0
        out[h, q, k] = k <= q and (h >= H - dense_heads or q - k < local or column)
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(1, 9),
    st.booleans(), st.integers(0, 5), st.integers(-3, 9),
)  # fmt: skip
def test_local_stride(H, n, local, stride, homo, dense_heads, offset):
    dense_heads = min(dense_heads, H)
    pattern = BlockPattern.local_stride(H, n, local, stride, homo_head=homo, num_dense_heads=dense_heads, offset=offset)
    np.testing.assert_array_equal(pattern.dense, local_stride_rule(H, n, local, stride, homo, dense_heads, offset))
    assert pattern.is_kv_cache_efficient()
    assert pattern.block_shape == (64, 64)


def test_homogeneous_heads_are_stored_once():
    pattern = BlockPattern.local_stride(8, 4, 1, 4, homo_head=True)
    assert pattern.blocks.shape == (1, 4, 4) and pattern.dense.shape == (8, 4, 4)


@pytest.mark.parametrize("left, right", [(0, 0), (2, 0), (1, 2), (9, 9)])
def test_sliding_blocks(left, right):
    expected = [[-left <= k - q <= right for k in range(5)] for q in range(5)]
    assert BlockPattern.sliding_blocks(5, left, right, block_size=16).dense.tolist() == expected


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5, 2, 3, 4), (5, 1, 3, 4)])
@pytest.mark.parametrize("dtype", [bool, np.int32])
def test_dense_round_trip(shape, dtype):
    mask = np.random.default_rng(0).random(shape) < 0.5
    pattern = BlockPattern.from_dense(mask.astype(dtype), block_size=(16, 32))
    assert pattern.dense.shape == shape and pattern.dense.dtype == bool
    np.testing.assert_array_equal(pattern.dense, mask)
    assert pattern.block_shape == (16, 32)


def brute_efficient(blocks, bq, bk):
    for k in range(blocks.shape[-1]):
        for q in range(blocks.shape[-2]):
            exists = k * bk <= (q + 1) * bq - 1
            for later in range(q + 1, blocks.shape[-2]):
                if exists and (~blocks[..., q, k] & blocks[..., later, k]).any():
                    return False
    return True


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=24, max_size=24), st.sampled_from([(1, 1), (2, 1), (1, 2)]))
def test_kv_cache_efficiency(bits, block_size):
    blocks = np.array(bits).reshape(2, 4, 3)
    pattern = BlockPattern.from_dense(blocks, block_size=block_size)
    assert pattern.is_kv_cache_efficient() == brute_efficient(blocks, *block_size)


def test_sliding_window_drops_blocks_for_good():
    assert BlockPattern.sliding_blocks(6, 2).is_kv_cache_efficient()
    assert not BlockPattern.from_dense(np.array([[1, 0, 0], [0, 1, 0], [1, 1, 1]])).is_kv_cache_efficient()


def test_pytree_and_transformations():
    pattern = BlockPattern.local_stride(2, 4, 1, 2, block_size=16)
    leaves, tree = jax.tree.flatten(pattern)
    assert len(leaves) == 1 and jax.tree.unflatten(tree, leaves).block_size == 16
    np.testing.assert_array_equal(jax.jit(lambda p: p.dense)(pattern), pattern.dense)
    batch = BlockPattern.from_dense(jnp.ones((3, 2, 4, 4), bool))
    assert jax.vmap(lambda p: p.dense)(batch).shape == (3, 2, 4, 4)
    # static patterns stay known while tracing
    assert jax.jit(lambda: jnp.int32(BlockPattern.sliding_blocks(4, 1).is_kv_cache_efficient()))() == 1


BAD = {
    "heads": (ValueError, "num_heads=0 must be at least 1", lambda: BlockPattern.local_stride(0, 4, 1, 2)),
    "local": (ValueError, "local_blocks=0 must be at least 1", lambda: BlockPattern.local_stride(2, 4, 0, 2)),
    "stride": (ValueError, "vert_stride=0 must be at least 1", lambda: BlockPattern.local_stride(2, 4, 1, 0)),
    "dense heads": (
        ValueError,
        "num_dense_heads must be at most num_heads=2, got 3",
        lambda: BlockPattern.local_stride(2, 4, 1, 2, num_dense_heads=3),
    ),
    "left": (ValueError, "left=-1 must be at least 0", lambda: BlockPattern.sliding_blocks(4, -1)),
    "block size": (
        ValueError,
        "block_size=0 must be at least 1",
        lambda: BlockPattern.sliding_blocks(4, 1, block_size=0),
    ),
    "block size pair": (
        ValueError,
        r"block_size=\(1, 2, 3\) must be an int or a pair",
        lambda: BlockPattern.sliding_blocks(4, 1, block_size=(1, 2, 3)),  # pyright: ignore[reportArgumentType]
    ),
    "bool count": (TypeError, "num_blocks must be an int, got True", lambda: BlockPattern.sliding_blocks(True, 1)),
    "rank": (ValueError, r"got \(3,\)", lambda: BlockPattern.from_dense(np.ones(3, bool))),
    "float": (TypeError, "0/1", lambda: BlockPattern.from_dense(np.ones((3, 3)))),
    "values": (ValueError, "only 0 and 1", lambda: BlockPattern.from_dense([[0, 2]])),
    "traced": (
        ValueError,
        "traced",
        lambda: jax.jit(lambda m: jnp.int32(BlockPattern.from_dense(m).is_kv_cache_efficient()))(np.eye(2, dtype=bool)),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    error, message, make = BAD[case]
    with pytest.raises(error, match=message):
        make()


def test_glossary():
    assert set(DIMS) == {"B", "T", "S", "H", "Hkv", "G", "D", "Dv", "N", "P"}
    assert format_shape("B T", (2, 3)) == "(B=2, T=3)"
    assert format_shape("B T", (2,)) == "(2,), expected (B, T)"
