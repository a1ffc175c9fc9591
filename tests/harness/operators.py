"""Inputs of the tests of `ejkernel.operators`."""

import jax.numpy as jnp
import numpy as np

from ejkernel.types import PagedCacheView, TransformerCacheView
from harness import normal

B, T, H, HKV, D = 2, 6, 4, 2, 8

MASK = np.array(normal("mask", (B, 1, T, T)) > -0.5)
BIAS = normal("bias", (H, T, T))


def qkv(T=T, S=T):
    return normal("q", (B, T, H, D)), normal("k", (B, S, HKV, D)), normal("v", (B, S, HKV, D))


def out(operator, *args, **kwargs):
    """The outputs of a call, without its weights."""
    return operator(*args, **kwargs).attention_outputs


def contiguous(lengths=(7, 4), starts=(2, 0), capacity=10):
    """A contiguous cache with rows of these lengths, the padding before `starts` included."""
    cache = TransformerCacheView.create(B, capacity, HKV, D, dtype=jnp.float32, starts=list(starts))
    chunk = normal("k", (B, max(lengths), HKV, D)), normal("v", (B, max(lengths), HKV, D))
    return cache.append(*chunk, lengths=list(lengths))


def paged():
    """Three sequences on eight pages of four tokens."""
    cache = PagedCacheView(normal("k", (8, 4, HKV, D)), normal("v", (8, 4, HKV, D)))
    return cache, np.array([9, 3, 6]), np.array([[5, 0, 2], [7, 1, 1], [3, 6, 4]])
