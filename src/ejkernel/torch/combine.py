"""Attention over partitions of the keys, merged by their log-sum-exp."""

import torch
from torch import Tensor


def combine_attn_partitions(*pairs: tuple[Tensor, Tensor], hdim: int = 1) -> Tensor:
    """Attention over all keys from `(out, lse)` over partitions of them, by their log-sum-exp; differentiable.

    Args:
        pairs: what `SparseAttention(..., return_lse=True)` gives for the same queries and different keys: out
            `(B, H, T, D)` or `(B, T, H, D)`, lse `(B, H, T)`. A partition of which a query sees nothing, lse -inf,
            weighs nothing.
        hdim: which dimension of out is the heads: 1, or 2.

    >>> import torch
    >>> from ejkernel.torch import combine_attn_partitions, flash_attention
    >>> q, k, v = (torch.randn(1, n, 2, 16) for n in (3, 8, 8))
    >>> partitions = [flash_attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 5), slice(5, 8))]
    >>> torch.allclose(combine_attn_partitions(*partitions, hdim=2), flash_attention(q, k, v), atol=1e-6)
    True
    """
    if not pairs:
        raise ValueError("combine_attn_partitions needs at least one pair (out, lse)")
    if hdim not in (1, 2):
        raise ValueError(f"hdim={hdim} must be 1 or 2")
    for number, (out, lse) in enumerate(pairs):
        heads_first = out if hdim == 1 else out.transpose(1, 2)
        if out.dim() != 4 or lse.shape != heads_first.shape[:3] or out.shape != pairs[0][0].shape:
            raise ValueError(
                f"pair {number}: out {tuple(out.shape)} and lse {tuple(lse.shape)} must be (B, H, T, D), or "
                f"(B, T, H, D) with hdim=2, and (B, H, T); {hdim=}, and the first out is {tuple(pairs[0][0].shape)}"
            )
    lse = torch.stack([lse.float() for _, lse in pairs])  # (n, B, H, T)
    largest = lse.detach().amax(0)
    largest = torch.where(torch.isneginf(largest), 0.0, largest)
    # through finite numbers where a partition weighs nothing: the gradient of exp(-inf) would be 0 * inf
    nothing = torch.isneginf(lse)
    weights = torch.where(nothing, 0.0, torch.exp(torch.where(nothing, 0.0, lse - largest)))
    weight_sum = weights.sum(0)
    share = (weights / torch.where(weight_sum == 0, 1.0, weight_sum))[..., None]
    share = share if hdim == 1 else share.transpose(2, 3)
    merged = sum(
        torch.where(weight == 0, 0.0, out.float()) * weight for (out, _), weight in zip(pairs, share, strict=True)
    )
    return merged.to(pairs[0][0].dtype)  # pyright: ignore[reportAttributeAccessIssue]
