"""Segment ids to masks and back, as functions of arrays: alone, in jit and vmap, and where there is no way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo, mask_to_segment_ids, segment_ids_to_mask
from ejkernel.types import mask as in_the_other_packages_place

IDS = np.array([[3, 3, 7, 7, -1], [2, -1, 2, 9, 9]])
NUMBERED = [[0, 0, 1, 1, -1], [0, -1, 0, 1, 1]]
MASK = (IDS[:, :, None] == IDS[:, None]) & (IDS[:, :, None] >= 0)


def test_they_are_where_the_other_package_has_them():
    assert in_the_other_packages_place.mask_to_segment_ids is mask_to_segment_ids
    assert in_the_other_packages_place.segment_ids_to_mask is segment_ids_to_mask


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_masks_of_ids(transform):
    np.testing.assert_array_equal(transform(segment_ids_to_mask)(jnp.array(IDS))[:, 0], MASK)
    kv_ids = jnp.array([[7, 3], [2, -1]])
    mask = transform(segment_ids_to_mask)((jnp.array(IDS), kv_ids))
    assert mask.shape == (2, 1, 5, 2)
    np.testing.assert_array_equal(mask, MaskInfo.from_segments(IDS, kv_ids).attention_mask)


def test_separate_masks_and_dtypes():
    q_mask, kv_mask, mask = segment_ids_to_mask((IDS, IDS[:, :3]), jnp.float32, return_separate_masks=True)
    assert {x.dtype for x in (q_mask, kv_mask, mask)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(q_mask, IDS >= 0)
    np.testing.assert_array_equal(kv_mask, IDS[:, :3] >= 0)
    assert MaskInfo.from_segments(IDS).get_or_compute_attention_mask(jnp.int32).dtype == jnp.int32


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_ids_of_masks(transform):
    q_ids, kv_ids = transform(mask_to_segment_ids)(jnp.array(MASK))
    assert q_ids.tolist() == kv_ids.tolist() == NUMBERED and q_ids.dtype == jnp.int32
    one = transform(mask_to_segment_ids)(jnp.array(MASK[0]))
    assert [x.tolist() for x in one] == [NUMBERED[0]] * 2
    heads = transform(mask_to_segment_ids)(jnp.array(MASK[:, None]).repeat(3, 1))
    assert [x.tolist() for x in heads] == [NUMBERED] * 2


def test_vmap_is_the_batch():
    for each, all_at_once in zip(jax.vmap(mask_to_segment_ids)(MASK), mask_to_segment_ids(MASK), strict=True):
        np.testing.assert_array_equal(each, all_at_once)


def test_each_head_may_have_its_own():
    heads = jnp.array(MASK)[None]  # two heads of one row
    q_ids, kv_ids = mask_to_segment_ids(heads, per_head=True)
    assert q_ids.tolist() == kv_ids.tolist() == [NUMBERED]
    with pytest.raises(ValueError, match=r"\(1, 2, 5, 5\) differs between heads: segment ids cannot express it"):
        mask_to_segment_ids(heads)


def test_what_is_not_made_of_segments(monkeypatch):
    causal = np.tri(4, dtype=bool)
    with pytest.raises(ValueError, match=r"is not made of segments .*: segment ids cannot express it"):
        mask_to_segment_ids(causal)
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")
    checked = jax.experimental.checkify.checkify(jax.jit(mask_to_segment_ids))
    assert checked(jnp.array(MASK))[0].get() is None
    assert "is not made of segments" in checked(jnp.array(causal))[0].get()


def test_bad_input():
    with pytest.raises(ValueError, match=r"mask must have shape \(T, S\), .* got \(3,\)"):
        mask_to_segment_ids([1, 0, 1])
    with pytest.raises(TypeError, match="mask must be bool or 0/1 integers, got dtype float32"):
        mask_to_segment_ids(jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="segment_ids must be an array or a pair of them, got 3 in a tuple"):
        segment_ids_to_mask((IDS, IDS, IDS))
    with pytest.raises(TypeError, match="per_head must be True or False"):
        mask_to_segment_ids(MASK, per_head=2)
