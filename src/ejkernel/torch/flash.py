"""Exact attention of tensors."""

from typing import Any

import torch
from torch import Tensor

from ejkernel.checks.options import flag, soft_cap
from ejkernel.kernels.softmax.spec import Band, sink_shapes, window_band
from ejkernel.torch.calls import Options
from ejkernel.torch.inputs import Inputs, Lengths, check_shapes, cumulative, packed_lengths, prepared, scale_of
from ejkernel.torch.operation import attend

_QKV = ("query", "key", "value")


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cum_seqlens_q: Tensor | None = None,
    cum_seqlens_k: Tensor | None = None,
    softmax_aux: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """`ejkernel.modules.flash_attention` on tensors, with the options that stand here and their meaning there.

    Args:
        query: `(B, T, H, D)`, `(T, H, D)`, or packed `(N_tokens, H, D)` with `cum_seqlens_q`. float32, bfloat16,
            float16, or float8 without gradients: computed in bfloat16, which comes back.
        key: `(B, S, Hkv, D)`; `Hkv` divides `H`. May be float8 where the query is bfloat16 or float16.
        value: `(B, S, Hkv, Dv)`.
        cum_seqlens_q: `(N + 1,)` cumulative lengths of packed sequences; tokens past the last are padding.
        cum_seqlens_k: the same for keys; by default that of the queries.
        softmax_aux: sink logits `(H,)`, `(H, n)`, or `(1, n)` that all heads share; have a gradient.
        softmax_scale: default `D ** -0.5`.
        causal: query `i` sees keys up to `i + S - T`.
        sliding_window: `w` for `(w, w)`, or `(left, right)`: keys within that distance of the aligned position.
        logits_soft_cap: logits become `cap * tanh(logits / cap)`.
        return_lse: also return the log-sum-exp of the logits, float32 `(B, H, T)`, or `(H, T)`; it has a gradient.

    >>> import torch
    >>> from ejkernel.torch import flash_attention
    >>> q = torch.randn(2, 128, 8, 64)
    >>> k, v = torch.randn(2, 2, 128, 2, 64)
    >>> flash_attention(q, k, v, causal=True, sliding_window=32).shape
    torch.Size([2, 128, 8, 64])
    """
    query, key, value = prepared(_QKV, query, key, value)
    unbatched = query.dim() == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    check_shapes(_QKV, query, key, value, "the layout is (batch, length, heads, head_dim)")
    lengths = _packed(query, key, cum_seqlens_q, cum_seqlens_k)
    band = Band(None, 0 if flag("causal", causal) else None) & window_band(sliding_window)
    options = Options(
        scale=scale_of("softmax_scale", softmax_scale, query.shape[3]),
        lo=band.lo,
        hi=band.hi,
        soft_cap=soft_cap(logits_soft_cap),
    )
    out, lse = attend(Inputs(query, key, value, lengths), _joined_sinks(softmax_aux, query), options)
    if unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if flag("return_lse", return_lse) else out


def _packed(query: Tensor, key: Tensor, cum_q: Any, cum_k: Any) -> Lengths:
    if cum_q is None and cum_k is not None:
        raise ValueError("cum_seqlens_k needs cum_seqlens_q")
    if cum_q is None:
        return Lengths()
    (B, T, *_), S = query.shape, key.shape[1]
    if B != 1:
        raise ValueError(f"cum_seqlens_q packs sequences into one row; query has batch {B}, needed 1")
    if cum_k is None and S != T:
        raise ValueError(f"keys have {S} tokens and queries {T}: give cum_seqlens_k")
    queries = cumulative("cum_seqlens_q", cum_q, T, query)
    keys = queries if cum_k is None else cumulative("cum_seqlens_k", cum_k, S, query)
    return packed_lengths(query, key, queries, keys, ("cum_seqlens_q", "cum_seqlens_k"))


def _joined_sinks(sinks: Any, query: Tensor) -> Tensor | None:
    """One logit (H,) for all sinks of a head: they only ever meet as a sum of exponentials."""
    if sinks is None:
        return None
    H = query.shape[2]
    if not isinstance(sinks, Tensor) or not sinks.dtype.is_floating_point:
        raise TypeError(f"softmax_aux must be a tensor of floats, got {getattr(sinks, 'dtype', type(sinks).__name__)}")
    if sinks.device != query.device:
        raise ValueError(f"softmax_aux is on {sinks.device}, query on {query.device}: they must be on one device")
    sinks = sinks.float()
    if sinks.dim() == 1 and sinks.shape[0] == H:
        return sinks
    if sinks.dim() != 2 or sinks.shape[0] not in (1, H) or sinks.shape[1] == 0:
        raise ValueError(sink_shapes(tuple(sinks.shape), H))
    sinks = sinks.expand(H, -1)
    # one of -inf weighs nothing; where all are, the gradient of logsumexp would be nan
    nothing = torch.isneginf(sinks).all(-1)
    joined = torch.logsumexp(torch.where(nothing[:, None], 0.0, sinks), -1)
    return torch.where(nothing, -torch.inf, joined)
