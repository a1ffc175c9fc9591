"""The delta rule: linear attention that erases what a key held before it writes."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.common.batch import shards
from ejkernel.kernels.linear.delta.members import product_call, rwkv7_call
from ejkernel.kernels.linear.delta.operations import (
    GATED_DELTA_PRODUCT,
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    RWKV7_ATTENTION,
)
from ejkernel.kernels.linear.delta.spec import canonicalise, kimi_call
from ejkernel.kernels.linear.spec import at_last_write, finish
from ejkernel.ops import run


def gated_delta_rule(
    query: Float[Array, "*B T Hk D"],
    key: Float[Array, "*B T Hk D"],
    value: Float[Array, "*B T H Dv"],
    g: Float[Array, "..."] | None = None,
    beta: Float[Array, "*#B #T #H"] | None = None,
    initial_state: Float[Array, "*N H D Dv"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    segment_ids: Int[Array, "*#B T"] | None = None,
    erase_key: Float[Array, "..."] | None = None,
    write_gate: Float[Array, "*#B #T #H #Dv"] | None = None,
    qk_norm: bool = False,
    softmax_scale: float | Float[Array, ""] | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Gated delta rule: a state that decays, and in which each token replaces what its key held by its value.

    For every token and head, with a state h (D, Dv):

        h~  = exp(g_t) * h_{t-1}
        h_t = h~ + k_t^T (w_t * v_t - p_t h~)        p = beta * k and w = beta, unless given
        o_t = scale * q_t h_t

    This is Gated DeltaNet (Qwen3-Next, OLMo Hybrid) with `g` per token and head, DeltaNet without `g`, Kimi delta
    attention with `g` per channel, Comba with erase keys of its own (`erase_key=beta * p`), GDN-2 with erase keys and
    write gates. Everything but `cu_seqlens` and `segment_ids` has a gradient, from the output and from the final state.

    Args:
        query: `(B, T, Hk, D)`, float32, bfloat16 or float16. `(T, Hk, D)` is one sequence; more leading dimensions are
            batch too, and come back. An empty batch gives empty arrays.
        key: `(B, T, Hk, D)`. They should have length 1 (or `qk_norm`), else erasing overshoots and the state grows.
        value: `(B, T, H, Dv)`, where Hk divides H: head h has the query and key of head `h // (H // Hk)`.
        g: log decay of every token and head, `(B, T, H)`, or of every key channel, `(B, T, H, D)`; at most 0, -inf
            forgets all. It is the logarithm: a caller who has `alpha = exp(g)` passes `log(alpha)`.
        beta: how much is erased and written, `(B, T, H)`: from 0 to 1, or to 2, where eigenvalues may be negative.
            None: 1. `g`, `beta`, `erase_key` and `write_gate` broadcast: any of their sizes may be 1.
        initial_state: what the sequences begin with, `(B, H, D, Dv)`; zeros by default. With `cu_seqlens`, one of each
            packed sequence, `(N, H, D, Dv)`.
        cu_seqlens: `(N + 1,)` integers rising from 0: where each of the sequences packed into one row begins, and where
            the last one ends. B is 1 then. What lies past the last entry is padding: it is not read, and gives zeros.
        segment_ids: `(B, T)` or `(T,)` integers: the sequences packed into each row. A state starts anew where the id
            changes; negative ids are padding, whose output is zero and which the state passes by. Not beside
            `cu_seqlens` or `initial_state`.
        erase_key: p, `(B, T, H, D)`, or `(B, T, Hk, D)` for heads that share keys.
        write_gate: w, `(B, T, H, Dv)`.
        qk_norm: divide queries and keys by their length, `sqrt(sum(x ** 2) + 1e-6)`.
        softmax_scale: of the output; default `D ** -0.5`. A number is part of the program and may not be 0; one that is
            traced is multiplied into the queries, and has a gradient.
        return_state: also return the state after the last token.
        platform: `None` or `"auto"`, `"xla"`, `"triton"`, `"pallas"`.
        cfg: the platform's `Config`, or a dict of its fields.
        mesh: devices to split batch and heads over, with `in_specs`, and the length too; alone, the device it is
            compiled for.
        in_specs: one `PartitionSpec` each for query, key, value (and g, ...), or a dict by name.
        out_specs: that of the output; by default that of the value.

    Returns:
        `(B, T, H, Dv)` in the query's dtype; with `return_state`, `(out, state)` with a state of the shape that
        `initial_state` has, float32: hand it to the next call to go on.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import gated_delta_rule
    >>> key = jnp.ones((1, 3, 1, 1))
    >>> value = jnp.array([5.0, 7.0, 9.0]).reshape(1, 3, 1, 1)
    >>> gated_delta_rule(key, key, value).ravel().tolist()  # the same key each time: only the last value stays
    [5.0, 7.0, 9.0]
    >>> half = jnp.full((1, 3, 1), 0.5)
    >>> gated_delta_rule(key, key, value, beta=half).ravel().tolist()  # replaces half
    [2.5, 4.75, 6.875]
    """
    call = canonicalise(
        query,
        key,
        value,
        g,
        beta,
        initial_state,
        cu_seqlens,
        segment_ids=segment_ids,
        erase_key=erase_key,
        write_gate=write_gate,
        qk_norm=qk_norm,
        softmax_scale=softmax_scale,
        return_state=return_state,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    return finish(call, run(GATED_DELTA_RULE, call, platform=platform, cfg=cfg, shards=split), query.shape)


def kimi_delta_attention(
    query: Float[Array, "*B T Hk D"],
    key: Float[Array, "*B T Hk D"],
    value: Float[Array, "*B T H Dv"],
    g: Float[Array, "*#B #T #H #D"],
    beta: Float[Array, "*#B #T #H"],
    initial_state: Float[Array, "*N H D Dv"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    segment_ids: Int[Array, "*#B T"] | None = None,
    qk_norm: bool = False,
    softmax_scale: float | Float[Array, ""] | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Kimi delta attention (Kimi Linear, GLM-5.3-Flash): `gated_delta_rule` whose decays are those of key channels.

    Args:
        query: `(B, T, Hk, D)`; `key`, `value`, the state and all options as in `gated_delta_rule`.
        g: log decays, `(B, T, H, D)`.
        beta: `(B, T, H)`.

    Returns:
        `(B, T, H, Dv)`, or `(out, state)`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import kimi_delta_attention
    >>> q = k = v = jnp.ones((2, 100, 4, 32))
    >>> g, beta = -jnp.ones((2, 100, 4, 32)), jnp.full((2, 100, 4), 0.5)
    >>> out, state = kimi_delta_attention(q, k, v, g, beta, qk_norm=True, return_state=True)
    >>> out.shape, state.shape
    ((2, 100, 4, 32), (2, 4, 32, 32))
    """
    call = kimi_call(
        query,
        key,
        value,
        g,
        beta,
        initial_state,
        cu_seqlens,
        segment_ids=segment_ids,
        qk_norm=qk_norm,
        softmax_scale=softmax_scale,
        return_state=return_state,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    return finish(call, run(KIMI_DELTA_ATTENTION, call, platform=platform, cfg=cfg, shards=split), query.shape)


def gated_delta_product(
    query: Float[Array, "*B T Hk D"],
    key: Float[Array, "*B T n Hk D"],
    value: Float[Array, "*B T n H Dv"],
    g: Float[Array, "..."] | None = None,
    beta: Float[Array, "*#B #T n #H"] | None = None,
    initial_state: Float[Array, "*N H D Dv"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    segment_ids: Int[Array, "*#B T"] | None = None,
    qk_norm: bool = False,
    softmax_scale: float | Float[Array, ""] | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Gated delta product: `gated_delta_rule` with n writes a token, so that its transition is a product of n.

    The state decays once a token, then the n keys erase and write one after the other, then the query reads.

    Args:
        query: `(B, T, Hk, D)`; the state and all options as in `gated_delta_rule`.
        key: `(B, T, n, Hk, D)`.
        value: `(B, T, n, H, Dv)`.
        g: log decays, `(B, T, H)` or `(B, T, H, D)`.
        beta: `(B, T, n, H)`; None: 1.
        mesh: devices to split over, with `in_specs`: those of arrays whose length is T * n.

    Returns:
        `(B, T, H, Dv)`, or `(out, state)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import gated_delta_product
    >>> query, key = jnp.ones((1, 2, 1, 1)), jnp.ones((1, 2, 3, 1, 1))
    >>> value = jnp.arange(6.0).reshape(1, 2, 3, 1, 1)
    >>> gated_delta_product(query, key, value).ravel().tolist()  # the last write of each token
    [2.0, 5.0]
    """
    call = product_call(
        query,
        key,
        value,
        g,
        beta,
        initial_state,
        cu_seqlens,
        segment_ids=segment_ids,
        qk_norm=qk_norm,
        softmax_scale=softmax_scale,
        return_state=return_state,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    outputs = run(GATED_DELTA_PRODUCT, call, platform=platform, cfg=cfg, shards=split)
    return finish(call, at_last_write(outputs, key.shape[-3]), query.shape)


def rwkv7_attention(
    r: Float[Array, "*B T H D"],
    w: Float[Array, "*B T H D"],
    k: Float[Array, "*B T H D"],
    v: Float[Array, "*B T H Dv"],
    a: Float[Array, "*B T H D"],
    b: Float[Array, "*B T H D"],
    initial_state: Float[Array, "*N H D Dv"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    segment_ids: Int[Array, "*#B T"] | None = None,
    softmax_scale: float | Float[Array, ""] = 1.0,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """RWKV-7's recurrence: what `a` reads of the state before a token is written by `b`, and v by k.

        h_t = exp(w_t)[:, None] * h_{t-1} + b_t^T (a_t h_{t-1}) + k_t^T v_t
        o_t = scale * r_t h_t

    In RWKV-7, `a` is minus the normalised key and `b` that key times the in-context learning rate.

    Args:
        r: the query, `(B, T, H, D)`; the state and all options as in `gated_delta_rule`.
        w: log decays, at most 0 (RWKV-7's are above -0.61); below -12 they count as that.
        k: keys.
        v: values, `(B, T, H, Dv)`.
        a: what reads the state before it decays.
        b: what writes that.
        softmax_scale: of the output; default 1.
        mesh: devices to split over, with `in_specs`: those of arrays whose length is 2 * T.

    Returns:
        `(B, T, H, Dv)`, or `(out, state)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import rwkv7_attention
    >>> r = k = v = jnp.ones((1, 3, 1, 1))
    >>> w = jnp.full((1, 3, 1, 1), jnp.log(0.5))
    >>> rwkv7_attention(r, w, k, v, -k, 0.5 * k).round(4).ravel().tolist()  # half decays, half is erased
    [1.0, 1.0, 1.0]
    """
    call = rwkv7_call(
        r,
        w,
        k,
        v,
        a,
        b,
        initial_state,
        cu_seqlens,
        segment_ids=segment_ids,
        softmax_scale=softmax_scale,
        return_state=return_state,
    )
    split = shards(r.shape, mesh, in_specs, out_specs)
    outputs = run(RWKV7_ATTENTION, call, platform=platform, cfg=cfg, shards=split)
    return finish(call, at_last_write(outputs, 2), r.shape)
