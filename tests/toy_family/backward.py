"""The gradients: the same sum from the last token to the first, by the same kernel."""

import jax.numpy as jnp


def backward_by(scan):
    """A platform's backward from its scan.

    `scan(x, state, lengths, decay, config, target, reverse=)` gives all h, and the last one.
    """

    def backward(call, residuals, cotangents, config):
        x, lengths, decay = call["x"], call["lengths"], call.spec.decay
        B, T, _ = x.shape
        # an output that nobody differentiates has no cotangent
        dout = cotangents.get("out", jnp.zeros_like(x))
        if "state" in cotangents:
            dout = dout.at[:, T - 1].add(cotangents["state"])
        no_state, all_tokens = jnp.zeros_like(call["state"]), jnp.full((B,), T, jnp.int32)
        dh, _ = scan(dout, no_state, all_tokens, decay, config, call.target, reverse=True)
        seen = jnp.arange(T)[None] < lengths[:, None]
        return {"x": jnp.where(seen[..., None], dh, 0), "state": decay * dh[:, 0]}

    return backward
