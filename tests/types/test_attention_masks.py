"""Arrays as masks: `from_attention_mask` on every shape that broadcasts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo
from harness import normal
from tolerances import assert_close


def random_mask(seed, shape):
    return np.random.default_rng(seed).random(shape) < 0.5


BROADCAST = {
    "keys": ((2, 1, 1, 6), True),
    "keys-of-one-row": ((1, 1, 1, 6), True),
    "keys-in-3-D": ((2, 1, 6), True),
    "queries": ((2, 1, 6, 1), True),
    "keys-by-head": ((2, 3, 1, 6), False),
    "one-row": ((1, 1, 6, 6), False),
    "one-row-in-3-D": ((1, 6, 6), False),
}


@pytest.mark.parametrize("name", BROADCAST)
def test_attention_masks_broadcast(name):
    shape, symbolic = BROADCAST[name]
    mask = random_mask(3, shape)
    info = MaskInfo.from_attention_mask(mask)
    full = mask if mask.ndim == 4 else mask[:, None]
    assert info.is_symbolic == symbolic and (info.q_len, info.kv_len) == (6, 6)
    np.testing.assert_array_equal(info.attention_mask, np.broadcast_to(full, (*full.shape[:2], 6, 6)))
    rows = jnp.array([1, 4])
    np.testing.assert_array_equal(
        np.broadcast_to(info.element_mask(rows, rows), (*full.shape[:2], 2, 2)),
        np.broadcast_to(full, (*full.shape[:2], 6, 6))[:, :, [1, 4]][..., [1, 4]],
    )


def test_a_mask_of_keys_takes_any_number_of_queries():
    mask = random_mask(3, (2, 1, 1, 6))
    info = MaskInfo.from_attention_mask(mask)
    both = np.broadcast_to(mask, (2, 1, 4, 6)) & np.tri(4, 6, 2, dtype=bool)
    for combined in (
        info.replace(q_len=4).apply_causal(),
        info.apply_causal() & MaskInfo(4, 6),
        MaskInfo(4, 6).apply_causal() & info,
    ):
        np.testing.assert_array_equal(combined.attention_mask, both)
    with pytest.raises(ValueError, match=r"same lengths \(T, S\), got \(6, 6\) and \(6, 5\)"):
        info & MaskInfo(6, 5)
    with pytest.raises(ValueError, match=r"same lengths \(T, S\), got \(1, 6\) and \(4, 6\)"):
        MaskInfo.from_segments(np.zeros((2, 1), int), np.zeros((2, 6), int)) & MaskInfo(4, 6)


SHAPES = {
    "keys": (2, 1, 1, 6),
    "decoding": (2, 1, 1, 6),
    "queries": (2, 1, 4, 1),
    "matrix": (1, 1, 4, 6),
    "heads": (2, 2, 1, 6),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_call_broadcasts_them(name):
    mask = random_mask(3, SHAPES[name])
    T = 1 if name == "decoding" else 4
    q, k = normal("q", (2, T, 2, 8)), normal("k", (2, 6, 2, 8))
    out = flash_attention(q, k, k, mask_info=MaskInfo.from_attention_mask(mask))
    # jax.nn's rows that see nothing see all alike
    seen = np.broadcast_to(mask, (2, 2, T, 6)).any(-1).swapaxes(1, 2)[..., None]
    exact = jax.nn.dot_product_attention(q, k, k, mask=jnp.asarray(mask))
    assert_close({"out": out}, {"out": jnp.where(seen, exact, 0)})


@pytest.mark.parametrize("shape", [(4, 6), (6, 6)])
def test_a_matrix_that_was_taken_for_padding_is_refused_with_the_mend(shape):
    q, k = normal("q", (2, shape[0], 2, 8)), normal("k", (2, 6, 2, 8))
    mend = r"a 2-D mask is padding \(B, S\); give a matrix of queries and keys as mask\[None\]"
    with pytest.raises(ValueError, match=mend):
        flash_attention(q, k, k, mask_info=MaskInfo.from_attention_mask(np.ones(shape, bool)))
    flash_attention(q, k, k, mask_info=MaskInfo.from_attention_mask(np.ones(shape, bool)[None]))
