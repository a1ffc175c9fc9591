"""Linear attention: a state that decays and takes in one outer product a token."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.common.batch import shards
from ejkernel.kernels.linear.operations import (
    GLA_ATTENTION,
    LIGHTNING_ATTENTION,
    MAMBA2_ATTENTION,
    RECURRENT_ATTENTION,
)
from ejkernel.kernels.linear.spec import canonicalise, finish, gla_call, lightning_call, mamba2_call, with_skipped
from ejkernel.ops import run


def recurrent_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B T H D"],
    value: Float[Array, "*B T H Dv"],
    g: Float[Array, "..."] | None = None,
    g_gamma: Float[Array, "#H"] | float | None = None,
    gk: Float[Array, "*#B #T #H #D"] | None = None,
    gv: Float[Array, "*#B #T #H #Dv"] | None = None,
    initial_state: Float[Array, "*N H D Dv"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    return_state: bool = False,
    segment_ids: Int[Array, "*#B T"] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention without softmax, whose past is one matrix a head: the state.

    For every token, with all decays given as logarithms:

        h_t = h_{t-1} * exp(g_t + g_gamma) * exp(gk_t)[:, None] * exp(gv_t)[None, :] + k_t^T v_t
        o_t = scale * q_t h_t

    Time and memory are linear in the length. Decays may be as strong as they like, -inf included, which forgets all
    that came before; they are meant to be at most 0. The state is float32. Everything but `cu_seqlens` has a gradient,
    from the output and from the final state.

    Mamba-2's recurrence is this call: x is `value`, B `key` and C `query`, both of which heads share and are broadcast
    to (B, T, H, D); `g` is dt * A, per token and head; dt multiplies the keys (or the values); the scale is 1.

    Args:
        query: `(B, T, H, D)`, float32, bfloat16 or float16. `(T, H, D)` is one sequence; more leading dimensions are
            batch too, and come back. An empty batch gives empty arrays.
        key: `(B, T, H, D)`.
        value: `(B, T, H, Dv)`.
        g: log decay of every token and head, `(B, T, H)`; `(B, T, H, D)` means `gk`. `g`, `gk` and `gv` broadcast: any
            of their sizes may be 1.
        g_gamma: log decay of every head, the same for all tokens, `(H,)`; a number, of all heads.
        gk: log decay of every key channel, `(B, T, H, D)`.
        gv: log decay of every value channel, `(B, T, H, Dv)`.
        initial_state: what the sequences begin with, `(B, H, D, Dv)`; zeros by default. With `cu_seqlens`, one of each
            packed sequence, `(N, H, D, Dv)`.
        cu_seqlens: `(N + 1,)` integers rising from 0: where each of the sequences packed into one row begins, and where
            the last one ends. B is 1 then. What lies past the last entry is padding: it is not read, and gives zeros.
        softmax_scale: of the output; default `D ** -0.5`. A number is part of the program and may not be 0; one that is
            traced is multiplied into the queries, and has a gradient.
        reverse: run from the last token to the first.
        return_state: also return the state after the last token (with `reverse`, after the first).
        segment_ids: `(B, T)` or `(T,)` integers: the sequences packed into each row. A state starts anew where the id
            changes; negative ids are padding, whose output is zero and which the state passes by. Not beside
            `cu_seqlens` or `initial_state`.
        platform: `None` or `"auto"`, `"xla"`, `"triton"`, `"pallas"`.
        cfg: the platform's `Config`, or a dict of its fields.
        mesh: devices to split batch and heads over, with `in_specs`; alone, the device it is compiled for.
        in_specs: one `PartitionSpec` each for query, key, value (and g, ...), or a dict by name.
        out_specs: that of the output; by default that of the query.

    Returns:
        `(B, T, H, Dv)` in the query's dtype; with `return_state`, `(out, state)` with a state of the shape that
        `initial_state` has, float32: hand it to the next call to go on.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import recurrent_attention
    >>> q = k = v = jnp.ones((1, 4, 1, 1))
    >>> recurrent_attention(q, k, v).ravel().tolist()  # sums
    [1.0, 2.0, 3.0, 4.0]
    >>> half = jnp.full((1, 4, 1), jnp.log(0.5))
    >>> out, state = recurrent_attention(q, k, v, half, return_state=True)  # decay by half
    >>> out.ravel().tolist(), state.shape
    ([1.0, 1.5, 1.75, 1.875], (1, 1, 1, 1))
    """
    call = canonicalise(
        query,
        key,
        value,
        g,
        g_gamma,
        gk,
        gv,
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        segment_ids=segment_ids,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    outputs = run(RECURRENT_ATTENTION, call, platform=platform, cfg=cfg, shards=split)
    return finish(call, outputs, query.shape)


def gla_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B T H D"],
    value: Float[Array, "*B T H Dv"],
    g: Float[Array, "..."] | None = None,
    g_gamma: Float[Array, "#H"] | float | None = None,
    initial_state: Float[Array, "*N H D Dv"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    return_state: bool = False,
    segment_ids: Int[Array, "*#B T"] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Gated linear attention: `recurrent_attention` whose decays are those of key channels, or of heads.

    Args:
        query: `(B, T, H, D)`; `key`, `value`, the state and all options as in `recurrent_attention`.
        g: log decays, `(B, T, H, D)` per key channel, which is GLA proper; `(B, T, H)` per token and head.
        g_gamma: log decay of every head, `(H,)`, or a number.

    Returns:
        `(B, T, H, Dv)`, or `(out, state)`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import gla_attention
    >>> q = k = v = jnp.ones((2, 100, 4, 32))
    >>> g = jax.nn.log_sigmoid(jnp.ones((2, 100, 4, 32)))
    >>> out, state = gla_attention(q, k, v, g, return_state=True)
    >>> out.shape, state.shape
    ((2, 100, 4, 32), (2, 4, 32, 32))
    """
    call = gla_call(
        query,
        key,
        value,
        g,
        g_gamma,
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        segment_ids=segment_ids,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    return finish(call, run(GLA_ATTENTION, call, platform=platform, cfg=cfg, shards=split), query.shape)


def lightning_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B T H D"],
    value: Float[Array, "*B T H Dv"],
    initial_state: Float[Array, "*N H D Dv"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    return_state: bool = False,
    segment_ids: Int[Array, "*#B T"] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Lightning attention: `recurrent_attention` with a fixed decay per head.

    Head `h` of `H` forgets by `exp(-(8 / H) * (1 - layer_idx / num_layers) * h)` a token: head 0 nothing, and all
    heads less in later layers. Under a mesh that splits heads, `h` counts those of all devices.

    Args:
        query: `(B, T, H, D)`; `key`, `value`, the state and all options as in `recurrent_attention`.
        layer_idx: this layer's number, from 0.
        num_layers: how many layers there are.

    Returns:
        `(B, T, H, Dv)`, or `(out, state)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import lightning_attention
    >>> q = k = v = jnp.ones((1, 3, 2, 1))
    >>> out = lightning_attention(q, k, v, layer_idx=0, num_layers=12)
    >>> out[0, :, 0, 0].tolist()  # head 0 sums
    [1.0, 2.0, 3.0]
    """
    call = lightning_call(
        query,
        key,
        value,
        initial_state,
        cu_seqlens,
        layer_idx=layer_idx,
        num_layers=num_layers,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
        segment_ids=segment_ids,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    return finish(call, run(LIGHTNING_ATTENTION, call, platform=platform, cfg=cfg, shards=split), query.shape)


def mamba2_attention(
    x: Float[Array, "*B T H P"],
    dt: Float[Array, "*B T H"],
    A: Float[Array, " H"],
    B: Float[Array, "*B T G S"],
    C: Float[Array, "*B T G S"],
    D: Float[Array, "..."] | None = None,
    initial_state: Float[Array, "*N H S P"] | None = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    segment_ids: Int[Array, "*#B T"] | None = None,
    return_state: bool = False,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Mamba-2's state space: `recurrent_attention` by that model's names.

        h_t = exp(dt_t A) * h_{t-1} + dt_t * B_t^T x_t
        y_t = C_t h_t + D x_t

    Args:
        x: `(B, T, H, P)`, after the convolution.
        dt: `(B, T, H)`, after its bias and softplus.
        A: `(H,)`, negative: `-exp(A_log)`.
        B: `(B, T, G, N)`, where G groups divide the heads; C has the same shape.
        D: what is passed by, `(H,)` or `(H, P)`.
        initial_state: `(B, H, N, P)`, float32: the transpose of what other packages keep.
        cu_seqlens, segment_ids, return_state: as in `recurrent_attention`.

    Returns:
        y `(B, T, H, P)`, or `(y, state)`.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import mamba2_attention
    >>> x, dt, A = jnp.ones((1, 3, 2, 1)), jnp.ones((1, 3, 2)), -jnp.ones(2)
    >>> B = C = jnp.ones((1, 3, 1, 1))
    >>> mamba2_attention(x, dt, A, B, C)[0, :, 0, 0].round(3)
    Array([1.   , 1.368, 1.503], dtype=float32)
    """
    call = mamba2_call(x, dt, A, B, C, initial_state, cu_seqlens, segment_ids=segment_ids, return_state=return_state)
    split = shards(x.shape, mesh, in_specs, out_specs)
    outputs = run(MAMBA2_ATTENTION, call, platform=platform, cfg=cfg, shards=split)
    return finish(call, with_skipped(outputs, x, D, segment_ids, cu_seqlens), x.shape)
