"""The delta rule: every case against its definition, and what holds whatever the numbers are."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.linear.delta.inverse import unit_lower_inverse
from ejkernel.kernels.linear.delta.reference import reference
from ejkernel.kernels.linear.delta.spec import canonicalise
from ejkernel.modules import gated_delta_rule, kimi_delta_attention, recurrent_attention
from harness import by_case, evaluate, normal
from harness.checks import Arrays
from harness.delta import (
    CASES,
    CORE,
    CORE_IDS,
    FOR_GPUS,
    FOR_GPUS_IDS,
    SEGMENTS,
    TRITON,
    TRITON_IDS,
    Case,
    check_case,
)
from harness.linear import named
from harness.platforms import PLATFORMS
from tolerances import assert_close, wide


@by_case(CASES, for_gpus=FOR_GPUS)
def test_case(case: Case, native):
    check_case(case, native)


@by_case(CORE)
def test_core_case(case: Case, interpreted):
    check_case(case, interpreted)


@by_case(TRITON)
def test_case_of_triton(case: Case):
    check_case(case, next(platform for platform in PLATFORMS if platform.name == "triton" and platform.interpreted))


def test_ids_are_unique_and_known():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids) and {*CORE_IDS, *TRITON_IDS, *FOR_GPUS_IDS} <= set(ids)


def attend(given, **options):
    return named(gated_delta_rule(**given, return_state=True, **options))


def token_by_token(given, scale):
    """Output and final state in float64, from the public function's arrays, of one head and row."""
    q, k, v = (wide(given[name])[0, :, 0] for name in ("query", "key", "value"))
    beta, g = wide(given["beta"])[0, :, 0], wide(given["g"])[0, :, 0]
    h, out = np.zeros((k.shape[-1], v.shape[-1])), np.zeros(v.shape)
    for t in range(len(q)):
        h = np.exp(g[t])[..., None] * h if g.ndim == 2 else np.exp(g[t]) * h
        # the matrix form: (I - beta k k^T) h + beta k v^T
        h = h - beta[t] * np.outer(k[t], k[t] @ h) + beta[t] * np.outer(k[t], v[t])
        out[t] = scale * q[t] @ h
    return {"out": out[None, :, None], "state": h[None, None]}


@pytest.mark.parametrize("g", ["token", "channel"])
def test_the_definition_is_the_matrix_form(g):
    given = Case("", T=30, H=1, Hk=1, g=g, decay="mixed", state=False).arrays()
    results = reference(canonicalise(**given, softmax_scale=0.3))
    assert_close({"out": results["out"], "state": results["state"][:, 0]}, token_by_token(given, 0.3))


def test_without_erasing_it_is_linear_attention():
    given = Case("", more=("erase_key",), g="channel").arrays()
    given["erase_key"] *= 0
    beta = given["beta"]
    plain = {name: given[name] for name in ("query", "key", "value", "g", "initial_state")}
    plain["value"] = plain["value"] * beta[..., None]
    assert_close(attend(given), named(recurrent_attention(**plain, return_state=True)))


def test_a_repeated_key_holds_the_last_value():
    k = jnp.ones((1, 5, 1, 1))
    v = normal("value", (1, 5, 1, 3))
    np.testing.assert_allclose(attend({"query": k, "key": k, "value": v})["out"], v, rtol=1e-6)


@pytest.mark.parametrize("g", [None, "token", "channel"])
def test_chunks_of_every_size_are_the_recurrence(g):
    case = Case("", T=150, g=g, decay="mixed", H=4, state=True)
    given = case.arrays()
    cotangents = {"out": normal("dout", (1, 150, 4, 16)), "state": normal("dstate", (1, 4, 16, 16))}
    one = evaluate(partial(attend, cfg={"chunk": 1}), given, cotangents)
    for chunk in (16, 128):
        many = evaluate(partial(attend, cfg={"chunk": chunk}), given, cotangents)
        for got, expected, kind in zip(many, one, ("output", "gradient of"), strict=True):
            assert_close(got, expected, kind=kind)


def test_a_state_can_be_handed_over():
    given = Case("", T=100, H=4).arrays()
    expected = attend(given)
    state, outs = given.pop("initial_state"), []
    for a, b in pairwise((0, 1, 40, 100)):
        results = attend({name: x[:, a:b] for name, x in given.items()} | {"initial_state": state})
        state = results["state"]
        outs.append(results["out"])
    assert_close({"out": jnp.concatenate(outs, 1), "state": state}, expected)


@pytest.mark.parametrize("function", [gated_delta_rule, recurrent_attention])
def test_segments_are_separate_rows(function):
    """Outputs and gradients; padding passes the state by, and the last segment's is returned."""
    case = Case("", ids=SEGMENTS, state=False, beta=None)
    given = case.arrays()

    def rows(given, cut):
        return named(function(**{name: x[:, cut] for name, x in given.items()}, return_state=True))

    def packed(given):
        return named(function(**given, segment_ids=case.segment_ids(), return_state=True))

    def separate(given):
        ends = np.cumsum([n for n, _ in SEGMENTS])
        cuts = [slice(end - n, end) for (n, _), end in zip(SEGMENTS, ends, strict=True)]
        results = [rows(given, cut) for cut in cuts]
        outs = [x["out"] if i >= 0 else 0 * x["out"] for (_, i), x in zip(SEGMENTS, results, strict=True)]
        return {"out": jnp.concatenate(outs, 1), "state": results[3]["state"]}

    cotangents = {"out": normal("dout", (1, 70, 2, 16)), "state": normal("dstate", (1, 2, 16, 16))}
    for got, expected in zip(evaluate(packed, given, cotangents), evaluate(separate, given, cotangents), strict=True):
        assert_close(got, expected)


