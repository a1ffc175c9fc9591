"""What every backward needs around its kernel, whatever the platform."""

import jax
import jax.numpy as jnp

from ejkernel.ops import Call


def row_terms(residuals: dict[str, jax.Array], cotangents: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """lse and delta, both float32 (B, H, T), ready for `p = exp(s - lse)` and `ds = p * (dp - delta)`.

    A row that saw nothing gets lse = +inf, so that its p is zero rather than nan.
    """
    lse, delta = residuals["lse"], jnp.zeros_like(residuals["lse"])
    if "out" in cotangents:
        out, dout = residuals["out"].astype(jnp.float32), cotangents["out"].astype(jnp.float32)
        delta = (out * dout).sum(-1).swapaxes(1, 2)
    if "lse" in cotangents:
        delta -= cotangents["lse"]
    return jnp.where(jnp.isneginf(lse), jnp.inf, lse), delta


def output_cotangent(residuals: dict[str, jax.Array], cotangents: dict[str, jax.Array]) -> jax.Array:
    """dout (B, T, H, Dv): zeros where only lse is differentiated."""
    return cotangents["out"] if "out" in cotangents else jnp.zeros_like(residuals["out"])


def sink_gradient(call: Call, lse: jax.Array, delta: jax.Array) -> dict[str, jax.Array]:
    """The gradient of the sinks (B|1, H): they take weight exp(sink - lse) and give no value."""
    if "sinks" not in call:
        return {}
    sinks = call["sinks"]
    share = jnp.exp(sinks[..., None] - lse)
    # a hidden row's delta may be nan; it has no share
    gradient = -jnp.where(share > 0, share * delta, 0.0).sum(-1)
    return {"sinks": gradient if sinks.shape[0] > 1 else gradient.sum(0, keepdims=True)}
