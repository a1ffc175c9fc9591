"""What a family gets from the framework for a folder of its own and one line: the toy family of tests/toy_family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.families import registered_families
from ejkernel.ops import (
    Shards,
    autotune,
    explain,
    get_operation,
    list_operations,
    register_families,
    support_table,
)
from harness import normal
from toy_family import xla
from toy_family.operations import DECAYED_SUM, decayed_sum

X, STATE, LENGTHS = normal("x", (2, 8, 3)), normal("state", (2, 3)), jnp.array([8, 5])


def by_definition(x, state, lengths, decay=0.5):
    x = jnp.where((jnp.arange(x.shape[1])[None] < lengths[:, None])[..., None], x, 0)
    out = []
    for t in range(x.shape[1]):
        state = decay * state + x[:, t]
        out.append(state)
    return jnp.stack(out, 1), state


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr("ejkernel.families._FAMILIES", [*registered_families()])  # for these tests alone
    register_families("toy_family")  # the one line


@pytest.fixture
def seen():
    """The shapes of what the backward was given, of each call of it."""
    shapes, backward = [], xla.IMPLEMENTATION.backward

    def recorded(call, residuals, cotangents, config):
        given = call.arrays | residuals | {f"d{name}": ct for name, ct in cotangents.items()}
        shapes.append({name: x.shape for name, x in given.items()})
        assert residuals["starts"].shape[1] == -(-call["x"].shape[1] // config.chunk)
        return backward(call, residuals, cotangents, config)

    jax.clear_caches()  # it is seen while it is traced
    object.__setattr__(xla.IMPLEMENTATION, "backward", recorded)
    yield shapes
    object.__setattr__(xla.IMPLEMENTATION, "backward", backward)


def close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def weighed(function, w_out, w_state):
    def loss(x, state):
        out, end = function(x, state, LENGTHS)
        return (w_out * out).sum() + (w_state * end).sum()

    return loss


def test_it_is_known():
    assert "decayed_sum" in list_operations() and get_operation("decayed_sum") is DECAYED_SUM
    assert support_table("decayed_sum").splitlines()[-1] == "| plain | yes | yes | yes |"
    told = explain(decayed_sum, X, STATE, LENGTHS)
    assert (told.operation, told.platform, told.config) == ("decayed_sum", "xla", xla.Config(2))


@pytest.mark.parametrize("chunk", [1, 2, 8])
def test_gradients_from_both_outputs(chunk, seen):
    ours = weighed(lambda *a: decayed_sum(*a, cfg={"chunk": chunk}), 2.0, 3.0)
    close(decayed_sum(X, STATE, LENGTHS, cfg={"chunk": chunk}), by_definition(X, STATE, LENGTHS))
    close(jax.grad(ours, (0, 1))(X, STATE), jax.grad(weighed(by_definition, 2.0, 3.0), (0, 1))(X, STATE))
    assert seen[0]["starts"] == (2, 8 // chunk, 3)


@pytest.mark.parametrize("used", ["out", "state"])
def test_an_output_that_nobody_differentiates_has_no_cotangent(used, seen):
    def loss(function, x):
        return dict(zip(("out", "state"), function(x, STATE, LENGTHS), strict=True))[used].sum()

    close(jax.grad(lambda x: loss(decayed_sum, x))(X), jax.grad(lambda x: loss(by_definition, x))(X))
    (given,) = seen
    assert {name for name in given if name.startswith("d")} == {f"d{used}"}


def test_vmap_expands_only_what_has_gradients(seen):
    many = normal("many", (4, 2, 8, 3))

    def loss(function, x, lengths):
        return function(x, STATE, lengths)[0].sum()

    one = jnp.array([5])  # broadcast over the batch
    ours = jax.vmap(jax.grad(lambda x: loss(decayed_sum, x, one)))(many)
    close(ours, jax.vmap(jax.grad(lambda x: loss(by_definition, x, one)))(many))
    given = seen[-1]
    assert given["x"] == (8, 8, 3) and given["state"] == (8, 3) and given["lengths"] == (1,)


def test_it_splits_over_devices():
    mesh = jax.make_mesh((2, 3), ("b", "d"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:6])
    shards = Shards(mesh, (P("b", None, "d"), P("b", "d")), None)
    close(decayed_sum(X, STATE, LENGTHS, shards=shards), by_definition(X, STATE, LENGTHS))
    with pytest.raises(ValueError, match=r"split dimension T .* can only be split over B, D; hand the state on"):
        decayed_sum(X, STATE, LENGTHS, shards=Shards(mesh, (P(None, "b"),), None))


def test_it_is_tuned_on_its_own_example(monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    drawn = []
    example = DECAYED_SUM.example
    monkeypatch.setattr("ejkernel.ops.tuning.REPEATS", 1)
    object.__setattr__(DECAYED_SUM, "example", lambda call: drawn.append(example(call)) or drawn[-1])
    try:
        with autotune(progress=False):
            jax.jit(decayed_sum)(X, STATE, LENGTHS)
    finally:
        object.__setattr__(DECAYED_SUM, "example", example)
    assert [given["lengths"].tolist() for given in drawn] == [[8, 8]]
    assert explain(decayed_sum, X, STATE, LENGTHS).config_source == "the user's tuned file"
