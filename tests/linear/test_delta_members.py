"""Members of the family by their models' names, against recurrences written down as those models have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import gated_delta_product, gated_delta_rule, mamba2_attention, rwkv7_attention
from harness import evaluate, normal
from harness.checks import Arrays
from harness.linear import named
from tolerances import assert_close

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


Q, V = normal("query", (B, T, H, D)), normal("value", (B, T, H, DV))
BAD = {
    "writes": (lambda: gated_delta_product(Q, Q, V), "must have one dimension more than query"),
    "product": (lambda: gated_delta_product(Q, Q[:, :, None], V[:, :3, None]), "must begin with (2, 21, 1)"),
    "product-beta": (lambda: gated_delta_product(Q, Q[:, :, None], V[:, :, None], None, Q[..., 0]), "needed (batch, l"),
    "rwkv": (lambda: rwkv7_attention(Q, Q, Q, V, Q, Q[:, 1:]), "b (2, 20, 4, 8) must have the shape of r"),
    "mamba-dt": (lambda: mamba2_attention(V, V, Q[0, 0, :, 0], Q, Q), "dt (2, 21, 4, 6) must have the shape of x"),
    "mamba-A": (lambda: mamba2_attention(V, V[..., 0], V[0, 0, 0], Q, Q), "A has shape (6,), needed one number a head"),
    "mamba-B": (lambda: mamba2_attention(V, V[..., 0], V[0, 0, :, 0], Q, Q[:, :, :3]), "B (2, 21, 4, 8) and C"),
    "mamba-D": (lambda: mamba2_attention(V, V[..., 0], V[0, 0, :, 0], Q, Q, V), "D has shape (2, 21, 4, 6), needed"),
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
