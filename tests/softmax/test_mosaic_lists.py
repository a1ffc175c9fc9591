"""The lists of the Mosaic GPU kernels against the mask they stand for, and what takes a pattern there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax import mosaic_gpu
from ejkernel.kernels.softmax.mosaic_gpu.block_lists import SUB_BLOCK, block_lists
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.reference import visible
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from ejkernel.ops.dispatch import choose
from ejkernel.types import BlockPattern, MaskInfo

HOPPER = Target("gpu", "nvidia_h200", "sm_90", cores=132)
B, H = 2, 2


def call_of(T, S, block, lead=(), D=1, dtype=jnp.float32, seed=0, **options):
    bq, bk = block
    blocks = np.random.default_rng(seed).random((*lead, -(-T // bq), -(-S // bk))) < 0.5
    pattern = BlockPattern.from_dense(blocks, block_size=block)
    mask = MaskInfo.from_block_pattern(pattern, q_len=T, kv_len=S)
    q, k = jnp.zeros((B, T, H, D), dtype), jnp.zeros((B, S, H, D), dtype)
    return canonicalise(q, k, k, mask_info=mask, **options)


def padded(x, rows, columns):
    """x (B, H, T, S) with more rows and columns, of zeros."""
    return np.pad(x, ((0, 0), (0, 0), (0, rows - x.shape[2]), (0, columns - x.shape[3])))


@pytest.mark.parametrize(
    ("T", "S", "block", "lead", "side", "rows", "per_block", "longest_first", "causal"),
    [
        (300, 200, (64, 64), (), "q", 128, 2, False, True),
        (300, 200, (64, 64), (B, H), "k", 128, 1, False, True),
        (200, 385, (128, 128), (H,), "q", 128, 1, False, False),
        (200, 385, (64, 128), (H,), "k", 128, 2, True, True),
        (200, 385, (192, 64), (), "k", 128, 1, True, False),
        (200, 385, (64, 64), (), "k", 64, 2, False, True),
    ],
)
def test_lists_hold_what_the_mask_shows(T, S, block, lead, side, rows, per_block, longest_first, causal):
    """Every visible pair is in one sub-block that its half sees, unmasked blocks hide nothing, and none comes twice."""
    call = call_of(T, S, block, lead, causal=causal)
    lists = block_lists(call, side, rows, per_block, longest_first=longest_first)
    bounds, entries = (np.asarray(lists[name]) for name in ("bounds", "entries"))
    assert bounds.dtype == entries.dtype == np.int32 and entries.shape[-1] % per_block == 0
    n, m = bounds.shape[2], entries.shape[3]
    bounds, entries = np.broadcast_to(bounds, (B, H, n, 4)), np.broadcast_to(entries, (B, H, n, m))
    seen = np.asarray(jnp.broadcast_to(visible(call), (B, H, T, S)))
    within = np.ones((1, 1, T, S), bool)
    if side == "k":
        seen, within = seen.swapaxes(2, 3), within.swapaxes(2, 3)
    columns = -(-seen.shape[3] // SUB_BLOCK) * SUB_BLOCK
    seen, within = padded(seen, n * rows, columns), padded(within, n * rows, columns)[0, 0]
    neighbours = np.arange(n * rows // SUB_BLOCK).reshape(1, 1, n, -1)
    starts_of = np.broadcast_to(np.asarray(lists.get("rows", neighbours)) * SUB_BLOCK, (B, H, n, rows // SUB_BLOCK))
    assert (np.sort(starts_of.reshape(B, H, -1)) == np.arange(n * rows // SUB_BLOCK) * SUB_BLOCK).all()
    for b, h, i in np.ndindex(B, H, n):
        lo, full_lo, full_hi, hi = bounds[b, h, i]
        assert (lo, full_lo) == (0, 0) and full_hi <= hi
        visited = entries[b, h, i, : hi * per_block]
        starts, bits = visited & -SUB_BLOCK, visited & (SUB_BLOCK - 1)
        shown = starts[bits > 0]
        assert len(set(shown)) == len(shown) and bits.max(initial=0) < 1 << rows // SUB_BLOCK
        columns = (starts_of[b, h, i][:, None] + np.arange(SUB_BLOCK)).ravel()
        tile, inside = seen[b, h][columns], within[columns]
        missing = tile.copy()
        for number, (start, bit) in enumerate(zip(starts, bits, strict=True)):
            sub_block = slice(start, start + SUB_BLOCK)
            for half in range(rows // SUB_BLOCK):
                if bit >> half & 1:
                    missing[half * SUB_BLOCK : (half + 1) * SUB_BLOCK, sub_block] = False
            if number < full_hi * per_block:
                assert (tile[:, sub_block] | ~inside[:, sub_block]).all()
                assert inside[:, sub_block].any(axis=0).all()  # a ragged last sub-block is masked
        assert not missing.any()


def test_a_pattern_that_does_not_fit_is_refused():
    def reasons(block, D=128):
        return mosaic_gpu.unsupported(call_of(256, 256, block, D=D, dtype=jnp.bfloat16).on(HOPPER))

    assert reasons((64, 64)) == reasons((128, 192), 64) == []
    assert reasons((64, 32)) == ["a block pattern needs blocks of multiples of 64, not (64, 32)"]


def test_auto_takes_hopper_s_own_kernels():
    call = call_of(256, 256, (64, 64), D=128, dtype=jnp.bfloat16, causal=True).on(HOPPER)
    _, why = choose(FLASH_ATTENTION, call, None, None)
    assert "pallas" not in why.refusals, why.refusals
    order = re.search(r"first of (.*) that can", why.reason)
    assert order and order[1].split(", ").index("pallas") < order[1].split(", ").index("triton"), why.reason


@pytest.mark.parametrize("side", ["q", "k"])
def test_another_pattern_is_no_other_program(side):
    traced = []

    @jax.jit
    def lists(pattern):
        traced.append(pattern.shape)
        call = call_of(256, 256, (64, 64))
        return block_lists(type(call)(call.spec, {**call.arrays, "pattern": pattern}), side, 128, 2)

    both = [lists(jnp.asarray(np.random.default_rng(seed).random((1, 1, 4, 4)) < 0.5)) for seed in range(2)]
    assert len(traced) == 1
    assert not np.array_equal(both[0]["entries"], both[1]["entries"])
