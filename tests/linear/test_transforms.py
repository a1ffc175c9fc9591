"""jit, vmap, scan, remat, export, donation and shapes of every rank give what a plain call gives."""

import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import gla_attention, lightning_attention, recurrent_attention
from harness import normal
from harness.compilations import compiled_programs
from harness.linear import named
from tolerances import assert_close

T, H, D, DV = 20, 2, 4, 6
N = 3  # the mapped axis
CU = jnp.array([0, 7, 18])


def log_decays(name, shape):
    return -jnp.abs(normal(name, shape)) / 4


def floats(*lead, B=2, sequences=None):
    """Everything with a gradient, behind the leading dimensions."""
    tokens = {"query": (T, H, D), "key": (T, H, D), "value": (T, H, DV)}
    gates = {"g": (T, H), "gk": (T, H, D)}
    results = {name: normal(name, (*lead, B, *shape)) for name, shape in tokens.items()}
    results |= {name: log_decays(name, (*lead, B, *shape)) for name, shape in gates.items()}
    results["g_gamma"] = log_decays("g_gamma", (*lead, H))
    return results | {"initial_state": normal("state", (*lead, sequences or B, H, D, DV))}


def attend(given, **options):
    return named(recurrent_attention(**given, return_state=True, cfg={"chunk": 8}, **options))


def with_gradients(given, cu_seqlens=None):
    """Outputs and gradients, under cotangents that differ from number to number."""
    outputs, pull = jax.vjp(partial(attend, cu_seqlens=cu_seqlens), given)
    return outputs, pull(jax.tree.map(jnp.cos, outputs))[0]


def agree(got, expected):
    assert_close(got[0], expected[0])
    assert_close(got[1], expected[1], kind="gradient of")


