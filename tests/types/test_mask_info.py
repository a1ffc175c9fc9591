"""MaskInfo against a brute-force mask: every constructor, refinement and read, alone and combined."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types import BlockPattern, MaskInfo

LENGTHS = [(6, 6), (3, 7), (7, 3), (1, 5)]


def brute(shape, visible):
    """The mask of a rule (b, h, i, j) -> bool, written out."""
    out = np.zeros(shape, bool)
    for index in np.ndindex(*shape):
        out[index] = bool(visible(*index))
    return out


@jax.jit
def read(info, q, k):
    """The mask's dense views, compiled once per kind of mask."""
    return info.attention_mask, info.bias, info.element_mask(q, k)


def check(info, visible, heads=1):
    """The mask equals the rule, in shape too, and bias and element_mask say the same."""
    B, H, T, S = info.shape
    assert info.shape == (info.batch_size, heads, info.q_len, info.kv_len)
    expected = brute((B, H, T, S), visible)
    q, k = np.arange(T)[::-1], np.arange(S)[::2]
    mask, bias, part = read(info, q, k)
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(bias == 0, expected)
    assert bias.dtype == jnp.float32 and np.isfinite(bias).all()
    part = np.broadcast_to(part, (B, H, len(q), len(k)))
    np.testing.assert_array_equal(part, expected[:, :, q][:, :, :, k])


def segment_rule(q, kv):
    q, kv = np.atleast_2d(q), np.atleast_2d(kv)
    return lambda b, h, i, j: q[b % len(q), i] == kv[b % len(kv), j] >= 0


def random_ids(seed, B, L):
    return np.random.default_rng(seed).integers(-1, 3, (B, L)).astype(np.int32)


def random_mask(seed, shape):
    return np.random.default_rng(seed).random(shape) < 0.5


# make


@pytest.mark.parametrize("T, S", LENGTHS)
def test_segments(T, S):
    q, kv = random_ids(0, 2, T), random_ids(1, 2, S)
    info = MaskInfo.from_segments(q, kv)
    check(info, segment_rule(q, kv))
    assert info.q_segment_ids.tolist() == q.tolist() and info.kv_segment_ids.tolist() == kv.tolist()


def test_segments_of_the_documented_example():
    ids = jnp.array([[1, 1, 2, 2, -1, -1]])
    info = MaskInfo.from_segments(ids)
    check(info, segment_rule(ids, ids))
    assert info.is_self_attention()
    assert info.q_segment_ids is not None and info.q_positions.tolist() == [[0, 1, 0, 1, 0, 0]]


def test_segments_without_batch_axis():
    info = MaskInfo.from_segments([1, 1, 2], [1, 2])
    assert info.shape == (1, 1, 3, 2)
    check(info, segment_rule([1, 1, 2], [1, 2]))


def test_batch_of_one_broadcasts():
    q, kv = random_ids(0, 1, 4), random_ids(1, 3, 5)
    info = MaskInfo.from_segments(q, kv)
    assert info.batch_size == 3 and info.q_segment_ids.shape == (3, 4)
    check(info, segment_rule(q, kv))


@pytest.mark.parametrize("dtype", [bool, np.int32, np.int64])
def test_attention_mask(dtype):
    padding = random_mask(0, (2, 5))
    check(MaskInfo.from_attention_mask(padding.astype(dtype)), lambda b, h, i, j: padding[b, i] and padding[b, j])
    dense = random_mask(1, (2, 3, 5))
    check(MaskInfo.from_attention_mask(dense.astype(dtype)), lambda b, h, i, j: dense[b, i, j])
    heads = random_mask(2, (2, 4, 3, 5))
    check(MaskInfo.from_attention_mask(heads.astype(dtype)), lambda b, h, i, j: heads[b, h, i, j], heads=4)


def owner(cu, i):
    """(sequence, index in it, its length) of packed token i, None for padding."""
    for n in range(len(cu) - 1):
        if cu[n] <= i < cu[n + 1]:
            return n, i - cu[n], cu[n + 1] - cu[n]
    return None


def packed_causal(cu_q, cu_kv):
    def visible(b, h, i, j):
        q, k = owner(cu_q, i), owner(cu_kv, j)
        return q and k and q[0] == k[0] and k[1] <= q[1] + k[2] - q[2]

    return visible


