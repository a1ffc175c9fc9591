"""What type checkers should know of public functions: `make types` checks it, nothing runs it."""

# pyright: reportUnnecessaryTypeIgnoreComment=true
from typing import assert_type

import jax

import ejkernel
from ejkernel.modules import flash_attention, recurrent_attention

Pair = tuple[jax.Array, jax.Array]


def results(q: jax.Array, cu_seqlens: jax.Array, flag: bool) -> None:
    assert_type(flash_attention(q, q, q, causal=True), jax.Array)
    assert_type(flash_attention(q, q, q, return_lse=True), Pair)
    assert_type(flash_attention(q, q, q, return_lse=flag), jax.Array | Pair)
    assert_type(ejkernel.flash_attention(q, q, q, return_lse=False), jax.Array)
    assert_type(recurrent_attention(q, q, q, cu_seqlens=cu_seqlens, return_state=True), Pair)
    assert_type(ejkernel.dot_product_attention(q, q, q, return_residual=True), Pair)
    assert_type(ejkernel.attention(q, q, q), Pair)
    assert_type(ejkernel.mean_pooling(q, cu_seqlens, chunk_size=4), jax.Array)
    assert_type(ejkernel.MaskInfo(4, 4).apply_causal(), ejkernel.MaskInfo)
    ejkernel.flash_attention(q, q, q, causl=True)  # pyright: ignore[reportCallIssue]
