"""Attention over sequences that are split over devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels.ring.run import attend
from ejkernel.kernels.softmax.spec import finish
from ejkernel.types import MaskInfo


def ring_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    bias: Float[Array, "..."] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    axis_name: str | tuple[str, str] = "sp",
    mask_info: MaskInfo | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | jax.Array | None = None,
    layout: str = "contiguous",
    method: str = "auto",
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    return_lse: bool = False,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    alibi_slopes: Float[Array, "..."] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact attention over sequences whose tokens are split over devices: `flash_attention` for long ones.

    The result is that of `flash_attention` on one device, dropout included; so are the gradients. No device ever has
    more than its own part of queries and output, and with a ring only one other's keys and values at a time.

    On a mesh (given, or around the call) arrays are whole sequences, split over `axis_name` along their length. Inside
    a `shard_map` over that axis, they are the device's own tokens, and so are the rows of bias and the ids of a mask.

    Args:
        query: `(B, T, H, D)`; leading dimensions as in `flash_attention`.
        key: `(B, S, Hkv, D)`; both lengths divide over the devices.
        value: `(B, S, Hkv, Dv)`.
        bias: broadcasts to `(B, H, T, S)`; its rows are split like queries, every device has all columns.
        softmax_aux: sink logits `(H,)`, `(H, n)`, or `(1, n)` that all heads share.
        axis_name: the mesh axis that lengths are split over; or two, `("ring", "heads")`: keys go round the first, and
            along the second heads change places with tokens. Lengths are then split over both.
        mask_info: segments, lengths, explicit positions, bounds, functions, unions, dense masks; no block patterns.
            Its arrays are of the tokens as they come, what is compared with their indices is of the whole sequence.
        causal: query `i` sees keys up to `i + S - T`.
        sliding_window: `w` for `(w, w)`, or `(left, right)`. Keys then travel no further than they are seen.
        softmax_scale: default `D ** -0.5`. A traced one is multiplied into the queries.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        dropout_prob: chance that a weight is dropped; needs `dropout_seed`.
        dropout_seed: an int, an integer scalar (may be traced) or a PRNG key.
        layout: "contiguous": device r has the r-th part of the tokens. "zigzag": it has chunks r and 2n - 1 - r of 2n,
            which makes causal work even; tokens, ids and positions come in that order (`to_zigzag`). With two axes n is
            the number of devices along the first.
        method: "ring": keys and values go round. "all_to_all": heads change places with tokens. "all_gather": every
            device gets all keys and values. "auto" takes the fastest by arithmetic; `ejkernel.explain` shows it.
        precision: of the matmuls on float32 inputs, as in `jax.lax.dot_general`; None is close to float32 everywhere.
        logits_dtype: the logits are rounded to it (None: float32) before the softmax, which is float32 always.
        return_lse: also return the log-sum-exp of the logits, `(B, H, T)` float32.
        mask_fn: `(b, h, i, j) -> bool` as in `flash_attention`: i and j are indices in the whole sequence, in its own
            order whatever the layout, and so are those of arrays that it closes over; inside a `shard_map` too.
        score_fn: `(score, b, h, i, j) -> score`, likewise; floats that it closes over have gradients.
        alibi_slopes: `(H,)` or `(B, H)`: `-slope * |distance|` is added to the capped logits; has a gradient.
        platform: that of each device's own calls, as in `flash_attention`.
        cfg: that platform's `Config`, or a dict of its fields.
        mesh: by default the one around the call.
        in_specs: one `PartitionSpec` each for query, key, value, or a dict by name. By default lengths are split over
            `axis_name`, and further axes of the mesh split the batch where they divide it, else heads.
        out_specs: that of the output; by default that of the query.

    Returns:
        `(B, T, H, Dv)` in the query's dtype, or `(out, lse)`.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import ring_attention
    >>> mesh = jax.sharding.Mesh(jax.devices(), ("sp",))
    >>> q, k = jnp.ones((1, 128, 4, 16)), jnp.ones((1, 128, 2, 16))
    >>> ring_attention(q, k, k, mesh=mesh, causal=True).shape
    (1, 128, 4, 16)
    """
    call, outputs = attend(
        (query, key, value, bias, softmax_aux),
        axis_name,
        (mesh, in_specs, out_specs),
        platform,
        cfg,
        mask_info=mask_info,
        softmax_scale=softmax_scale,
        dropout_prob=dropout_prob,
        dropout_seed=dropout_seed,
        causal=causal,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        precision=precision,
        logits_dtype=logits_dtype,
        return_lse=return_lse,
        mask_fn=mask_fn,
        score_fn=score_fn,
        alibi_slopes=alibi_slopes,
        layout=layout,
        method=method,
    )
    return finish(call, outputs, query.shape)
