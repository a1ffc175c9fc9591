"""Attention in the shapes in which MaxText and Levanter call theirs: packed documents honoured, on every device.

    python examples/attention_hooks.py

Both frameworks hand segment ids to attention. On NVIDIA GPUs MaxText's cuDNN path has dropped them (documents saw one
another, AI-Hypercomputer/maxtext#4476), and Levanter fell back to a matrix of logits (marin-community/marin#7013).
These functions take the same arguments and do neither; the check at the end is the one of those reports.
"""

from dataclasses import dataclass

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
    """In the place of `AttentionOp.cudnn_flash_attention` and its siblings, for training and prefill.

    Args:
        query: `(batch, length, heads, head_dim)`, scaled already, as MaxText does it.
        key: `(batch, length, kv_heads, head_dim)`; `value` likewise.
        decoder_segment_ids: `(batch, length)`; 0 is padding.
        model_mode: "train" or "prefill".
        sliding_window_size: how many tokens a query sees, itself included.
    """
    if model_mode not in ("train", "prefill"):
        raise ValueError(f"model_mode {model_mode!r}: decoding is page_attention or ragged_decode_attention")
    packing = None
    if decoder_segment_ids is not None:
        packing = MaskInfo.from_segments(jnp.where(decoder_segment_ids == 0, -1, decoder_segment_ids))
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
    """The fields of Levanter's mask that attention reads. Segment ids are those of queries and of keys."""

    is_causal: bool = False
    segment_ids: tuple[jax.Array, jax.Array] | None = None
    sliding_window: int | None = None


def levanter_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask | jax.Array | None) -> jax.Array:
    """In the place of `levanter.grug.attention.attention`: q `(B, Q, heads, D)`, k and v `(B, K, kv_heads, D)`.

    `mask` may also be an array of bools that broadcasts to `(B, heads, Q, K)`. Negative segment ids are padding; a
    window counts the query itself, as Levanter's does.
    """
    if mask is None or not hasattr(mask, "is_causal"):
        given = None if mask is None else jnp.asarray(mask)
        dense = None if given is None else given.reshape((1,) * (4 - given.ndim) + given.shape)
        return flash_attention(q, k, v, mask_info=None if dense is None else MaskInfo.from_attention_mask(dense))
    assert not isinstance(mask, jax.Array)
    return flash_attention(
        q,
        k,
        v,
        mask_info=None if mask.segment_ids is None else MaskInfo.from_segments(*mask.segment_ids),
        causal=mask.is_causal,
        sliding_window=None if mask.sliding_window is None else (mask.sliding_window - 1, 0),
    )


def document_by_document(q: jax.Array, k: jax.Array, v: jax.Array, ids: np.ndarray, scale: float) -> np.ndarray:
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
    q, k, v = (jax.random.normal(key, (2, 96, heads, 32)) for key, heads in zip(keys, (8, 2, 2), strict=True))
    ids = np.repeat([[1, 2, 3, 0], [1, 2, 0, 0]], [40, 30, 20, 6], axis=1)
    segments = jnp.asarray(ids)
    real = np.flatnonzero(ids.ravel())
    worst = 0.0
    hidden = jnp.where(segments == 0, -1, segments)
    masks = AttentionMask(is_causal=True, segment_ids=(hidden, hidden))
    for name, found, scale in (
        ("MaxText", jax.jit(maxtext_attention)(q, k, v, segments), 1.0),
        ("Levanter", levanter_attention(q, k, v, masks), 32**-0.5),
    ):
        right = document_by_document(q, k, v, ids, scale)
        error, leak = (
            float(np.abs(np.asarray(x) - right).reshape(-1, *right.shape[2:])[real].max())
            for x in (found, jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=scale))
        )
        print(f"{name}'s call: {error:.1e} from every document alone; without segment ids it would be {leak:.1f}")
        worst = max(worst, error)
    if worst > 1e-4:
        raise SystemExit("a document saw another")
    return worst


if __name__ == "__main__":
    main()
