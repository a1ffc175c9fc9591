"""Rows that see nothing: zeros, lse -inf (or that of their sinks), and no gradient.

Interpreters are given each way in which a kernel can come to see nothing: no tile to visit, in a range and in a list,
and a tile all hidden. Their core cases have rows that see nothing with every option.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.types import BlockPattern, MaskInfo
from harness import check, cotangents_for, evaluate, normal, with_gradients
from harness.softmax import Case, call_case, definition, runs
from tolerances import assert_close

T, S = 20, 24

MASKS = {
    "kv-length-0": lambda c: MaskInfo(T, S).apply_kv_lengths(jnp.array([0, 0])),
    "mask-all-false": lambda c: MaskInfo.from_attention_mask(jnp.zeros((2, 1, T, S), bool)),
    "all-padding": lambda c: MaskInfo.from_segments(jnp.full((2, T), -1), jnp.full((2, S), -1)),
    "no-common-segment": lambda c: MaskInfo.from_segments(jnp.zeros((2, T), int), jnp.ones((2, S), int)),
    "pattern-all-false": lambda c: MaskInfo.from_block_pattern(
        BlockPattern.from_dense(np.zeros((5, 6), bool), block_size=4), q_len=T, kv_len=S
    ),
    "band-out-of-reach": lambda c: MaskInfo(T, S).apply_causal(-40),
    "window-past-the-end": lambda c: MaskInfo(T, S).apply_sliding_window(1, offset=50),
}


def results(case, platform):
    """((outputs, gradients), arrays), or None where the platform refuses the case."""
    if not runs(case, platform):
        return None
    arrays = case.arrays()
    cotangents = cotangents_for(partial(definition, case, dtype=jnp.dtype(case.dtype)), arrays, case.dtype)
    return evaluate(partial(call_case, case, platform), arrays, cotangents), arrays


def check_nothing_at_all(mask, platform):
    case = Case(mask, T=T, S=S, D=8, tiles=(8, 8), mask=MASKS[mask], bias="HT1")
    if (result := results(case, platform)) is None:
        return
    (outputs, gradients), _ = result
    assert not np.any(outputs["out"]) and np.isneginf(outputs["lse"]).all()
    for name, x in gradients.items():
        assert not np.any(x), f"the gradient of {name} is not zero"


@pytest.mark.parametrize("mask", MASKS)
def test_nothing_at_all(mask, native):
    check_nothing_at_all(mask, native)


@pytest.mark.parametrize("mask", ["kv-length-0", "mask-all-false", "pattern-all-false"])
def test_nothing_at_all_in_a_kernel(mask, interpreted):
    check_nothing_at_all(mask, interpreted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nothing_at_all_in_a_narrow_dtype(dtype, native):
    case = Case("narrow", T=T, S=S, D=64, dtype=dtype, tiles=(8, 8), mask=MASKS["kv-length-0"])
    if (result := results(case, native)) is None:
        return
    (outputs, gradients), _ = result
    assert not np.any(outputs["out"]) and np.isneginf(outputs["lse"]).all()
    assert not any(np.any(x) for x in gradients.values())


OPTIONS = {
    "unnormalised": {"normalize_output": False},
    "dropout": {"dropout_prob": 0.5, "dropout_seed": 1},
    "soft-cap": {"logits_soft_cap": 1.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_at_all_with(name, native):
    case = Case(name, T=T, S=S, D=8, tiles=(8, 8), mask=MASKS["mask-all-false"], options=OPTIONS[name])
    if (result := results(case, native)) is None:
        return
    (outputs, gradients), _ = result
    assert not np.any(outputs["out"]) and np.isneginf(outputs["lse"]).all()
    assert not any(np.any(x) for x in gradients.values())


@pytest.mark.parametrize("sinks", ["H", "H3", "14"])
@pytest.mark.parametrize("normalised", [True, False], ids=["normalised", "unnormalised"])
def test_sinks_alone(sinks, normalised, native):
    """lse is that of the sinks, and they alone have a gradient."""
    case = Case("sinks", T=T, S=S, D=8, sinks=sinks, tiles=(8, 8), mask=MASKS["kv-length-0"],
                options={"normalize_output": normalised})  # fmt: skip
    if (result := results(case, native)) is None:
        return
    (outputs, gradients), arrays = result
    given = np.asarray(arrays["softmax_aux"], np.float64)
    given = given[:, None] if sinks == "H" else given
    by_head = np.broadcast_to(given, (2, given.shape[-1]))
    lse = np.broadcast_to(np.logaddexp.reduce(by_head, axis=-1)[None, :, None], (2, 2, T))
    assert not np.any(outputs["out"])
    np.testing.assert_allclose(outputs["lse"], lse, rtol=1e-6)
    assert not any(np.any(gradients[name]) for name in ("query", "key", "value"))
    assert np.abs(gradients["softmax_aux"]).min() > 0


@pytest.mark.parametrize("D", [64, 128, 256])
def test_some_wide_rows_see_nothing(D, native):
    """Whole tiles and parts of tiles of queries before the first key, and padding in the middle."""
    ids = jnp.asarray(np.repeat([[-1, 0, -1, 1]], [70, 60, 100, 40], axis=1), jnp.int32)
    case = Case("wide", B=1, T=270, D=D, dtype="bfloat16", tiles=(128, 64),
                mask=lambda c: MaskInfo.from_segments(ids), options={"causal": True})  # fmt: skip
    if (result := results(case, native)) is None:
        return
    (outputs, gradients), _ = result
    nothing = np.asarray(ids[0] < 0)
    assert not np.any(outputs["out"][:, nothing]) and np.isneginf(outputs["lse"][:, :, nothing]).all()
    assert np.isfinite(outputs["lse"][:, :, ~nothing]).all()
    for name, x in gradients.items():
        assert not np.any(x[:, nothing]), f"the gradient of {name} is not zero"
        assert np.isfinite(np.asarray(x, np.float32)).all()


def test_some_rows_see_nothing(native):
    """The first queries of a causal call with fewer keys than queries."""
    case = Case("some", T=30, S=12, D=8, tiles=(8, 8), options={"causal": True})
    if (result := results(case, native)) is None:
        return
    (outputs, gradients), _ = result
    assert not np.any(outputs["out"][:, :18]) and np.isneginf(outputs["lse"][:, :, :18]).all()
    assert not np.any(gradients["query"][:, :18])
    assert np.all(np.any(outputs["out"][:, 18:], axis=-1)) and np.isfinite(outputs["lse"][:, :, 18:]).all()


LEAST = float(jnp.finfo(jnp.float32).min)


def coldest(platform):
    """The least bias that counts as finite on a platform: to Mosaic GPU -2e38 is nothing, as the README says."""
    return -1e30 if (platform.name, platform.device) == ("pallas", "gpu") else LEAST


def test_very_negative_logits_are_not_nothing(platform):
    """A row whose logits are all far below zero still sees its keys; what is -inf stays hidden."""
    case = Case("cold", B=1, T=T, S=S, D=8, bias="1HTS", tiles=(8, 8), mask=lambda c: MaskInfo(T, S).apply_causal())
    if not runs(case, platform):
        return
    arrays = case.arrays()
    program = with_gradients(partial(call_case, case, platform))
    cotangents = cotangents_for(partial(definition, case, dtype=jnp.float32), arrays, "float32")
    least = coldest(platform)
    cold = np.array([-1e30, max(-2.4e38, least), least, -np.inf], np.float32)
    bias = np.broadcast_to(np.repeat(cold, T // 4)[None, None, :, None], (1, case.H, T, S)).copy()
    bias[:, 1, 5:, 3] = -np.inf
    bias[:, 1, :, 7] = 1.0
    arrays["bias"] = jnp.asarray(bias)
    outputs, gradients = program(arrays, cotangents)
    # beside 1e30 the logits vanish: every key that a query sees weighs the same
    exact = definition(case, arrays, jnp.float32)
    assert_close(outputs, exact)
    np.testing.assert_allclose(outputs["lse"][0, 0, :15], bias[0, 0, :15, 0], rtol=1e-6)
    assert not np.any(outputs["out"][0, 15:, 0]) and np.isneginf(outputs["lse"][0, 0, 15:]).all()
    assert all(np.isfinite(np.asarray(x)).all() for x in gradients.values())
    assert not np.any(gradients["query"][0, 15:, 0]) and not np.any(gradients["bias"][0, 0, 15:])


def test_a_whole_mask_of_the_least_number_gives_the_mean(native):
    """As in `jax.nn.dot_product_attention`."""
    if native.name != "xla":
        return
    q, k, v = (normal(name, (2, T, 2, 8)) for name in ("query", "key", "value"))
    bias = jnp.full((1, 1, T, T), LEAST)
    with native.context():
        out = flash_attention(q, k, v, bias, platform=native.name)
    with jax.default_matmul_precision("highest"):  # a GPU rounds float32 otherwise
        expected = jax.nn.dot_product_attention(q, k, v, bias)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("D", [64, 128])
def test_wide_rows_of_very_negative_logits(D, native):
    """All keys there weigh the same, and gradients stay small; the first alone, as padding is, weigh nothing."""
    case = Case("cold-wide", B=1, T=270, D=D, dtype="bfloat16", bias="1H1S", tiles=(128, 64))
    if not runs(case, native):
        return
    function, arrays = partial(call_case, case, native), case.arrays()
    program, cotangents = with_gradients(function), cotangents_for(function, arrays, case.dtype)
    mean = jnp.broadcast_to(arrays["value"].astype(jnp.float32).mean(1, keepdims=True), arrays["query"].shape)
    for cold in (-1e9, -1e10, -1e30, max(coldest(native), float(jnp.finfo(jnp.bfloat16).min))):
        arrays["bias"] = jnp.full((1, case.H, 1, case.T), cold, jnp.bfloat16)
        outputs, gradients = program(arrays, cotangents)
        lse = jnp.full(outputs["lse"].shape, arrays["bias"][0, 0, 0, 0], jnp.float32)
        assert_close({"lse": outputs["lse"]}, {"lse": lse}, kind=f"{cold}: ")
        assert_close({"out": outputs["out"]}, {"out": mean}, {"out": mean.astype(jnp.bfloat16)}, f"{cold}: ")
        # beside such an lse no weight is known but for being at most 1, which bounds every sum over 270 pairs of a head
        most = {name: np.abs(np.asarray(x, np.float32)).max() for name, x in (arrays | cotangents).items()}
        ds = 2 * D * most["out"] * most["value"] + most["lse"]
        limits = {
            "value": most["out"],
            "bias": ds,
            "query": D**-0.5 * ds * most["key"],
            "key": D**-0.5 * ds * most["query"],
        }
        for name, x in gradients.items():
            assert np.abs(np.asarray(x, np.float32)).max() <= case.H * case.T * limits[name], f"{cold}: {name}"
    # with the strongest of them
    padded = arrays | {"bias": jnp.where(jnp.arange(case.T) < 130, arrays["bias"], 0)}
    check(function, partial(definition, case), padded, case.dtype)


def test_sinks_of_minus_infinity_weigh_nothing(platform):
    """Nor have they a gradient: where a head has no other, and beside one."""
    case = Case("no-sinks", T=30, S=12, D=8, sinks="H2", tiles=(8, 8), options={"causal": True})
    if not runs(case, platform):
        return
    arrays = case.arrays() | {"softmax_aux": jnp.array([[-jnp.inf, -jnp.inf], [-jnp.inf, 0.3]])}
    function = partial(call_case, case, platform)
    cotangents = cotangents_for(partial(definition, case, dtype=jnp.float32), arrays, "float32")
    outputs, gradients = evaluate(function, arrays, cotangents)
    sinks = np.asarray(gradients.pop("softmax_aux"))
    assert not np.any(sinks[:, 0]) and not sinks[0, 1] and np.isfinite(sinks[1, 1]) and sinks[1, 1]
    without, expected = evaluate(function, {n: x for n, x in arrays.items() if n in gradients}, cotangents)
    first = {"out": np.s_[:, :, 0], "lse": np.s_[:, 0]}
    assert_close({n: x[first[n]] for n, x in outputs.items()}, {n: x[first[n]] for n, x in without.items()})
    assert_close({n: x[:, :, 0] for n, x in gradients.items()}, {n: x[:, :, 0] for n, x in expected.items()})