@pytest.mark.parametrize(
    "cu_q, cu_kv, L_q, L_kv",
    [
        ([0, 3, 5], None, 7, None),
        ([0, 3, 3, 5], None, 5, 5),
        ([0, 3, 5], None, 6, 9),
        ([0, 1, 3, 3], [0, 4, 5, 7], 4, 8),
        ([0, 4, 6], [0, 2, 5], 6, 6),
    ],
)
def test_cu_seqlens(cu_q, cu_kv, L_q, L_kv):
    info = MaskInfo.from_cu_seqlens(
        np.array(cu_q), None if cu_kv is None else jnp.array(cu_kv), max_q_len=L_q, max_kv_len=L_kv
    )
    cu_kv = cu_kv or cu_q
    assert info.shape == (1, 1, L_q, L_kv or L_q)
    check(info, lambda b, h, i, j: (owner(cu_q, i) or (-1,))[0] == (owner(cu_kv, j) or (-2,))[0])
    check(info.apply_causal(), packed_causal(cu_q, cu_kv))
    assert info.cu_seqlens_q.tolist() == sorted(set(cu_q))
    assert info.cu_seqlens_kv.tolist() == sorted(set(cu_kv))


def test_cu_seqlens_under_jit_equals_eager():
    make = jax.jit(lambda a, b: MaskInfo.from_cu_seqlens(a, b, max_q_len=4, max_kv_len=8).apply_causal())
    check(make(jnp.array([0, 1, 3]), jnp.array([0, 4, 8])), packed_causal([0, 1, 3], [0, 4, 8]))


def test_lengths():
    check(MaskInfo.from_lengths([2, 0, 4], q_len=4), lambda b, h, i, j: max(i, j) < (2, 0, 4)[b])
    info = MaskInfo.from_lengths([2, 3], jnp.array([5, 1]), q_len=3, kv_len=6)
    check(info, lambda b, h, i, j: i < (2, 3)[b] and j < (5, 1)[b])
    assert not info.is_self_attention()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("T, S", [(10, 10), (5, 12)])
