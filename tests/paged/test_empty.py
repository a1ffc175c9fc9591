"""Batches without sequences, and calls without tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.paged import ragged
from ejkernel.modules import (
    cascade_attention,
    decode_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    write_interleaved_kv_pages,
    write_kv_pages,
)
from ejkernel.ops import explain
from harness.paged import refused

H, HKV, D, DV, L, W = 4, 2, 16, 24, 4, 3
KEYS, VALUES = jnp.full((6, L, HKV, D), jnp.nan), jnp.full((6, L, HKV, DV), jnp.nan)
LENS, TABLE = np.zeros(0, np.int32), np.zeros((0, W), np.int32)
LSE = {"return_lse": True}


def queries(*lead):
    return jnp.ones((*lead, H, D))


# id: (function, arrays, options, shapes of out and lse)
CASES = {
    "page": (page_attention, (queries(0), KEYS, VALUES, LENS, TABLE), LSE, [(0, H, DV), (0, H)]),
    "page-tokens": (page_attention, (queries(0, 2), KEYS, VALUES, LENS, TABLE), LSE, [(0, 2, H, DV), (0, H, 2)]),
    "page-lists": (page_attention, (queries(0), KEYS, VALUES, [], TABLE), {}, [(0, H, DV)]),
    "cascade": (cascade_attention, (queries(0, 2), KEYS, VALUES, LENS, TABLE, 5), LSE, [(0, 2, H, DV), (0, H, 2)]),
    "cascade-of-lists": (cascade_attention, (queries(0, 2), KEYS, VALUES, [], [], 4), LSE, [(0, 2, H, DV), (0, H, 2)]),
    "no-tokens": (
        ragged_page_attention,
        (queries(0), (KEYS, VALUES), np.array([3, 0]), np.zeros((2, W), np.int32), np.zeros(3, np.int32), 2),
        {"softmax_aux": jnp.ones(H)},
        [(0, H, DV)],
    ),
    "no-sequences": (
        ragged_page_attention, (queries(5), (KEYS, VALUES), LENS, TABLE, np.zeros(1, np.int32), None), {}, [(5, H, DV)],
    ),
    "nothing": (
        ragged_page_attention, (queries(0), (KEYS, VALUES), LENS, TABLE, np.zeros(1, np.int32), 0), {}, [(0, H, DV)],
    ),
    "prefill": (
        prefill_page_attention, (queries(0), KEYS, VALUES, 7, np.array([1, 4])), LSE, [(0, H, DV), (H, 0)],
    ),
    "decode": (
        decode_attention,
        (queries(0), KEYS.reshape(-1, HKV, D), VALUES.reshape(-1, HKV, DV), TABLE, LENS),
        LSE | {"page_size": L},
        [(0, H, DV), (0, H)],
    ),
    "whole": (
        ragged_decode_attention,
        (queries(0, 1), jnp.zeros((0, 9, HKV, D)), jnp.zeros((0, 9, HKV, DV)), LENS, LENS),
        LSE,
        [(0, 1, H, DV), (0, H, 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_empty_arrays(name, native):
    check(name, native)


@pytest.mark.parametrize("name", ["page-tokens", "nothing", "whole"])
def test_empty_arrays_of_a_kernel(name, interpreted):
    check(name, interpreted)


def check(name, platform):
    function, arrays, options, shapes = CASES[name]
    if refused(platform):
        return
    with platform.context():
        outputs = function(*arrays, **options, platform=platform.name)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert [x.shape for x in outputs] == shapes
    assert all(x.dtype == jnp.float32 and not x.any() for x in outputs)


@pytest.mark.parametrize("name", CASES)
def test_under_jit_and_explained(name, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECKS", "0")
    function, arrays, options, shapes = CASES[name]
    assert explain(function, *arrays, **options).platform == "xla" or name.startswith("cascade")
    arrays = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays]
    outputs = jax.eval_shape(jax.jit(lambda: function(*arrays, **options)))
    assert [x.shape for x in jax.tree.leaves(outputs)] == shapes


def test_checks_of_values_on_the_device(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CHECKS", "1")
    assert page_attention(queries(0), KEYS, VALUES, jnp.asarray(LENS), jnp.asarray(TABLE)).shape == (0, H, DV)


def test_over_a_mesh():
    mesh = jax.make_mesh((2,), ("dp",))
    specs = (P("dp"), P(None), P(None))
    options = {"mesh": mesh, "in_specs": specs, "out_specs": P("dp")}
    out = page_attention(queries(0), KEYS, VALUES, LENS, TABLE, **options)
    assert out.shape == (0, H, DV)
    options["in_specs"] = (P("nope"), P(None), P(None))
    with pytest.raises(ValueError, match="mesh axis 'nope'; the mesh has"):
        page_attention(queries(0), KEYS, VALUES, LENS, TABLE, **options)
    given = (queries(4), (KEYS, VALUES), LENS, TABLE, np.zeros(1, np.int32), None)
    out = ragged_page_attention(*given, mesh=mesh, in_specs={"context_lens": P("dp")})
    np.testing.assert_array_equal(out, np.zeros((4, H, DV)))


def test_split_by_its_type():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    query = jax.device_put(queries(0, 2), jax.NamedSharding(mesh, P(None, None, "tp")))
    assert page_attention(query, KEYS, VALUES, LENS, TABLE).shape == (0, 2, H, DV)


@pytest.mark.parametrize("table", [[], np.zeros((0, 0), np.int32)], ids=["list", "no pages"])
def test_a_table_of_nobody_has_no_pages(table):
    assert page_attention(queries(0), KEYS, VALUES, [], table).shape == (0, H, DV)


def test_in_parts():
    cache = jnp.zeros((0, 9, HKV, D))
    for function in (ragged.ragged_gqa, ragged.reference_gqa):
        lead = (0,) if function is ragged.ragged_gqa else (0, 1)
        outputs = function(queries(0), cache, cache, LENS, LENS)
        assert [x.shape for x in outputs] == [(*lead, H, D), (*lead, H, 1), (*lead, H, 1)]


def test_nothing_is_written():
    key, value, none = jnp.zeros((0, HKV, D)), jnp.zeros((0, HKV, DV)), np.zeros(0, np.int32)
    for slots in (none, []):
        keys, values = write_kv_pages(KEYS, VALUES, key, value, slots, k_scale=2.0)
        assert keys.shape == KEYS.shape and values.shape == VALUES.shape
    pages = jnp.ones((6, L, 2 * HKV, D))
    np.testing.assert_array_equal(write_interleaved_kv_pages(pages, key, key, none), pages)


def test_what_does_not_fit_still_raises():
    with pytest.raises(ValueError, match=r"context_lens \(2,\) must have one entry per sequence: 0"):
        page_attention(queries(0), KEYS, VALUES, [1, 2], TABLE)
    with pytest.raises(ValueError, match=r"query has an empty dimension: shape \(2, 0, 4, 16\)"):
        page_attention(queries(2, 0), KEYS, VALUES, [1, 2], np.zeros((2, W), int))
    with pytest.raises(ValueError, match="platform 'cuda' is unknown"):
        page_attention(queries(0), KEYS, VALUES, LENS, TABLE, platform="cuda")
