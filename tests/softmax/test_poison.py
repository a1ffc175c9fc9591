"""A nan or inf shows where it is seen, and nowhere else. Padding is poisoned in every case of test_cases.py."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.types import MaskInfo
from harness import PLATFORMS, cotangents_for, with_gradients
from harness.poison import filled
from harness.softmax import Case, call_case, definition, runs
from tolerances import assert_close

POISONS = [np.nan, np.inf, -np.inf]

# Segments that poison only themselves -------------------------------------------------------------------------

T, H, D = 40, 1, 8
IDS = np.array([[0] * 13 + [1] * 11 + [2] * 16, ([0, 1, 2, 1] * 10)])
TILES = (16, 8)


def segment_case(**options):
    return Case(
        "segments", B=2, T=T, H=H, D=D, tiles=TILES, options=options,
        mask=lambda c: MaskInfo.from_segments(jnp.asarray(IDS, jnp.int32)),
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"logits_soft_cap": 2.0}], ids=["plain", "causal", "capped"])
def test_a_segment_poisons_only_itself(options, native):
    check_segments(options, native)


def test_a_segment_poisons_only_itself_in_a_kernel(interpreted):
    check_segments({"causal": True, "logits_soft_cap": 2.0}, interpreted)


def check_segments(options, platform):
    """Outputs and gradients of the other segments stay; its own output shows the nan."""
    case = segment_case(**options)
    if not runs(case, platform):
        return
    arrays = case.arrays()
    function = partial(call_case, case, platform)
    cotangents = cotangents_for(partial(definition, case, dtype=jnp.float32), arrays, "float32")
    sick = IDS == 1
    compiled = with_gradients(function)
    clean = compiled(arrays, cotangents)
    for value in POISONS:
        ill = arrays | {name: filled(arrays[name], sick, value) for name in ("query", "key", "value")}
        outputs, gradients = compiled(ill, cotangents)
        for got, expected in (({"out": outputs["out"]}, clean[0]), (gradients, clean[1])):
            others = {name: x[~sick] for name, x in got.items()}
            assert_close(others, {name: expected[name][~sick] for name in got}, kind=f"{value} in another segment:")
        lse = outputs["lse"].swapaxes(1, 2)
        assert_close({"lse": lse[~sick]}, {"lse": clean[0]["lse"].swapaxes(1, 2)[~sick]})
        assert not np.isfinite(outputs["out"][sick]).any(), f"{value} was laundered"


@pytest.mark.parametrize("D", [64, 256])
def test_a_segment_poisons_only_itself_in_wide_tiles(D, native):
    """The same where a tile holds several segments of 16-bit numbers: others change by a rounding at most."""
    ids = np.repeat([[0, 1, 2]], [90, 80, 100], axis=1)
    case = Case(
        "wide", B=1, T=270, H=2, Hkv=1, D=D, dtype="bfloat16", options={"causal": True},
        tiles=(128, 64), mask=lambda c: MaskInfo.from_segments(jnp.asarray(ids, jnp.int32)),
    )  # fmt: skip
    if not runs(case, native):
        return
    arrays = case.arrays()
    function = partial(call_case, case, native)
    cotangents = cotangents_for(function, arrays, case.dtype)
    sick = ids == 1
    compiled = with_gradients(function)
    clean = compiled(arrays, cotangents)
    for value in (np.nan, np.inf):
        ill = arrays | {name: filled(arrays[name], sick, value) for name in ("query", "key", "value")}
        outputs, gradients = compiled(ill, cotangents)
        for got, expected in (({"out": outputs["out"]}, clean[0]), (gradients, clean[1])):
            for name, x in got.items():
                x, right = np.asarray(x, np.float32), np.asarray(expected[name], np.float32)
                largest = np.abs(right).max()
                np.testing.assert_allclose(x[~sick], right[~sick], 2**-7, 2**-8 * largest, err_msg=f"{value}: {name}")
        assert not np.isfinite(np.asarray(outputs["out"], np.float32)[sick]).any(), f"{value} was laundered"


@pytest.fixture(scope="module")
def causal():
    case = Case("causal", B=1, T=T, H=4, Hkv=2, D=D, tiles=TILES, options={"causal": True})
    return jax.jit(partial(call_case, case, PLATFORMS[0])), case.arrays(), np.tri(T, dtype=bool)


@pytest.mark.parametrize("at", [0, 7, 8, 39])
def test_own_nan_in_a_value_shows_where_it_is_seen(causal, at):
    function, arrays, seen = causal
    value = arrays["value"].at[0, at, 1, 3].set(np.nan)
    out = function(arrays | {"value": value})["out"]
    expected = np.zeros((1, T, 4), bool)
    expected[0, seen[:, at], 2:] = True  # the two query heads of that key head; other channels may be nan too
    np.testing.assert_array_equal(np.isnan(out[..., 3]), expected)
    assert np.isfinite(out[~expected]).all()


@pytest.mark.parametrize("at", [0, 7, 8, 39])
def test_own_nan_in_a_key_shows_where_it_is_seen(causal, at):
    function, arrays, seen = causal
    outputs = function(arrays | {"key": arrays["key"].at[0, at, 1, 3].set(np.nan)})
    expected = np.zeros((1, T, 4), bool)
    expected[0, seen[:, at], 2:] = True
    np.testing.assert_array_equal(np.isnan(outputs["out"]).all(-1), expected)
    np.testing.assert_array_equal(np.isnan(outputs["lse"]), expected.swapaxes(1, 2))


@pytest.mark.parametrize("at", [0, 7, 8, 39])
def test_own_nan_in_a_query_shows_in_its_row(causal, at):
    function, arrays, _ = causal
    outputs = function(arrays | {"query": arrays["query"].at[0, at, 1, 3].set(np.nan)})
    expected = np.zeros((1, T, 4), bool)
    expected[0, at, 1] = True
    np.testing.assert_array_equal(np.isnan(outputs["out"]).all(-1), expected)
    np.testing.assert_array_equal(np.isnan(outputs["out"]).any(-1), expected)


@pytest.mark.parametrize("name", ["key", "value", "softmax_aux"])
def test_the_definition_shows_own_nan_as_platforms_do(name, platform):
    sinks = "H" if name == "softmax_aux" else ""
    options = {"causal": True}
    case = Case("own", B=1, T=20, H=4, Hkv=2, D=64, dtype="bfloat16", tiles=TILES, sinks=sinks, options=options)
    if not runs(case, platform):
        return
    arrays = case.arrays()
    arrays[name] = arrays[name].at[2 if name == "softmax_aux" else (0, 7, 1, 3)].set(jnp.nan)
    right, ours = definition(case, arrays, jnp.float32), call_case(case, platform, arrays)
    lost = {kind: {n: np.isnan(x) for n, x in results.items()} for kind, results in (("ours", ours), ("exact", right))}
    assert lost["exact"]["out"].any() and lost["exact"]["lse"].any() == (name != "value")
    if name == "value":  # which has no part in lse; some platforms show its nan there too
        lost["ours"]["lse"] &= ~lost["exact"]["out"].any(-1).swapaxes(1, 2)
    for n in ("out", "lse"):
        np.testing.assert_array_equal(lost["ours"][n].any(-1), lost["exact"][n].any(-1), n)
    nowhere = np.isnan(ours["lse"]) | np.isnan(right["lse"])
    assert_close(*({"lse": np.where(nowhere, 0.0, results["lse"])} for results in (ours, right)))


@pytest.mark.parametrize("future", [np.nan, np.inf, 7.0], ids=str)
@pytest.mark.parametrize("at", [1, 8, 17, 39])
def test_a_causal_prefix_does_not_see_the_future(causal, at, future):
    function, arrays, _ = causal
    later = np.arange(T)[None] >= at
    outputs = function({name: filled(x, later, future) for name, x in arrays.items()})
    clean = function(arrays)
    assert_close({"out": outputs["out"][:, :at]}, {"out": clean["out"][:, :at]})
    assert_close({"lse": outputs["lse"][:, :, :at]}, {"lse": clean["lse"][:, :, :at]})


@pytest.mark.parametrize("name", ["query", "value"])
@pytest.mark.parametrize("value", [np.inf, -np.inf], ids=str)
def test_own_inf_is_not_laundered(causal, name, value):
    """Who sees it is not finite, everybody else is (a key may rightly weigh nothing: its logit is -inf for some)."""
    function, arrays, _ = causal
    out = np.asarray(function(arrays | {name: arrays[name].at[0, 5].set(value)})["out"])
    hit = np.arange(T) == 5 if name == "query" else np.arange(T) >= 5
    assert np.isfinite(out[0, ~hit]).all()
    assert not np.isfinite(out[0, hit]).all(-1).any()