def test_segments_run_backwards_too():
    case = Case("", ids=SEGMENTS, state=False, beta=None)
    given, ids = case.arrays(), case.segment_ids()
    flipped = {name: x[:, ::-1] for name, x in given.items()}
    results = named(recurrent_attention(**given, segment_ids=ids, reverse=True))
    expected = named(recurrent_attention(**flipped, segment_ids=ids[:, ::-1]))
    assert_close({"out": results["out"][:, ::-1]}, expected)


def bad_matrix(name, rng, C=64):
    """L of keys that models have: alike, hardly decayed, with beta near 1 or up to 2."""
    key = rng.standard_normal((C, 32)) + {"alike": 6.0, "negative": 3.0, "forgetful": 0.0}[name]
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    beta = {"alike": 0.98, "negative": 1.9, "forgetful": 1.0}[name]
    decay = np.exp(np.cumsum(np.full(C, {"forgetful": -30.0}.get(name, -1e-3))))
    decay = np.tril(decay[:, None] / np.maximum(decay[None], 1e-300), -1)
    return np.tril(beta * (key @ key.T), -1) * np.minimum(decay, 1)


@pytest.mark.parametrize("name", ["alike", "negative", "forgetful"])
def test_inverses_of_what_models_have(name):
    """As exact as substitution in float32."""
    lower = bad_matrix(name, np.random.default_rng(0))
    exact = np.linalg.inv(np.eye(64) + lower)
    substituted = np.eye(64, dtype=np.float32)
    for i in range(1, 64):
        substituted[i, :i] -= lower[i, :i].astype(np.float32) @ substituted[:i, :i]
    results = unit_lower_inverse(jnp.asarray(lower, jnp.float32))
    allowed = 2 * np.abs(substituted - exact).max() + 64 * np.finfo(np.float32).eps * np.abs(exact).max()
    assert np.abs(np.asarray(results) - exact).max() <= allowed


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_long_sequences_do_not_drift(beta):
    """8192 tokens of keys that repeat, hardly decayed, against float64: the last are as good as the first."""
    case = Case("", T=8192, H=1, Hk=1, repeated=1.0, decay="zero", beta=beta, state=False)
    given = case.arrays()
    results, exact = attend(given), token_by_token(given, 16**-0.5)
    error = np.abs(wide(results["out"]) - exact["out"])[0, :, 0].max(-1)
    assert error[-256:].max() <= 4 * max(error[:256].max(), 1e-6)


def test_kimi_is_the_rule_with_decays_of_channels():
    given = Case("", g="channel", T=20).arrays()
    state = given.pop("initial_state")
    results = kimi_delta_attention(**given, initial_state=state, return_state=True)
    assert_close(named(results), attend(given | {"initial_state": state}))


def test_normalised_queries_and_keys():
    given = Case("", T=20).arrays()
    scaled = given | {"query": 3 * given["query"], "key": 0.2 * given["key"]}
    results, expected = attend(scaled, qk_norm=True), attend(given)
    for name in results:  # eps is not nothing beside 0.2 ** 2
        np.testing.assert_allclose(results[name], expected[name], rtol=2e-4, atol=2e-4)


def test_vmap():
    case = Case("", T=20, state=False, final=False)
    given = case.arrays()
    many = {name: jnp.stack([x, 0.5 * x]) for name, x in given.items()}
    results = jax.vmap(attend)(many)
    each = [attend({name: x[i] for name, x in many.items()}) for i in (0, 1)]
    assert_close(results, jax.tree.map(lambda *x: jnp.stack(x), *each))


BAD = {
    "heads": ({"value": (1, 6, 3, 4)}, "value heads H=3 must be a multiple of query and key heads Hk=2"),
    "key": ({"key": (1, 6, 2, 5)}, "key (1, 6, 2, 5) must have the shape of query (1, 6, 2, 4)"),
    "value": ({"value": (1, 7, 2, 4)}, "value (1, 7, 2, 4) must have the batch and length of query"),
    "g": ({"g": (1, 6, 4)}, "g has shape (1, 6, 4), needed (1, 6, 2)"),
    "beta": ({"beta": (6, 2)}, "beta has shape (6, 2), needed (1, 6, 2)"),
    "state": ({"initial_state": (1, 2, 4, 5)}, "initial_state has shape (1, 2, 4, 5), needed (1, 2, 4, 4)"),
    "erase_key": ({"erase_key": (1, 6, 2, 5)}, "erase_key has shape (1, 6, 2, 5), needed (1, 6, 2, 4)"),
    "useless": (
        {"beta": (1, 6, 2), "erase_key": (1, 6, 2, 4), "write_gate": (1, 6, 2, 4)}, "beta says nothing beside both",
    ),
    "both": ({"initial_state": (1, 2, 4, 4), "segment_ids": np.zeros(6, int)}, "segment_ids are not for calls with"),
    "ids": ({"segment_ids": np.zeros(5, int)}, "segment_ids have shape (5,), needed (1, 6)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    changed, message = BAD[name]
    given = dict.fromkeys(("query", "key", "value"), (1, 6, 2, 4)) | changed
    arrays: Arrays = {n: normal(n, x) if isinstance(x, tuple) else x for n, x in given.items()}
    with pytest.raises(ValueError) as raised:
        gated_delta_rule(**arrays)
    assert message in str(raised.value)
