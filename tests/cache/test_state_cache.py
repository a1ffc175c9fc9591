"""States of linear attention in slots: served in parts, they give what one call gives."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import recurrent_attention
from ejkernel.types import StateCacheView
from harness import normal

H, D, Dv = 2, 4, 6


def tokens(B, T):
    shapes = {"query": (B, T, H, D), "key": (B, T, H, D), "value": (B, T, H, Dv), "g": (B, T, H)}
    return {name: normal(name, shape) for name, shape in shapes.items()} | {"g": -abs(normal("g", (B, T, H)))}


@jax.jit(donate_argnums=0)
def step(cache, slots, given):
    out, state = recurrent_attention(**given, initial_state=cache.read(slots), return_state=True)
    return cache.write(slots, state), out


def parts(given, *bounds):
    return [{name: x[:, a:b] for name, x in given.items()} for a, b in pairwise(bounds)]


def test_prefill_and_decoding_are_one_call():
    given, slots = tokens(2, 7), jnp.array([3, 1])
    cache, outs = StateCacheView.create(5, H, D, value_dim=Dv), []
    for part in parts(given, 0, 5, 6, 7):
        cache, out = step(cache, slots, part)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), recurrent_attention(**given), rtol=1e-5, atol=1e-5)
    assert not cache.state[jnp.array([0, 2, 4])].any()


def test_forks_go_on_from_a_shared_prefix():
    prefix, suffix = tokens(1, 4), tokens(2, 3)
    cache, _ = step(StateCacheView.create(4, H, D, value_dim=Dv), jnp.array([0]), prefix)
    cache = cache.fork([0, 0], [2, -1])
    _, out = step(cache, jnp.array([2, 0]), suffix)
    whole = {name: jnp.concatenate([jnp.repeat(prefix[name], 2, 0), suffix[name]], 1) for name in suffix}
    np.testing.assert_allclose(out, recurrent_attention(**whole)[:, 4:], rtol=1e-5, atol=1e-5)


def test_reset_empties_single_slots():
    cache = StateCacheView(jnp.ones((3, H, D, Dv))).reset([2, -1])
    assert cache.state[:2].all() and not cache.state[2].any()


def test_padding_is_read_as_zeros_and_never_written():
    cache = StateCacheView(jnp.ones((3, 1, 1, 1)))
    assert cache.read([-1, 2]).ravel().tolist() == [0.0, 1.0]
    written = jax.jit(StateCacheView.write)(cache, jnp.array([-1, 7, 0]), jnp.full((3, 1, 1, 1), jnp.nan))
    assert np.isnan(written.state[0]).all() and written.state[1:].all() and np.isfinite(written.state[1:]).all()


def test_it_is_updated_in_place_where_donated():
    cache = StateCacheView.create(4, H, D, value_dim=Dv)
    lowered = jax.jit(StateCacheView.write, donate_argnums=0).lower(cache, jnp.array([1]), jnp.ones((1, H, D, Dv)))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == cache.state.nbytes


ERRORS = {
    "slot": (lambda c: c.read([3]), ValueError, r"slots must be below 3.*\(row 0: 3\)"),
    "rank": (lambda c: c.reset([[0]]), ValueError, r"slots must have shape \(N,\), got \(1, 1\)"),
    "floats": (lambda c: c.read(np.array([0.5])), TypeError, "slots must hold integers"),
    "states": (lambda c: c.write([0], jnp.ones((1, H, D, D))), ValueError, r"states must be \(1, 2, 4, 6\)"),
    "pairs": (lambda c: c.fork([0, 1], [2]), ValueError, r"sources \(2,\) and targets \(1,\) must both be"),
    "twice": (lambda c: c.write([1, -1, 1], jnp.zeros((3, H, D, Dv))), ValueError, r"a slot twice \(row 2: 1\)"),
    "fork-twice": (lambda c: c.fork([0, 1], [2, 2]), ValueError, r"targets must not hold a slot twice \(row 1: 2\)"),
    "create": (lambda c: c.create(0, 1, 1), ValueError, "slots=0 must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("call, kind, message", ERRORS.values(), ids=ERRORS)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call(StateCacheView.create(3, H, D, value_dim=Dv))
