"""`a | b`: right in every case, by fields where it can be, else by a rule; a T x S array is made by none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import BlockPattern, MaskInfo


def random_ids(seed, B, L):
    return np.random.default_rng(seed).integers(-1, 3, (B, L)).astype(np.int32)


def random_mask(seed, shape):
    return np.random.default_rng(seed).random(shape) < 0.5


def union(a, b):
    """`a | b`, checked against the masks in full."""
    either = a | b
    np.testing.assert_array_equal(*np.broadcast_arrays(either.attention_mask, a.attention_mask | b.attention_mask))
    return either


def symbolic_pairs():
    ids, other = np.array([[0, 0, 1, 1, -1]]), random_ids(1, 2, 5)
    segments, plain = MaskInfo.from_segments(ids), MaskInfo(5, 5)
    blocks = MaskInfo.from_block_pattern(BlockPattern.from_dense(random_mask(5, (2, 4, 4)), block_size=2), q_len=5)
    finer = MaskInfo.from_block_pattern(BlockPattern.from_dense(random_mask(6, (8, 8)), block_size=1), q_len=5)
    dense = MaskInfo.from_attention_mask(random_mask(4, (2, 5, 5)))
    return {
        "with-everything": (plain, segments.apply_causal().apply_chunked(2)),
        "with-itself": (MaskInfo.from_segments(other).apply_causal(), MaskInfo.from_segments(other).apply_causal()),
        "with-less": (segments.apply_causal(), plain.apply_causal()),
        "with-less-of-dense": (plain.apply_causal(1), dense.apply_causal()),
        "bands-that-overlap": (plain.apply_sliding_window((3, -0)), plain.apply_sliding_window((1, 2))),
        "bands-that-touch": (plain.replace(band=(-3, -2)), plain.replace(band=(-1, 0))),
        "an-empty-band": (plain.replace(band=(2, 0)), plain.replace(band=(-4, -3))),
        "bands-in-segments": (segments.apply_causal(), segments.apply_sliding_window((0, 1))),
        "bands-on-positions": (
            MaskInfo.from_segments(ids, None, ids + 3).apply_causal(),
            MaskInfo.from_segments(ids, None, ids + 3).apply_sliding_window((0, 1)),
        ),
        "chunks-that-nest": (plain.apply_chunked(2), plain.apply_chunked(4)),
        "band-and-chunk-wider": (plain.apply_chunked(2).apply_causal(), plain.apply_chunked(4).apply_causal(2)),
        "patterns": (blocks, finer),
        "patterns-in-segments": (blocks & segments, finer & segments),
    }


@pytest.mark.parametrize("name", symbolic_pairs())
def test_unions_that_fields_can_say_have_no_rule(name):
    a, b = symbolic_pairs()[name]
    for either in (union(a, b), union(b, a)):
        assert either.is_symbolic and either.rule is None


def test_other_unions_are_rules():
    plain, segments = MaskInfo(5, 5), MaskInfo.from_segments(random_ids(1, 2, 5))
    bands = union(plain.replace(band=(-3, -2)), plain.replace(band=(0, 0)))
    assert (
        repr(bands)
        == "MaskInfo(T=5, S=5, rule=(((j - i) >= -3) & ((j - i) <= -2)) | (((j - i) >= 0) & ((j - i) <= 0)))"
    )
    dense = MaskInfo.from_attention_mask(random_mask(4, (2, 5, 5)))
    for a, b in (
        (plain.apply_chunked(2), plain.apply_chunked(3)),
        (segments, plain.apply_causal()),
        (segments, MaskInfo.from_segments(random_ids(2, 1, 5))),
        (segments.apply_causal(), dense),
        (plain.apply_causal(), MaskInfo.from_function(lambda b, h, i, j: i == j - 2, q_len=5)),
    ):
        assert union(a, b).is_symbolic and union(a, b).rule is not None


def test_what_masks_agree_in_stays_out_of_their_union():
    """Segments, and the batch with them: the rule has no array."""
    segments = MaskInfo.from_segments(random_ids(1, 2, 5))
    chunked = union(segments.apply_causal(), segments.apply_chunked(2))
    assert chunked.rule.arrays == () and chunked.q_ids is segments.q_ids
    banded = union(segments.apply_causal(), MaskInfo.from_segments(random_ids(2, 2, 5)).apply_causal())
    assert banded.band == (None, 0)


def test_symbolic_unions_never_make_a_square_array():
    L = 4096

    @jax.jit
    def build(ids):
        info = MaskInfo.from_segments(ids)
        images = info.apply_causal().apply_token_type_ids(ids)
        return (
            info.apply_causal() | info.apply_sliding_window((3, 64)),
            images,
            images | MaskInfo.prefix_lm([9, 70], q_len=L),
        )

    either, *others = build(jnp.zeros((2, L), jnp.int32))
    assert either.is_symbolic and either.band == (None, 64)
    assert all(x.size <= 2 * L for mask in others for x in jax.tree.leaves(mask))
