"""Attention in the shapes in which MaxText and Levanter call theirs: packed documents honoured,
on every device.

    python examples/attention_hooks.py

Both frameworks hand segment ids to attention. On NVIDIA GPUs MaxText's cuDNN path has dropped
them (documents saw one another, AI-Hypercomputer/maxtext#4476), and Levanter fell back to a
matrix of logits (marin-community/marin#7013). These functions take the same arguments and do
neither; the check at the end is the one of those reports.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo


def maxtext_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decoder_segment_ids: jax.Array | None,
    model_mode: str = "train",
    *,
    sliding_window_size: int | None = None,
    attn_logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """In the place of `AttentionOp.cudnn_flash_attention` and its siblings, for training and
    prefill.

    Args:
        query: `(batch, length, heads, head_dim)`, scaled already, as MaxText does it.
        key: `(batch, length, kv_heads, head_dim)`; `value` likewise.
        decoder_segment_ids: `(batch, length)`; 0 is padding.
        model_mode: "train" or "prefill".
        sliding_window_size: how many tokens a query sees, itself included.
    """
    if model_mode not in ("train", "prefill"):
        raise ValueError(
            f"model_mode {model_mode!r}: decoding is page_attention or ragged_decode_attention"
        )
    packing = None
    if decoder_segment_ids is not None:
        packing = MaskInfo.from_segments(
            jnp.where(decoder_segment_ids == 0, -1, decoder_segment_ids)
        )
    return flash_attention(
        query,
        key,
        value,
        softmax_aux=sinks,
        mask_info=packing,
        softmax_scale=1.0,
        causal=True,
        sliding_window=None if sliding_window_size is None else (sliding_window_size - 1, 0),
        logits_soft_cap=attn_logits_soft_cap,
    )


@dataclass(frozen=True)
class AttentionMask:
    """The fields that attention reads of Levanter's two masks, in `levanter.grug.attention` and
    `levanter.layers`.

    Queries and keys are both counted from 0. The arrays may be haliax `NamedArray`s, batch
    first, then queries, keys.

    Fields:
        is_causal: query i sees keys up to `i + causal_offset`.
        causal_offset: a number, or one for each row of the batch; None is 0.
        explicit_mask: bools, `(Q, K)`, `(B, Q, K)` or `(B, heads, Q, K)`.
        segment_ids: of queries and of keys, `(Q,)` and `(K,)` or with a batch. Equal ids see
            each other, negative ones too: padding sees padding.
        sliding_window: how many keys a query sees, up to its own.
        bidirectional_window: query i sees keys from `i - bidirectional_window` to
            `i + bidirectional_window`.
    """

    is_causal: bool = False
    causal_offset: int | jax.Array | None = None
    explicit_mask: jax.Array | None = None
    segment_ids: tuple[jax.Array, jax.Array] | None = None
    sliding_window: int | None = None
    bidirectional_window: int | None = None


def levanter_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: AttentionMask | jax.Array | None,
    *,
    bias: jax.Array | None = None,
    scaling_factor: float | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: jax.Array | None = None,
) -> jax.Array:
    """In the place of `levanter.grug.attention.attention`, and of `dot_product_attention` on
    arrays in this order.

    Args:
        q: `(B, Q, heads, D)`.
        k: `(B, K, kv_heads, D)`; `v` likewise.
        mask: an `AttentionMask`; or bools that say what is seen, or floats that are added to
            the logits, `(Q, K)`, `(B, Q, K)` or `(B, heads, Q, K)`.
        bias: floats that broadcast to `(B, heads, Q, K)`, added before the cap.
        attn_sink: `(heads,)`.

    A query that sees nothing gives zeros, where Levanter's reference gives the mean of all
    values.
    """
    if isinstance(mask, (jax.Array, np.ndarray)):
        structured, given = None, _batch_first(mask)
    else:
        structured, given = mask, None
    if given is not None and given.dtype != bool:
        bias, given = given if bias is None else bias + given, None
    visible = None if given is None else MaskInfo.from_attention_mask(given)
    return flash_attention(
        q,
        k,
        v,
        bias,
        softmax_aux=attn_sink,
        mask_info=visible
        if structured is None
        else levanter_mask(structured, q.shape[1], k.shape[1]),
        softmax_scale=scaling_factor,
        logits_soft_cap=logits_soft_cap,
    )


def levanter_mask(mask: AttentionMask, q_len: int, k_len: int) -> MaskInfo:
    """One of Levanter's masks. The dense ones, and traced offsets, become an array of queries
    and keys.
    """
    info = MaskInfo(q_len, k_len)
    if mask.segment_ids is not None:
        # negative ids, which a MaskInfo takes for padding that sees nothing, are moved to the
        # end of int32
        info = MaskInfo.from_segments(
            *(_array(ids).astype(jnp.int32) & 0x7FFFFFFF for ids in mask.segment_ids)
        )
    if q_len != k_len:  # a MaskInfo without positions aligns the ends
        info = info.replace(q_positions=jnp.arange(q_len), kv_positions=jnp.arange(k_len))
    offset = getattr(mask, "causal_offset", None)
    if mask.is_causal:
        info = info.apply_causal(0 if offset is None else _array(offset))
    if mask.sliding_window is not None:
        if mask.sliding_window <= 0:
            raise ValueError(f"sliding_window must be positive, got {mask.sliding_window}")
        # the window of `levanter.layers`, which has offsets, ends at the query; that of
        # `levanter.grug` does not
        right = 0 if hasattr(mask, "causal_offset") else None
        info = info.apply_sliding_window((mask.sliding_window - 1, right))
    both_ways = getattr(mask, "bidirectional_window", None)
    if both_ways is not None:
        info = info.apply_sliding_window(both_ways)
    if getattr(mask, "explicit_mask", None) is not None:
        info &= MaskInfo.from_attention_mask(_batch_first(mask.explicit_mask))
    return info


def _array(x: Any) -> jax.Array:
    """A plain array, also of a haliax `NamedArray`."""
    return jnp.asarray(getattr(x, "array", x))


def _batch_first(mask: Any) -> jax.Array:
    """A mask of queries and keys as (B|1, heads|1, Q, K)."""
    given = _array(mask)
    if given.ndim not in (2, 3, 4):
        raise ValueError(
            f"a mask must be (Q, K), (B, Q, K) or (B, heads, Q, K), got {given.shape}"
        )
    return (
        given[None, None] if given.ndim == 2 else given[:, None] if given.ndim == 3 else given
    )


def document_by_document(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: np.ndarray, scale: float
) -> np.ndarray:
    """jax.nn's attention of every document alone; zeros for padding, which has the id 0."""
    out = np.zeros(q.shape, np.float32)
    for row in range(len(ids)):
        for document in set(ids[row]) - {0}:
            at = np.flatnonzero(ids[row] == document)
            alone = (x[row : row + 1, at] for x in (q, k, v))
            out[row, at] = jax.nn.dot_product_attention(*alone, is_causal=True, scale=scale)[0]
    return out


def main() -> float:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 96, heads, 32))
        for key, heads in zip(keys, (8, 2, 2), strict=True)
    )
    ids = np.repeat([[1, 2, 3, 0], [1, 2, 0, 0]], [40, 30, 20, 6], axis=1)
    segments = jnp.asarray(ids)
    real = np.flatnonzero(ids.ravel())
    worst = 0.0
    masks = AttentionMask(is_causal=True, segment_ids=(segments, segments))
    for name, out, scale in (
        ("MaxText", jax.jit(maxtext_attention)(q, k, v, segments), 1.0),
        ("Levanter", levanter_attention(q, k, v, masks), 32**-0.5),
    ):
        right = document_by_document(q, k, v, ids, scale)
        error, leak = (
            float(np.abs(np.asarray(x) - right).reshape(-1, *right.shape[2:])[real].max())
            for x in (out, jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale))
        )
        print(
            f"{name}'s call: {error:.1e} from every document alone; "
            f"without segment ids it would be {leak:.1f}"
        )
        worst = max(worst, error)
    if worst > 1e-4:
        raise SystemExit("a document saw another")
    return worst


if __name__ == "__main__":
    main()
