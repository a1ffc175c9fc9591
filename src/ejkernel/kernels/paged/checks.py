"""A few representative calls over a cache, each with its definition."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.family import Check
from ejkernel.kernels.paged.calls import page_call
from ejkernel.kernels.paged.reference import reference
from ejkernel.ops import Call


def _defined(call: Call, dtype: Any) -> jax.Array:
    return reference(call, dtype)["out"][0]


def cascade_call(*, prefix_len: Any, **arguments: Any) -> Call:
    """What `cascade_attention` is another way to compute."""
    return page_call(**arguments)


def checks() -> list[Check]:
    """Three sequences of up to 250 keys in permuted pages of 16 tokens; four query heads for each of two key heads."""
    lens, pages, size, heads = jnp.array([250, 0, 100]), 48, 16, 2
    table = jnp.asarray(np.random.default_rng(0).permutation(pages).reshape(3, size).astype(np.int32))
    shared = table.at[:, :3].set(table[0, :3])
    query, cache = (3, 4 * heads, 64), (pages, size, heads, 64)
    caches = {"key_cache": cache, "value_cache": cache}
    batch = {"context_lens": lens, "block_tables": table}
    mixed = {**batch, "query_start_loc": jnp.array([0, 1, 1, 20]), "num_seqs": jnp.int32(3)}
    chunk = {"context_len": jnp.int32(250), "page_indices": table[0]}
    flat, whole = (pages * size, heads, 64), (3, 250, heads, 64)
    spans = {"sequence_start": jnp.array([9, 0, 0]), "sequence_end": lens}

    def check(name: str, operation: str, dtype: str, arrays: Any, fixed: Any, **static: Any) -> Check:
        return Check(name, operation, _defined, dtype, arrays, fixed, static, differentiable=False)

    return [
        check("decode", "page_attention", "float32", {"query": query, **caches}, batch),
        check(
            "decode, window of 64", "page_attention", "bfloat16",
            {"query": query, **caches}, batch, sliding_window=64,
        ),
        check(
            "shared prefix", "cascade_attention", "bfloat16",
            {"query": query, **caches}, {**batch, "block_tables": shared, "prefix_len": jnp.int32(40)},
        ),
        check(
            "mixed batch", "ragged_page_attention", "bfloat16",
            {"queries": (24, *query[1:]), "kv_pages": (pages, size, 2 * heads, 64)}, mixed,
        ),
        check(
            "chunk of 50", "prefill_page_attention", "bfloat16",
            {"query": (50, *query[1:]), **caches}, chunk,
        ),
        check(
            "pages of 16", "decode_attention", "bfloat16",
            {"query": query, "key_buffer": flat, "value_buffer": flat}, {"req_to_tokens": table, "seq_lens": lens},
            page_size=size,
        ),
        check(
            "starts and ends", "ragged_decode_attention", "bfloat16",
            {"query": query, "key": whole, "value": whole}, spans,
        ),
    ]  # fmt: skip
