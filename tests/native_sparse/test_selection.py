"""Which blocks are selected: against a brute-force choice, on every platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.native_sparse import reference
from ejkernel.kernels.native_sparse.block_table import block_table
from ejkernel.kernels.native_sparse.operations import SELECT_BLOCKS
from ejkernel.kernels.native_sparse.selection import selection_call
from ejkernel.modules import mean_pooling, select_blocks
from ejkernel.ops import interpret, run
from harness import normal

# id: (B, T, H, Hkv, D, block_size, count, cu_seqlens, kv_lengths with S)
CASES = {
    "plain": (1, 44, 4, 2, 16, 2, 8, None, None),
    "mha": (2, 30, 1, 1, 16, 1, 5, None, None),
    "mqa-6": (1, 30, 6, 1, 40, 3, 6, None, None),
    "one-head-64": (1, 20, 64, 1, 16, 2, 5, None, None),
    "two-of-three": (1, 20, 2, 1, 16, 4, 2, None, None),
    "more-than-there-are": (1, 20, 2, 1, 16, 4, 16, None, None),
    "packed": (1, 50, 4, 2, 16, 2, 7, (0, 0, 7, 7, 37, 38, 45), None),
    "cache": (2, 3, 4, 2, 16, 4, 7, None, ((2, 90), 90)),
}
on_platforms = pytest.mark.parametrize("chosen", ["xla", "triton"])
by_name = pytest.mark.parametrize("name", CASES)
# tiles that are small for the interpreter, so that there are several
CONFIGS = {"xla": {"block_q": 16}, "triton": {"rows": 32, "blocks": 16}}


def selected(call, chosen):
    with interpret():
        return run(SELECT_BLOCKS, call, platform=chosen, cfg=CONFIGS[chosen])["indices"]


def call_of(name: str, dtype: str = "float32"):
    B, T, H, Hkv, D, size, count, cu, cache = CASES[name]
    lengths, S = cache or (None, T)
    table = block_table(T, S, size, None if cu is None else np.asarray(cu, np.int32), lengths)
    query, key = normal("query", (B, T, H, D), dtype), normal("key", (B, table.starts.shape[1], Hkv, D), dtype)
    # any would do: here the heads of a group weigh differently
    lse = normal("lse", (B, H, T))
    return selection_call(query, key, lse, table, scale=D**-0.5, count=count)


def brute_force(call) -> np.ndarray:
    """One query at a time, in numpy."""
    weight = np.asarray(reference.importance(call), np.float64)
    B, T, Hkv, _ = weight.shape
    first, own_block = (np.broadcast_to(call[name], (B, T)) for name in ("first_row", "own_block"))
    blocks = np.full((B, T, Hkv, call.spec.count), -1)
    for b, t, h in np.ndindex(B, T, Hkv):
        last = own_block[b, t]
        always = [n for n, there in ((0, last >= 0), (last, last >= 1), (last - 1, last >= 2)) if there]
        free = [n for n in range(last + 1) if n not in always]
        best = sorted(free, key=lambda n: (-weight[b, t, h, first[b, t] + n], n))
        chosen = (always + best)[: call.spec.count]
        blocks[b, t, h, : len(chosen)] = chosen
    return blocks


@on_platforms
@by_name
def test_equals_brute_force(name, chosen):
    call = call_of(name)
    blocks = selected(call, chosen)
    np.testing.assert_array_equal(blocks, brute_force(call))
    np.testing.assert_array_equal(reference.select(call), blocks)


@on_platforms
def test_low_precision_selects_what_weighs_as_much(chosen):
    call = call_of("plain", "bfloat16")
    blocks = selected(call, chosen)
    weight = np.maximum(np.asarray(reference.importance(call)), 0)

    def total(indices):
        return np.where(indices >= 0, np.take_along_axis(weight, np.maximum(indices, 0), -1), 0).sum(-1)

    np.testing.assert_allclose(total(np.asarray(blocks)), total(brute_force(call)), rtol=1e-5)


@on_platforms
def test_ties_go_to_the_lower_block(chosen):
    B, T, H, Hkv, D, size, count, _, _ = CASES["plain"]
    table = block_table(T, T, size)
    zeros = jnp.zeros((B, T, H, D)), jnp.zeros((B, table.starts.shape[1], Hkv, D)), jnp.zeros((B, H, T))
    blocks = selected(selection_call(*zeros, table, scale=1.0, count=count), chosen)
    assert blocks[0, -1, 0].tolist() == [0, 21, 20, 1, 2, 3, 4, 5]


def test_select_blocks_follows_the_compressed_weights():
    """The public function finds the normaliser of the weights itself."""
    query, key = normal("query", (1, 40, 4, 16)), normal("key", (1, 40, 2, 16))
    compressed = mean_pooling(key, chunk_size=4)
    blocks = np.asarray(select_blocks(query, compressed, 6, block_size=4))
    t = 38  # of block 9: blocks 0 to 8 are whole
    logits = np.einsum("hgd,nhd->hgn", query[0, t].reshape(2, 2, 16), compressed[0, :9]) / 4
    weights = (np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)).sum(1)
    for h in range(2):
        best = 1 + np.argsort(-weights[h, 1:8], kind="stable")[:3]
        assert blocks[0, t, h].tolist() == [0, 9, 8, *best]


def test_no_array_of_queries_by_blocks():
    """At 64k tokens the weights of all queries would be 1 GiB for each key head."""
    T, N = 65536, 4096
    shapes = ((1, T, 4, 64), (1, N, 4, 64), (1, 4, T))
    table = block_table(T, T, 16)

    def choose(query, key, lse):
        return run(SELECT_BLOCKS, selection_call(query, key, lse, table, scale=1.0, count=16))["indices"]

    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    memory = jax.jit(choose).lower(*arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * T * N


def test_bad_input():
    query, key = jnp.zeros((1, 40, 4, 16)), jnp.zeros((1, 10, 2, 16))
    with pytest.raises(ValueError, match=r"a row for each of the 20 blocks of 40 tokens; .* need kv_lengths"):
        select_blocks(query, key, block_size=2)
    with pytest.raises(ValueError, match="block_counts=0 must be at least 1"):
        select_blocks(query, key, 0, block_size=4)
    with interpret(), pytest.raises(NotImplementedError, match="200 blocks for a query: at most 128"):
        select_blocks(query, key, 200, block_size=4, platform="triton")
