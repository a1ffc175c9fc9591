"""The definition: token by token, in float32.

h_t = exp(g_t + g_gamma) * exp(gk_t)[:, None] * exp(gv_t)[None, :] * h_{t-1} + k_t^T v_t
o_t = scale * q_t h_t
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear.spec import dimensions
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays


def reference(call: Call, dtype: Any = jnp.float32) -> Arrays:
    """`out` (B, T, H, Dv) and `state` (B, N, H, D, Dv), computed and kept in `dtype`; differentiable in everything."""
    B, _, H, D, Dv, N = dimensions(call)
    zeros = jnp.zeros((B, N, H, D, Dv), dtype)
    state = call["initial_state"].astype(dtype) if "initial_state" in call else zeros
    tokens = {name: call[name] for name in ("query", "key", "value", "g", "gk", "gv") if name in call}
    tokens["sequence"] = sequence_of_tokens(call, *call["query"].shape[:2])
    if call.spec.reverse:
        tokens = {name: jnp.flip(x, 1) for name, x in tokens.items()}
    gamma = call["g_gamma"] if "g_gamma" in call else jnp.zeros((1, H))

    def step(state: jax.Array, token: Arrays) -> tuple[jax.Array, jax.Array]:
        member = jnp.arange(N) == token["sequence"][:, None]  # (B, N): all False for padding
        seen = member.any(-1)
        # what lies in padding is selected away, not multiplied by zero: it may be nan
        x = {n: jnp.where(seen.reshape(-1, *(1,) * (t.ndim - 1)), t, 0).astype(dtype) for n, t in token.items()}
        decay = jnp.exp(gamma.astype(dtype) + x.get("g", jnp.zeros((), dtype)))[..., None, None]
        decay = decay * jnp.exp(x["gk"])[..., None] if "gk" in x else decay
        decay = decay * jnp.exp(x["gv"])[..., None, :] if "gv" in x else decay
        h = jnp.where(member[..., None, None, None], state, 0).sum(1)
        h = decay * h + x["key"][..., None] * x["value"][..., None, :]
        out = jnp.asarray(call.spec.scale, dtype) * (x["query"][..., None] * h).sum(-2)
        state = jnp.where(member[..., None, None, None], h[:, None], state)
        return state, jnp.where(seen[:, None, None], out, 0)

    state, out = jax.lax.scan(step, state, {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()})
    out = jnp.moveaxis(out, 0, 1)
    return {"out": jnp.flip(out, 1) if call.spec.reverse else out, "state": state}


def sequence_of_tokens(call: Call, B: int, T: int) -> jax.Array:
    """The sequence of every token, -1 for padding: (B, T)."""
    if "cu_seqlens" not in call:
        return jnp.zeros((B, T), jnp.int32)
    token = jnp.arange(T)

    def one(cu: jax.Array) -> jax.Array:
        return jnp.where(token < cu[-1], jnp.searchsorted(cu, token, side="right") - 1, -1)

    return jnp.broadcast_to(jax.vmap(one)(call["cu_seqlens"]), (B, T))


def without_padding(call: Call, x: jax.Array) -> jax.Array:
    """(B, T, ...) with zeros behind packed sequences."""
    if "cu_seqlens" not in call:
        return x
    sequence = sequence_of_tokens(call, *x.shape[:2])
    return jnp.where(sequence.reshape(*sequence.shape, *(1,) * (x.ndim - 2)) >= 0, x, jnp.zeros((), x.dtype))
