"""No queries or no keys: outputs and gradients of zero, an lse of the sinks (or -inf), and no block selected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import mean_pooling, native_sparse_attention, select_blocks, selected_attention
from harness import PLATFORMS, normal

B, H, HKV, D, DV = 2, 4, 2, 16, 8
CPU = [p for p in PLATFORMS if p.device == "cpu" and p.name in (None, "auto", "xla", "triton")]
LENGTHS = [(0, 12), (12, 0)]
BRANCHES = {
    "compressed": {"g_cmp": None},
    "selected": {"g_slc": None, "block_counts": 5},
    "every block": {"g_slc": None, "block_counts": 50},
    "indices": {"block_indices": None},
    "window": {"g_swa": None, "window_size": 3},
}


def qkv(T, S, B=B):
    shapes = (B, T, H, D), (B, S, HKV, D), (B, S, HKV, DV)
    return tuple(normal(name, shape) for name, shape in zip("qkv", shapes, strict=True))


def options(name, T, B=B):
    made = {"block_indices": jnp.zeros((B, T, HKV, 3), jnp.int32)}
    return {key: made.get(key, jnp.ones((B, T, H))) if x is None else x for key, x in BRANCHES[name].items()}


@pytest.mark.parametrize("platform", CPU, ids=lambda p: p.id)
@pytest.mark.parametrize(("T", "S", "sinks"), [(0, 12, True), (12, 0, True), (12, 0, False)])
def test_selected_attention(T, S, sinks, platform):
    indices = jnp.zeros((B, T, HKV, 3), jnp.int32)

    def attend(arrays):
        with platform.context():
            return selected_attention(
                **arrays, block_indices=indices, block_size=4, return_lse=True, platform=platform.name
            )

    arrays = dict(zip(("query", "key", "value"), qkv(T, S), strict=True))
    arrays |= {"softmax_aux": normal("sinks", (H,))} if sinks else {}
    (out, lse), pull = jax.vjp(jax.jit(attend), arrays)
    assert out.shape == (B, T, H, DV) and not np.any(out)
    expected = arrays["softmax_aux"][:, None] if sinks else -np.inf
    np.testing.assert_array_equal(lse, np.broadcast_to(expected, (B, H, T)))
    (gradients,) = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    for name, x in gradients.items():
        # each row's lse is its sink
        assert x.shape == arrays[name].shape and (x == (B * T if name == "softmax_aux" else 0)).all()


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_every_branch(T, S, name):
    def attend(q, k, v):
        return native_sparse_attention(q, k, v, **options(name, T), block_size=4)

    arrays = qkv(T, S)
    out, pull = jax.vjp(attend, *arrays)
    assert out.shape == (B, T, H, DV) and not np.any(out)
    for x, gradient in zip(arrays, pull(jnp.ones_like(out)), strict=True):
        assert gradient.shape == x.shape and not np.any(gradient)


@pytest.mark.parametrize("name", BRANCHES)
def test_packed_sequences_without_tokens(name):
    q, k, v = qkv(0, 0, 1)
    cu = jnp.array([0, 0, 0])
    out = native_sparse_attention(q, k, v, **options(name, 0, 1), cu_seqlens=cu, block_size=4)
    assert out.shape == (1, 0, H, DV)


@pytest.mark.parametrize("name", BRANCHES)
def test_caches_without_keys(name):
    q, k, v = qkv(6, 0)
    out = native_sparse_attention(q, k, v, **options(name, 6), kv_lengths=np.zeros(B, int), block_size=4)
    assert out.shape == (B, 6, H, DV) and not np.any(out)


@pytest.mark.parametrize("platform", CPU, ids=lambda p: p.id)
@pytest.mark.parametrize("count", [2, 8])
def test_choosing_blocks(count, platform):
    q, k, _ = qkv(0, 0)
    with platform.context():
        blocks = select_blocks(q, k, count, block_size=4, platform=platform.name)
        assert blocks.shape == (B, 0, HKV, count)
        q, k, _ = qkv(6, 2)
        blocks = select_blocks(q, k, count, kv_lengths=np.zeros(B, int), block_size=4, platform=platform.name)
    assert blocks.shape == (B, 6, HKV, count) and (np.asarray(blocks) == -1).all()


@pytest.mark.parametrize("platform", CPU, ids=lambda p: p.id)
def test_compressing_packed_sequences_without_tokens(platform):
    x = jnp.ones((1, 0, HKV, D))
    with platform.context():
        out, pull = jax.vjp(lambda x: mean_pooling(x, jnp.array([0, 0]), chunk_size=4, platform=platform.name), x)
    assert out.shape[0] == 1 and not np.any(out) and pull(out)[0].shape == x.shape
