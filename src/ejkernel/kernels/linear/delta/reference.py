"""The definition: token by token, in float32.

h~  = exp(g_t) * exp(gk_t)[:, None] * h_{t-1}
h_t = h~ + k_t^T (w_t * v_t - p_t h~)
o_t = scale * q_t h_t
"""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear.delta.spec import dimensions
from ejkernel.kernels.linear.reference import sequence_of_tokens
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays


def reference(call: Call, dtype: Any = jnp.float32) -> Arrays:
    """`out` (B, T, H, Dv) and `state` (B, N, H, D, Dv), computed and kept in `dtype`; differentiable in everything."""
    B, T, H, Hk, D, Dv, N = dimensions(call)
    state = call["initial_state"] if "initial_state" in call else jnp.zeros((B, N, H, D, Dv))
    tokens = {name: x for name, x in call.arrays.items() if name not in ("initial_state", "cu_seqlens")}
    tokens["sequence"] = sequence_of_tokens(call, B, T)

    def step(state: jax.Array, token: Arrays) -> tuple[jax.Array, jax.Array]:
        member = jnp.arange(N) == token["sequence"][:, None]  # (B, N): all False for padding
        seen = member.any(-1)
        # what lies in padding is selected away, not multiplied by zero: it may be nan
        x = {n: jnp.where(seen.reshape(-1, *(1,) * (t.ndim - 1)), t, 0).astype(dtype) for n, t in token.items()}
        q, k = (jnp.repeat(x[name], H // Hk, 1) for name in ("query", "key"))
        beta = x["beta"][..., None] if "beta" in x else jnp.ones((), dtype)
        erase, write = x.get("erase_key", beta * k), x.get("write_gate", beta)
        h = jnp.where(member[..., None, None, None], state, 0).sum(1)
        h = jnp.exp(x["g"])[..., None, None] * h if "g" in x else h
        h = jnp.exp(x["gk"])[..., None] * h if "gk" in x else h
        h = h + k[..., None] * (write * x["value"] - (erase[..., None] * h).sum(-2))[..., None, :]
        out = jnp.asarray(call.spec.scale, dtype) * (q[..., None] * h).sum(-2)
        state = jnp.where(member[..., None, None, None], h[:, None], state)
        return state, jnp.where(seen[:, None, None], out, 0)

    by_token = {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()}
    state, out = jax.lax.scan(step, state.astype(dtype), by_token)
    return {"out": jnp.moveaxis(out, 0, 1), "state": state}
