"""One representative call of the toy family, with its definition."""

import jax.numpy as jnp

from ejkernel.family import Check
from ejkernel.ops import Call
from toy_family.operations import Spec


def canonicalise(x, state, lengths, *, decay=0.5):
    return Call(Spec(decay), {"x": x, "state": state, "lengths": lengths})


def definition(call, dtype):
    h, out = call["state"].astype(dtype), []
    for t in range(call["x"].shape[1]):
        h = call.spec.decay * h + jnp.where(
            t < call["lengths"][:, None], call["x"][:, t].astype(dtype), 0
        )
        out.append(h)
    return jnp.stack(out, 1), h


def checks():
    lengths = {"lengths": jnp.array([8, 5])}
    return [
        Check(
            "short",
            "decayed_sum",
            definition,
            "float32",
            {"x": (2, 8, 3), "state": (2, 3)},
            lengths,
        )
    ]
