"""Seed 003: `(o, m, l)` of ragged decode attention, against numpy."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from ejkernel.kernels.paged import pallas_tpu, ragged
from ejkernel.ops import run
from harness import normal
from tolerances import assert_close

B, S, H, HKV, D = 4, 50, 4, 2, 8
STARTS, LENGTHS = jnp.array([0, 7, 33, 0]), jnp.array([50, 20, 33, 1])  # full, unaligned, empty, one key


def by_hand(query, key, value):
    """(B, H, D), (B, H, 1), (B, H, 1) row by row in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out, top, total = np.zeros((B, H, D)), np.full((B, H, 1), ragged.MASK_VALUE), np.zeros((B, H, 1))
    for b in range(B):
        span = slice(int(STARTS[b]), int(LENGTHS[b]))
        for h in range(H):
            kv = h * key.shape[2] // H
            logits = key[b, span, kv] @ query[b, h]
            if logits.size:
                top[b, h] = logits.max()
                weights = np.exp(logits - logits.max())
                total[b, h] = weights.sum()
                out[b, h] = weights @ value[b, span, kv] / weights.sum()
    return {"o": out, "m": top, "l": total}


def arrays(heads):
    key, value = normal("key", (B, S, heads, D)), normal("value", (B, S, heads, D))
    hidden = (jnp.arange(S) < STARTS[:, None]) | (jnp.arange(S) >= LENGTHS[:, None])
    poisoned = [jnp.where(hidden[..., None, None], jnp.nan, x) for x in (key, value)]
    return normal("query", (B, H, D)), *poisoned


def named(parts):
    return dict(zip("oml", parts, strict=True))


def agree(parts, expected):
    """m of an empty row is mask_value: compared exactly, unlike the others."""
    parts, empty = named(parts), np.asarray(LENGTHS <= STARTS)
    np.testing.assert_array_equal(parts["m"][empty], np.float32(ragged.MASK_VALUE))
    assert_close(*({n: np.asarray(x)[~empty] for n, x in side.items()} for side in (parts, expected)))
    assert not parts["o"][empty].any() and not parts["l"][empty].any()


@pytest.mark.parametrize("block_size", [256, 16])
def test_gqa(block_size):
    query, key, value = arrays(HKV)
    agree(ragged.ragged_gqa(query, key, value, LENGTHS, STARTS, block_size=block_size), by_hand(query, key, value))


def test_mha():
    query, key, value = arrays(H)
    agree(ragged.ragged_mha(query[:, None], key, value, LENGTHS, STARTS), by_hand(query, key, value))


def test_mqa():
    query, key, value = arrays(1)
    got = ragged.ragged_mqa(query, key[:, :, 0], value[:, :, 0], LENGTHS, STARTS, block_size=16)
    agree(got, by_hand(query, key, value))


def test_references():
    for heads, function in ((HKV, ragged.reference_gqa), (H, ragged.reference_mha)):
        query, key, value = arrays(heads)
        outputs = jax.jit(function)(query[:, None], key, value, LENGTHS, STARTS)
        assert [x.shape for x in outputs] == [(B, 1, H, D), (B, 1, H, 1), (B, 1, H, 1)]
        agree([x[:, 0] for x in outputs], by_hand(query, key, value))
    query, key, value = arrays(1)
    outputs = jax.jit(ragged.reference_mqa)(query, key[:, :, 0], value[:, :, 0], LENGTHS, STARTS)
    assert [x.shape for x in outputs] == [(B, 1, H, D), (B, 1, H, 1), (B, 1, H, 1)]
    agree([x[:, 0] for x in outputs], by_hand(query, key, value))


