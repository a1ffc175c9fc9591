"""Masks and scores beside PyTorch's FlexAttention, which says them by the same functions."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from harness import normal

torch = pytest.importorskip("torch")

from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

B, H, Hkv, T, S, D = 2, 4, 2, 40, 48, 16
IDS = np.sort(np.random.default_rng(0).integers(0, 4, (B, S)), axis=1)
PREFIX, SLOPES = np.array([5, 17]), 2.0 ** -np.arange(1.0, H + 1, dtype=np.float32)
TABLE = np.random.default_rng(1).standard_normal((2 * S + 1, H), np.float32)
GATES = np.cumsum(-np.random.default_rng(2).random((B, H, S), np.float32), axis=-1)

# of (numpy's namespace, an array as that has it) to functions of indices
MASKS = {
    "causal": lambda xp, x: lambda b, h, i, j: i >= j,
    "window": lambda xp, x: lambda b, h, i, j: (i >= j) & (i - j <= 9),
    "prefix": lambda xp, x: lambda b, h, i, j: (i >= j) | (j < x(PREFIX)[b]),
    "documents": lambda xp, x: lambda b, h, i, j: (x(IDS)[b, i] == x(IDS)[b, j]) & (i >= j),
    "dilated": lambda xp, x: lambda b, h, i, j: (i >= j) & ((i - j) % 3 == 0),
    "natten": lambda xp, x: lambda b, h, i, j: (abs(i // 8 - j // 8) <= 1) & (abs(i % 8 - j % 8) <= 2),
}
SCORES = {
    "alibi": lambda xp, x: lambda s, b, h, i, j: s - x(SLOPES)[h] * abs(i - j),
    "relative": lambda xp, x: lambda s, b, h, i, j: s + x(TABLE)[j - i + S, h],
    "soft-cap": lambda xp, x: lambda s, b, h, i, j: 3.0 * xp.tanh(s / 3.0),
    "forgetting": lambda xp, x: lambda s, b, h, i, j: s + x(GATES)[b, h, i] - x(GATES)[b, h, j],
    "conditional": lambda xp, x: lambda s, b, h, i, j: xp.where(i % 2 == 0, s * 2.0, xp.exp(s * 0.25)),
}


def by_flex(arrays, mask, score):
    query, key, value = (torch.tensor(x).transpose(1, 2).contiguous() for x in arrays)
    block_mask = create_block_mask(mask, B, H, T, S, device="cpu")
    with warnings.catch_warnings():  # that it is not compiled
        warnings.simplefilter("ignore")
        out = flex_attention(query, key, value, score_mod=score, block_mask=block_mask, enable_gqa=True)
    return out.transpose(1, 2).numpy()


@pytest.mark.parametrize(
    ("mask", "score"),
    [
        ("causal", "relative"), ("window", "alibi"), ("prefix", "forgetting"), ("documents", "soft-cap"),
        ("dilated", "conditional"), ("natten", None),
    ],
)  # fmt: skip
def test_the_same_functions_give_the_same(mask, score):
    """On a CPU FlexAttention has no gradients."""
    shapes = {"query": (B, T, H, D), "key": (B, S, Hkv, D), "value": (B, S, Hkv, D)}
    arrays = [np.array(normal(name, shape)) for name, shape in shapes.items()]

    def functions(xp, x):
        return MASKS[mask](xp, x), None if score is None else SCORES[score](xp, x)

    mask_fn, score_fn = functions(jnp, jnp.asarray)
    ours = flash_attention(*map(jnp.asarray, arrays), mask_fn=mask_fn, score_fn=score_fn)
    np.testing.assert_allclose(ours, by_flex(arrays, *functions(torch, torch.tensor)), rtol=2e-5, atol=2e-6)
