"""A shared prefix and what follows it in each sequence: two calls of the family, and how their answers merge."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.checks.arrays import integers
from ejkernel.kernels.common.tiles import online_finish
from ejkernel.kernels.paged.calls import page_call, prefill_call
from ejkernel.kernels.paged.merge import finished_part, merge
from ejkernel.kernels.paged.spec import check, finish
from ejkernel.ops import Call


def cascade_calls(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    context_lens: Any,
    block_tables: Any,
    prefix_len: Any,
    *,
    softmax_aux: Any = None,
    **options: Any,
) -> tuple[Call, Call]:
    """The call of all queries over the prefix, and that of each sequence over the keys behind it."""
    # sinks join once: with the keys of the sequence itself
    whole = page_call(query, key_cache, value_cache, context_lens, block_tables, softmax_aux=softmax_aux, **options)
    prefix_len = integers("prefix_len", prefix_len, 0)
    S = whole["block_tables"].shape[2] * whole["key_pages"].shape[2]
    message = f"prefix_len must be from 0 to {S}, what the table holds"
    check(prefix_len, lambda xp, n: (n < 0) | (n > S), message, (prefix_len,))
    lens = jnp.clip(whole["context_lens"], 0, S)
    first_query = jnp.where(lens > 0, lens - whole.spec.tokens, S)  # (1, B)
    # every query must see all of the prefix
    length = jnp.clip(jnp.minimum(prefix_len, first_query.min() + 1), 0, S)
    table = whole["block_tables"][0, jnp.argmax(lens[0] > 0)]
    arrays = whole["query"][0], whole["key_pages"][0], whole["value_pages"][0]
    prefix = prefill_call(*arrays, length, table, causal=False, **options)
    starts = jnp.broadcast_to(length, lens.shape).astype(jnp.int32)
    return _in_float32(prefix), _in_float32(Call(whole.spec, {**whole.arrays, "starts": starts}))


def _in_float32(call: Call) -> Call:
    """A part is rounded after it has been merged, not before."""
    return replace(call, spec=replace(call.spec, out_dtype="float32"))


def merge_answers(
    suffix_call: Call, prefix: dict[str, jax.Array], suffix: dict[str, jax.Array], shape: tuple[int, ...]
) -> Any:
    """The answer of both calls, from their outputs, in the rank and dtype of the query."""
    some = jnp.repeat(suffix_call["context_lens"] > 0, suffix_call.spec.tokens, axis=1)[:, None]  # (1, 1, tokens)
    prefix_lse = jnp.where(some, prefix["lse"], -jnp.inf)
    answers = ((prefix["out"], prefix_lse), (suffix["out"], suffix["lse"]))
    parts = [finished_part(jnp.moveaxis(out, 2, 1), lse) for out, lse in answers]
    merged = merge(jax.tree.map(lambda *x: jnp.stack(x), *parts))
    out, lse = jax.vmap(jax.vmap(online_finish))(merged)  # (1, H, tokens, Dv), (1, H, tokens)
    out = jnp.moveaxis(out, 1, 2).astype(suffix_call["query"].dtype)
    return finish(suffix_call, {"out": out, "lse": lse}, shape, batched=True)