def test_parts_over_disjoint_keys_merge():
    query, key, value = normal("q", (B, H, D)), normal("key", (B, S, HKV, D)), normal("value", (B, S, HKV, D))
    zero, middle, end = jnp.zeros(B, int), jnp.full(B, 21), jnp.full(B, S)
    attend = jax.jit(ragged.ragged_gqa)
    parts = [attend(query, key, value, b, a) for a, b in ((zero, middle), (middle, end))]
    top = jnp.maximum(parts[0][1], parts[1][1])
    weights = [l * jnp.exp(m - top) for _, m, l in parts]
    merged = sum(o * w for (o, _, _), w in zip(parts, weights, strict=True)) / sum(weights)
    assert_close({"o": merged}, {"o": attend(query, key, value, end, zero)[0]})


def test_the_tpu_kernel_takes_the_cost_that_is_given(monkeypatch):
    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((B, 1, H, D), (B, S, H, D), (B, S, H, D))]
    cost = ragged.get_mha_cost_estimate((*shapes, jax.ShapeDtypeStruct((B,), "int32")))
    assert (cost.flops, cost.transcendentals) == (4 * B * H * S * D, B * H * S)
    query, key, value = arrays(1)
    given = query, key[:, :, 0], value[:, :, 0], LENGTHS, STARTS
    ragged.ragged_mqa(*given, cost_estimate=cost)
    told = []

    def spied(operation, call):
        told.append(pallas_tpu.cost(call))
        return run(operation, call)

    monkeypatch.setattr(ragged, "run", spied)
    for estimate in (cost, None):
        ragged.ragged_mqa(*given, cost_estimate=estimate)
    assert told[0] == cost != told[1]


def test_what_is_no_cost_estimate_is_refused():
    query, key, value = arrays(1)
    given = query, key[:, :, 0], value[:, :, 0], LENGTHS, STARTS
    with pytest.raises(TypeError, match=r"cost_estimate must be a pallas\.CostEstimate, got int"):
        ragged.ragged_mqa(*given, cost_estimate=3)
    with pytest.raises(ValueError, match=r"cost_estimate\.flops=-1 must be at least 0"):
        ragged.ragged_mqa(*given, cost_estimate=pl.CostEstimate(flops=-1, transcendentals=0, bytes_accessed=0))


def test_signatures_are_those_of_the_seed():
    mqa = "(q, k, v, lengths, starts, *, block_size=256, mask_value=-2.381976426469702e+38, cost_estimate=None)"
    same = "(query, key, value, lengths, starts, *, block_size=256, mask_value=-2.381976426469702e+38)"
    for name, expected in {"ragged_mqa": mqa, "ragged_mha": same, "ragged_gqa": same}.items():
        signature = inspect.signature(getattr(ragged, name))
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
        assert str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)) == expected


WRONG = {
    "mask_value": ({"mask_value": -1.0}, "mask_value=-1.0 must be below -1e30"),
    "block_size": ({"block_size": 0}, "block_size=0 must be at least 1"),
    "lengths": ({"lengths": np.array([51, 0, 0, 0])}, r"lengths must be from 0 to 50.*\(row 0: 51\)"),
    "query": ({"query": normal("q", (B, 3, D))}, "query heads H=3 must be a multiple"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    changes, message = WRONG[name]
    query, key, value = arrays(HKV)
    right = {"query": query, "key": key, "value": value, "lengths": np.asarray(LENGTHS), "starts": np.asarray(STARTS)}
    with pytest.raises(ValueError, match=message):
        ragged.ragged_gqa(**{**right, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": [-1, 0, 0, 0]}, r"starts must be from 0 to 50 \(row 0: -1\)"),
        ({"k": [[1.0]]}, "k must be an array, got list"),
    ],
)
def test_errors_have_the_names_of_the_caller(changes, message):
    query, key, value = arrays(1)
    given = {"q": query, "k": key[:, :, 0], "v": value[:, :, 0], "lengths": LENGTHS, "starts": STARTS}
    with pytest.raises((TypeError, ValueError), match=message):
        ragged.ragged_mqa(**{**given, "starts": np.asarray(STARTS), "lengths": np.asarray(LENGTHS), **changes})
