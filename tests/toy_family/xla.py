"""In chunks. The residuals are the states between them: how many depends on the config.

The gradient of a sum needs none of them; most gradients do.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.ops import Implementation


@dataclass(frozen=True)
class Config:
    chunk: int = 2


def _masked(call):
    x, keep = call["x"], jnp.arange(call["x"].shape[1])[None] < call["lengths"][:, None]
    return jnp.where(keep[..., None], x, 0), keep


def _steps(decay, h, xs):
    def step(h, x):
        h = decay * h + x
        return h, h

    return jax.lax.scan(step, h, xs)


def forward(call, config):
    x, _ = _masked(call)
    (B, T, D), decay = x.shape, call.spec.decay
    x = jnp.pad(x, ((0, 0), (0, -T % config.chunk), (0, 0)))  # any length, in whole chunks
    # (chunks, chunk, B, D)
    chunks = jnp.moveaxis(x.reshape(B, -1, config.chunk, D), 0, 2)

    def chunk(h, xs):
        end, out = _steps(decay, h, xs)
        return end, (out, h)

    _, (out, states) = jax.lax.scan(chunk, call["state"], chunks)
    out = jnp.moveaxis(out, 2, 0).reshape(B, -1, D)[:, :T]
    return {"out": out, "state": out[:, -1]}, {"starts": jnp.moveaxis(states, 1, 0)}


def backward(call, residuals, cotangents, config):
    _, keep = _masked(call)
    T = call["x"].shape[1]
    # an output that nobody differentiates has no cotangent
    dout = cotangents.get("out", jnp.zeros_like(call["x"]))
    if "state" in cotangents:
        dout = dout.at[:, T - 1].add(cotangents["state"])
    _, dx = _steps(
        call.spec.decay, jnp.zeros_like(call["state"]), jnp.moveaxis(dout, 1, 0)[::-1]
    )
    dx = jnp.moveaxis(dx[::-1], 0, 1)
    return {"x": jnp.where(keep[..., None], dx, 0), "state": call.spec.decay * dx[:, 0]}


IMPLEMENTATION = Implementation(
    Config,
    lambda call: [],
    lambda call: Config(),
    lambda call: [Config(1), Config(4)],
    forward,
    backward,
    shared_residuals=False,
    residuals={"starts": "B chunks D"},
)
