"""Masks of one step of many: causality with an offset that is traced or of each row, and the newest queries alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.types import BlockPattern, MaskInfo

T, S = 3, 7
OFFSETS = np.array([0, -2, 3])


def shown(mask: MaskInfo) -> np.ndarray:
    return np.asarray(mask.attention_mask)


def test_a_traced_offset_is_the_static_one():
    mask = MaskInfo.from_segments([[1, 1, 2]] * 3, [[1, 1, 1, 2, 2, 2, -1]] * 3)
    traced = jax.jit(lambda offset: mask.apply_causal(offset).attention_mask)
    for offset in (-9, -1, 0, 2, 2**31 - 1, -(2**31)):
        np.testing.assert_array_equal(traced(offset), shown(mask.apply_causal(offset)))


def test_an_offset_of_each_row():
    for mask in (
        MaskInfo(T, S),
        MaskInfo(T, S).apply_sliding_window((2, 2)),
        MaskInfo.from_segments([[1] * T] * 3, [[1] * S] * 3),
    ):
        by_row = shown(mask.apply_causal(offset=OFFSETS))
        for row, offset in enumerate(OFFSETS):
            alone = shown(mask.apply_causal(int(offset)))
            np.testing.assert_array_equal(by_row[row], alone[min(row, len(alone) - 1)])


def test_vmap_over_offsets_is_a_loop():
    mapped = jax.vmap(lambda offset: MaskInfo(T, S).apply_causal(offset))(jnp.array(OFFSETS))
    np.testing.assert_array_equal(mapped.attention_mask, shown(MaskInfo(T, S).apply_causal(OFFSETS)))


def test_positions_decide():
    mask = MaskInfo.from_segments([1] * T, [1] * S, [4, 5, 6], list(range(S)))
    np.testing.assert_array_equal(shown(mask.apply_causal([-1]))[0, 0], np.arange(S) <= np.array([[3], [4], [5]]))


def test_a_number_stays_symbolic():
    assert MaskInfo(T, S).apply_causal(jnp.int32(2)).is_symbolic
    of_rows = MaskInfo(T, S).apply_causal([2])
    assert of_rows.is_symbolic and of_rows.rule is not None


def test_attention_takes_them():
    q, k = (jax.random.normal(jax.random.key(n), (3, n, 2, 8)) for n in (T, S))
    out = jax.jit(lambda offset: flash_attention(q, k, k, mask_info=MaskInfo(T, S).apply_causal(offset)))(OFFSETS)
    for row, offset in enumerate(OFFSETS):
        alone = (x[row : row + 1] for x in (q, k, k))
        expected = flash_attention(*alone, mask_info=MaskInfo(T, S).apply_causal(int(offset)))
        np.testing.assert_allclose(out[row], expected[0], atol=1e-6)


def test_bad_offsets():
    for offset, error, message in (
        (1.5, TypeError, "offset must be an int, got float"),
        (jnp.ones(2), TypeError, "offset must hold integers, got float32"),
        (np.zeros((2, 2), int), ValueError, r"offset must have 0 or 1 dimensions, got shape \(2, 2\)"),
    ):
        with pytest.raises(error, match=message):
            MaskInfo(T, S).apply_causal(offset)
    with pytest.raises(ValueError, match=r"batch sizes must agree or be 1, got {'mask': 2, 'offset': 3}"):
        MaskInfo.from_segments([[1] * 3] * 2).apply_causal([0, 1, 2])


# The newest queries --------------------------------------------------------------------------------------------

L = 12
PATTERN = BlockPattern.local_stride(2, 3, local_blocks=1, vert_stride=2, block_size=4)
MASKS = {
    "everything": MaskInfo(L, L),
    "causal": MaskInfo(L, L).apply_causal(),
    "window": MaskInfo(L, L).apply_sliding_window((3, 0)),
    "chunks": MaskInfo(L, L).apply_causal().apply_chunked(5),
    "segments": MaskInfo.from_segments([[1] * 5 + [2] * 7, [1] * 12]).apply_causal(),
    "positions": MaskInfo.from_segments([1] * L, None, list(range(5, 5 + L))).apply_causal(-1),
    "dense": MaskInfo.from_attention_mask(np.random.default_rng(0).random((2, 2, L, L)) < 0.5),
    "pattern": MaskInfo.from_block_pattern(PATTERN, q_len=L).apply_causal(),
    "keys-before": MaskInfo(5, L).apply_causal(),
}


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", MASKS)
def test_the_queries_before_an_end(name, jitted):
    mask, count, lengths, ends = MASKS[name], 2, np.array([9, 4]), np.array([5, 3])

    def step(lengths, ends):
        return mask.apply_kv_lengths(lengths, q_len=count, end_index=ends).attention_mask

    kept = (jax.jit(step) if jitted else step)(lengths, ends)
    whole = np.broadcast_to(shown(mask), (2, *mask.shape[1:]))
    for row in range(2):
        expected = whole[row][:, ends[row] - count : ends[row]] & (np.arange(L) < lengths[row])
        np.testing.assert_array_equal(kept[row], expected)


@pytest.mark.parametrize("name", MASKS)
def test_the_keys_of_a_window(name):
    mask, lengths = MASKS[name], np.array([9, 2])
    kept = shown(mask.apply_kv_lengths(lengths, sliding_window=4))
    whole = np.broadcast_to(shown(mask), (2, *mask.shape[1:]))
    for row, start in enumerate((5, 0)):
        expected = whole[row][..., start : start + 4] & (np.arange(start, start + 4) < lengths[row])
        np.testing.assert_array_equal(kept[row], expected)


def test_kept_queries_stand_where_they_stood():
    """Causality that comes after the cut is that of before."""
    before = MaskInfo(L, L).apply_causal().apply_kv_lengths([8, 6], q_len=2, end_index=[8, 6])
    after = MaskInfo(L, L).apply_kv_lengths([8, 6], q_len=2, end_index=[8, 6]).apply_causal()
    np.testing.assert_array_equal(shown(before), shown(after))
    assert before.is_symbolic and before.q_positions.tolist() == [[6, 7], [4, 5]]


def test_a_step_in_a_vmap_and_a_scan():
    mask = MaskInfo(L, L).apply_causal()

    def step(index):
        return mask.apply_kv_lengths(index, q_len=1, end_index=index).attention_mask[0, 0, 0]

    indices = jnp.arange(1, L + 1)
    expected = np.tri(L, dtype=bool)
    np.testing.assert_array_equal(jax.vmap(step)(indices), expected)
    np.testing.assert_array_equal(jax.lax.scan(lambda _, index: (None, step(index)), None, indices)[1], expected)


def test_traced_ends_are_clamped():
    step = jax.jit(lambda ends: MaskInfo(4, 4).apply_kv_lengths([4], q_len=2, end_index=ends).q_positions)
    assert [step(jnp.array([end])).tolist() for end in (1, 9)] == [[[0, 1]], [[2, 3]]]


def test_bad_steps():
    mask = MaskInfo(4, 4)
    for options, message in (
        ({"q_len": 1}, "q_len and end_index must be given together, got q_len=1, end_index=None"),
        ({"end_index": [1]}, "q_len and end_index must be given together"),
        ({"q_len": 5, "end_index": [4]}, "q_len=5 is more than the 4 queries of the mask"),
        ({"q_len": 2, "end_index": [5]}, r"end_index must lie in \[2, 4\] \(row 0: 5\)"),
        ({"q_len": 2, "end_index": [1]}, r"end_index must lie in \[2, 4\] \(row 0: 1\)"),
        ({"q_len": 1, "end_index": [1, 2, 3]}, "batch sizes must agree or be 1"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            mask.apply_kv_lengths([4, 4], **options)
