"""Attention over key blocks that each query selects: native sparse attention, and its steps."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ejkernel.kernels.common.batch import shards, unfolded
from ejkernel.kernels.native_sparse import whole
from ejkernel.kernels.native_sparse.operations import NATIVE_SPARSE_ATTENTION, SELECT_BLOCKS, SELECTED_ATTENTION
from ejkernel.kernels.native_sparse.spec import canonicalise, finish
from ejkernel.ops import Composite, run


def native_sparse_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    g_cmp: Float[Array, "*B T H"] | None = None,
    g_slc: Float[Array, "*B T H"] | None = None,
    block_indices: Int[Array, "*B T Hkv K"] | None = None,
    block_counts: Any = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    g_swa: Float[Array, "*B T H"] | None = None,
    compressed: tuple[Float[Array, "*B N Hkv D"], Float[Array, "*B N Hkv Dv"]] | None = None,
    kv_lengths: Int[Array, " B"] | None = None,
    block_size: int = 64,
    window_size: int | jax.Array = 0,
    softmax_scale: float | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Float[Array, "*B T H Dv"]:
    """Native sparse attention: a few blocks of keys for each query, chosen by a cheap look at all of them.

    The output is a sum of branches, each weighed by its gate; one whose gate is None is left out.

    - *compressed* (`g_cmp`): softmax attention to one key and value for each block, the mean of its tokens. Query t
      sees block c once it is whole: `(c + 1) * block_size <= t + 1`.
    - *selected* (`g_slc`): softmax attention to the tokens `s <= t` of some blocks: those of `block_indices` (which
      without `g_slc` weigh 1), or else the first block, the query's own, the one before, and those with the largest
      weights in the compressed branch, summed over the query heads of a key head (ties: the lower block),
      `block_counts` in all.
    - *window* (`g_swa`): softmax attention to the last `window_size` tokens.

    Queries are the last tokens of the keys: T may be less than S. Everything has a gradient but which blocks are
    selected. No array of T times the number of blocks is made.

    Args:
        query: `(B, T, H, D)`, float32, bfloat16 or float16. `(T, H, D)` is one sequence; more leading dimensions are
            batch too, and come back.
        key: `(B, S, Hkv, D)`; Hkv divides H.
        value: `(B, S, Hkv, Dv)`.
        g_cmp: gate of the compressed branch, `(B, T, H)`.
        g_slc: gate of the selected branch, `(B, T, H)`.
        block_indices: `(B, T, Hkv, K)` integers, blocks counted from the start of a sequence, in any order. One that
            is negative or lies behind the query is none; one that is repeated counts once.
        block_counts: how many blocks of each query count, a number or `(B, T, Hkv)`, `(B, T, 1)`, `(T,)`: the first of
            `block_indices` (default: all of them), or those selected here (default: 16). Where an array is traced and
            no indices are given, room is made for all blocks.
        cu_seqlens: `(N + 1,)` integers rising from 0: where each of the sequences packed into one row begins, and where
            the last one ends. B is 1 then, and blocks count from the start of each sequence.
        g_swa: gate of the window branch, `(B, T, H)`.
        compressed: keys and values `(B, blocks, Hkv, D)` in place of the means, from a learned compression or from a
            cache of them, one row for each block; the last may be left out while it is not whole. With `cu_seqlens`
            the rows of all sequences follow each other.
        kv_lengths: `(B,)`, keys of each sequence in a cache of S; the queries are its last tokens.
        block_size: tokens of a block.
        window_size: tokens of the window, the query's own among them; needs `g_swa`. It may be a traced integer.
        softmax_scale: of all logits, a number, which may be traced; default `D ** -0.5`.
        platform: `None` or `"auto"`, `"xla"`, `"triton"`.
        cfg: the `Config` of `selected_attention` on that platform, or a dict of its fields; needs the selected branch.
        mesh: devices to split batch and heads over, with `in_specs`; alone, the device it is compiled for.
        in_specs: one `PartitionSpec` each for query, key, value (and g_cmp, ...), or a dict by name.
        out_specs: that of the output; by default that of the query.

    Returns:
        `(B, T, H, Dv)` in the query's dtype.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.modules import native_sparse_attention
    >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 256, 4, 64)) for i in range(3))
    >>> gate = jnp.full((1, 256, 4), 1 / 3)
    >>> native_sparse_attention(
    ...     q, k, v, gate, gate, g_swa=gate, block_size=16, block_counts=4, window_size=32
    ... ).shape
    (1, 256, 4, 64)
    """
    call = whole.canonicalise(
        query,
        key,
        value,
        g_cmp,
        g_slc,
        block_indices,
        block_counts,
        cu_seqlens,
        g_swa=g_swa,
        compressed=compressed,
        kv_lengths=kv_lengths,
        block_size=block_size,
        window_size=window_size,
        softmax_scale=softmax_scale,
    )
    composite = Composite(NATIVE_SPARSE_ATTENTION, platform, cfg, mesh)
    out = whole.run_whole(call, composite, shards(query.shape, mesh, in_specs, out_specs))
    return unfolded(out, query.shape[:-3])


def selected_attention(
    query: Float[Array, "*B T H D"],
    key: Float[Array, "*B S Hkv D"],
    value: Float[Array, "*B S Hkv Dv"],
    block_indices: Int[Array, "*B T Hkv K"],
    block_counts: Any = None,
    cu_seqlens: Int[Array, " N1"] | None = None,
    softmax_aux: Float[Array, "..."] | None = None,
    *,
    kv_lengths: Int[Array, " B"] | None = None,
    block_size: int = 64,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    mask_fn: Callable[..., Any] | None = None,
    score_fn: Callable[..., Any] | None = None,
    platform: str | None = None,
    cfg: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Causal softmax attention to the key blocks that each query names; with `block_size=1`, to the tokens.

    Args:
        query, key, value: as in `native_sparse_attention`, and so are `cu_seqlens`, `kv_lengths` and the options.
        block_indices: `(B, T, Hkv, K)` integers, blocks counted from the start of a sequence, in any order. One that
            is negative or lies behind the query is none; one that is repeated counts once.
        block_counts: how many of the indices count, from the first: a number or an array as above. Default: all.
        softmax_aux: sinks `(H,)`, `(H, n)`, or `(1, n)` that all heads share, logits that join the denominator once.
        return_lse: also return the log-sum-exp of the logits, `(B, H, T)` float32, sinks included.
        mask_fn: `(b, h, i, j) -> bool`: which tokens of the blocks a query sees, as in `flash_attention`; with
            `cu_seqlens` i and j count inside each sequence. Functions run on XLA alone.
        score_fn: `(score, b, h, i, j) -> score`, likewise; floats that it closes over have gradients.

    Returns:
        `(B, T, H, Dv)` in the query's dtype; with `return_lse`, `(out, lse)`. A query without a block gives zeros.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import selected_attention
    >>> k = v = jnp.arange(8.0).reshape(1, 8, 1, 1)
    >>> first = jnp.zeros((1, 8, 1, 1), int)  # every query takes block 0: tokens 0 and 1
    >>> selected_attention(jnp.zeros((1, 8, 1, 1)), k, v, first, block_size=2).ravel().tolist()
    [0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]
    """
    call = canonicalise(
        query,
        key,
        value,
        block_indices,
        block_counts,
        cu_seqlens,
        softmax_aux,
        kv_lengths=kv_lengths,
        block_size=block_size,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
        mask_fn=mask_fn,
        score_fn=score_fn,
    )
    split = shards(query.shape, mesh, in_specs, out_specs)
    return finish(call, run(SELECTED_ATTENTION, call, platform=platform, cfg=cfg, shards=split), query.shape)


