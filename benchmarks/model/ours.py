"""The model with the library's attention."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measuring.benchmark import Arrays
from benchmarks.model.cases import TRAINED, Case
from benchmarks.model.transformer import decode, losses
from ejkernel.modules import flash_attention, page_attention, write_kv_pages


def training(case: Case, arrays: Arrays, platform: str | None) -> jax.Array:
    """The losses of a training step; documents are packed."""
    attend = partial(flash_attention, causal=True, cum_seqlens_q=arrays.get("offsets"), platform=platform)
    weights = {name: arrays[name] for name in TRAINED}
    return losses(case, weights, arrays["tokens"], arrays["targets"], attend, case.dtype)


def decoding(case: Case, arrays: Arrays, platform: str | None) -> jax.Array:
    """The logits of a decode loop over pages."""
    table = arrays["block_tables"]

    def attend(pages: Any, number: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        at = case.T + number
        slots = table[:, at // case.page] * case.page + at % case.page
        keys, values = write_kv_pages(pages[0], pages[1], key, value, slots)
        lengths = jnp.full((case.B,), at + 1, jnp.int32)
        return (keys, values), page_attention(query, keys, values, lengths, table, platform=platform)

    return decode(case, {name: arrays[name] for name in TRAINED}, arrays["caches"], arrays["tokens"], attend)
