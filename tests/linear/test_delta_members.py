"""Members of the family by their models' names, against recurrences written down as those models have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import (
    gated_delta_product,
    gated_delta_rule,
    mamba2_attention,
    recurrent_attention,
    rwkv7_attention,
)
from harness import evaluate, normal
from harness.checks import Arrays
from harness.linear import named
from tolerances import assert_close, wide

B, T, H, Hk, D, DV = 2, 21, 4, 2, 8, 6


def unit(name: str, shape: tuple[int, ...]) -> jax.Array:
    x = normal(name, shape)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def by_token(step, state, tokens):
    state, out = jax.lax.scan(step, state, [jnp.moveaxis(x, 1, 0) for x in tokens])
    return {"out": jnp.moveaxis(out, 0, 1), "state": state}


def agree(function, definition, given: Arrays) -> None:
    """Outputs and every gradient."""
    shapes = jax.eval_shape(definition, given)
    cotangents = {name: normal(f"d{name}", x.shape) for name, x in shapes.items()}
    both = (evaluate(f, given, cotangents) for f in (function, definition))
    for got, expected, kind in zip(*both, ("output", "gradient of"), strict=True):
        assert_close(got, expected, kind=kind)


def test_rwkv_7():
    shape = (B, T, H, D)
    erase = unit("kappa", shape)
    given = {"r": normal("r", shape), "w": -0.6 * jax.nn.sigmoid(normal("w", shape)), "k": normal("k", shape)}
    given |= {"v": normal("v", (B, T, H, DV)), "a": -erase, "b": erase * jax.nn.sigmoid(normal("rate", shape))}
    given |= {"initial_state": normal("state", (B, H, D, DV))}

    def definition(x):
        def step(h, token):
            r, w, k, v, a, b = token
            read = jnp.einsum("bhd,bhde->bhe", a, h)
            h = jnp.exp(w)[..., None] * h + b[..., None] * read[..., None, :] + k[..., None] * v[..., None, :]
            return h, jnp.einsum("bhd,bhde->bhe", r, h)

        return by_token(step, x["initial_state"], [x[name] for name in "rwkvab"])

    agree(lambda x: named(rwkv7_attention(**x, return_state=True)), definition, given)


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_product_of_writes(per_channel):
    n = 3
    given = {"query": normal("query", (B, T, Hk, D)), "key": unit("key", (B, T, n, Hk, D))}
    given |= {"value": normal("value", (B, T, n, H, DV)), "beta": 2 * jax.nn.sigmoid(normal("beta", (B, T, n, H)))}
    given["g"] = -jnp.abs(normal("g", (B, T, H, D) if per_channel else (B, T, H)))

    def definition(x):
        def step(h, token):
            q, key, value, beta, g = token
            h = jnp.exp(g if per_channel else g[..., None])[..., None] * h
            for i in range(n):
                k = jnp.repeat(key[:, i], H // Hk, 1)
                d = beta[:, i, :, None] * (value[:, i] - jnp.einsum("bhd,bhde->bhe", k, h))
                h = h + k[..., None] * d[..., None, :]
            return h, D**-0.5 * jnp.einsum("bhd,bhde->bhe", jnp.repeat(q, H // Hk, 1), h)

        tokens = [x[name] for name in ("query", "key", "value", "beta", "g")]
        return by_token(step, jnp.zeros((B, H, D, DV)), tokens)

    agree(lambda x: named(gated_delta_product(**x, return_state=True)), definition, given)


def test_products_are_packed_as_others_are():
    arrays = {"query": (1, T, Hk, D), "key": (1, T, 2, Hk, D), "value": (1, T, 2, H, DV)}
    given = {name: normal(name, shape) for name, shape in arrays.items()}
    cu, ids = np.array([0, 9, 21]), np.repeat([3, 1], [9, 12])
    packed = gated_delta_product(**given, cu_seqlens=cu, qk_norm=True)
    assert_close(named(packed), named(gated_delta_product(**given, segment_ids=ids, qk_norm=True)))


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba_2(groups):
    P, S = 6, 8
    given = {"x": normal("x", (B, T, H, P)), "dt": jax.nn.softplus(normal("dt", (B, T, H)))}
    given |= {"A": -jnp.exp(normal("A", (H,))), "D": normal("D", (H,))}
    given |= {name: normal(name, (B, T, groups, S)) for name in "BC"}

    def definition(x):
        def step(h, token):
            y, dt, b, c = token
            b, c = (jnp.repeat(z, H // groups, 1) for z in (b, c))
            h = h * jnp.exp(dt * x["A"])[..., None, None] + (dt[..., None] * y)[..., None] * b[..., None, :]
            return h, jnp.einsum("bhpn,bhn->bhp", h, c) + x["D"][:, None] * y

        results = by_token(step, jnp.zeros((B, H, P, S)), [x[name] for name in ("x", "dt", "B", "C")])
        return results | {"state": results["state"].mT}

    agree(lambda x: named(mamba2_attention(**x, return_state=True)), definition, given)


PACKINGS = {"cu_seqlens": np.array([0, 5, 9]), "segment_ids": np.array([0] * 5 + [1] * 4 + [-1] * 3)}
LONG = (1, 12, 2, 4)


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("function", ["rwkv7", "mamba2", "normalised"])
def test_nan_in_padding_is_not_read(function, name):
    """Not by what is computed before a kernel either, forward or backward."""
    packing = {name: PACKINGS[name]}
    padded = np.arange(12) >= 9
    if function == "rwkv7":
        given: Arrays = {n: 0.3 * normal(n, LONG) for n in "rwkvab"}
        call = rwkv7_attention
    elif function == "mamba2":
        given = {"x": normal("x", LONG), "dt": jax.nn.softplus(normal("dt", LONG[:3])), "A": -jnp.ones(2)}
        given |= {"B": normal("B", (1, 12, 1, 4)), "C": normal("C", (1, 12, 1, 4)), "D": normal("D", (2,))}
        call = mamba2_attention
    else:
        given = {n: normal(n, LONG) for n in ("query", "key", "value")}
        packing["qk_norm"] = True
        call = gated_delta_rule

    def bad(x):
        return jnp.where(padded.reshape(1, 12, *(1,) * (x.ndim - 2)), jnp.nan, x) if x.ndim > 1 else x

    cotangents = {"out": normal("dout", LONG)}
    clean = evaluate(lambda x: named(call(**x, **packing)), given, cotangents)
    poisoned = evaluate(lambda x: named(call(**x, **packing)), {n: bad(x) for n, x in given.items()}, cotangents)
    assert not np.asarray(clean[0]["out"])[:, 9:].any()
    for got, expected in zip(poisoned, clean, strict=True):
        for array in expected:
            np.testing.assert_array_equal(got[array], expected[array])


def test_decays_of_heads_leave_padding_alone():
    given = {n: normal(n, LONG) for n in ("query", "key", "value")}
    ids = np.array([0] * 9 + [-1] * 3)
    state = recurrent_attention(**given, g_gamma=-1.0, segment_ids=ids, return_state=True)[1]
    short = {n: x[:, :9] for n, x in given.items()}
    assert_close({"state": state}, {"state": recurrent_attention(**short, g_gamma=-1.0, return_state=True)[1]})


def test_rwkv_7_in_float16():
    """What reads the state is multiplied by the inverse of a decay, which float16 does not hold."""
    x = jnp.ones((1, 4, 1, 4), "float16")
    given = (x, -12 * x, x / 4, x, -x / 2, x / 4)
    exact = rwkv7_attention(*(y.astype(jnp.float32) for y in given))
    np.testing.assert_allclose(wide(rwkv7_attention(*given)), wide(exact), rtol=2e-3)


Q, V = normal("query", (B, T, H, D)), normal("value", (B, T, H, DV))
BAD = {
    "writes": (lambda: gated_delta_product(Q, Q, V), "must have one dimension more than query"),
    "product": (lambda: gated_delta_product(Q, Q[:, :, None], V[:, :3, None]), "must begin with (2, 21, 1)"),
    "product-beta": (
        lambda: gated_delta_product(Q, Q[:, :, None], V[:, :, None], None, Q[..., 0]),
        "beta has shape (2, 21, 4), needed (2, 21, 1, 4)",
    ),
    "rwkv": (lambda: rwkv7_attention(Q, Q, Q, V, Q, Q[:, 1:]), "b (2, 20, 4, 8) must have the shape of r"),
    "mamba-dt": (lambda: mamba2_attention(V, V, Q[0, 0, :, 0], Q, Q), "dt (2, 21, 4, 6) must have the shape of x"),
    "mamba-A": (lambda: mamba2_attention(V, V[..., 0], V[0, 0, 0], Q, Q), "A has shape (6,), needed one number a head"),
    "mamba-B": (lambda: mamba2_attention(V, V[..., 0], V[0, 0, :, 0], Q, Q[:, :, :3]), "B (2, 21, 4, 8) and C"),
    "mamba-D": (lambda: mamba2_attention(V, V[..., 0], V[0, 0, :, 0], Q, Q, V), "D has shape (2, 21, 4, 6), needed"),
    "product-swapped": (
        lambda: gated_delta_product(Q, Q[:, :, None], V[:, :, None], None, jnp.ones((B, 1, T, H))),
        "beta has shape (2, 1, 21, 4), needed (2, 21, 1, 4)",
    ),
    "rwkv-heads": (lambda: rwkv7_attention(Q, Q, Q, V[:, :, :2], Q, Q), "v (2, 21, 2, 6) must have the batch, length"),
    "scale": (lambda: gated_delta_rule(Q, Q, V, softmax_scale=0), "softmax_scale=0.0 must not be 0"),
    "wide-ids": (lambda: gated_delta_rule(Q, Q, V, segment_ids=np.full(T, 2**32)), "segment_ids must fit in int32"),
    "segments": (
        lambda: gated_delta_rule(Q, Q, V, segment_ids=np.zeros((B, T), int), cu_seqlens=np.array([0, 3])),
        "cu_seqlens packs sequences into one row",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)