def stacked(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def test_jit_is_eager():
    given = floats()
    agree(with_gradients(given), jax.jit(with_gradients)(given))


# which arrays are mapped
MAPS = {
    "everything": tuple(floats()),
    "query": ("query",),
    "decays": ("g", "gk"),
    "g_gamma": ("g_gamma",),
    "states": ("initial_state",),
}


@pytest.mark.parametrize(("name", "B"), [*((name, 2) for name in MAPS), ("everything", 1), ("g_gamma", 1)])
def test_vmap_is_a_loop(name, B):
    """Values and per-example gradients."""
    mapped = MAPS[name]
    given = floats(B=B) | {name: floats(N, B=B)[name] for name in mapped}
    axes = {name: 0 if name in mapped else None for name in given}
    got = jax.jit(jax.vmap(with_gradients, in_axes=(axes,)))(given)
    one = jax.jit(with_gradients)
    agree(got, stacked([one({n: x[i] if n in mapped else x for n, x in given.items()}) for i in range(N)]))


def test_gradient_of_vmap_is_the_sum_of_a_loop():
    """Of arrays that are not mapped."""
    given = floats() | {"query": floats(N)["query"]}
    axes = {name: 0 if name == "query" else None for name in given}

    def loss(given):
        return sum(jnp.sin(x).sum() for x in attend(given).values())

    got = jax.jit(jax.grad(lambda x: jax.vmap(loss, in_axes=(axes,))(x).sum()))(given)
    one = jax.jit(jax.grad(loss))
    loop = [one(given | {"query": q}) for q in given["query"]]
    assert_close(got, {n: (np.stack if n == "query" else sum)([g[n] for g in loop]) for n in given})


def test_vmap_over_lengths():
    given, lengths = floats(B=1, sequences=2), jnp.array([[0, 7, 18], [0, 0, 20], [0, 3, 4]])
    got = jax.jit(jax.vmap(with_gradients, in_axes=(None, 0)))(given, lengths)
    one = jax.jit(with_gradients)
    agree(got, stacked([one(given, cu) for cu in lengths]))


def test_nested_vmap():
    queries, states, unmapped = floats(2)["query"], floats(N)["initial_state"], floats()

    def one(query, state):
        return with_gradients(unmapped | {"query": query, "initial_state": state})

    inner = jax.vmap(one, in_axes=(None, 0))
    got = jax.jit(jax.vmap(inner, in_axes=(0, None)))(queries, states)
    single = jax.jit(one)
    agree(got, stacked([stacked([single(q, s) for s in states]) for q in queries]))


def test_vmap_over_other_axes():
    q, k, v = (normal(name, (2, T, N, H, D)) for name in "qkv")
    got = jax.jit(jax.vmap(recurrent_attention, in_axes=2, out_axes=2))(q, k, v)
    single = jax.jit(recurrent_attention)
    assert_close({"out": got}, {"out": np.stack([single(q[:, :, n], k[:, :, n], v[:, :, n]) for n in range(N)], 2)})


def test_scan_over_layers():
    given, weights = floats(), normal("weights", (3, DV, D))

    def layer(x, w):
        results = attend(given | {"query": x @ w})
        return results["out"], results["state"]

    def scanned(x):
        return jax.lax.scan(layer, x, weights)[1].sum()

    def unrolled(x):
        total = 0.0
        for w in weights:
            x, state = layer(x, w)
            total += state.sum()
        return total + 0 * x.sum()

    x = given["value"]
    got, expected = (jax.jit(jax.value_and_grad(lambda x, f=f: f(x)))(x) for f in (scanned, unrolled))
    assert_close(dict(enumerate(got)), dict(enumerate(expected)))


def test_remat_keeps_what_its_policy_says():
    """By name: with the output and the state kept, the forward runs once."""
    given = floats()

    def loss(given):
        return sum(jnp.sin(x).sum() for x in attend(given).values())

    def step(policy):
        return jax.jit(jax.grad(lambda x: jnp.tanh(jax.checkpoint(loss, policy=policy)(x) / 100)))

    policies = jax.checkpoint_policies
    names, nothing = policies.save_only_these_names("ejkernel_out", "ejkernel_state"), policies.nothing_saveable
    assert [step(policy).lower(given).as_text().count("call @forward") for policy in (names, nothing)] == [1, 2]
    assert_close(step(names)(given), jax.jit(jax.grad(lambda x: jnp.tanh(loss(x) / 100)))(given))


def test_export():
    given = floats()
    function = jax.jit(with_gradients)
    exported = jax.export.export(function, platforms=("cpu",))(given)
    if importlib.util.find_spec("flatbuffers"):  # what JAX writes exports with
        exported = jax.export.deserialize(exported.serialize())
    agree(jax.jit(exported.call)(given), function(given))


def test_numpy_inputs():
    given = floats()
    out = attend({name: np.asarray(x) for name, x in given.items()})
    assert isinstance(out["out"], jax.Array)
    assert_close(out, attend(given))


def test_a_donated_state_is_updated_in_place():
    given = floats()

    def decode(state, tokens):
        return recurrent_attention(**tokens, initial_state=state, return_state=True)

    tokens = {name: x[:, :1] if x.ndim > 2 else x for name, x in given.items() if name != "initial_state"}
    expected = jax.jit(decode)(given["initial_state"], tokens)
    step = jax.jit(decode, donate_argnums=0)
    text = step.lower(given["initial_state"], tokens).compile().as_text()
    assert "may-alias" in text or "must-alias" in text
    assert_close(named(step(jnp.copy(given["initial_state"]), tokens)), named(expected))


# Ranks and empty arrays ---------------------------------------------------------------------------------------


def test_unbatched():
    given = floats(B=1)
    batched, one = attend(given), attend({name: x[0] if name != "g_gamma" else x for name, x in given.items()})
    assert one["out"].shape == (T, H, DV) and one["state"].shape == (H, D, DV)
    assert_close(one, {name: x[0] for name, x in batched.items()})


def test_unbatched_packed():
    given = floats(B=1, sequences=2)
    bare = {name: x if name in ("g_gamma", "initial_state") else x[0] for name, x in given.items()}
    batched, one = attend(given, cu_seqlens=CU), attend(bare, cu_seqlens=CU)
    assert one["out"].shape == (T, H, DV) and one["state"].shape == (2, H, D, DV)
    assert_close(one, {"out": batched["out"][0], "state": batched["state"]})


def test_more_leading_dimensions():
    given = floats(B=6)
    folded = {n: x if n == "g_gamma" else x.reshape(2, 3, *x.shape[1:]) for n, x in given.items()}
    results = attend(folded)
    assert results["out"].shape == (2, 3, T, H, DV) and results["state"].shape == (2, 3, H, D, DV)
    assert_close({n: x.reshape(6, *x.shape[2:]) for n, x in results.items()}, attend(given))


def test_an_empty_batch():
    given = floats(B=0)
    outputs, gradients = with_gradients(given)
    assert outputs["out"].shape == (0, T, H, DV) and outputs["state"].shape == (0, H, D, DV)
    assert {name: x.shape for name, x in gradients.items()} == {name: x.shape for name, x in given.items()}
    assert not np.any(gradients["g_gamma"])


def test_no_tokens():
    """The state goes through as it is."""
    given = {n: x if n in ("g_gamma", "initial_state") else x[:, :0] for n, x in floats().items()}
    outputs, gradients = with_gradients(given)
    assert outputs["out"].shape == (2, 0, H, DV)
    np.testing.assert_array_equal(outputs["state"], given["initial_state"])
    np.testing.assert_array_equal(gradients["initial_state"], jnp.cos(given["initial_state"]))


def test_packed_sequences_without_any_tokens():
    given = {n: x if n in ("g_gamma", "initial_state") else x[:, :0] for n, x in floats(B=1, sequences=2).items()}
    outputs, gradients = with_gradients(given, jnp.array([0, 0, 0]))
    assert outputs["out"].shape == (1, 0, H, DV)
    np.testing.assert_array_equal(outputs["state"], given["initial_state"])
    np.testing.assert_array_equal(gradients["initial_state"], jnp.cos(given["initial_state"]))
    assert not np.any(gradients["g_gamma"])


def test_two_decays_of_channels_in_two_dtypes():
    """`g` per channel adds to `gk`, in float32, under strict promotion too."""
    q, k, v = (normal(name, (1, T, H, D)) for name in "qkv")
    g, gk = log_decays("g", (1, T, H, D)).astype("bfloat16"), log_decays("gk", (1, T, H, D))
    with jax.numpy_dtype_promotion("strict"):
        both = recurrent_attention(q, k, v, g, gk=gk)
    assert_close({"out": both}, {"out": recurrent_attention(q, k, v, gk=g.astype("float32") + gk)})


def test_the_other_two():
    """Their gradients, mapped."""
    given = floats(N)
    q, k, v, gk = (given[name] for name in ("query", "key", "value", "gk"))
    for attend in (gla_attention, lambda q, k, v, g: lightning_attention(q, k, v, layer_idx=1, num_layers=4)):
        step = jax.grad(lambda q, k, v, g, f=attend: jnp.sin(f(q, k, v, g)).sum(), argnums=(0, 1, 2))
        got = jax.jit(jax.vmap(step))(q, k, v, gk)
        loop = stacked([jax.jit(step)(*(x[n] for x in (q, k, v, gk))) for n in range(N)])
        assert_close(dict(enumerate(got)), dict(enumerate(loop)))


@pytest.mark.parametrize("convert", [list, np.asarray, jnp.asarray], ids=["list", "numpy", "jax"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_new_lengths_compile_nothing(convert, differentiated):
    """Outside of jit: where sequences begin is a number of the program, whatever it comes as."""
    given = {name: normal(name, (1, 16, 2, 4)) for name in ("query", "key", "value", "gk")}

    def attend(cu, x):
        return sum(y.sum() for y in recurrent_attention(**x, cu_seqlens=cu, return_state=True))

    def run(*cu):
        jax.block_until_ready((jax.grad(attend, 1) if differentiated else attend)(convert(cu), given))

    run(0, 9, 16)
    with compiled_programs() as names:
        for cu in ((0, 7, 16), (0, 16, 16), (0, 3, 5)):
            run(*cu)
    assert names == []
