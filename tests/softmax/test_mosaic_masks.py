"""What the Mosaic GPU kernels compute of a tile's mask, run by run, against the mask as it is defined."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax import mosaic_gpu
from ejkernel.kernels.softmax.mosaic_gpu.tiles import Kernel
from ejkernel.kernels.softmax.reference import visible
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from ejkernel.types import MaskInfo

HOPPER = Target("gpu", "nvidia_h200", "sm_90", cores=132)
ROWS, BLOCK = 16, 8


def _segments(T, number=4, padding=5):
    ids = np.sort(np.random.default_rng(0).integers(0, number, T))
    return np.where(np.arange(T) < T - padding, ids, -1)[None]


def _scattered(T):
    return np.random.default_rng(1).integers(0, 3, T)[None]


def _positions(T):
    return MaskInfo.from_segments(_segments(T), q_positions=np.arange(T)[::-1][None], kv_positions=np.arange(T)[None])


MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal, T < S": {"causal": True, "S": 150},
    "causal, T > S": {"causal": True, "S": 61},
    "window": {"causal": True, "sliding_window": 30},
    "a window on both sides": {"sliding_window": (20, 9)},
    "a window of less than a tile": {"causal": True, "sliding_window": 3},
    "chunks": {"mask_info": MaskInfo(100, 100).apply_chunked(7)},
    "long chunks": {"mask_info": MaskInfo(100, 100).apply_chunked(37), "causal": True},
    "lengths": {"mask_info": MaskInfo.from_lengths([77], q_len=100), "causal": True},
    "segments": {"mask_info": MaskInfo.from_segments(_segments(100)), "causal": True},
    "segments and a window": {"mask_info": MaskInfo.from_segments(_segments(100)), "sliding_window": (25, 3)},
    "scattered segments": {"mask_info": MaskInfo.from_segments(_scattered(100)), "sliding_window": (40, 3)},
    "positions": {"mask_info": _positions(100), "sliding_window": (40, 3)},
    "packed": {"cum_seqlens_q": [0, 3, 40, 40, 90]},
    "packed, causal": {"cum_seqlens_q": [0, 33, 34, 100], "causal": True},
    "packed, a window": {"cum_seqlens_q": [0, 70, 97], "sliding_window": (25, 3)},
    "packed, other keys": {"cum_seqlens_q": [0, 3, 40, 40, 90], "cum_seqlens_k": [0, 20, 20, 66, 140], "S": 150},
    "packed, other keys, causal": {
        "cum_seqlens_q": [0, 3, 60, 90], "cum_seqlens_k": [0, 40, 70, 141], "S": 150, "causal": True
    },
    "packed, other keys, a window": {
        "cum_seqlens_q": [0, 50, 100], "cum_seqlens_k": [0, 40, 141], "S": 150, "sliding_window": (30, 2)
    },
    "packed, chunks": {
        "cum_seqlens_q": [0, 33, 100], "mask_info": MaskInfo(100, 100).apply_chunked(16), "causal": True
    },
}  # fmt: skip


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("name", list(MASKS))
def test_runs_and_intervals_are_the_mask(name, side):
    """Blocks that no run has are hidden, unmasked ones are seen, and `keep`, done in NumPy, says the rest."""
    options = dict(MASKS[name])
    T, S = 100, options.pop("S", 100)
    q, k = jnp.zeros((1, T, 1, 64), jnp.bfloat16), jnp.zeros((1, S, 1, 64), jnp.bfloat16)
    call = canonicalise(q, k, k, **{n: np.asarray(x) if "cum" in n else x for n, x in options.items()}).on(HOPPER)
    kernel = Kernel.of(call, replace(mosaic_gpu.default_config(call), persistent=False), side, ROWS, BLOCK)
    given = {n: np.asarray(x) for n, x in kernel.operands(call).items()}
    assert not ("cum_seqlens_q" in options and "mask_info" not in options and kernel.masks.segments)
    right = np.broadcast_to(np.asarray(visible(call))[0, 0], (T, S))
    right = right if side == "q" else right.T
    for tile in range(-(-right.shape[0] // ROWS)):
        rows = range(tile * ROWS, min((tile + 1) * ROWS, right.shape[0]))
        lo, full_lo, full_hi, hi = kernel.runs.constant or given["bounds"][0, 0, tile]
        for block in range(-(-right.shape[1] // BLOCK)):
            columns = np.arange(block * BLOCK, min((block + 1) * BLOCK, right.shape[1]))
            run = "" if full_lo <= block < full_hi else "before" if block < full_lo else "after"
            for row in rows:
                seen = _kept(kernel.masks, given, row, columns, run) if lo <= block < hi else False
                np.testing.assert_array_equal(right[row, columns], seen, f"{row=} {block=} {run=}")


def _kept(masks, given, row, columns, run):
    if not run:
        return True
    seen = np.ones(len(columns), bool)
    at = given["column_positions"][0, columns] if masks.positions else columns
    low, high = (given.get(name, np.zeros((1, 1000), int))[0, row] for name in ("row_low", "row_high"))
    assert low <= high
    if masks.lower and (run == "before" or masks.positions):
        seen &= at >= low
    if masks.upper:
        seen &= at <= high
    if masks.segments:
        seen &= given["row_segments"][0, row] == given["column_segments"][0, columns]
    return seen
