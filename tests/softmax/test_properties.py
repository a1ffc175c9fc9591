"""What must hold whatever the numbers are."""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ejkernel.modules import flash_attention
from ejkernel.ops import explain
from ejkernel.types import MaskInfo
from harness import PLATFORMS, evaluate, normal
from harness.softmax import Case, call_case
from tolerances import assert_close

H, HKV, D = 4, 2, 8
TILES = {"block_q": 16, "block_k": 8}


def qkv(*lead):
    return {
        "query": normal("query", (*lead, H, D)),
        "key": normal("key", (*lead, HKV, D)),
        "value": normal("value", (*lead, HKV, D)),
    }


def attend(floats, **options):
    out, lse = flash_attention(**floats, return_lse=True, cfg=TILES, **options)
    return {"out": out, "lse": lse}


def with_gradients(floats, cotangents, **options):
    outputs, pull = jax.vjp(partial(attend, **options), floats)
    return outputs, pull(cotangents)[0]


# Packed == separate --------------------------------------------------------------------------------------------

LENGTHS = (1, 6, 9, 17)
TOTAL = sum(LENGTHS) + 4  # the last tokens are padding


@cache
def packed_program():
    return jax.jit(lambda floats, cotangents, cum: with_gradients(floats, cotangents, cum_seqlens_q=cum, causal=True))


@cache
def separate_program():
    return jax.jit(lambda floats, cotangents: with_gradients(floats, cotangents, causal=True))


@given(st.permutations(LENGTHS))
def test_packed_is_separate(lengths):
    """Outputs, lse and gradients of each sequence; one compiled program for every packing."""
    floats = qkv(TOTAL)
    cotangents = {"out": normal("dout", (TOTAL, H, D)), "lse": normal("dlse", (H, TOTAL))}
    cum = np.concatenate([[0], np.cumsum(lengths)])
    outputs, gradients = packed_program()(floats, cotangents, jnp.asarray(cum, jnp.int32))
    for start, stop in pairwise(cum):
        part = {name: x[None, start:stop] for name, x in floats.items()}
        own_cotangents = {"out": cotangents["out"][None, start:stop], "lse": cotangents["lse"][None, :, start:stop]}
        alone = separate_program()(part, own_cotangents)
        packed = {"out": outputs["out"][None, start:stop], "lse": outputs["lse"][None, :, start:stop]}
        assert_close(packed, alone[0])
        assert_close({name: x[None, start:stop] for name, x in gradients.items()}, alone[1])
    end = cum[-1]
    assert not np.any(outputs["out"][end:]) and np.isneginf(outputs["lse"][:, end:]).all()
    assert not any(np.any(x[end:]) for x in gradients.values())


@cache
def segment_program():
    def run(floats, cotangents, ids):
        return with_gradients(floats, cotangents, mask_info=MaskInfo.from_segments(ids))

    return jax.jit(run)


@given(st.permutations(range(24)), st.integers(0, 2**16))
def test_tokens_may_come_in_any_order(order, seed):
    """Without positions, permuting tokens with their segment ids permutes the results."""
    order = np.asarray(order)
    ids = np.random.default_rng(seed).integers(-1, 3, (1, 24))
    floats = qkv(1, 24)
    cotangents = {"out": normal("dout", (1, 24, H, D)), "lse": normal("dlse", (1, H, 24))}
    plain = segment_program()(floats, cotangents, jnp.asarray(ids))
    moved = segment_program()(
        {name: x[:, order] for name, x in floats.items()},
        {"out": cotangents["out"][:, order], "lse": cotangents["lse"][:, :, order]},
        jnp.asarray(ids[:, order]),
    )
    assert_close(moved[0], {"out": plain[0]["out"][:, order], "lse": plain[0]["lse"][:, :, order]})
    assert_close(moved[1], {name: x[:, order] for name, x in plain[1].items()})


@cache
def position_program():
    def run(floats, positions):
        zeros = jnp.zeros_like(positions)
        return attend(floats, mask_info=MaskInfo.from_segments(zeros, zeros, positions, positions), causal=True)

    return jax.jit(run)


