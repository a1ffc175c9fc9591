"""A shared prefix and what follows it in each sequence: two calls of the family, and how their answers merge."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.checks.arrays import integers
from ejkernel.checks.values import check
from ejkernel.kernels.common.online_softmax import merge, online_finish, state_of
from ejkernel.kernels.paged import rules
from ejkernel.kernels.paged.calls import page_call, prefill_call
from ejkernel.kernels.paged.spec import finish
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
    mask_fn: Any = None,
    score_fn: Any = None,
    tree_mask: Any = None,
    **options: Any,
) -> tuple[Call, Call]:
    """The call of all queries over the prefix, and that of each sequence over the keys behind it."""
    # sinks join once: with the keys of the sequence itself
    functions = {"mask_fn": mask_fn, "score_fn": score_fn, "tree_mask": tree_mask, "by_token": True}
    own = {"softmax_aux": softmax_aux, **functions}
    whole = page_call(query, key_cache, value_cache, context_lens, block_tables, **own, **options)
    prefix_len = integers("prefix_len", prefix_len, 0)
    S = whole["block_tables"].shape[2] * whole["key_pages"].shape[2]
    message = f"prefix_len must be from 0 to {S}, what the table holds"
    check(prefix_len, lambda xp, n: (n < 0) | (n > S), message, (prefix_len,))
    if not whole.spec.stands_in:
        _check_shared(whole, context_lens, block_tables, prefix_len)
    length, table, starts = _prefix(whole.spec.tokens, S, whole["context_lens"], whole["block_tables"], prefix_len)
    arrays = whole["query"][0], whole["key_pages"][0], whole["value_pages"][0]
    prefix = prefill_call(*arrays, length, table, causal=False, **options)
    # functions are of the sequences, in which queries have other positions than in the prefix
    same = {name: getattr(whole.spec, name) for name in ("rules", "hides", "soft_cap")}
    read = {name: x for name, x in whole.arrays.items() if name in rules.ARRAYS}
    prefix = Call(replace(prefix.spec, **same), prefix.arrays | read)
    return _in_float32(prefix), _in_float32(Call(whole.spec, {**whole.arrays, "starts": starts}))


@partial(jax.jit, static_argnums=(0, 1))
def _prefix(tokens: int, S: int, context_lens: jax.Array, tables: jax.Array, prefix_len: Any) -> tuple[jax.Array, ...]:
    """Its length, its pages, and where the sequences (1, B) go on by themselves."""
    length = _length(jnp, tokens, S, context_lens, prefix_len.astype(jnp.int32))
    return length, tables[0, jnp.argmax(context_lens[0] > 0)], jnp.broadcast_to(length, context_lens.shape)


def _length(xp: Any, tokens: int, S: int, context_lens: Any, prefix_len: Any) -> Any:
    """As much of the prefix as every query sees; `xp` is numpy or jax.numpy."""
    lens = xp.clip(context_lens, 0, S)
    first_query = xp.where(lens > 0, lens - tokens, S)
    return xp.clip(xp.minimum(prefix_len, first_query.min() + 1), 0, S)


def _check_shared(whole: Call, context_lens: Any, tables: Any, prefix_len: Any) -> None:
    """That the pages of the prefix are the same in every row that is not empty."""
    context_lens, tables = integers("context_lens", context_lens, 1), integers("block_tables", tables, 2)
    W, L = whole["block_tables"].shape[2], whole["key_pages"].shape[2]

    def others(xp: Any) -> Any:
        lens, ids = xp.asarray(context_lens), xp.asarray(tables)
        length = _length(xp, whole.spec.tokens, W * L, lens, xp.asarray(prefix_len))
        first = ids[xp.argmax(lens > 0)]
        return (ids != first[None]) & (xp.arange(W, dtype=np.int32) * L < length)[None] & (lens > 0)[:, None]

    def first_other(xp: Any) -> Any:
        return xp.take_along_axis(xp.asarray(tables), others(xp).argmax(1)[:, None], 1)[:, 0]

    message = "block_tables must have the same pages in every row for the first prefix_len keys"
    check(first_other, lambda xp, _: others(xp).any(1), message, (context_lens, tables, prefix_len))


def _in_float32(call: Call) -> Call:
    """The call with a float32 output: an answer is rounded after it has been merged, not before."""
    return replace(call, spec=replace(call.spec, out_dtype="float32"))


def merge_answers(
    suffix_call: Call, prefix: dict[str, jax.Array], suffix: dict[str, jax.Array], shape: tuple[int, ...]
) -> Any:
    """The answer of both calls, from their outputs, in the rank and dtype of the query."""
    out, lse = _merged(suffix_call.spec.tokens, suffix_call["context_lens"], prefix, suffix)
    out = out.astype(suffix_call["query"].dtype)
    return finish(suffix_call, {"out": out, "lse": lse}, shape, batched=True)


@partial(jax.jit, static_argnums=0)
def _merged(
    tokens: int, context_lens: jax.Array, prefix: dict[str, jax.Array], suffix: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """out (1, T, H, Dv) and lse (1, H, T) of both calls."""
    some = jnp.repeat(context_lens > 0, tokens, axis=1)[:, None]  # (1, 1, T)
    prefix_lse = jnp.where(some, prefix["lse"], -jnp.inf)
    answers = ((prefix["out"], prefix_lse), (suffix["out"], suffix["lse"]))
    states = [state_of(jnp.moveaxis(out, 2, 1), lse) for out, lse in answers]
    merged = merge(jax.tree.map(lambda *x: jnp.stack(x), *states))
    out, lse = online_finish(merged)  # (1, H, T, Dv), (1, H, T)
    return jnp.moveaxis(out, 1, 2), lse
