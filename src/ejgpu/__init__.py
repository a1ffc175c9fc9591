"""ejgpu's functions, on the kernels of ejkernel: programs written for it change nothing.

New code does better with `ejkernel.modules`, which has more options and one layout.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import concrete, cumulative_lengths, integers
from ejkernel.checks.names import errors_as_called
from ejkernel.checks.options import static_int
from ejkernel.checks.values import check_rows
from ejkernel.modules import (
    flash_attention,
    gla_attention,
    lightning_attention,
    native_sparse_attention,
    ragged_decode_attention,
    recurrent_attention,
)

__all__ = [
    "flash_attn_varlen",
    "flash_attn_varlen_decode",
    "lightning_attn",
    "native_spare_attention",
    "recurrent",
    "recurrent_gla",
]

LAYOUTS = ("bshd", "bhsd", "thd")
DROPOUT_SEED = 0

# what `ejkernel.modules` calls the arguments of these functions
ARGUMENTS = {
    "query": "q",
    "key": "k",
    "value": "v",
    "cum_seqlens_q": "cu_seqlens_q",
    "cum_seqlens_k": "cu_seqlens_k",
    "cu_q": "cu_seqlens_q",
    "cu_kv": "cu_seqlens_k",
    "sequence_end": "cache_seqlens",
}

Layout = Literal["bshd", "bhsd", "thd"]
OutAndState = tuple[jax.Array, jax.Array]


def flash_attn_varlen(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sm_scale: float | None = None,
    causal: bool = True,
    layout: Layout = "bshd",
    b: jax.Array | None = None,
    dropout_p: float = 0.0,
    alibi_slopes: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_k: jax.Array | None = None,
    max_seqlens_q: int | None = None,
    max_seqlens_k: int | None = None,
) -> jax.Array:
    """Exact attention in one of three layouts, `ejkernel.modules.flash_attention` inside; differentiable.

    Args:
        q: `(batch, length, heads, head_dim)` for "bshd", `(batch, heads, length, head_dim)` for "bhsd"; for "thd"
            sequences one after another, `(tokens, heads, head_dim)`.
        k: likewise; `v` too. Their heads divide those of q.
        sm_scale: default `head_dim ** -0.5`.
        causal: every query sees the keys up to its own, the ends of queries and keys aligned, in each sequence.
        layout: "bshd", "bhsd" or "thd".
        b: added to the logits; broadcasts to `(batch, heads, q_len, k_len)` in every layout.
        dropout_p: chance that a weight is dropped. The seed is fixed: the same weights every time.
        alibi_slopes: `(heads,)` or `(batch, heads)`; in "thd", `(sequences, heads)`. Adds `-slope * distance`, the
            distance between query and key with their ends aligned.
        cu_seqlens_q: `(sequences + 1,)`, where each sequence of "thd" begins, and where the last one ends.
        cu_seqlens_k: the same for keys; default: that of the queries.
        max_seqlens_q: a bound of the lengths. A longer sequence is an error, unless the lengths are traced;
            `EJKERNEL_CHECKS=1` finds it there too.
        max_seqlens_k: the same for keys.

    Returns:
        The output in the layout of q.

    >>> import jax.numpy as jnp
    >>> from ejgpu import flash_attn_varlen
    >>> tokens = jnp.ones((10, 4, 16))
    >>> flash_attn_varlen(tokens, tokens, tokens, layout="thd", cu_seqlens_q=jnp.array([0, 3, 10])).shape
    (10, 4, 16)
    """
    _check_layout(layout, {"q": q, "k": k, "v": v}, cu_seqlens_q, cu_seqlens_k)
    if layout == "bhsd":
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    T, S = q.shape[-3], k.shape[-3]
    for name, starts, tokens in (("cu_seqlens_q", cu_seqlens_q, T), ("cu_seqlens_k", cu_seqlens_k, S)):
        if starts is not None:
            cumulative_lengths(name, starts, tokens)
    _check_longest("max_seqlens_q", max_seqlens_q, T, cu_seqlens_q)
    _check_longest("max_seqlens_k", max_seqlens_k, S, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    with errors_as_called(ARGUMENTS | {"softmax_scale": "sm_scale", "dropout_prob": "dropout_p", "bias": "b"}):
        out = flash_attention(
            q,
            k,
            v,
            b,
            cu_seqlens_q,
            cu_seqlens_k,
            softmax_scale=sm_scale,
            dropout_prob=dropout_p,
            dropout_seed=DROPOUT_SEED,
            causal=causal,
            alibi_slopes=alibi_slopes,
        )
    return jnp.swapaxes(out, 1, 2) if layout == "bhsd" else out


def flash_attn_varlen_decode(
    q: jax.Array, k: jax.Array, v: jax.Array, *, cache_seqlens: jax.Array, sm_scale: float | None = None
) -> jax.Array:
    """Attention of one new token per sequence over a contiguous cache; forward only.

    Args:
        q: `(B, 1, H, D)`.
        k: the cache, `(B, S, Hkv, D)`; `v` likewise.
        cache_seqlens: `(B,)`, how many tokens of each row are valid, the new one included.
        sm_scale: default `D ** -0.5`.

    >>> cache = jnp.ones((2, 50, 2, 16))
    >>> flash_attn_varlen_decode(jnp.ones((2, 1, 4, 16)), cache, cache, cache_seqlens=jnp.array([50, 9])).shape
    (2, 1, 4, 16)
    """
    with errors_as_called(ARGUMENTS | {"softmax_scale": "sm_scale"}):
        # on the host, since lengths there are checked where all that they are compared with is there too
        starts: Any = np.zeros(q.shape[0], np.int32)
        return ragged_decode_attention(q, k, v, starts, cache_seqlens, softmax_scale=sm_scale)


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    gk: jax.Array | None = None,
    gv: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
) -> OutAndState:
    """Linear attention with its final state: `ejkernel.modules.recurrent_attention`, which documents the arguments.

    >>> x = jnp.ones((2, 100, 4, 16))
    >>> out, state = recurrent(x, x, x)
    >>> out.shape, state.shape
    ((2, 100, 4, 16), (2, 4, 16, 16))
    """
    gates = {"g": g, "g_gamma": g_gamma, "gk": gk, "gv": gv}
    return _linear(recurrent_attention, q, k, v, scale, initial_state, reverse, cu_seqlens, **gates)


def recurrent_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
) -> OutAndState:
    """Gated linear attention with its final state: `ejkernel.modules.gla_attention`, which documents the arguments.

    >>> x = jnp.ones((2, 100, 4, 16))
    >>> recurrent_gla(x, x, x, g=-x)[0].shape
    (2, 100, 4, 16)
    """
    return _linear(gla_attention, q, k, v, scale, initial_state, reverse, cu_seqlens, g=g, g_gamma=g_gamma)


def lightning_attn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
) -> OutAndState:
    """Lightning attention with its final state: `ejkernel.modules.lightning_attention`, which documents the arguments.

    >>> x = jnp.ones((2, 100, 4, 16))
    >>> lightning_attn(x, x, x, layer_idx=0, num_layers=12)[0].shape
    (2, 100, 4, 16)
    """
    layer = {"layer_idx": layer_idx, "num_layers": num_layers}
    return _linear(lightning_attention, q, k, v, scale, initial_state, reverse, cu_seqlens, **layer)


def native_spare_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g_cmp: jax.Array | None = None,
    g_slc: jax.Array | None = None,
    g_swa: jax.Array | None = None,
    block_indices: jax.Array | None = None,
    block_counts: int | jax.Array | None = None,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: jax.Array | None = None,
) -> jax.Array:
    """Native sparse attention (the name is spelt as in ejgpu): `ejkernel.modules.native_sparse_attention`, which
    documents the arguments.

    >>> from ejgpu.utils import generate_block_indices
    >>> q, k = jnp.ones((1, 64, 16, 32)), jnp.ones((1, 64, 1, 32))
    >>> blocks = generate_block_indices(1, 64, 1, 2, 16)
    >>> native_spare_attention(q, k, k, block_indices=blocks, block_size=16).shape
    (1, 64, 16, 32)
    """
    with errors_as_called(ARGUMENTS | {"softmax_scale": "scale"}):
        return native_sparse_attention(
            q,
            k,
            v,
            g_cmp,
            g_slc,
            block_indices,
            block_counts,
            cu_seqlens,
            g_swa=g_swa,
            block_size=block_size,
            window_size=window_size,
            softmax_scale=scale,
        )


def _linear(
    attend: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float | None,
    initial_state: jax.Array | None,
    reverse: bool,
    cu_seqlens: jax.Array | None,
    **others: Any,
) -> OutAndState:
    options = {"initial_state": initial_state, "reverse": reverse, "cu_seqlens": cu_seqlens, "return_state": True}
    with errors_as_called(ARGUMENTS | {"softmax_scale": "scale"}):
        if cu_seqlens is not None and jnp.ndim(q) >= 3:
            cumulative_lengths("cu_seqlens", cu_seqlens, q.shape[-3])
        return attend(q, k, v, softmax_scale=scale, **options, **others)


def _check_layout(layout: str, arrays: dict[str, jax.Array], cu_q: object, cu_k: object) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {', '.join(LAYOUTS)}")
    rank = len(layout)
    for name, x in arrays.items():
        if jnp.ndim(x) != rank:
            raise ValueError(f"{name} has shape {jnp.shape(x)}; layout {layout!r} has {rank} dimensions")
    if layout == "thd" and cu_q is None:
        raise ValueError("layout 'thd' packs sequences: cu_seqlens_q must say where they begin")
    if layout != "thd" and (cu_q is not None or cu_k is not None):
        raise ValueError(f"cu_seqlens_q and cu_seqlens_k describe layout 'thd', got layout {layout!r}")


def _check_longest(name: str, bound: int | None, length: int, cu: jax.Array | None) -> None:
    """ValueError where a sequence is longer than its caller says."""
    if bound is None:
        return
    bound = static_int(name, bound, 0)
    if cu is None and length > bound:
        raise ValueError(f"{name}={bound}, but sequences have {length} tokens")
    if cu is not None:
        starts = integers(name.replace("max", "cu"), cu, 1)
        with jax.transfer_guard("allow"):  # values on a device are read on purpose
            values = concrete(starts)
        starts = starts if values is None else values
        lengths = starts[1:] - starts[:-1]
        check_rows(lengths, lengths > bound, f"{name}={bound}, but a sequence has more tokens")
