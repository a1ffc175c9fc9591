"""Masks from functions, bounds, prefixes and trees: what they show, alone and with other masks, in every view."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from ejkernel.types import MaskInfo
from harness.gallery import MASKS, Sizes, values

B, H, T, S = SIZES = Sizes(B=2, H=4, T=12, S=16)


def shown(mask, heads=1):
    return np.broadcast_to(mask.attention_mask, (B, heads, mask.q_len, mask.kv_len))


def by_pairs(visible, heads=1, q_len=T, kv_len=S):
    return np.array([bool(visible(*at)) for at in np.ndindex(B, heads, q_len, kv_len)]).reshape(B, heads, q_len, kv_len)


STARTS, ENDS = (
    np.random.default_rng(0).integers(0, S // 2, (B, H, T)),
    np.random.default_rng(1).integers(S // 2, S + 3, (B, H, T)),
)


@pytest.mark.parametrize("name", MASKS)
def test_a_function_shows_what_it_says(name):
    function = MASKS[name](SIZES)
    mask = MaskInfo.from_function(function, q_len=T, kv_len=S, batch_size=B)
    np.testing.assert_array_equal(np.broadcast_to(mask.attention_mask, SIZES), values(function, SIZES))
    causal = mask.apply_causal(offset=T - S).attention_mask
    expected = values(function, SIZES) & (jnp.arange(S) <= jnp.arange(T)[:, None])
    np.testing.assert_array_equal(np.broadcast_to(causal, SIZES), expected)


def test_bounds():
    mask = MaskInfo.from_bounds(STARTS[:, 0], ENDS[:, 0], q_len=T, kv_len=S)
    expected = by_pairs(lambda b, h, i, j: STARTS[b, 0, i] <= j < ENDS[b, 0, i])
    np.testing.assert_array_equal(shown(mask), expected)
    np.testing.assert_array_equal(
        shown(MaskInfo(T, S).apply_bounds(STARTS[:, 0]).apply_bounds(ends=ENDS[:, 0])), expected
    )
    by_head = MaskInfo.from_bounds(STARTS, ENDS, q_len=T, kv_len=S)
    np.testing.assert_array_equal(
        shown(by_head, H), by_pairs(lambda b, h, i, j: STARTS[b, h, i] <= j < ENDS[b, h, i], H)
    )
    assert MaskInfo.from_bounds(STARTS[0, 0], q_len=T, kv_len=S).shape == (1, 1, T, S)


def test_bounds_of_keys():
    # T and S exchanged: keys have the limits
    mask = MaskInfo.from_key_bounds(STARTS[:, 0], ENDS[:, 0], q_len=S, kv_len=T)
    expected = by_pairs(lambda b, h, i, j: STARTS[b, 0, j] <= i < ENDS[b, 0, j], 1, S, T)
    np.testing.assert_array_equal(shown(mask), expected)
    applied = MaskInfo(S, T).apply_key_bounds(STARTS, ENDS)
    expected = by_pairs(lambda b, h, i, j: STARTS[b, h, j] <= i < ENDS[b, h, j], H, S, T)
    np.testing.assert_array_equal(shown(applied, H), expected)


def test_prefixes_and_trees():
    prefixes = [3, 9]
    mask = MaskInfo.prefix_lm(prefixes, q_len=T, kv_len=S)
    np.testing.assert_array_equal(shown(mask), by_pairs(lambda b, h, i, j: j <= i + S - T or j < prefixes[b]))
    # a prefix of 4 tokens, then two rollouts of 5 and 3
    ends = np.array([12] * 4 + [9] * 5 + [12] * 3)
    tree = MaskInfo.tree(ends)
    np.testing.assert_array_equal(shown(tree), by_pairs(lambda b, h, i, j: j <= i < ends[j], 1, T, T))


def test_rules_pass_through_jit_vmap_and_scan():
    def mask(lengths):
        return MaskInfo.prefix_lm(lengths, q_len=T).apply_function(lambda b, h, i, j: i != j + lengths[b])

    lengths = jnp.array([[2, 5], [7, 1], [0, 12]])
    expected = jnp.stack([mask(row).attention_mask for row in lengths])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: mask(x).attention_mask))(lengths), expected)
    made = jax.vmap(mask)(lengths)
    assert made.shape == (6, 1, T, T)
    np.testing.assert_array_equal(made.attention_mask.reshape(expected.shape), expected)
    np.testing.assert_array_equal(jax.lax.map(lambda m: m.attention_mask, made), expected)


def test_reads_and_pictures():
    mask = MaskInfo.prefix_lm([1], q_len=3)
    assert repr(mask) == "MaskInfo(T=3, S=3, rule=(j <= i) | (j < x0[b]))"
    assert mask.visualize().splitlines()[1:] == ["█··", "██·", "███"]
    assert mask.is_symbolic and jax.tree.leaves(mask)[0].shape == (1,)
    sharded = mask.get_shardings(mesh=jax.make_mesh((1,), ("dp",)))
    assert jax.device_put(mask, sharded).shape == (1, 1, 3, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaskInfo.from_bounds([0, 1], q_len=3), "starts .2,. must have one number for each of 3 tokens"),
        (lambda: MaskInfo.from_bounds([0.5] * 3, q_len=3), "starts must hold integers"),
        (
            lambda: MaskInfo.from_key_bounds(None, [[1] * 3] * 2, q_len=3) & MaskInfo.from_lengths([1] * 3, q_len=3),
            "batch",
        ),
        (lambda: MaskInfo.prefix_lm([4], q_len=3), "prefix_lengths"),
        (lambda: MaskInfo.from_function(lambda b, h, i, j: 2 * h > j, q_len=3).attention_mask, "number of a head"),
        (lambda: MaskInfo.from_function(lambda b, h, i, j: j, q_len=3), "must give a bool"),
    ],
)
def test_what_fits_nothing_is_refused(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


OUT_OF_RANGE = {
    "starts": (
        lambda n: MaskInfo.from_bounds(jnp.array([[0, 1], [0, n]]), q_len=2, kv_len=4),
        (0, 5),
        r"\[0, 4\] \(row 1, 1",
    ),
    "ends": (
        lambda n: MaskInfo.from_key_bounds(None, jnp.array([1, 2, n, 2]), q_len=2, kv_len=4),
        (2, -1),
        r"\[0, 2\] \(row 0, 2",
    ),
    "lengths": (
        lambda n: MaskInfo.prefix_lm(jnp.array([2, n]), q_len=2, kv_len=4),
        (4, 5),
        r"prefix_lengths .*\[0, 4\] \(row 1",
    ),
    "tree": (
        lambda n: MaskInfo.tree(jnp.array([4, 2, n, 4])),
        (3, 2),
        r"past their own token and be at most 4 \(row 0, 2",
    ),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_bounds_out_of_range_are_errors_on_request(name, monkeypatch):
    make, (good, bad), message = OUT_OF_RANGE[name]
    jax.jit(lambda n: make(n).attention_mask)(bad)  # clamped
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")
    make(good)
    with pytest.raises(ValueError, match=rf"{message}: {bad}\)"):
        make(bad)
    program = checkify.checkify(jax.jit(lambda n: make(n).attention_mask))
    assert program(good)[0].get() is None
    with pytest.raises(checkify.JaxRuntimeError, match=rf"{message}\)"):
        program(bad)[0].throw()
