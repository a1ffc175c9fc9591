"""Exact attention of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ejkernel.checks.options import flag, number, soft_cap
from ejkernel.kernels.softmax.spec import Band, sink_shapes, window_band
from ejkernel.torch.calls import Options
from ejkernel.torch.dropout import head_seeds
from ejkernel.torch.inputs import (
    FLOATS,
    Inputs,
    Lengths,
    aligned_lengths,
    check_shapes,
    cumulative,
    packed_lengths,
    prepared,
    scale_of,
    segment_ids,
)
from ejkernel.torch.operation import NO_EXTRAS, Extras, attend
from ejkernel.torch.pair_rules import Limits, Offsets, PairOptions, with_pair_rules

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
    bias: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    bounds: Limits | None = None,
    key_bounds: Limits | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    mask_mod: Callable[..., Any] | None = None,
    score_mod: Callable[..., Any] | None = None,
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
        bias: added to the logits; broadcasts to `(B, H, T, S)`; has a gradient.
        q_segment_ids: int `(B, T)` or `(T,)`: a query sees the keys of its own segment; negative ids are padding.
        kv_segment_ids: `(B, S)` or `(S,)`; by default those of the queries.
        bounds: `(starts, ends)`, each int `(B, T)` or `(B, H, T)`, or None for open: query `i` sees keys in
            `[starts[i], ends[i])`.
        key_bounds: `(starts, ends)`, `(B, S)` or `(B, H, S)`: key `j` is seen by queries in `[starts[j], ends[j])`.
        alibi_slopes: `(H,)` or `(B, H)`, of packed sequences `(H,)` or `(N, H)`: adds `-slope * distance`, where the
            ends of queries and keys are aligned; has a gradient.
        dropout_prob: the chance that a weight is dropped. The same seed drops the same weights, here and in JAX.
        dropout_seed: an int, or a tensor of one.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx)` says whether a pair is seen, as in PyTorch's `flex_attention`.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx)` changes a logit, after bias and soft cap. Tensors that it
            reads have gradients. Indices count inside of packed sequences; else queries and keys both count from 0.

    >>> import torch
    >>> from ejkernel.torch import flash_attention
    >>> q = torch.randn(2, 128, 8, 64)
    >>> k, v = torch.randn(2, 2, 128, 2, 64)
    >>> flash_attention(q, k, v, causal=True, sliding_window=32).shape
    torch.Size([2, 128, 8, 64])
    >>> slopes = torch.rand(8, requires_grad=True)
    >>> out = flash_attention(q, k, v, causal=True, score_mod=lambda score, b, h, i, j: score + slopes[h] * (j - i))
    >>> out.sum().backward()
    >>> slopes.grad.shape
    torch.Size([8])
    """
    query, key, value = prepared(_QKV, query, key, value)
    unbatched = query.dim() == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    check_shapes(_QKV, query, key, value, "the layout is (batch, length, heads, head_dim)")
    lengths, offsets = _packed(query, key, cum_seqlens_q, cum_seqlens_k)
    ids = segment_ids(query, key, q_segment_ids, kv_segment_ids)
    if ids is not None and offsets is None:
        lengths, ids = aligned_lengths(ids[0], ids[1]), None
    band = Band(None, 0 if flag("causal", causal) else None) & window_band(sliding_window)
    options = Options(
        scale=scale_of("softmax_scale", softmax_scale, query.shape[3]),
        lo=band.lo,
        hi=band.hi,
        soft_cap=soft_cap(logits_soft_cap),
        dropout=number("dropout_prob", dropout_prob),
    )
    seeds = _dropout_seeds(options.dropout, dropout_seed, query)
    extras = Extras(_joined_sinks(softmax_aux, query), _checked_bias(bias, query, key), dropout_seeds=seeds)
    inputs = Inputs(query, key, value, lengths)
    pairs = PairOptions(mask_mod, score_mod, bounds, key_bounds, alibi_slopes, ids)
    if any(x is not None for x in pairs):
        # a graph of `torch.compile` breaks here
        attach: Any = torch.compiler.disable(with_pair_rules) if torch.compiler.is_compiling() else with_pair_rules
        options, extras = attach(inputs, offsets, pairs, options, extras)
    out, lse = attend(inputs, extras if any(x is not None for x in extras) else NO_EXTRAS, options)
    if unbatched:
        out, lse = out[0], lse[0]
    return (out, lse) if flag("return_lse", return_lse) else out


def _dropout_seeds(probability: float, seed: Any, query: Tensor) -> Tensor | None:
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"dropout_prob={probability} must be at least 0 and below 1")
    if not probability:
        return None
    if seed is None:
        raise ValueError(f"dropout_prob={probability} needs dropout_seed")
    return head_seeds(seed, query.shape[0], query.shape[2], query.device)


def _checked_bias(bias: Any, query: Tensor, key: Tensor) -> Tensor | None:
    """(B|1, H|1, T|1, S|1), dense: what is repeated by strides of 0 is there once."""
    if bias is None:
        return None
    if not isinstance(bias, Tensor) or bias.dtype not in FLOATS:
        got = getattr(bias, "dtype", type(bias).__name__)
        raise TypeError(f"bias must be a tensor of float32, bfloat16 or float16, got {got}")
    if bias.device != query.device:
        raise ValueError(f"bias is on {bias.device}, query on {query.device}: they must be on one device")
    wanted = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if len(shape) != 4 or any(n != 1 and n != m for n, m in zip(shape, wanted, strict=True)):
        raise ValueError(f"bias {tuple(bias.shape)} does not broadcast to (batch, heads, q_len, kv_len) = {wanted}")
    bias = bias.reshape(shape)
    for axis, (n, stride) in enumerate(zip(shape, bias.stride(), strict=True)):
        if n > 1 and stride == 0:
            bias = bias.narrow(axis, 0, 1)
    return bias.contiguous()


def _packed(query: Tensor, key: Tensor, cum_q: Any, cum_k: Any) -> tuple[Lengths, Offsets | None]:
    if cum_q is None and cum_k is not None:
        raise ValueError("cum_seqlens_k needs cum_seqlens_q")
    if cum_q is None:
        return Lengths(), None
    (B, T, *_), S = query.shape, key.shape[1]
    if B != 1:
        raise ValueError(f"cum_seqlens_q packs sequences into one row; query has batch {B}, needed 1")
    if cum_k is None and S != T:
        raise ValueError(f"keys have {S} tokens and queries {T}: give cum_seqlens_k")
    queries = cumulative("cum_seqlens_q", cum_q, T, query)
    keys = queries if cum_k is None else cumulative("cum_seqlens_k", cum_k, S, query)
    lengths = packed_lengths(query, key, queries, keys, ("cum_seqlens_q", "cum_seqlens_k"))
    return lengths, Offsets(queries, keys)


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
