"""Which configs the calls of a ring run with: those said for it, then what is known of flash_attention."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.softmax import xla
from ejkernel.modules import flash_attention, ring_attention
from ejkernel.ops import TunedConfigs, autotune, dispatch, explain, tuning, use_config
from ejkernel.ops.tuned_files import user_file

FAST, SMALL = xla.Config(16, 16), xla.Config(8, 4)
BOTH = ("sp", "heads")
Q = jnp.ones((2, 64, 4, 8))
CASES = {
    "ring": {"method": "ring"},
    "halves": {"method": "ring", "layout": "zigzag"},
    "dropout": {"method": "ring", "layout": "zigzag", "dropout_prob": 0.1, "dropout_seed": 0},
    "all_to_all": {"method": "all_to_all"},
    "all_gather": {"method": "all_gather"},
    "gathered dropout": {"method": "all_gather", "layout": "zigzag", "dropout_prob": 0.1, "dropout_seed": 0},
    "ring and heads": {"method": "ring", "axis_name": BOTH, "mesh": (2, 2), "axes": BOTH},
    "a batch that is split": {"method": "ring", "mesh": (2, 2), "axes": ("data", "sp")},
    "one device": {"mesh": (1,)},
}


def mesh_of(shape=(2,), axes=("sp",)):
    """Where tests are collected there may be fewer devices."""
    return Mesh(np.asarray(jax.devices("cpu")[: math.prod(shape)]).reshape(shape), axes)


def options(name):
    case = dict(CASES[name])
    return {"causal": True, "mesh": mesh_of(case.pop("mesh", (2,)), case.pop("axes", ("sp",))), **case}


def explained(name, q=Q):
    return explain(ring_attention, q, q, q, **options(name))


def traced(name, q=Q):
    jax.eval_shape(lambda q: ring_attention(q, q, q, **options(name)), q)


@pytest.fixture
def taken(monkeypatch):
    """The configs of the calls that are made, by the operation's name."""
    configs, plan = {}, dispatch.plan

    def planned(operation, call, platform=None, cfg=None):
        made = plan(operation, call, platform, cfg)
        configs.setdefault(operation.name, set()).add(made.config)
        return made

    monkeypatch.setattr(dispatch, "plan", planned)
    return configs


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Where FAST is the fastest; the shapes of queries and keys measured, in order."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(xla.IMPLEMENTATION, "search_space", lambda call: [FAST])
    seen = []

    def measure(operation, implementation, call, config, arrays):
        assert not any(isinstance(x, jax.core.Tracer) for x in arrays.values())
        seen.append((arrays["query"].shape, arrays["key"].shape))
        return (1e-6, 2e-6) if config == FAST else (2e-6, 4e-6)

    monkeypatch.setattr(tuning, "_measure", measure)
    return seen


@pytest.mark.parametrize("name", CASES)
def test_use_config(name, taken):
    with use_config("ring_attention", {"block_q": 8, "block_k": 4}):
        traced(name)
        assert set.union(*taken.values()) == {SMALL}
        told = explained(name)
        assert (told.config, told.config_source) == (SMALL, "use_config")
        assert explain(flash_attention, Q, Q, Q).config_source == "default"
    taken.clear()
    traced(name)
    assert SMALL not in set.union(*taken.values())


def test_a_config_for_the_ring_goes_before_one_for_what_it_calls():
    with use_config("flash_attention", FAST):
        assert explained("ring").config == FAST
        with use_config("ring_attention", SMALL):
            assert explained("ring").config == SMALL


def test_a_config_with_unknown_fields_is_refused():
    with use_config("ring_attention", {"num_warps": 4}), pytest.raises(ValueError, match=r"\['num_warps'\].*block_q"):
        traced("ring")


@pytest.mark.parametrize("name", CASES)
def test_what_was_tuned_is_what_runs(name, measured, taken):
    """Kept under the name that a ring looks it up by, for the calls of a device, and for no other."""
    with autotune(progress=False) as tuned:
        traced(name)
    assert {one.operation for one in tuned} == {"ring_attention"}
    assert [*TunedConfigs.load(user_file("cpu")).entries] == ["flash_attention"]
    assert len(measured) == 2 * len(tuned) == (4 if name == "halves" else 2)
    taken.clear()
    traced(name)
    assert FAST in taken["ring_attention"]
    told = explained(name)
    assert (told.config, told.config_source) == (FAST, "the user's tuned file")
    assert (f"config {FAST} (from the user's tuned file)" in told.reason) == (name == "halves")


def test_times_measured_for_flash_attention_order_the_platforms_of_a_ring(measured):
    with autotune(progress=False) as tuned:
        traced("ring")
    bucket = tuned[0].bucket
    TunedConfigs().add("flash_attention", bucket, "triton", {}, 5.0).save(user_file("cpu"))
    assert f"fastest measured for {bucket}: xla 1 us, triton 5 us" in explained("ring").reason


@pytest.mark.parametrize("name", ["ring", "all_to_all", "all_gather"])
def test_outside_of_jit_too(name, measured):
    with autotune(save=False, progress=False) as tuned:
        out = ring_attention(Q, Q, Q, **options(name))
    assert [one.best for one in tuned] == [FAST]
    np.testing.assert_allclose(out, 1.0, rtol=1e-5)


def test_a_split_call_of_any_operation_is_measured_by_its_parts(measured):
    with autotune(save=False, progress=False) as tuned:
        flash_attention(Q, Q, Q, mesh=mesh_of(), in_specs=(P("sp"),) * 3)
    assert len(tuned) == 1 and {shape for shape, _ in measured} == {(1, 64, 4, 8)}


def test_where_nothing_can_be_measured(measured):
    def attend(q):
        return ring_attention(q, q, q, causal=True, method="ring")

    inside = jax.shard_map(attend, mesh=mesh_of(), in_specs=P(None, "sp"), out_specs=P(None, "sp"), check_vma=False)
    with autotune(save=False, progress=False) as tuned:
        with pytest.raises(RuntimeError, match=r"cannot measure ring_attention in a shard_map outside of jit.*jax.jit"):
            inside(Q)
        jax.jit(inside).lower(Q)
    assert len(tuned) == 1


@pytest.mark.parametrize("method", ["auto", "ring", "all_gather", "all_to_all"])
def test_what_would_raise_is_not_explained(method):
    odd = jnp.ones((1, 6, 4, 8))
    for run in (ring_attention, lambda *given, **how: explain(ring_attention, *given, **how)):
        with pytest.raises(ValueError, match=r"two chunks|2 \* 2 chunks"):
            run(odd, odd, odd, mesh=mesh_of(), layout="zigzag", method=method)