def test_block_pattern(heads, T, S):
    blocks = random_mask(3, (heads, 4, 5))
    pattern = BlockPattern.from_dense(blocks, block_size=(3, 4))
    info = MaskInfo.from_block_pattern(pattern, q_len=T, kv_len=S)
    check(info, lambda b, h, i, j: blocks[h, i // 3, j // 4], heads=heads)
    assert info.pattern.blocks.shape == (1, heads, -(-T // 3), -(-S // 4))


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 1.0])
def test_random(sparsity):
    info = MaskInfo.from_random(3, 10, 20, sparsity=sparsity, seed=1)
    assert info.shape == (3, 1, 10, 20)
    assert (~info.attention_mask).sum(axis=(1, 2, 3)).tolist() == [round(200 * sparsity)] * 3
    again, other = MaskInfo.from_random(3, 10, 20, sparsity, 1), MaskInfo.from_random(3, 10, 20, sparsity, 2)
    assert (again.attention_mask == info.attention_mask).all()
    assert sparsity in (0, 1) or (other.attention_mask != info.attention_mask).any()


# refine


@pytest.mark.parametrize("T, S", LENGTHS)
@pytest.mark.parametrize("offset", [-2, 0, 1])
def test_causal(T, S, offset):
    check(MaskInfo(T, S).apply_causal(offset), lambda b, h, i, j: j <= i + S - T + offset)


@pytest.mark.parametrize("T, S", LENGTHS)
@pytest.mark.parametrize("window, left, right", [(1, 1, 1), ((2, 0), 2, 0), ((None, 1), 99, 1), ([0, None], 0, 99)])
@pytest.mark.parametrize("offset", [0, -1])
def test_sliding_window(T, S, window, left, right, offset):
    info = MaskInfo(T, S).apply_sliding_window(window, offset)
    check(info, lambda b, h, i, j: -left <= j - (i + S - T + offset) <= right)


@pytest.mark.parametrize("T, S", LENGTHS)
def test_chunked(T, S):
    check(MaskInfo(T, S).apply_chunked(2), lambda b, h, i, j: (i + S - T) // 2 == j // 2)


@pytest.mark.parametrize("first, second, symbolic", [(4, 2, True), (2, 4, True), (3, 3, True), (2, 3, False)])
def test_second_chunk_is_a_rule_only_if_it_does_not_nest(first, second, symbolic):
    info = MaskInfo(7, 7).apply_chunked(first).apply_chunked(second)
    check(info, lambda b, h, i, j: i // first == j // first and i // second == j // second)
    assert info.is_symbolic and (info.rule is None) == symbolic


def test_kv_lengths_fold_into_ids():
    info = MaskInfo(2, 4).apply_kv_lengths(jnp.array([1, 3]))
    assert info.q_ids.tolist() == [[0, 0]] and info.kv_ids.tolist() == [[0, -1, -1, -1], [0, 0, 0, -1]]
    ids = random_ids(0, 2, 4)
    segmented = MaskInfo.from_segments(ids).apply_kv_lengths([1, 3])
    check(segmented, lambda b, h, i, j: segment_rule(ids, ids)(b, h, i, j) and j < (1, 3)[b])
    assert segmented.is_self_attention()


@pytest.mark.parametrize("combine", ["union", "intersect", "replace"])
@pytest.mark.parametrize("T, S", [(5, 5), (3, 6)])
def test_token_types(combine, T, S):
    ids_q, ids_kv = random_ids(0, 2, T), random_ids(1, 2, S)
    types_q, types_kv = random_ids(2, 2, T), random_ids(3, 1, S)
    info = MaskInfo.from_segments(ids_q, ids_kv).apply_causal()
    info = info.apply_token_type_ids(types_q, types_kv, combine=combine)

    def visible(b, h, i, j):
        segment, causal = segment_rule(ids_q, ids_kv)(b, h, i, j), j <= i + S - T
        equal = types_q[b, i] == types_kv[0, j]
        if combine == "union":
            return segment and (causal or (equal and types_q[b, i] > 0))
        equal &= types_q[b, i] >= 0
        return equal if combine == "replace" else equal and segment and causal

    check(info, visible)
    assert info.is_symbolic and (info.rule is None) == (combine != "union")


def test_token_types_loosen_nothing_in_plain_segments():
    info = MaskInfo.from_segments([1, 1, 2]).apply_token_type_ids([1, 1, 1])
    assert info.dense is None and info.q_ids.tolist() == [[1, 1, 2]]


def test_explicit_positions_decide():
    q, kv = [0, 0, 0], [0, 0, 0, 0]
    q_pos, kv_pos = np.array([5, 1, 3]), np.array([3, 0, 9, 2])
    info = MaskInfo.from_segments(q, kv, q_pos, kv_pos)
    check(info, lambda b, h, i, j: True)
    check(info.apply_causal(), lambda b, h, i, j: kv_pos[j] <= q_pos[i])
    check(info.apply_sliding_window((2, 1), 1), lambda b, h, i, j: -2 <= kv_pos[j] - q_pos[i] - 1 <= 1)
    check(info.apply_chunked(4), lambda b, h, i, j: kv_pos[j] // 4 == q_pos[i] // 4)
    assert info.q_positions.tolist() == [[5, 1, 3]] and info.kv_positions.tolist() == [[3, 0, 9, 2]]


def test_replace():
    info = MaskInfo.from_segments([[1, 1, 2]]).apply_causal()
    check(info.replace(band=(None, None), q_segment_ids=[[2, 1, 2]]), segment_rule([2, 1, 2], [1, 1, 2]))
    check(info.replace(q_ids=None, kv_ids=None), lambda b, h, i, j: j <= i)
    dense = random_mask(0, (1, 1, 3, 3))
    check(info.replace(dense=dense, chunk=2), lambda b, h, i, j: (
        segment_rule([1, 1, 2], [1, 1, 2])(b, h, i, j) and j <= i and i // 2 == j // 2 and dense[0, 0, i, j]
    ))  # fmt: skip


# combine


def parts(T, S):
    """Masks of many kinds on the same lengths, as (MaskInfo, rule, heads)."""
    ids_q, ids_kv = random_ids(0, 2, T), random_ids(1, 2, S)
    other_q, other_kv = random_ids(2, 2, T), random_ids(3, 1, S)
    pos_q, pos_kv = np.arange(T)[::-1] * 2, np.arange(S)
    dense, blocks, fine = random_mask(4, (2, 2, T, S)), random_mask(5, (2, 4, 4)), random_mask(6, (1, 8, 8))
    odd = random_mask(7, (5, 5))
    positioned = MaskInfo.from_segments(ids_q, ids_kv, pos_q, pos_kv)
    segment = segment_rule(ids_q, ids_kv)
    return {
        "segments": (MaskInfo.from_segments(ids_q, ids_kv), segment, 1),
        "other_segments": (MaskInfo.from_segments(other_q, other_kv), segment_rule(other_q, other_kv), 1),
        "lengths": (
            MaskInfo.from_lengths([T, 1], [2, S], q_len=T, kv_len=S),
            lambda b, h, i, j: i < (T, 1)[b] and j < (2, S)[b], 1,
        ),
        "causal": (MaskInfo(T, S).apply_causal(), lambda b, h, i, j: j <= i + S - T, 1),
        "window": (MaskInfo(T, S).apply_sliding_window((2, 3)), lambda b, h, i, j: -2 <= j - i - S + T <= 3, 1),
        "chunk": (MaskInfo(T, S).apply_chunked(2), lambda b, h, i, j: j // 2 == (i + S - T) // 2, 1),
        "other_chunk": (MaskInfo(T, S).apply_chunked(3), lambda b, h, i, j: j // 3 == (i + S - T) // 3, 1),
        "positions": (positioned, segment, 1),
        "positions_causal": (
            positioned.apply_causal(), lambda b, h, i, j: segment(b, h, i, j) and pos_kv[j] <= pos_q[i], 1,
        ),
        "other_positions_chunk": (
            positioned.replace(q_positions=pos_q // 2).apply_chunked(3),
            lambda b, h, i, j: segment(b, h, i, j) and pos_kv[j] // 3 == pos_q[i] // 2 // 3, 1,
        ),
        "dense": (MaskInfo.from_attention_mask(dense), lambda b, h, i, j: dense[b, h, i, j], 2),
        "pattern": (
            MaskInfo.from_block_pattern(BlockPattern.from_dense(blocks, block_size=2), q_len=T, kv_len=S),
            lambda b, h, i, j: blocks[h, i // 2, j // 2], 2,
        ),
        "fine_pattern": (
            MaskInfo.from_block_pattern(BlockPattern.from_dense(fine, block_size=(4, 1)), q_len=T, kv_len=S),
            lambda b, h, i, j: fine[0, i // 4, j], 1,
        ),
        "odd_pattern": (
            MaskInfo.from_block_pattern(BlockPattern.from_dense(odd, block_size=3), q_len=T, kv_len=S),
            lambda b, h, i, j: odd[i // 3, j // 3], 1,
        ),
    }  # fmt: skip


KINDS = list(parts(5, 5))


@pytest.mark.parametrize("T, S", [(5, 5), (3, 7)])
@pytest.mark.parametrize("left", KINDS)
def test_and_or_of_every_pair(T, S, left):
    kinds = parts(T, S)
    a, _, heads_a = kinds[left]
    full = {}
    for name, (_, rule, heads) in kinds.items():
        full[name] = brute((2, 2, T, S), lambda b, h, i, j, rule=rule, heads=heads: rule(b, h % heads, i, j))
    for name, (b, _, heads_b) in kinds.items():
        heads = max(heads_a, heads_b)
        for result, expected in ((a & b, full[left] & full[name]), (a | b, full[left] | full[name])):
            assert result.shape[1:] == (heads, T, S), name
            np.testing.assert_array_equal(
                np.broadcast_to(result.attention_mask, expected.shape), expected, err_msg=f"{left} with {name}"
            )


SYMBOLIC = ["segments", "other_segments", "lengths", "causal", "window", "chunk", "pattern", "fine_pattern"]


def test_and_of_symbolic_parts_stays_symbolic():
    kinds = parts(5, 5)
    for left in SYMBOLIC:
        for right in SYMBOLIC:
            assert (kinds[left][0] & kinds[right][0]).dense is None, (left, right)
    for left, right in (("odd_pattern", "pattern"), ("chunk", "other_chunk")):
        mask = kinds[left][0] & kinds[right][0]
        assert mask.dense is None and mask.rule is not None


def test_symbolic_masks_never_make_a_square_array():
    L = 4096
    pattern = BlockPattern.local_stride(2, 64, 2, 8)

    @jax.jit
    def build(ids, other, lengths):
        info = MaskInfo.from_segments(ids).apply_causal().apply_sliding_window(128).apply_chunked(512)
        info = (info & MaskInfo.from_segments(other)).apply_kv_lengths(lengths)
        info = (info & MaskInfo.from_block_pattern(pattern, q_len=L)).apply_token_type_ids(other, combine="intersect")
        return info, info.q_positions, info.q_segment_ids

    ids = jnp.zeros((2, L), jnp.int32)
    text = str(jax.make_jaxpr(build)(ids, ids, jnp.array([3, 4])))
    assert f"{L},{L}" not in text
    assert build(ids, ids, jnp.array([3, 4]))[0].shape == (2, 2, L, L)


def test_one_segment_keeps_the_other_ids():
    ids = np.array([[7, 7, 3, 3, -1]])
    merged = MaskInfo.from_lengths([3], q_len=5) & MaskInfo.from_segments(ids)
    assert merged.q_segment_ids.tolist() == [[7, 7, 3, -1, -1]]
    assert merged.is_self_attention()


ID_ROWS = st.lists(st.integers(-2, 3), min_size=4, max_size=4)


@settings(max_examples=40, deadline=None)
@given(ID_ROWS, ID_ROWS, ID_ROWS, ID_ROWS, st.integers(-5, 5), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_conjunction_of_random_segments_and_bands(qa, ka, qb, kb, offset, window):
    info = MaskInfo.from_segments(qa, ka).apply_causal(offset) & MaskInfo.from_segments(qb, kb)
    info = info.apply_sliding_window(window)
    left, right = window
    np.testing.assert_array_equal(
        info.attention_mask,
        brute((1, 1, 4, 4), lambda b, h, i, j: (
            qa[i] == ka[j] >= 0 and qb[i] == kb[j] >= 0 and j <= i + offset and -left <= j - i <= right
        )),
    )  # fmt: skip
    assert info.dense is None


# read


@settings(max_examples=60, deadline=None)
@given(ID_ROWS, st.lists(st.integers(-2, 3), min_size=5, max_size=5))
def test_segment_like_masks_convert_to_ids_and_back(q, kv):
    mask = MaskInfo.from_segments(q, kv).attention_mask
    info = MaskInfo.from_attention_mask(mask)
    again = MaskInfo.from_segments(info.q_segment_ids, info.kv_segment_ids)
    np.testing.assert_array_equal(again.attention_mask, mask)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), min_size=9, max_size=9))
def test_converting_any_mask_is_exact_or_refused(bits):
    mask = np.array(bits).reshape(1, 3, 3)
    info = MaskInfo.from_attention_mask(mask)
    try:
        q, kv = info.q_segment_ids, info.kv_segment_ids
    except ValueError:
        rows = {tuple(row) for row in mask[0] if row.any()}
        assert any(a != b and np.logical_and(a, b).any() for a in rows for b in rows)
    else:
        np.testing.assert_array_equal(MaskInfo.from_segments(q, kv).attention_mask[:, 0], mask)


def test_ids_describe_segments_next_to_other_parts():
    blocks = np.kron(np.eye(2, dtype=bool), np.ones((2, 2), bool))[None]
    assert MaskInfo.from_attention_mask(blocks).apply_causal().q_segment_ids.tolist() == [[0, 0, 1, 1]]
    assert MaskInfo(2, 3).apply_causal().kv_segment_ids.tolist() == [[0, 0, 0]]
    both = MaskInfo.from_segments([1, 1, 1, -1]) & MaskInfo.from_attention_mask(blocks)
    assert both.q_segment_ids.tolist() == [[0, 0, 1, -1]]


def test_masks_that_are_not_segments_do_not_convert():
    with pytest.raises(ValueError, match="not made of segments"):
        _ = MaskInfo.from_attention_mask(np.tri(3, dtype=bool)[None]).q_segment_ids
    heads = np.stack([np.eye(2), np.ones((2, 2))]).astype(bool)[None]
    with pytest.raises(ValueError, match="differs between heads"):
        _ = MaskInfo.from_attention_mask(heads).kv_segment_ids
    with pytest.raises(ValueError, match="traced"):
        jax.jit(lambda m: MaskInfo.from_attention_mask(m).q_segment_ids)(np.ones((1, 2, 2), bool))


def test_positions_restart_in_each_segment():
    ids = random_ids(5, 3, 12)  # not sorted, not contiguous
    expected = [[0 if x < 0 else row[:i].count(x) for i, x in enumerate(row)] for row in ids.tolist()]
    info = MaskInfo.from_segments(ids)
    assert info.q_positions.tolist() == expected == jax.jit(lambda m: m.kv_positions)(info).tolist()
    assert info.q_positions.dtype == jnp.int32
    assert MaskInfo(2, 3).apply_causal().kv_positions.tolist() == [[0, 1, 2]]


def test_cu_seqlens_reads_rows_in_order():
    info = MaskInfo.from_segments([[5, 5, 2, -1], [-1, 1, 1, 1]])
    assert info.cu_seqlens_q.tolist() == [0, 2, 3, 6]
    with pytest.raises(ValueError, match="contiguous"):
        _ = MaskInfo.from_segments([[1, 2, 1]]).cu_seqlens_q
    with pytest.raises(ValueError, match="concrete"):
        jax.jit(lambda m: m.cu_seqlens_q)(info)


def test_self_attention():
    ids = [[1, 1, 2]]
    assert MaskInfo.from_segments(ids, ids).is_self_attention()
    assert not MaskInfo.from_segments(ids, [[1, 2, 2]]).is_self_attention()
    assert not MaskInfo.from_segments(ids, [[1, 2]]).is_self_attention()
    assert jax.jit(lambda x: jnp.int32(MaskInfo.from_segments(x, x).is_self_attention()))(jnp.array(ids)) == 1
    assert jax.jit(lambda m: jnp.int32(m.is_self_attention()))(MaskInfo.from_segments(ids)) == 1
    assert not (MaskInfo.from_segments(ids) & MaskInfo.from_segments(ids, [[1, 2, 2]])).is_self_attention()


def test_shardings():
    mesh = jax.make_mesh((1, 1), ("dp", "tp"))
    pattern = BlockPattern.local_stride(4, 2, 1, 2, block_size=4)
    info = MaskInfo.from_segments(random_ids(0, 2, 8)) & MaskInfo.from_block_pattern(pattern, q_len=8)
    info = info & MaskInfo.from_random(2, 8, 8)
    shardings = info.get_shardings(mesh=mesh)
    assert tuple(shardings.q_ids.spec) == ("dp", None)
    assert tuple(shardings.dense.spec) == ("dp", "tp", None, None)
    assert tuple(shardings.pattern.blocks.spec) == ("dp", "tp", None, None)
    placed = jax.device_put(info, shardings)
    np.testing.assert_array_equal(placed.attention_mask, info.attention_mask)
    assert tuple(info.get_shardings(mesh=mesh, batch_axis=("dp", "tp")).kv_ids.spec) == (("dp", "tp"), None)


def test_shardings_leave_what_does_not_divide():
    mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "tp"))

    def spec(**axes):
        return tuple(MaskInfo.from_random(6, 8, 8).get_shardings(mesh=mesh, **axes).dense.spec)

    assert spec() == ("dp", None, None, None)
    assert spec(batch_axis="tp", q_axis="tp") == (None, None, "tp", None)
    assert spec(q_axis=("dp", "tp"), kv_axis="tp") == ("dp", None, "tp", None)
    assert spec(batch_axis=None, q_axis=("dp", "missing", "tp")) == (None, None, ("dp", "tp"), None)


def test_import_is_light():
    code = "import sys, ejkernel.types; assert not {'matplotlib', 'triton', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# transformations


def everything(ids):
    """A mask with every part."""
    B, L = ids.shape
    pattern = BlockPattern.from_dense(jnp.ones((B, 2, 2, 2), bool), block_size=4)
    info = MaskInfo.from_segments(ids, q_positions=jnp.broadcast_to(jnp.arange(L), ids.shape)).apply_causal()
    info = info.apply_chunked(4) & MaskInfo.from_block_pattern(pattern, q_len=L)
    return info & MaskInfo.from_random(B, L, L, 0.2)


def test_pytree_round_trip():
    info = everything(jnp.asarray(random_ids(0, 2, 8)))
    leaves, tree = jax.tree.flatten(info)
    assert len(leaves) == 6
    again = jax.tree.unflatten(tree, leaves)
    assert again.band == info.band and again.chunk == 4 and again.is_self_attention()
    np.testing.assert_array_equal(again.attention_mask, info.attention_mask)
    assert jax.tree.structure(MaskInfo(3, 3)) != jax.tree.structure(MaskInfo(3, 3).apply_causal())
    assert isinstance(jax.tree.map(lambda x: None, info), MaskInfo)


def test_new_ids_do_not_retrace():
    traces = []

    @jax.jit
    def read(info):
        traces.append(info)
        return info.attention_mask

    for seed in range(3):
        ids = random_ids(seed, 2, 6)
        expected = brute((2, 1, 6, 6), lambda b, h, i, j, ids=ids: segment_rule(ids, ids)(b, h, i, j) and j <= i)
        np.testing.assert_array_equal(read(MaskInfo.from_segments(ids).apply_causal()), expected)
    assert len(traces) == 1


def test_made_inside_jit():
    ids = random_ids(0, 2, 8)
    outside = everything(jnp.asarray(ids))
    inside = jax.jit(everything)(ids)
    assert jax.tree.structure(inside) == jax.tree.structure(outside)
    np.testing.assert_array_equal(inside.attention_mask, outside.attention_mask)


def test_vmap_over_the_batch_equals_the_batch():
    ids = jnp.asarray(random_ids(0, 3, 8))
    info = everything(ids)
    rows = jax.jit(jax.vmap(lambda m: m.attention_mask))(info)
    np.testing.assert_array_equal(rows[:, 0], info.attention_mask)
    refine = jax.jit(jax.vmap(lambda m, n: m.apply_sliding_window(2).apply_kv_lengths(n)))
    refined = refine(info, jnp.array([3, 8, 0]))
    expected = info.apply_sliding_window(2).apply_kv_lengths([3, 8, 0])
    np.testing.assert_array_equal(refined.attention_mask, expected.attention_mask)
    assert refined.q_positions.shape == refined.canonical().kv_ids.shape == (3, 8)


def test_vmap_of_constructors():
    ids = jnp.asarray(random_ids(0, 3, 8))
    made = jax.vmap(lambda x: MaskInfo.from_segments(x).apply_causal())(ids)
    expected = MaskInfo.from_segments(ids).apply_causal()
    np.testing.assert_array_equal(made.attention_mask, expected.attention_mask)
    np.testing.assert_array_equal(made.q_positions, expected.q_positions)
    both = jax.vmap(lambda a, b: MaskInfo.from_segments(a) & MaskInfo.from_segments(b))
    twice = jax.jit(both)(ids, ids[::-1])
    joint = MaskInfo.from_segments(ids) & MaskInfo.from_segments(ids[::-1])
    np.testing.assert_array_equal(twice.attention_mask, joint.attention_mask)


def test_scan_over_rows_and_as_carry():
    ids = jnp.asarray(random_ids(0, 3, 8))
    info = MaskInfo.from_segments(ids).apply_causal()
    carry, counts = jax.lax.scan(lambda c, row: (c, row.attention_mask.sum()), info, info)
    assert counts.tolist() == info.attention_mask.sum(axis=(1, 2, 3)).tolist()
    np.testing.assert_array_equal(carry.attention_mask, info.attention_mask)


# bad input

ids23 = np.zeros((2, 3), np.int32)
BAD = {
    "float ids": (TypeError, "q_segment_ids must hold integers", lambda: MaskInfo.from_segments(np.ones((2, 3)))),
    "3-D ids": (ValueError, r"q_segment_ids .*\(1, 2, 3\)", lambda: MaskInfo.from_segments(ids23[None])),
    "huge ids": (ValueError, "int32", lambda: MaskInfo.from_segments(np.array([2**40]))),
    "batch": (ValueError, "batch sizes", lambda: MaskInfo.from_segments(ids23, np.zeros((3, 4), int))),
    "no key positions": (
        ValueError,
        "kv_positions is missing",
        lambda: MaskInfo.from_segments(ids23, ids23.copy(), q_positions=ids23),
    ),
    "position length": (
        ValueError,
        "q_positions must have length 3",
        lambda: MaskInfo.from_segments(ids23, q_positions=np.zeros(4, int)),
    ),
    "mask rank": (ValueError, r"mask must have shape.*\(3,\)", lambda: MaskInfo.from_attention_mask([1, 0, 1])),
    "mask values": (ValueError, "only 0 and 1", lambda: MaskInfo.from_attention_mask([[1, 2]])),
    "mask dtype": (TypeError, "float", lambda: MaskInfo.from_attention_mask(np.ones((2, 2), np.float32))),
    "cu start": (ValueError, "start at 0", lambda: MaskInfo.from_cu_seqlens([1, 2], max_q_len=4)),
    "cu order": (ValueError, "never decrease", lambda: MaskInfo.from_cu_seqlens([0, 3, 2], max_q_len=4)),
    "cu end": (
        ValueError,
        r"cu_q must start .* within the 4 tokens \(row 1: 5\)",
        lambda: MaskInfo.from_cu_seqlens([0, 5], max_q_len=4),
    ),
    "cu end of keys": (
        ValueError,
        r"cu_kv must start .* within the 8 tokens \(row 1: 9\)",
        lambda: MaskInfo.from_cu_seqlens([0, 4], [0, 9], max_q_len=4, max_kv_len=8),
    ),
    "cu count": (
        ValueError,
        "as many sequences",
        lambda: MaskInfo.from_cu_seqlens([0, 4], [0, 2, 4], max_q_len=4, max_kv_len=4),
    ),
    "negative length": (ValueError, r"q_lengths must lie in \[0, 4\]", lambda: MaskInfo.from_lengths([-1], q_len=4)),
    "long length": (
        ValueError,
        r"\[0, 4\] \(row 0: 5\)",
        lambda: MaskInfo.from_lengths(jnp.array([5]), q_len=4),
    ),
    "key lengths needed": (ValueError, "kv_lengths", lambda: MaskInfo.from_lengths([2], q_len=4, kv_len=8)),
    "kv length": (ValueError, "lengths must lie in", lambda: MaskInfo(2, 3).apply_kv_lengths([4])),
    "kv lengths batch": (
        ValueError,
        "'lengths': 3",
        lambda: MaskInfo.from_segments(ids23).apply_kv_lengths([1, 1, 1]),
    ),
    "pattern type": (
        TypeError,
        "BlockPattern.from_dense",
        lambda: MaskInfo.from_block_pattern(np.ones((2, 2)), q_len=8),  # pyright: ignore[reportArgumentType]
    ),
    "pattern too small": (
        ValueError,
        "covers lengths up to .128, 128",
        lambda: MaskInfo.from_block_pattern(BlockPattern.sliding_blocks(2, 1), q_len=129),
    ),
    "sparsity": (ValueError, r"sparsity must lie in \[0, 1\], got 1.5", lambda: MaskInfo.from_random(1, 2, 2, 1.5)),
    "negative q_len": (ValueError, "q_len=-1 must be at least 0", lambda: MaskInfo(-1, 3)),
    "window": (ValueError, "window=-1 must be at least 0", lambda: MaskInfo(3, 3).apply_sliding_window(-1)),
    "window triple": (
        ValueError,
        r"\(left, right\), got \(1, 2, 3\)",
        lambda: MaskInfo(3, 3).apply_sliding_window((1, 2, 3)),  # pyright: ignore[reportArgumentType]
    ),
    "chunk": (ValueError, "chunk_size=0 must be at least 1", lambda: MaskInfo(3, 3).apply_chunked(0)),
    "traced offset": (
        TypeError,
        "got a traced value",
        lambda: jax.jit(lambda n: MaskInfo(3, 3).apply_sliding_window(1, n).bias)(1),
    ),
    "float offset": (TypeError, "offset", lambda: MaskInfo(3, 3).apply_causal(0.5)),  # pyright: ignore
    "combine": (
        ValueError,
        "combine must be",
        lambda: MaskInfo(3, 3).apply_token_type_ids([1, 1, 1], combine="xor"),  # pyright: ignore
    ),
    "types length": (ValueError, "must have length 4", lambda: MaskInfo(3, 4).apply_token_type_ids([1, 1, 1])),
    "and lengths": (ValueError, r"\(3, 3\) and \(3, 4\)", lambda: MaskInfo(3, 3) & MaskInfo(3, 4)),
    "or batch": (ValueError, "left mask", lambda: MaskInfo.from_random(2, 3, 3) | MaskInfo.from_random(3, 3, 3)),
    "and heads": (
        ValueError,
        "one head or as many, got 2 and 3",
        lambda: (
            MaskInfo.from_attention_mask(np.ones((1, 2, 3, 3), bool))
            & MaskInfo.from_attention_mask(np.ones((1, 3, 3, 3), bool))
        ),
    ),
    "replace name": (TypeError, "unknown or repeated", lambda: MaskInfo(3, 3).replace(ids=1)),
    "replace shape": (
        ValueError,
        "must have length 3",
        lambda: MaskInfo.from_segments(ids23).replace(q_segment_ids=[[1, 2]]),
    ),
    "replace half": (ValueError, "together", lambda: MaskInfo(3, 3).replace(q_ids=ids23)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    error, message, make = BAD[case]
    with pytest.raises(error, match=message):
        make()
