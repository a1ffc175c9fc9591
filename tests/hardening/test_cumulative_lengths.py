"""Bad cumulative lengths of packed sequences are an error wherever their values are known, in every function."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import dkernel
import ejgpu
import ejkernel.torch
from ejkernel import modules
from ejkernel.types import MaskInfo

TOKENS = 16
BAD = {"starts-late": [2, 16], "decreases": [0, 9, 5], "ends-outside": [0, 99], "negative": [0, -3, 16]}


class Packed(NamedTuple):
    """A function of one argument of cumulative lengths, with everything else given."""

    function: Callable[..., Any]
    argument: str
    options: Mapping[str, Any] = MappingProxyType({})

    def __call__(self, lengths: Any) -> Any:
        return self.function(**{**self.options, self.argument: lengths})


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape)


QKV = {"query": ones(1, TOKENS, 2, 16), "key": ones(1, TOKENS, 2, 16), "value": ones(1, TOKENS, 2, 16)}
SHORT = {"q": QKV["query"], "k": QKV["key"], "v": QKV["value"]}
THD = {name: x[0] for name, x in SHORT.items()} | {"layout": "thd"}
GATES = {"g_cmp": ones(1, TOKENS, 2), "g_slc": ones(1, TOKENS, 2)}
BLOCKS = {"block_indices": jnp.zeros((1, TOKENS, 2, 1), jnp.int32), "block_size": 4}
GOOD = jnp.array([0, 5, TOKENS])


def ragged(query_start_loc: Any, num_seqs: Any = None) -> Any:
    sequences = len(query_start_loc) - 1
    lens, tables = jnp.full(sequences, TOKENS, jnp.int32), jnp.zeros((sequences, 1), jnp.int32)
    pages = ones(1, TOKENS, 4, 16)
    return modules.ragged_page_attention(ones(TOKENS, 2, 16), pages, lens, tables, query_start_loc, num_seqs)


def tensors(function: Callable[..., Any], *names: str, **lengths: Any) -> Any:
    packed = {name: torch.ones(TOKENS, 2, 16) for name in names}
    return function(**packed, **{name: torch.as_tensor(np.array(x)) for name, x in lengths.items()})


def dkernel_attention(**arguments: Any) -> Any:
    attend = dkernel.LocalStrideSparseAttention(2, 64, 16, local_blocks=1, vert_stride=2)
    return attend(**{"cu_seqlen_k": torch.tensor([0, 5, TOKENS]), **arguments})


KIMI = {"g": -ones(1, TOKENS, 2, 16), "beta": ones(1, TOKENS, 2)}
TWICE = {name: ones(1, TOKENS, 2, 2, 16) for name in ("key", "value")}
MAMBA = {"x": ones(1, TOKENS, 2, 16), "dt": ones(1, TOKENS, 2), "A": -ones(2)}
MAMBA |= dict.fromkeys("BC", ones(1, TOKENS, 1, 16))

CALLS = {
    "flash-q": Packed(modules.flash_attention, "cum_seqlens_q", QKV),
    "flash-k": Packed(modules.flash_attention, "cum_seqlens_k", QKV | {"cum_seqlens_q": GOOD}),
    "sdpa-q": Packed(modules.scaled_dot_product_attention, "cum_seqlens_q", QKV),
    "sdpa-k": Packed(modules.scaled_dot_product_attention, "cum_seqlens_k", QKV | {"cum_seqlens_q": GOOD}),
    "recurrent": Packed(modules.recurrent_attention, "cu_seqlens", QKV),
    "gla": Packed(modules.gla_attention, "cu_seqlens", QKV | {"g": -ones(1, TOKENS, 2)}),
    "lightning": Packed(modules.lightning_attention, "cu_seqlens", QKV | {"layer_idx": 1, "num_layers": 4}),
    "delta": Packed(modules.gated_delta_rule, "cu_seqlens", QKV),
    "kimi": Packed(modules.kimi_delta_attention, "cu_seqlens", QKV | KIMI),
    "delta-product": Packed(modules.gated_delta_product, "cu_seqlens", QKV | TWICE),
    "rwkv7": Packed(modules.rwkv7_attention, "cu_seqlens", dict.fromkeys("rwkvab", QKV["query"])),
    "mamba2": Packed(modules.mamba2_attention, "cu_seqlens", MAMBA),
    "native-sparse": Packed(modules.native_sparse_attention, "cu_seqlens", QKV | GATES | {"block_size": 4}),
    "native-sparse-blocks": Packed(modules.native_sparse_attention, "cu_seqlens", QKV | BLOCKS),
    "selected": Packed(modules.selected_attention, "cu_seqlens", QKV | BLOCKS),
    "select-blocks": Packed(
        modules.select_blocks,
        "cu_seqlens",
        {"query": QKV["query"], "compressed_key": ones(1, 5, 2, 16), "block_size": 4},
    ),
    "mean-pooling": Packed(modules.mean_pooling, "cu_seqlens", {"x": QKV["query"]}),
    "ragged-page": Packed(ragged, "query_start_loc"),
    "mask-q": Packed(MaskInfo.from_cu_seqlens, "cu_q", {"max_q_len": TOKENS}),
    "mask-kv": Packed(MaskInfo.from_cu_seqlens, "cu_kv", {"cu_q": GOOD, "max_q_len": TOKENS}),
    "ejgpu-q": Packed(ejgpu.flash_attn_varlen, "cu_seqlens_q", THD),
    "ejgpu-k": Packed(ejgpu.flash_attn_varlen, "cu_seqlens_k", THD | {"cu_seqlens_q": GOOD}),
    "ejgpu-recurrent": Packed(ejgpu.recurrent, "cu_seqlens", SHORT),
    "ejgpu-gla": Packed(ejgpu.recurrent_gla, "cu_seqlens", SHORT | {"g": -ones(1, TOKENS, 2)}),
    "ejgpu-lightning": Packed(ejgpu.lightning_attn, "cu_seqlens", SHORT | {"layer_idx": 1, "num_layers": 4}),
    "ejgpu-native-sparse": Packed(ejgpu.native_spare_attention, "cu_seqlens", SHORT | BLOCKS),
    "torch-q": Packed(partial(tensors, ejkernel.torch.flash_attention, "query", "key", "value"), "cum_seqlens_q"),
    "dkernel-k": Packed(partial(tensors, dkernel_attention, "q", "k", "v"), "cu_seqlen_k"),
    "dkernel-q": Packed(partial(tensors, dkernel_attention, "q", "k", "v"), "cu_seqlen_q"),
}
HELD = {"list": list, "numpy": np.array, "device": jnp.array}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", CALLS)
def test_bad_ones_raise(name, bad, held):
    call = CALLS[name]
    lengths = HELD[held](BAD[bad])
    if call.argument.endswith(("_k", "_kv")) and len(lengths) == 2:  # as many as there are of the queries
        lengths = HELD[held]([BAD[bad][0], 16, BAD[bad][1]])
    with pytest.raises(ValueError, match=rf"{call.argument} must start at 0, never decrease, and end within the 16"):
        call(lengths)


@pytest.mark.parametrize("name", CALLS)
def test_good_ones_do_not(name):
    call = CALLS[name]
    if call.argument in ("cu_seqlen_k", "cu_seqlen_q", "cum_seqlens_q") and name.startswith(("torch", "dkernel")):
        call(GOOD)
    else:
        jax.eval_shape(lambda: call(GOOD))


def test_entries_past_the_sequences_that_count_may_be_anything():
    jax.eval_shape(lambda: ragged(jnp.array([0, TOKENS, 0, 0]), jnp.int32(1)))
    with pytest.raises(ValueError, match=r"never decrease, and end within the 16 query tokens \(row 2: 0\)"):
        ragged(jnp.array([0, TOKENS, 0, 0]), jnp.int32(2))


def test_every_public_function_is_here():
    takes = {
        (function, argument)
        for function in (getattr(modules, name) for name in modules.__all__)
        for argument in inspect.signature(function).parameters
        if argument.startswith(("cu_seqlens", "cum_seqlens")) or argument == "query_start_loc"
    }
    here = {(call.function, call.argument) for call in CALLS.values()}
    assert takes - here == {(modules.ragged_page_attention, "query_start_loc")}  # by `ragged`
