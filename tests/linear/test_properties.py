"""Independent forms agree, states can be handed over, packing changes nothing, whatever the numbers are."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.linear.reference import reference
from ejkernel.kernels.linear.spec import canonicalise, lightning_decay
from ejkernel.modules import gla_attention, lightning_attention, recurrent_attention
from harness import evaluate, normal, with_gradients
from harness.linear import CASES, DECAYS, GATES, named, refusals
from tolerances import assert_close, wide

H, D, DV = 2, 8, 12


def arrays(T, gates=GATES, decay="mild", B=2, state=True, N=None, dtype="float32"):
    shapes = {"query": (B, T, H, D), "key": (B, T, H, D), "value": (B, T, H, DV)}
    results = {name: normal(name, shape, dtype) for name, shape in shapes.items()}
    sizes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, D), "gv": (B, T, H, DV)}
    results |= {name: jnp.asarray(DECAYS[decay](np.abs(normal(name, sizes[name]))), jnp.float32) for name in gates}
    if state:
        results["initial_state"] = normal("initial state", (N or B, H, D, DV))
    return results


def attend(given, **options):
    return named(recurrent_attention(**given, return_state=True, **options))


def in_pairs(given, scale, reverse=False):
    """Output and final state in float64: what each token gets of each, decayed by all that lies between them."""
    x = {name: wide(a) for name, a in given.items()}
    B, T = x["query"].shape[:2]
    logs = np.zeros((B, T, H, D, DV))
    logs += x["g"][..., None, None] if "g" in x else 0
    logs += x["g_gamma"][:, None, None] if "g_gamma" in x else 0
    logs += x["gk"][..., None] if "gk" in x else 0
    logs += x["gv"][..., None, :] if "gv" in x else 0
    ordered = (lambda a: a[:, ::-1]) if reverse else (lambda a: a)
    q, k, v, logs = (ordered(a) for a in (x["query"], x["key"], x["value"], logs))
    start = x.get("initial_state", np.zeros((B, H, D, DV)))
    out, state = np.zeros(v.shape), start
    for t in range(T):
        # the decays of (j, t], one sum for every j
        between = [np.exp(logs[:, j + 1 : t + 1].sum(1)) for j in range(t + 1)]
        state = start * np.exp(logs[:, : t + 1].sum(1))
        for j, decay in enumerate(between):
            state = state + decay * k[:, j, :, :, None] * v[:, j, :, None, :]
        out[:, t] = scale * np.einsum("bhd,bhde->bhe", q[:, t], state)
    return {"out": ordered(out), "state": state}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("decay", ["mild", "mixed", "resets"])
def test_the_definition_is_the_sum_over_pairs(decay, reverse):
    given = arrays(21, decay=decay)
    call = canonicalise(**given, reverse=reverse, softmax_scale=0.3)
    results = reference(call)
    results = {"out": results["out"], "state": results["state"][:, 0]}
    assert_close(results, in_pairs(given, 0.3, reverse))


@pytest.mark.parametrize("gates", [("g",), GATES], ids="-".join)
def test_chunks_of_every_size_are_the_recurrence(gates):
    """Chunks of 1 are the recurrence itself; of 256, one chunk."""
    given = arrays(150, gates, "mixed")
    cotangents = {"out": normal("dout", (2, 150, H, DV)), "state": normal("dstate", (2, H, D, DV))}
    one = evaluate(partial(attend, cfg={"chunk": 1}), given, cotangents)
    for chunk in (16, 256):
        many = evaluate(partial(attend, cfg={"chunk": chunk}), given, cotangents)
        for got, expected, kind in zip(many, one, ("output", "gradient of"), strict=True):
            assert_close(got, expected, kind=kind)


def attend_on(platform, given, **options):
    with platform.context():
        return attend(given, platform=platform.name, **options)


@pytest.fixture
def able(platform):
    """A platform that has the family; one that has not is checked to say so in test_cases.py."""
    return None if refusals(CASES[0], platform) else platform


@pytest.mark.parametrize("reverse", [False, True])
def test_a_state_can_be_handed_over(reverse, able):
    if able is None:
        return
    attend = partial(attend_on, able)
    given = arrays(100, B=1)
    expected = attend(given, reverse=reverse)
    state, outs = given.pop("initial_state"), []
    cuts = [*pairwise((0, 99, 100))]  # several chunks, and a step of decoding
    for a, b in reversed(cuts) if reverse else cuts:
        tokens = {name: x[:, a:b] if name != "g_gamma" else x for name, x in given.items()}
        results = attend(tokens | {"initial_state": state}, reverse=reverse)
        state = results["state"]
        outs.append(results["out"])
    joined = jnp.concatenate(outs[::-1] if reverse else outs, 1)
    assert_close({"out": joined, "state": state}, expected)


def test_packed_outputs_and_states_are_separate_ones(able):
    """On every platform; `test_packed_is_separate` has the gradients."""
    if able is None:
        return
    given = arrays(60, ("g_gamma", "gk"), "mixed", B=1, N=3)
    cu = [0, 17, 17, 55]
    packed = attend_on(able, given, cu_seqlens=np.array(cu))
    outs, states = [], []
    for n, (a, b) in enumerate(pairwise(cu)):
        share = {name: x[:, a:b] if x.ndim > 1 else x for name, x in given.items()}
        results = attend_on(able, share | {"initial_state": given["initial_state"][n : n + 1]})
        outs.append(results["out"])
        states.append(results["state"])
    expected = {"out": np.concatenate([*outs, np.zeros((1, 5, H, DV))], 1), "state": np.concatenate(states)}
    assert_close(packed, expected)


def test_decode_steps_continue_a_prefill():
    """One token at a time, by scan, from the state that a prompt left."""
    given = arrays(70)
    expected = attend(given)
    prompt = {name: x[:, :65] if name not in ("g_gamma", "initial_state") else x for name, x in given.items()}
    steps = {n: jnp.moveaxis(x[:, 65:], 1, 0) for n, x in given.items() if n not in ("g_gamma", "initial_state")}

    def step(state, token):
        token = {name: x[:, None] for name, x in token.items()}
        results = attend(token | {"g_gamma": given["g_gamma"], "initial_state": state})
        return results["state"], results["out"][:, 0]

    state, out = jax.jit(lambda s, t: jax.lax.scan(step, s, t))(attend(prompt)["state"], steps)
    assert_close(
        {"out": jnp.moveaxis(out, 0, 1), "state": state}, {"out": expected["out"][:, 65:], "state": expected["state"]}
    )


CU = np.array([0, 0, 30, 31, 31, 61, 91, 92])


@pytest.mark.parametrize("reverse", [False, True])
def test_packed_is_separate(reverse):
    """Outputs, states and gradients; the sequences' shares of g_gamma's add up."""
    given = arrays(100, B=1, N=len(CU) - 1)
    cotangents = {"out": normal("dout", (1, 100, H, DV)), "state": normal("dstate", (len(CU) - 1, H, D, DV))}
    packed = evaluate(partial(attend, cu_seqlens=CU, reverse=reverse), given, cotangents)
    one = with_gradients(partial(attend, reverse=reverse))
    outs, states, gradients = [], [], []
    for n, (a, b) in enumerate(pairwise(CU)):
        share = {name: x[:, a:b] if x.ndim > 1 else x for name, x in given.items()}
        share["initial_state"] = given["initial_state"][n : n + 1]
        back = {"out": cotangents["out"][:, a:b], "state": cotangents["state"][n : n + 1]}
        if a == b:
            states.append(share["initial_state"])
            gradients.append({"initial_state": back["state"]})
            continue
        results, gradient = one(share, back)
        outs.append(results["out"])
        states.append(results["state"])
        gradients.append(gradient)
    padding = jnp.zeros((1, 100 - CU[-1], H, DV))
    assert_close(packed[0], {"out": jnp.concatenate([*outs, padding], 1), "state": jnp.concatenate(states)})
    expected = {}
    for name, x in given.items():
        shares = [gradient[name] for gradient in gradients if name in gradient]
        if name == "g_gamma":
            expected[name] = sum(shares)
        else:
            axis = 0 if name == "initial_state" else 1
            joined = np.concatenate(shares, axis)
            expected[name] = np.pad(joined, [(0, m - n) for m, n in zip(x.shape, joined.shape, strict=True)])
    assert_close(packed[1], expected, kind="gradient of")


def test_nan_stays_in_its_sequence():
    cu = np.array([0, 40, 75, 100])
    given = arrays(100, B=1, N=3)
    cotangents = {"out": normal("dout", (1, 100, H, DV)), "state": normal("dstate", (3, H, D, DV))}
    bad = {n: x.at[:, 50].set(jnp.nan) if x.ndim > 1 and x.shape[1] == 100 else x for n, x in given.items()}
    step = with_gradients(partial(attend, cu_seqlens=cu))
    (clean, expected), (results, gradients) = step(given, cotangents), step(bad, cotangents)
    assert np.isnan(results["out"][0, 50:75]).all() and np.isnan(results["state"][1]).all()
    for tokens in (slice(0, 40), slice(75, 100)):
        np.testing.assert_array_equal(results["out"][0, tokens], clean["out"][0, tokens])
        for name in ("query", "key", "value", "g", "gk", "gv"):
            np.testing.assert_array_equal(gradients[name][0, tokens], expected[name][0, tokens])


def test_lightning_is_a_decay_per_head():
    q, k, v = (normal(name, (1, 50, 4, D)) for name in "qkv")
    decay = lightning_decay(4, 3, 12)
    np.testing.assert_allclose(decay, [-2.0 * 0.75 * head for head in range(4)])
    options = {"layer_idx": 3, "num_layers": 12}
    out = lightning_attention(q, k, v, **options)
    assert_close({"out": out}, {"out": recurrent_attention(q, k, v, g_gamma=jnp.asarray(decay))})
    # head 0 forgets nothing
    scores = np.tril(np.einsum("ic,jc->ij", wide(q[0, :, 0]), wide(k[0, :, 0])))
    assert_close({"out": out[0, :, 0]}, {"out": D**-0.5 * scores @ wide(v[0, :, 0])})


def test_gla_is_a_decay_per_key_channel():
    given = arrays(50, ("gk",), "mixed")
    q, k, v, gk, state = given.values()
    results = gla_attention(q, k, v, gk, None, state, return_state=True)
    assert_close(named(results), attend(given))
    both = recurrent_attention(q, k, v, gk, gk=gk)
    assert_close({"out": both}, {"out": recurrent_attention(q, k, v, gk=2 * gk)})


@pytest.mark.parametrize("decay", [-1.0, -0.1, -1e-3])
def test_the_gradient_of_a_heads_decay_is_as_exact_as_any(decay):
    """Against float64, along 520 tokens: sums of the shares of tokens would be wrong by 1e-4 where each decays by e."""
    T, H, D = 520, 2, 16
    given = {name: normal(name, (1, T, H, D)) for name in ("query", "key", "value")}
    given |= {"g_gamma": jnp.full((H,), decay), "initial_state": normal("initial state", (1, H, D, D))}
    dout, dstate = wide(normal("dout", (1, T, H, D))), wide(normal("dstate", (1, H, D, D)))
    q, k, v, gamma, h = (wide(x) for x in given.values())
    # the derivative of the recurrence by the logarithm of its decay
    dh, exact = np.zeros_like(h), np.zeros(H)
    for t in range(T):
        dh = np.exp(gamma)[:, None, None] * (dh + h)
        h = np.exp(gamma)[:, None, None] * h + k[:, t, :, :, None] * v[:, t, :, None]
        exact += D**-0.5 * np.einsum("bhd,bhdv,bhv->h", q[:, t], dh, dout[:, t])
    exact += (dh * dstate).sum((0, 2, 3))
    cotangents = {"out": jnp.asarray(dout, "float32"), "state": jnp.asarray(dstate, "float32")}
    results = evaluate(attend, given, cotangents)[1]["g_gamma"]
    np.testing.assert_allclose(wide(results), exact, rtol=4e-6, atol=4e-6 * np.abs(exact).max())


@pytest.mark.parametrize("known", [False, True])
def test_states_of_zeros_that_the_compiler_knows(known):
    """XLA for CPUs leaves products with them unwritten (jaxlib 0.12): what lies in memory is not to come out."""
    given = {name: normal(name, (4, 12, 8, 8)) for name in ("query", "key", "value")}
    given |= {"g": -jnp.ones((4, 12, 8)), "g_gamma": -jnp.ones(8)}
    cotangents = {"out": normal("dout", (4, 12, 8, 8)), "state": normal("dstate", (4, 8, 8, 8))}
    zeros = np.zeros((4, 8, 8, 8), np.float32)
    outputs, gradients = evaluate(attend, given | {"initial_state": jnp.asarray(zeros)}, cotangents)
    gradients.pop("initial_state")
    state = {"initial_state": zeros} if known else {}
    for _ in range(3):
        jax.block_until_ready([jnp.full((2**k,), 1e30) for k in range(4, 16)])  # what lies there
        results = evaluate(lambda x: attend(x | state), given, cotangents)
        assert_close(results[0], outputs)
        assert_close(results[1], gradients)


@pytest.mark.parametrize(
    ("name", "small", "full"),
    [
        ("g_gamma", -0.5, (H,)),
        ("g_gamma", -1, (H,)),
        ("g_gamma", -np.inf, (H,)),
        ("g_gamma", np.float32(-0.5), (H,)),
        ("g_gamma", (1,), (H,)),
        ("g", (1, 1, H), (2, 20, H)),
        ("g", (2, 20, 1), (2, 20, H)),
        ("g", (1, 20, 1, 1), (2, 20, H, D)),
        ("gk", (2, 20, H, 1), (2, 20, H, D)),
        ("gv", (1, 1, 1, DV), (2, 20, H, DV)),
    ],
    ids=str,
)
def test_decays_that_are_the_same_along_an_axis(name, small, full):
    given = arrays(20, ())
    small = -jnp.abs(normal(name, small)) / 8 if isinstance(small, tuple) else small
    spread = attend(given | {name: jnp.broadcast_to(jnp.asarray(small, jnp.float32), full)})
    assert_close(attend(given | {name: small}), spread)


def test_a_gradient_of_decays_that_are_the_same_along_an_axis():
    given, decay = arrays(20, ()), -jnp.abs(normal("g", (1, 1, H)))

    def total(g):
        return sum(x.sum() for x in attend(given | {"g": g}).values())

    results, expected = jax.grad(total)(decay), jax.grad(total)(jnp.broadcast_to(decay, (2, 20, H)))
    assert_close({"g": results}, {"g": expected.sum((0, 1), keepdims=True)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_traced_scale_is_the_number(dtype):
    """And has a gradient; a program of one serves all of them."""
    given = arrays(20, ("gk",), dtype=dtype)

    def total(scale):
        return attend(given, softmax_scale=scale)["out"].astype(jnp.float32).sum()

    both = jax.jit(jax.value_and_grad(total))
    for scale in (0.5, -2.0, 0.0):
        value, slope = both(scale)
        exact = attend(given, softmax_scale=1.0)["out"].astype(jnp.float32).sum()
        tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(slope, exact, rtol=tolerance)
        np.testing.assert_allclose(value, scale * exact, rtol=tolerance, atol=1e-6)
    assert both._cache_size() == 1


def test_a_number_of_all_heads_under_a_traced_call():
    given = arrays(20, ())
    results = jax.jit(lambda x, gamma: attend(x | {"g_gamma": gamma}))(given, -0.5)
    assert_close(results, attend(given | {"g_gamma": jnp.full(H, -0.5)}))


def test_decays_in_another_dtype():
    """Narrow decays beside wide queries are the same numbers; their gradients are rounded to them."""
    given = arrays(40, ("g", "gk"))
    narrow = {name: x.astype("bfloat16") if name in GATES else x for name, x in given.items()}
    same = {name: x.astype("float32") for name, x in narrow.items()}
    gradient = jax.jit(jax.grad(lambda x: attend(x)["out"].sum()))
    results, exact = gradient(narrow), gradient(same)
    assert results["g"].dtype == results["gk"].dtype == "bfloat16" and results["query"].dtype == "float32"
    np.testing.assert_array_equal(results["query"], exact["query"])
    np.testing.assert_array_equal(results["gk"], exact["gk"].astype("bfloat16"))


def test_long_sequences_do_not_drift(native):
    """4096 tokens of bfloat16 against float64: the state is float32, so the last tokens are as good as the first."""
    T, D = 4096, 16
    q, k, v = (normal(name, (1, T, 1, D), "bfloat16") for name in "qkv")
    decay = np.float32(-1e-3)
    if refusals(CASES[0], native):
        return
    attend = jax.jit(partial(recurrent_attention, return_state=True, platform=native.name))
    out, state = attend(q, k, v, g_gamma=jnp.full(1, decay))
    x, y, z = (wide(a[0, :, 0]) for a in (q, k, v))
    h, exact = np.zeros((D, D)), np.zeros((T, D))
    for t in range(T):
        h = h * np.exp(np.float64(decay)) + np.outer(y[t], z[t])
        exact[t] = D**-0.5 * x[t] @ h
    error = np.abs(wide(out[0, :, 0]) - exact)
    ulp = float(jnp.finfo("bfloat16").eps)
    assert error[-64:].max() <= ulp * np.abs(exact[-64:]).max()  # one rounding, of the output
    assert np.abs(wide(state[0, 0]) - h).max() <= ulp * np.abs(h).max()  # one rounding, of what is added


def test_same_inputs_same_bits(native):
    if refusals(CASES[0], native):
        return
    given = arrays(130, decay="mixed")
    step = jax.jit(jax.grad(lambda x: sum(jnp.sin(y).sum() for y in attend_on(native, x).values())))
    first, second = step(given), step(given)
    for name in given:
        np.testing.assert_array_equal(first[name], second[name])