def select_blocks(
    query: Float[Array, "*B T H D"],
    compressed_key: Float[Array, "*B N Hkv D"],
    block_counts: int = 16,
    cu_seqlens: Int[Array, " N1"] | None = None,
    *,
    kv_lengths: Int[Array, " B"] | None = None,
    block_size: int = 64,
    softmax_scale: float | None = None,
    platform: str | None = None,
    cfg: Any = None,
) -> Int[Array, "*B T Hkv K"]:
    """The key blocks that `native_sparse_attention` would select for each query.

    Args:
        query: `(B, T, H, D)`.
        compressed_key: `(B, N, Hkv, D)`, one for each block: `mean_pooling(key, chunk_size=block_size)`.
        block_counts: how many blocks, of which three are always the first one, the query's own and the one before.
        cu_seqlens, kv_lengths: as in `native_sparse_attention`. Without `kv_lengths` the queries are all tokens.
        block_size: tokens of a block.
        softmax_scale: default `D ** -0.5`.
        cfg: the `Config` of `select_blocks` on that platform, or a dict of its fields.

    Returns:
        `(B, T, Hkv, block_counts)` int32: the ones that are always taken, then the best; -1 where there are no more.

    >>> import jax, jax.numpy as jnp
    >>> from ejkernel.modules import select_blocks
    >>> q = jnp.ones((1, 8, 1, 4))
    >>> k = jnp.arange(8.0)[None, :, None, None] * jnp.ones(4)  # blocks of one token, each better than the one before
    >>> select_blocks(q, k, 4, block_size=1)[0, 7, 0].tolist()
    [0, 7, 6, 5]
    """
    call = whole.selecting_call(
        query,
        compressed_key,
        block_counts,
        cu_seqlens,
        kv_lengths=kv_lengths,
        block_size=block_size,
        softmax_scale=softmax_scale,
    )
    indices = whole.run_selection(call, Composite(SELECT_BLOCKS, platform, cfg))
    return unfolded(indices, query.shape[:-3])
