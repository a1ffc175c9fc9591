"""Softmax attention as it is defined: float32, the whole matrix of logits, nothing clever."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.dropout import keep
from ejkernel.kernels.common.tiles import rounded
from ejkernel.kernels.softmax.rules import whole_operands
from ejkernel.kernels.softmax.spec import Dimensions, Spec, dimensions
from ejkernel.ops import Call
from ejkernel.types import visibility
from ejkernel.types.visibility import Tokens, pattern_cells


def visible(call: Call) -> jax.Array:
    """Which query sees which key: bool, broadcastable to (B, H, T, S)."""
    spec: Spec = call.spec
    dims = dimensions(call)
    index = jnp.arange(dims.T), jnp.arange(dims.S)
    q_pos, k_pos = call.get("q_positions"), call.get("kv_positions")
    if q_pos is None:
        q_pos, k_pos = index[0][None] + (dims.S - dims.T), index[1][None]
    queries, keys = Tokens(q_pos[:, None, :, None]), Tokens(k_pos[:, None, None, :])
    if "q_segments" in call:
        queries = queries._replace(segment=call["q_segments"][:, None, :, None])
        keys = keys._replace(segment=call["kv_segments"][:, None, None, :])
    rules = [call["mask"]] if "mask" in call else []
    if "pattern" in call:
        rules.append(pattern_cells(call["pattern"], index[0][:, None], index[1][None], spec.pattern_block or (1, 1)))
    if (rule := spec.rules.mask) is not None:
        rules.append(whole_operands(call.arrays).value(rule, *_int32_indices(dims)))
    pairs = jnp.ones((1, 1, dims.T, dims.S), bool)
    return visibility.visible(queries, keys, spec.band, spec.chunk, pairs=pairs, also=rules)


def _int32_indices(dims: Dimensions) -> tuple[jax.Array, jax.Array]:
    return jnp.arange(dims.T, dtype=jnp.int32)[:, None], jnp.arange(dims.S, dtype=jnp.int32)[None]


def _finite(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x with zeros for what is not finite, and where that was."""
    fine = jnp.isfinite(x)
    return jnp.where(fine, x, 0), ~fine


def weights(call: Call, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """Softmax weights (B, H, T, S) before dropout, and lse (B, H, T)."""
    spec: Spec = call.spec
    dims = dimensions(call)
    # 0 * nan is nan, in gradients too: what is not finite stays out of the products and marks its own pairs after
    query, bad_query = _finite(call["query"].astype(dtype))
    key, bad_key = _finite(jnp.repeat(call["key"].astype(dtype), dims.G, axis=2))
    logits = spec.scale * jnp.einsum(
        "bthd,bshd->bhts", query, key, precision="highest", preferred_element_type=jnp.float32
    )
    bad = bad_query.any(-1).swapaxes(1, 2)[..., None] | bad_key.any(-1).swapaxes(1, 2)[:, :, None]
    logits = jnp.where(bad, jnp.nan, logits)
    if "bias" in call:
        logits += call["bias"].astype(jnp.float32)
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    if spec.rules.score is not None:
        logits = whole_operands(call.arrays).value(spec.rules.score, *_int32_indices(dims), logits)
    logits = rounded(logits, spec.logits_dtype)
    seen = jnp.broadcast_to(visible(call), logits.shape)
    logits = jnp.where(seen, logits, -jnp.inf)
    sinks = call["sinks"][..., None] if "sinks" in call else jnp.full((1, dims.H, 1), -jnp.inf)
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, initial=-jnp.inf), sinks))
    top = jnp.where(jnp.isneginf(top), 0.0, top)  # a row that sees nothing: exp(-inf - 0) is the 0 it should be
    exponentials = jnp.where(seen, jnp.exp(jnp.where(seen, logits, 0.0) - top[..., None]), 0.0)
    total = exponentials.sum(-1) + jnp.exp(sinks - top)
    some = total != 0  # a nan total is not nothing: it must show
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)
    return exponentials / jnp.where(some, total, 1.0)[..., None], lse


def dropped(call: Call, p: jax.Array) -> jax.Array:
    """Weights after dropout: survivors scaled so that the expectation stays."""
    spec: Spec = call.spec
    if not spec.dropout:
        return p
    dims = dimensions(call)
    queries, keys = jnp.arange(dims.T)[None, None, :, None], jnp.arange(dims.S)[None, None, None, :]
    stays = keep(call["dropout_seeds"][:, :, None, None], queries, keys, spec.dropout)
    return jnp.where(stays, p / (1.0 - spec.dropout), 0.0)


def weighted_values(call: Call, p: jax.Array) -> jax.Array:
    """Weights (B, H, T, S) times the values of their heads, in float32; only a value that is seen counts."""
    value, bad = _finite(jnp.repeat(call["value"].astype(p.dtype), dimensions(call).G, axis=2))
    seen = jnp.broadcast_to(visible(call), p.shape)
    p = jnp.where(seen, p, 0)  # it is zero already, but in the gradient a hidden value times dout may be inf
    out = jnp.einsum("bhts,bshd->bthd", p, value, precision="highest", preferred_element_type=jnp.float32)
    hits = (seen & bad.any(-1).swapaxes(1, 2)[:, :, None]).any(-1)  # (B, H, T)
    return jnp.where(hits.swapaxes(1, 2)[..., None], jnp.nan, out)


def reference(call: Call, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """out (B, T, H, Dv) and lse (B, H, T); with a narrow `dtype`, the naive computation in that dtype."""
    p, lse = weights(call, dtype)
    out = weighted_values(call, dropped(call, p).astype(dtype))
    return {"out": out.astype(dtype), "lse": lse}
