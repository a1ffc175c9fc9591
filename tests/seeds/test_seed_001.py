"""The examples of seed 001, as printed; shapes are fixed up only where the document contradicts itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo


def test_quick_start():
    # Create query, key, value tensors
    q = jnp.ones((2, 128, 8, 64))  # (batch, seq_len, heads, head_dim)
    k = jnp.ones((2, 128, 8, 64))
    v = jnp.ones((2, 128, 8, 64))

    # Run flash attention
    output = flash_attention(q, k, v, causal=True)

    assert output.shape == (2, 128, 8, 64)
    np.testing.assert_allclose(output, 1.0, rtol=1e-6)


def test_with_masking():
    # the document's q has length 128, its segment ids 6
    q = k = v = jnp.arange(6.0).reshape(1, 6, 1, 1) * jnp.ones((2, 6, 8, 64))

    # Create mask from segment IDs
    segment_ids = jnp.array([[1, 1, 2, 2, -1, -1]])  # -1 = padding
    mask_info = MaskInfo.from_segments(segment_ids)

    # Use with attention
    output = flash_attention(q, k, v, mask_info=mask_info)

    assert not np.any(output[:, 4:])  # padding
    assert (output[:, :2] <= 1).all() and (output[:, 2:4] >= 2).all() and (output[:, 2:4] <= 3).all()


def test_packed_sequence_batching():
    # the document's q has length 128, its segment ids 10
    q = k = v = jnp.arange(10.0).reshape(1, 10, 1, 1) * jnp.ones((1, 10, 8, 64))

    # Pack multiple sequences into one batch
    segment_ids = jnp.array([
        [1, 1, 1, 2, 2, 3, 3, 3, 3, -1]  # 3 sequences, 1 padding
    ])  # fmt: skip
    mask_info = MaskInfo.from_segments(segment_ids)

    # Each sequence only attends within itself
    output = flash_attention(q, k, v, mask_info=mask_info)

    for first, last in ((0, 2), (3, 4), (5, 8)):
        assert (output[:, first : last + 1] >= first).all() and (output[:, first : last + 1] <= last + 1e-5).all()
    assert not np.any(output[:, 9:])


def test_inference_with_kv_cache():
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (2, 1, 8, 64))
    key_cache, value_cache = (jax.random.normal(k, (8, 16, 2, 64)) for k in keys[1:])
    context_lens = jnp.array([20, 5])
    block_tables = jnp.array([[3, 1], [7, 0]])

    from ejkernel.modules import page_attention

    output = page_attention(
        query,  # (batch, 1, heads, dim) - single token
        key_cache,  # (num_blocks, block_size, kv_heads, dim)
        value_cache,
        context_lens,  # (batch,) - current context length
        block_tables,  # (batch, max_blocks) - page table
    )

    assert output.shape == (2, 1, 8, 64)
    for row, (length, pages) in enumerate([(20, [3, 1]), (5, [7])]):
        k, v = (cache[jnp.array(pages)].reshape(1, -1, 2, 64)[:, :length] for cache in (key_cache, value_cache))
        np.testing.assert_allclose(output[row], flash_attention(query[row : row + 1], k, v)[0], atol=1e-5)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_distributed_execution():
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    q = k = v = jnp.ones((2, 128, 8, 64))
    devices = np.asarray(jax.devices())  # the document reshapes a list
    mesh = Mesh(devices.reshape(2, 4), axis_names=("dp", "tp"))
    with mesh:
        output = flash_attention(
            q, k, v,
            mesh=mesh,
            in_specs=(P("dp", None, "tp", None),) * 3,
            out_specs=P("dp", None, "tp", None),
        )  # fmt: skip
    np.testing.assert_allclose(output, 1.0, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_long_sequence_training():
    q = k = v = jax.random.normal(jax.random.key(0), (1, 64, 2, 16))

    from jax.sharding import Mesh

    from ejkernel.modules import ring_attention

    # Distribute very long sequences across devices
    mesh = Mesh(jax.devices(), axis_names=("sp",))
    with mesh:
        output = ring_attention(
            q, k, v,
            axis_name="sp",
            causal=True,
        )  # fmt: skip
    assert len(output.sharding.device_set) == jax.device_count() == 8
    np.testing.assert_allclose(output, flash_attention(q, k, v, causal=True), atol=1e-5)


def test_force_a_specific_platform():
    q = k = v = jnp.ones((2, 128, 8, 64))
    with pytest.raises(NotImplementedError, match="platform 'triton' cannot do this call"):
        flash_attention(q, k, v, platform="triton")  # GPU
    with pytest.raises(NotImplementedError, match="platform 'pallas' cannot do this call"):
        flash_attention(q, k, v, platform="pallas")  # TPU
    output = flash_attention(q, k, v, platform="xla")  # Fallback
    np.testing.assert_allclose(output, 1.0, rtol=1e-6)


def test_the_packages_of_the_overview_import():
    import ejkernel.modules
    import ejkernel.ops
    import ejkernel.types

    assert ejkernel.modules and ejkernel.types and ejkernel.ops
