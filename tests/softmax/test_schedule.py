"""The block schedule against a map of blocks made from the whole mask.

Drawn calls are planned on the host, as known masks are, and one of each kind in a program, as others are.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.kernels.softmax.reference import visible
from ejkernel.kernels.softmax.schedule import Lists, Ranges, by_index, in_order, plan
from ejkernel.kernels.softmax.spec import canonicalise, dimensions
from ejkernel.types import BlockPattern, MaskInfo

B, H = 2, 2
# few shapes, so that what jax.numpy compiles for them is reused
LENGTHS = [(9, 21), (21, 9)]
TILES = [(8, 4), (5, 7)]

lengths = st.sampled_from(LENGTHS)
tiles = st.sampled_from(TILES)
seeds = st.integers(0, 2**16)
windows = st.sampled_from([None, 0, 3, (2, 0), (0, 4), (None, 2), (6, None)])


def call_of(T, S, heads=H, **options):
    shape = {"query": (B, T, heads, 1), "key": (B, S, heads, 1), "value": (B, S, heads, 1)}
    return canonicalise(**{name: jnp.zeros(x) for name, x in shape.items()}, **options)


def rows_of(schedule, H):
    """By batch, head and row: the blocks visited without a mask, and those visited with one."""
    if isinstance(schedule, Ranges):
        bounds = np.broadcast_to(schedule.bounds, (B, H, *schedule.bounds.shape[2:])).tolist()
        return [[[_run(*row) for row in rows] for rows in heads] for heads in bounds]
    number = np.broadcast_to(schedule.number, (B, H, *schedule.number.shape[2:])).tolist()
    index = np.broadcast_to(schedule.index, (B, H, *schedule.index.shape[2:])).tolist()
    return [[[_listed(*pair) for pair in zip(*rows)] for rows in zip(*heads)] for heads in zip(number, index)]


def _run(lo, full_lo, full_hi, hi):
    assert lo <= full_lo <= full_hi <= hi
    return set(range(full_lo, full_hi)), {*range(lo, full_lo), *range(full_hi, hi)}


def _listed(number, index):
    unmasked, total = number
    assert 0 <= unmasked <= total and len(set(index[:total])) == total
    return set(index[:unmasked]), set(index[unmasked:total])


def tiled(seen, block_q, block_k):
    """For each tile: is any pair visible, are all, and is it whole in queries and in keys?"""
    T, S = seen.shape
    nq, nk = -(-T // block_q), -(-S // block_k)
    padded = np.zeros((nq * block_q, nk * block_k), bool)
    padded[:T, :S] = seen
    parts = padded.reshape(nq, block_q, nk, block_k)
    real = np.zeros_like(padded)
    real[:T, :S] = True
    shown = (padded | ~real).reshape(nq, block_q, nk, block_k)
    whole_q, whole_k = (np.arange(1, nq + 1) * block_q <= T), (np.arange(1, nk + 1) * block_k <= S)
    return parts.any((1, 3)), shown.all((1, 3)), whole_q, whole_k


def check(call, block_q, block_k, *, exact=False):
    """Every visible pair is visited, and what is visited unmasked is all visible; the number of visits."""
    call = replace(call, arrays={name: np.asarray(x) for name, x in call.arrays.items()})
    _, T, H, _ = call["query"].shape
    S = call["key"].shape[1]
    mask = np.broadcast_to(visible(call), (B, H, T, S))
    count = {}
    for side in ("q", "k"):
        rows = rows_of(plan(call, block_q, block_k, side, np), H)
        count[side] = 0
        for b, h in np.ndindex(B, H):
            some, every, whole_q, whole_k = tiled(mask[b, h], block_q, block_k)
            # a ragged tail holds keys that do not exist; the backward, row by row over keys, sums over queries too
            every = every & whole_k & (whole_q[:, None] if side == "k" else True)
            some, every = (some, every) if side == "q" else (some.T, every.T)
            for i in range(len(some)):
                unmasked, masked = rows[b][h][i]
                needed, allowed = set(np.flatnonzero(some[i]).tolist()), set(np.flatnonzero(every[i]).tolist())
                where = f"side {side}, batch {b}, head {h}, row {i}"
                assert needed <= unmasked | masked, f"{where}: {needed - unmasked - masked} not visited"
                assert unmasked <= allowed, f"{where}: {unmasked - allowed} need a mask"
                assert not exact or needed == unmasked | masked, f"{where}: {unmasked | masked} instead of {needed}"
                count[side] += len(unmasked | masked)
    return count


@given(lengths, tiles, st.booleans(), windows)
def test_bands(sizes, blocks, causal, window):
    call = call_of(*sizes, causal=causal, sliding_window=window)
    assert isinstance(plan(call, *blocks, "q").bounds, np.ndarray)  # a constant of the program
    check(call, *blocks, exact=True)


@given(lengths, tiles, st.integers(1, 9), st.booleans(), windows)
def test_chunks(sizes, blocks, chunk, causal, window):
    mask = MaskInfo(*sizes).apply_chunked(chunk)
    call = call_of(*sizes, mask_info=mask, causal=causal, sliding_window=window)
    check(call, *blocks, exact=not causal and window is None)


@given(lengths, tiles, st.integers(-12, 12))
def test_causal_offsets(sizes, blocks, offset):
    check(call_of(*sizes, mask_info=MaskInfo(*sizes).apply_causal(offset)), *blocks, exact=True)


def ids(rng, length, ordered):
    drawn = rng.integers(-1, 3, (B, length))
    return (np.sort(drawn, axis=1)[:, ::-1] if ordered else drawn).astype(np.int32)


@given(lengths, tiles, seeds, st.booleans(), st.booleans(), windows)
def test_segments(sizes, blocks, seed, ordered, causal, window):
    rng = np.random.default_rng(seed)
    mask = MaskInfo.from_segments(ids(rng, sizes[0], ordered), ids(rng, sizes[1], ordered))
    schedule = call_of(*sizes, mask_info=mask, causal=causal, sliding_window=window)
    assert isinstance(plan(schedule, *blocks, "k"), Ranges)
    check(schedule, *blocks)


@given(tiles, seeds)
def test_packed_documents_are_visited_exactly(blocks, seed):
    T = 21
    cuts = np.sort(np.random.default_rng(seed).integers(0, T, 3))
    mask = MaskInfo.from_cu_seqlens(np.array([0, *cuts], np.int32), max_q_len=T)
    check(call_of(T, T, mask_info=mask), *blocks, exact=True)


@given(lengths, tiles, st.integers(0, 21), st.integers(0, 21), st.booleans())
def test_lengths(sizes, blocks, first, second, causal):
    q, k = ([min(first, n), min(second, n)] for n in sizes)
    mask = MaskInfo.from_lengths(q, k, q_len=sizes[0], kv_len=sizes[1])
    check(call_of(*sizes, mask_info=mask, causal=causal), *blocks, exact=not causal)


@given(lengths, tiles, seeds, st.booleans(), windows, st.sampled_from([None, 4, 7]))
def test_positions(sizes, blocks, seed, causal, window, chunk):
    rng = np.random.default_rng(seed)
    q, k = (rng.integers(0, 25, (B, n), np.int32) for n in sizes)
    mask = MaskInfo.from_segments(ids(rng, sizes[0], True), ids(rng, sizes[1], True), q, k)
    mask = mask if chunk is None else mask.apply_chunked(chunk)
    check(call_of(*sizes, mask_info=mask, causal=causal, sliding_window=window), *blocks)


@given(lengths, tiles, seeds, st.sampled_from([(1, 1), (B, 1), (1, H), (B, H)]), st.floats(0, 1), st.booleans())
def test_dense_masks(sizes, blocks, seed, lead, share, causal):
    mask = MaskInfo.from_attention_mask(np.random.default_rng(seed).random((*lead, *sizes)) < share)
    call = call_of(*sizes, mask_info=mask, causal=causal)
    assert isinstance(plan(call, *blocks, "q"), Lists)
    check(call, *blocks, exact=not causal)


@given(lengths, tiles, seeds, st.sampled_from([4, 8, 5, (4, 8), (3, 2)]), st.booleans(), st.booleans(), windows)
def test_patterns(sizes, blocks, seed, size, per_head, causal, window):
    bq, bk = (size, size) if isinstance(size, int) else size
    shape = ((H,) if per_head else ()) + (-(-sizes[0] // bq), -(-sizes[1] // bk))
    pattern = BlockPattern.from_dense(np.random.default_rng(seed).random(shape) < 0.5, block_size=size)
    mask = MaskInfo.from_block_pattern(pattern, q_len=sizes[0], kv_len=sizes[1])
    check(call_of(*sizes, mask_info=mask, causal=causal, sliding_window=window), *blocks)


@given(lengths, tiles, seeds, st.booleans())
def test_all_together(sizes, blocks, seed, causal):
    rng = np.random.default_rng(seed)
    mask = MaskInfo.from_segments(ids(rng, sizes[0], False), ids(rng, sizes[1], True))
    mask &= MaskInfo.from_attention_mask(rng.random((B, H, *sizes)) < 0.7)
    pattern = rng.random((-(-sizes[0] // 4), -(-sizes[1] // 4))) < 0.7
    mask &= MaskInfo.from_block_pattern(BlockPattern.from_dense(pattern, block_size=4), q_len=sizes[0], kv_len=sizes[1])
    check(call_of(*sizes, mask_info=mask, causal=causal), *blocks)


def _with_positions(T, S):
    rng = np.random.default_rng(0)
    q, k = (rng.integers(0, 25, (B, n), np.int32) for n in (T, S))
    return MaskInfo.from_segments(ids(rng, T, True), ids(rng, S, True), q, k)


def _pattern(T, S):
    cells = np.random.default_rng(0).random((H, -(-T // 4), -(-S // 8))) < 0.5
    return MaskInfo.from_block_pattern(BlockPattern.from_dense(cells, block_size=(4, 8)), q_len=T, kv_len=S)


def _dense(T, S):
    return MaskInfo.from_attention_mask(np.random.default_rng(0).random((B, 1, T, S)) < 0.5)


KINDS = {
    "segments": lambda T, S: {
        "mask_info": MaskInfo.from_segments(*(ids(np.random.default_rng(0), n, True) for n in (T, S)))
    },
    "positions": lambda T, S: {"mask_info": _with_positions(T, S).apply_chunked(7), "causal": True},
    "lengths": lambda T, S: {"mask_info": MaskInfo.from_lengths([5, T], [S, 3], q_len=T, kv_len=S), "causal": True},
    "dense": lambda T, S: {"mask_info": _dense(T, S), "causal": True},
    "pattern": lambda T, S: {"mask_info": _pattern(T, S), "sliding_window": (6, 2)},
    "all": lambda T, S: {"mask_info": _with_positions(T, S) & _pattern(T, S) & _dense(T, S), "causal": True},
}


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_plans_what_the_host_does(kind, side):
    (T, S), tile = LENGTHS[0], TILES[1]
    call = call_of(T, S, **KINDS[kind](T, S))
    known = replace(call, arrays={name: np.asarray(x) for name, x in call.arrays.items()})
    planned = jax.jit(lambda arrays: plan(replace(call, arrays=arrays), *tile, side))(call.arrays)
    assert rows_of(planned, H) == rows_of(plan(known, *tile, side, np), H)


# Blocks of keys that are put together from sub-blocks ---------------------------------------------------------


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("sizes", LENGTHS)
def test_sub_blocks_in_order_visit_what_each_of_them_needs(sizes, group, xp):
    rng = np.random.default_rng(0)
    cells = rng.random((2 * group, 6, 6)) < np.linspace(0.1, 0.9, 6)
    mask = MaskInfo.from_block_pattern(BlockPattern.from_dense(cells, block_size=4), q_len=sizes[0], kv_len=sizes[1])
    shapes = {"query": (B, sizes[0], 2 * group, 1), "key": (B, sizes[1], 2, 1), "value": (B, sizes[1], 2, 1)}
    call = canonicalise(**{name: jnp.zeros(x) for name, x in shapes.items()}, mask_info=mask, causal=True)
    schedule, order = in_order(call, 8, 8, 4, xp)
    alone = plan(call, 8, 4, "k", xp)
    sub_blocks, n = np.asarray(order).reshape(2, -1, 2), -(-sizes[1] // 4)
    assert all(sorted(np.minimum(head.ravel(), n)) == [*range(n), *[n] * (n % 2)] for head in sub_blocks)
    joined, each = (rows_of(x, 2 * group) for x in (schedule, alone))
    for h, i in np.ndindex(2 * group, sub_blocks.shape[1]):
        mine = [each[0][h][p] for p in sub_blocks[h // group, i] if p < n]
        free = set.intersection(*[unmasked for unmasked, _ in mine]) if len(mine) == 2 else set()
        assert joined[0][h][i] == (free, set.union(*[u | m for u, m in mine]) - free)


def test_sub_blocks_that_many_queries_see_come_together_and_documents_stay():
    def visits(cells):
        mask = MaskInfo.from_block_pattern(BlockPattern.from_dense(cells, block_size=4), q_len=256, kv_len=256)
        schedule, order = in_order(call_of(256, 256, mask_info=mask, causal=True), 16, 16, 4, np)
        return schedule.number[..., 1].sum(), order[0, 0]

    n, at = 64, np.arange(64)
    stripes = (at[:, None] == at) | (at % 8 == 0)
    number, order = visits(stripes)
    assert (order[:4] == [0, 8, 16, 24]).all()
    # 8 stripes in two blocks, which 16 and 8 blocks of 16 queries see, and each other block those of its sub-blocks
    assert number <= 24 + 2 * 14
    number, order = visits(at[:, None] // 8 == at // 8)
    assert (order == at).all() and number == n // 8 * 2 * 2 - n // 8


# Work is proportional to the blocks visited -------------------------------------------------------------------


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("sizes", LENGTHS)
def test_without_lists_all_that_they_visit_is_visited_with_a_mask(sizes, side):
    blocks = np.random.default_rng(0).random((H, 6, 6)) < 0.5
    mask = MaskInfo.from_block_pattern(BlockPattern.from_dense(blocks, block_size=4), q_len=sizes[0], kv_len=sizes[1])
    call = call_of(*sizes, mask_info=mask, causal=True)
    more, listed = (rows_of(make(call, 8, 4, side), H) for make in (by_index, plan))
    for b, h, i in np.ndindex(B, H, len(more[0][0])):
        unmasked, masked = more[b][h][i]
        assert not unmasked and masked >= set.union(*listed[b][h][i])


def visited_fraction(call, block_q, block_k):
    """Visited blocks over all blocks."""
    schedule = plan(call, block_q, block_k, "q")
    table = np.asarray(schedule.bounds if isinstance(schedule, Ranges) else schedule.number)
    visits = table[..., 3] - table[..., 0] if isinstance(schedule, Ranges) else table[..., 1]
    return float(visits.mean()) / -(-dimensions(call).S // block_k)


def test_causal_visits_half():
    assert visited_fraction(call_of(1024, 1024, causal=True), 64, 64) == pytest.approx((16 + 1) / 32)


def test_a_window_visits_its_width():
    # 16 rows of 64 queries: each sees its own block and the one before
    assert visited_fraction(call_of(1024, 1024, causal=True, sliding_window=63), 64, 64) == pytest.approx(31 / 256)


def test_packed_documents_visit_their_own_blocks():
    mask = MaskInfo.from_segments(jnp.arange(1024)[None] // 64)
    assert visited_fraction(call_of(1024, 1024, mask_info=mask), 64, 64) == pytest.approx(1 / 16)
    assert visited_fraction(call_of(1024, 1024, mask_info=mask, causal=True), 32, 32) == pytest.approx(3 / 64)


def test_lengths_skip_what_lies_beyond():
    mask = MaskInfo.from_lengths(jnp.array([128, 256]), q_len=1024)
    assert visited_fraction(call_of(1024, 1024, mask_info=mask), 64, 64) == pytest.approx((2 * 2 + 4 * 4) / 2 / 256)


def test_a_pattern_visits_its_blocks():
    pattern = BlockPattern.local_stride(4, 16, 2, 5, block_size=64)
    mask = MaskInfo.from_block_pattern(pattern, q_len=1024)
    share = float(np.asarray(pattern.dense).mean())
    assert visited_fraction(call_of(1024, 1024, heads=4, mask_info=mask), 64, 64) == pytest.approx(share)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"mask_info": MaskInfo.from_random(B, 21, 21, 0.7)}], ids=["ranges", "lists"]
)
def test_a_schedule_names_its_blocks_one_by_one(options):
    schedule = plan(call_of(21, 21, **options), 4, 4, "q")
    for i, (unmasked, masked) in enumerate(rows_of(schedule, H)[1][1]):
        first, total = (int(n) for n in schedule.counts(1, 1, i))
        blocks = [int(schedule.block(1, 1, i, n)) for n in range(total)]
        assert (set(blocks[:first]), set(blocks[first:])) == (unmasked, masked)


def test_only_blocks_on_an_edge_need_a_mask():
    schedule = plan(call_of(1024, 1024, causal=True), 64, 64, "q")
    counts = np.array([schedule.counts(0, 0, i) for i in range(16)])
    np.testing.assert_array_equal(counts[:, 1] - counts[:, 0], 1)  # the diagonal


def test_one_document_needs_no_mask_at_all():
    schedule = plan(call_of(1024, 1024, mask_info=MaskInfo.from_segments(jnp.zeros((1, 1024), jnp.int32))), 64, 64, "k")
    assert all(tuple(map(int, schedule.counts(0, 0, i))) == (16, 16) for i in range(16))
