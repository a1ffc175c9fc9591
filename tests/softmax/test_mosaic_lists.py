"""The lists of the Mosaic GPU kernels against the mask they stand for, and what takes a pattern there."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax import mosaic_gpu
from ejkernel.kernels.softmax.mosaic_gpu.block_lists import PIECE, entries
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


def whole(x, rows, columns):
    """x (B, H, T, S) with more rows and columns, of zeros."""
    return np.pad(x, ((0, 0), (0, 0), (0, rows - x.shape[2]), (0, columns - x.shape[3])))


@pytest.mark.parametrize(
    ("T", "S", "block", "lead", "side", "rows", "parts", "alike", "causal"),
    [
        (300, 200, (64, 64), (), "q", 128, 2, False, True),
        (300, 200, (64, 64), (B, H), "k", 128, 1, False, True),
        (200, 385, (128, 128), (H,), "q", 128, 1, False, False),
        (200, 385, (64, 128), (H,), "k", 128, 2, True, True),
        (200, 385, (192, 64), (), "k", 128, 1, True, False),
        (200, 385, (64, 64), (), "k", 64, 2, False, True),
    ],
)
def test_lists_hold_what_the_mask_shows(T, S, block, lead, side, rows, parts, alike, causal):
    """Every visible pair is in one piece that its half is shown; unmasked blocks hide nothing; no piece comes twice."""
    call = call_of(T, S, block, lead, causal=causal)
    found = entries(call, side, rows, parts, alike=alike)
    bounds, listed = (np.asarray(found[name]) for name in ("bounds", "entries"))
    assert bounds.dtype == listed.dtype == np.int32 and listed.shape[-1] % parts == 0
    n, m = bounds.shape[2], listed.shape[3]
    bounds, listed = np.broadcast_to(bounds, (B, H, n, 4)), np.broadcast_to(listed, (B, H, n, m))
    seen = np.asarray(jnp.broadcast_to(visible(call), (B, H, T, S)))
    within = np.ones((1, 1, T, S), bool)
    if side == "k":
        seen, within = seen.swapaxes(2, 3), within.swapaxes(2, 3)
    columns = -(-seen.shape[3] // PIECE) * PIECE
    seen, within = whole(seen, n * rows, columns), whole(within, n * rows, columns)[0, 0]
    plain = np.arange(n * rows // PIECE).reshape(1, 1, n, -1)
    starts_of = np.broadcast_to(np.asarray(found.get("rows", plain)) * PIECE, (B, H, n, rows // PIECE))
    assert (np.sort(starts_of.reshape(B, H, -1)) == np.arange(n * rows // PIECE) * PIECE).all()
    for b, h, i in np.ndindex(B, H, n):
        lo, full_lo, full_hi, hi = bounds[b, h, i]
        assert (lo, full_lo) == (0, 0) and full_hi <= hi
        visited = listed[b, h, i, : hi * parts]
        starts, bits = visited & -PIECE, visited & (PIECE - 1)
        shown = starts[bits > 0]
        assert len(set(shown)) == len(shown) and bits.max(initial=0) < 1 << rows // PIECE
        columns = (starts_of[b, h, i][:, None] + np.arange(PIECE)).ravel()
        tile, inside = seen[b, h][columns], within[columns]
        left = tile.copy()
        for place, (start, bit) in enumerate(zip(starts, bits, strict=True)):
            piece = slice(start, start + PIECE)
            for half in range(rows // PIECE):
                if bit >> half & 1:
                    left[half * PIECE : (half + 1) * PIECE, piece] = False
            if place < full_hi * parts:
                assert (tile[:, piece] | ~inside[:, piece]).all()
                assert inside[:, piece].any(axis=0).all()  # a ragged last piece is masked
        assert not left.any()


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
        return entries(type(call)(call.spec, {**call.arrays, "pattern": pattern}), side, 128, 2)

    found = [lists(jnp.asarray(np.random.default_rng(seed).random((1, 1, 4, 4)) < 0.5)) for seed in range(2)]
    assert len(traced) == 1
    assert not np.array_equal(found[0]["entries"], found[1]["entries"])