@given(st.permutations(range(24)))
def test_positions_travel_with_their_tokens(order):
    order = np.asarray(order)
    floats = qkv(1, 24)
    plain = position_program()(floats, jnp.arange(24)[None])
    moved = position_program()({name: x[:, order] for name, x in floats.items()}, jnp.asarray(order)[None])
    assert_close(moved, {"out": plain["out"][:, order], "lse": plain["lse"][:, :, order]})
    assert_close(plain, causal_program()(floats))


@cache
def causal_program():
    return jax.jit(partial(attend, causal=True))


# Symmetries ----------------------------------------------------------------------------------------------------

T = 24


@pytest.fixture(scope="module")
def program():
    """Outputs and gradients of a causal call with a bias and sinks, compiled once."""
    floats = qkv(2, T) | {"bias": normal("bias", (2, H, T, T)), "softmax_aux": normal("sinks", (H, 2))}
    cotangents = {"out": normal("dout", (2, T, H, D)), "lse": normal("dlse", (2, H, T))}
    return jax.jit(partial(with_gradients, causal=True)), floats, cotangents


def test_same_bits_every_time(program):
    function, floats, cotangents = program
    first = function(floats, cotangents)
    again = function(floats, cotangents)
    recompiled = jax.jit(lambda *x: with_gradients(*x, causal=True))(floats, cotangents)
    for a, b, c in zip(*(jax.tree.leaves(x) for x in (first, again, recompiled)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


def test_permuting_the_batch_permutes_the_result(program):
    function, floats, cotangents = program
    outputs, gradients = function(floats, cotangents)
    swap = lambda x: x if x.shape[0] != 2 or x.ndim < 3 else x[::-1]  # noqa: E731
    moved = function({k: swap(x) for k, x in floats.items()}, {k: swap(x) for k, x in cotangents.items()})
    for name, x in outputs.items():
        np.testing.assert_array_equal(moved[0][name], swap(x))
    for name in ("query", "key", "value", "bias"):
        np.testing.assert_array_equal(moved[1][name], swap(gradients[name]))


def test_permuting_key_heads_with_their_queries_permutes_the_result(program):
    function, floats, cotangents = program
    outputs, gradients = function(floats, cotangents)
    groups = [2, 3, 0, 1]
    axes = {"query": 2, "key": 2, "value": 2, "bias": 1, "softmax_aux": 0, "out": 2, "lse": 1}

    def moved(arrays):
        return {
            name: jnp.take(x, jnp.asarray(groups if x.shape[axes[name]] == H else [1, 0]), axes[name])
            for name, x in arrays.items()
        }

    got = function(moved(floats), moved(cotangents))
    for part, expected in zip(got, (outputs, gradients), strict=True):
        for name, x in moved(expected).items():
            np.testing.assert_array_equal(part[name], x)


def test_a_constant_on_all_logits_moves_only_lse(program):
    function, floats, cotangents = program
    outputs, _ = function(floats, cotangents)
    lifted = floats | {"bias": floats["bias"] + 3.0, "softmax_aux": floats["softmax_aux"] + 3.0}
    assert_close(function(lifted, cotangents)[0], {"out": outputs["out"], "lse": outputs["lse"] + 3.0})


def test_the_output_is_linear_in_the_values(program):
    function, floats, cotangents = program
    one, other = normal("v1", (2, T, HKV, D)), normal("v2", (2, T, HKV, D))
    out = {name: function(floats | {"value": v}, cotangents)[0]["out"] for name, v in
           {"one": one, "other": other, "both": one - 2 * other}.items()}  # fmt: skip
    assert_close({"out": out["both"]}, {"out": out["one"] - 2 * out["other"]})


def test_grouped_heads_are_repeated_heads():
    floats = qkv(2, T)
    wide = floats | {name: jnp.repeat(floats[name], H // HKV, axis=2) for name in ("key", "value")}
    cotangents = {"out": normal("dout", (2, T, H, D)), "lse": normal("dlse", (2, H, T))}
    grouped, repeated = (evaluate(partial(attend, causal=True), x, cotangents) for x in (floats, wide))
    assert_close(grouped[0], repeated[0])
    summed = repeated[1] | {n: repeated[1][n].reshape(2, T, HKV, -1, D).sum(3) for n in ("key", "value")}
    assert_close(grouped[1], summed)


@pytest.mark.parametrize("tiles", [(1, 8), (7, 5), (16, 32), (64, 16), (512, 512)], ids=str)
def test_tile_sizes_do_not_change_the_answer(tiles):
    """Dropout included: its bits belong to pairs, not to tiles."""
    options = {"causal": True, "dropout_prob": 0.3, "dropout_seed": 2}
    case = Case("tiles", T=45, S=53, H=2, D=8, bias="HT1", sinks="H", tiles=tiles, options=options)
    floats = case.arrays()
    cotangents = {"out": normal("dout", (2, 45, 2, 8)), "lse": normal("dlse", (2, 2, 45))}
    got = evaluate(partial(call_case, case, PLATFORMS[0]), floats, cotangents)
    expected = standard_tiles()
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1])


@cache
def standard_tiles():
    options = {"causal": True, "dropout_prob": 0.3, "dropout_seed": 2}
    case = Case("tiles", T=45, S=53, H=2, D=8, bias="HT1", sinks="H", tiles=(16, 16), options=options)
    cotangents = {"out": normal("dout", (2, 45, 2, 8)), "lse": normal("dlse", (2, 2, 45))}
    return evaluate(partial(call_case, case, PLATFORMS[0]), case.arrays(), cotangents)


@pytest.mark.parametrize("D", [64, 192])
def test_one_number_a_head_is_that_number_for_every_key(D, native):
    """As a bias, which a soft cap makes count. Its own gradient is a sum that cancels, and is not compared."""
    floats = {name: normal(name, (1, 130, 2, D), jnp.bfloat16) for name in ("query", "key", "value")}
    options = native.options((128, 64), "bfloat16")
    if native.name in explain(flash_attention, **floats, logits_soft_cap=2.0, **options).refusals:
        with pytest.raises(NotImplementedError, match="soft cap"):
            flash_attention(**floats, logits_soft_cap=2.0, **options)
        return
    numbers, dout = normal("bias", (1, 2, 1, 1), jnp.bfloat16), normal("dout", (1, 130, 2, D), jnp.bfloat16)

    def step(floats, keys, **options):
        bias = jnp.broadcast_to(numbers, (1, 2, 1, keys)).astype(floats["query"].dtype)
        attend = partial(flash_attention, bias=bias, logits_soft_cap=2.0, **options)
        return evaluate(lambda x: {"out": attend(**x)}, floats, {"out": dout.astype(bias.dtype)})

    wide = {name: x.astype(jnp.float32) for name, x in floats.items()}
    exact, naive = (step(x, 130, platform="xla", precision="highest") for x in (wide, floats))
    for got, right, rough in zip(step(floats, 1, **options), exact, naive, strict=True):
        assert_close(got, right, rough)


def test_dropout_of_a_prefix_does_not_depend_on_what_follows():
    """Bits depend on (seed, batch, head, query, key) only."""
    floats = qkv(2, 32)
    options = {"causal": True, "dropout_prob": 0.5, "dropout_seed": 11}
    long = jax.jit(partial(attend, **options))(floats)
    short = jax.jit(partial(attend, **options))({name: x[:1, :T] for name, x in floats.items()})
    assert_close(short, {"out": long["out"][:1, :T], "lse": long["lse"][:1, :, :T]})


def test_dropout_seeds_differ_and_repeat():
    floats = qkv(1, T)
    program = jax.jit(lambda seed: attend(floats, dropout_prob=0.5, dropout_seed=seed)["out"])
    a, b, again = program(1), program(2), program(1)
    np.testing.assert_array_equal(a, again)
    assert np.abs(a - b).max() > 0.1


def test_dropout_keeps_the_mean():
    floats = qkv(1, T)
    program = jax.jit(jax.vmap(lambda seed: attend(floats, dropout_prob=0.5, dropout_seed=seed)["out"]))
    mean = program(jnp.arange(400)).mean(0)
    exact = jax.jit(attend)(floats)["out"]
    # 400 draws: a weight p has standard deviation p, so the mean is off by about |v| * sqrt(sum p^2) / 20
    assert float(jnp.abs(mean - exact).max()) < 0.25


def test_dropout_with_probability_zero_needs_no_seed():
    floats = qkv(1, T)
    assert_close(jax.jit(partial(attend, dropout_prob=0.0))(floats), jax.jit(attend)(floats))
