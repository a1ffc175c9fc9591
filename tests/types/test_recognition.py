"""Functions that say what the fields of a mask can: they become these fields, for which kernels are faster."""

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo

T, S = 9, 12
IDS = jnp.array([3, 3, -1, -1, -1, 7, 7, 2, 3])
ROWS = jnp.stack([IDS, IDS[::-1]])


def made(function, q_len=T, kv_len=S, batch_size=1):
    """The mask of a function, checked pair by pair."""
    mask = MaskInfo.from_function(function, q_len=q_len, kv_len=kv_len, batch_size=batch_size)
    expected = np.array([bool(function(*at)) for at in np.ndindex(batch_size, 1, q_len, kv_len)])
    shown = np.broadcast_to(mask.attention_mask, (batch_size, 1, q_len, kv_len))
    np.testing.assert_array_equal(shown, expected.reshape(shown.shape))
    return mask


@pytest.mark.parametrize(
    ("function", "band"),
    [
        (lambda b, h, i, j: j <= i, (None, 0)),
        (lambda b, h, i, j: i >= j, (None, 0)),
        (lambda b, h, i, j: j < i, (None, -1)),
        (lambda b, h, i, j: (i - j < 4) & (i - j >= 0), (-3, 0)),
        (lambda b, h, i, j: jnp.abs(i - j) <= 2, (-2, 2)),
        (lambda b, h, i, j: jnp.abs(j - i - 3) < 2, (2, 4)),
        (lambda b, h, i, j: (i + 1) * 1 > j - 2, (None, 2)),
        (lambda b, h, i, j: i == j, (0, 0)),
        (lambda b, h, i, j: (j <= i) & (j <= i - 2) & (j >= i - 5), (-5, -2)),
    ],
)
def test_bands(function, band):
    mask = made(function)
    assert mask.rule is None
    assert mask.band == tuple(None if x is None else x - (S - T) for x in band)


def test_chunks():
    mask = made(lambda b, h, i, j: (i // 4 == j // 4) & (j <= i), kv_len=T)
    assert (mask.chunk, mask.band, mask.rule) == (4, (None, 0), None)
    assert made(lambda b, h, i, j: i // 4 == j // 4).chunk is None  # counted from the end, were it one


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, i, j: (IDS[i] == IDS[j]) & (j <= i),
        lambda b, h, i, j: (ROWS[b, i] == ROWS[b, j]) & (j <= i),
    ],
)
def test_documents_are_segments(function):
    mask = made(function, kv_len=T, batch_size=2)
    assert mask.rule is None and mask.band == (None, 0) and mask.q_ids is mask.kv_ids
    assert int(mask.q_ids.min()) >= 0  # negative ids are no padding to a function


def test_ids_of_other_lengths():
    mask = made(lambda b, h, i, j: (IDS[i] == IDS[j]) & (j <= i), q_len=5, kv_len=12)
    assert mask.rule is None and mask.q_ids.shape == (1, 5) and mask.kv_ids.shape == (1, 12)


def test_of_queries_and_of_keys():
    keys = jnp.arange(S) // 5
    mask = made(lambda b, h, i, j: IDS[i] == keys[j])
    assert mask.rule is None and mask.q_ids.shape == (1, T) and mask.kv_ids.shape == (1, S)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, i, j: (j <= i) | (j < 3),
        lambda b, h, i, j: 2 * j <= i,
        lambda b, h, i, j: i // 4 == j // 3,
        lambda b, h, i, j: (i * j) % 3 == 0,
        lambda b, h, i, j: jnp.abs(i - 2 * j) < 3,
        lambda b, h, i, j: jnp.abs(i - j) > 3,
        lambda b, h, i, j: i > 3,
        lambda b, h, i, j: IDS[i] == IDS[jnp.minimum(j, 4)],
    ],
)
def test_what_is_none_of_these_stays_a_rule(function):
    mask = made(function)
    assert mask.rule is not None and mask.band == (None, None) and mask.q_ids is None


def test_the_rest_of_a_conjunction_stays_a_rule():
    mask = made(lambda b, h, i, j: (j <= i) & ((i * j) % 3 == 0))
    assert mask.band == (None, -(S - T)) and repr(mask.rule.expression) == "((i * j) % 3) == 0"
