"""What `ejkernel verify` checks: a few representative calls per operation, each with its definition."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.paged import calls as paged_calls
from ejkernel.kernels.paged.reference import reference as paged_reference
from ejkernel.kernels.pooling import reference as pooling_reference
from ejkernel.kernels.pooling import spec as pooling_spec
from ejkernel.kernels.softmax.blocks import pattern_mask
from ejkernel.kernels.softmax.reference import reference, visible
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import (
    blocksparse_attention,
    decode_attention,
    flash_attention,
    mean_pooling,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    scaled_dot_product_attention,
)
from ejkernel.ops import Call
from ejkernel.types import BlockPattern, MaskInfo

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Case:
    """One call, what it should give, and what jax.nn would make of it.

    Attributes:
        function: the public function; takes trained and fixed arrays, static options and `platform`, by name.
        canonicalise: the same arguments to the canonical call that `definition` and `peer` work on.
        definition: the call by its definition, in the dtype given; differentiable.
        peer: the same with jax.nn, or None where it has no such thing.
        trained: shapes of the arrays that get a gradient.
        fixed: traced arguments that get none, such as a MaskInfo.
        static: options that are part of the program.
        differentiable: whether there are gradients to check.
    """

    name: str
    function: Callable[..., jax.Array]
    canonicalise: Callable[..., Call]
    definition: Callable[[Call, Any], jax.Array]
    peer: Callable[[Call], jax.Array] | None
    dtype: str
    trained: dict[str, tuple[int, ...]]
    fixed: dict[str, Any] = field(default_factory=dict)
    static: dict[str, Any] = field(default_factory=dict)
    differentiable: bool = True

    @property
    def operation(self) -> str:
        return self.function.__name__

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for name, shape in self.trained.items()}

    def arrays(self) -> Arrays:
        """Random values for the trained arrays. From numpy: jax.random would compile a program per shape."""
        rng = np.random.default_rng(0)
        draw = rng.standard_normal
        return {name: jnp.asarray(draw(x.shape, np.float32).astype(x.dtype)) for name, x in self.structs().items()}


# Softmax ----------------------------------------------------------------------------------------------------


def _defined(call: Call, dtype: Any) -> jax.Array:
    return reference(call, dtype)["out"]


def _jax_nn(call: Call) -> jax.Array:
    """jax.nn's attention under the same mask; plain causal in its own words."""
    causal = call.spec.band == (None, 0) and len(call.arrays) == 3 and call["query"].shape[1] == call["key"].shape[1]
    return jax.nn.dot_product_attention(
        call["query"],
        call["key"],
        call["value"],
        bias=call.get("bias"),
        mask=None if causal else visible(call),
        is_causal=causal,
        scale=call.spec.scale,
    )


def _attention(
    name: str,
    dims: str,
    *,
    dtype: str,
    peer: bool = True,
    function: Any = flash_attention,
    canonicalise: Any = canonicalise,
    bias: bool = False,
    sinks: bool = False,
    fixed: Any = (),
    **static: Any,
) -> Case:
    """A case from sizes such as "B2 T512 H8 Hkv2 D64"; S, Hkv and Dv default to T, H and D."""
    size = {word.rstrip("0123456789"): int(word.lstrip("BTSHDkv")) for word in dims.split()}
    B, T, H, D = (size[letter] for letter in "BTHD")
    S, Hkv, Dv = size.get("S", T), size.get("Hkv", H), size.get("Dv", D)
    trained = {"query": (B, T, H, D), "key": (B, S, Hkv, D), "value": (B, S, Hkv, Dv)}
    trained |= {"bias": (1, H, T, S)} if bias else {}
    trained |= {"softmax_aux": (H,)} if sinks else {}
    return Case(
        name, function, canonicalise, _defined, _jax_nn if peer else None, dtype, trained, dict(fixed), dict(static)
    )


def _pattern_call(*, query: Any, key: Any, value: Any, block_mask: Any, causal: bool = True) -> Call:
    mask = pattern_mask(query, key, block_mask, None, None)
    return canonicalise(query, key, value, mask_info=mask, causal=causal)


def _documents(length: int, *lengths: int) -> MaskInfo:
    """Packed documents of those lengths; the rest is padding."""
    ids = [jnp.full(n, i) for i, n in enumerate(lengths)] + [jnp.full(length - sum(lengths), -1)]
    return MaskInfo.from_segments(jnp.concatenate(ids)[None])


def _softmax_cases() -> list[Case]:
    documents = _documents(1024, 300, 17, 333, 250)
    stride = BlockPattern.local_stride(4, num_blocks=16, local_blocks=2, vert_stride=4, block_size=64)
    # "highest": on a GPU or TPU float32 matmuls are otherwise rounded, and the definition's are not
    flash = partial(_attention, dtype="float32", precision="highest")
    half = partial(_attention, peer=False)
    sparse = partial(_attention, function=blocksparse_attention, canonicalise=_pattern_call)
    sdpa = partial(_attention, function=scaled_dot_product_attention)
    return [
        flash("causal", "B1 T1024 H4 D64", causal=True),
        flash("window of 128", "B1 T1024 H4 D64", causal=True, sliding_window=(127, 0)),
        flash("packed documents", "B1 T1024 H4 D64", causal=True, fixed={"mask_info": documents}),
        flash("bias, sinks, cap", "B1 T384 H4 D64", bias=True, sinks=True, logits_soft_cap=20.0, peer=False),
        flash("dropout", "B1 T256 H4 D64", dropout_prob=0.2, dropout_seed=7, peer=False),
        half("causal, GQA", "B2 T512 H8 Hkv2 D64", dtype="bfloat16", causal=True),
        half("T != S, Dv != D", "B2 T129 S417 H4 Hkv1 D40 Dv72", dtype="float16"),
        sparse("local-stride pattern", "B1 T1024 H4 D64", dtype="bfloat16", fixed={"block_mask": stride}),
        sdpa("causal", "B1 T512 H8 D64", dtype="bfloat16", causal=True),
    ]


# Paged ------------------------------------------------------------------------------------------------------


def _read(call: Call, dtype: Any) -> jax.Array:
    return paged_reference(call, dtype)["out"][0]


def _paged_cases() -> list[Case]:
    """Three sequences of up to 250 keys in permuted pages of 16 tokens; four query heads for each of two key heads."""
    lens, pages, size, heads = jnp.array([250, 0, 100]), 48, 16, 2
    table = jnp.asarray(np.random.default_rng(0).permutation(pages).reshape(3, size).astype(np.int32))
    query, cache = (3, 4 * heads, 64), (pages, size, heads, 64)
    caches = {"key_cache": cache, "value_cache": cache}
    batch = {"context_lens": lens, "block_tables": table}
    mixed = {**batch, "query_start_loc": jnp.array([0, 1, 1, 20]), "num_seqs": jnp.int32(3)}
    chunk = {"context_len": jnp.int32(250), "page_indices": table[0]}
    flat, whole = (pages * size, heads, 64), (3, 250, heads, 64)
    spans = {"sequence_start": jnp.array([9, 0, 0]), "sequence_end": lens}

    def case(name: str, function: Any, call: Any, dtype: str, arrays: Any, fixed: Any, **static: Any) -> Case:
        return Case(name, function, call, _read, None, dtype, arrays, fixed, static, differentiable=False)

    return [
        case("decode", page_attention, paged_calls.page_call, "float32", {"query": query, **caches}, batch),
        case(
            "decode, window of 64", page_attention, paged_calls.page_call, "bfloat16",
            {"query": query, **caches}, batch, sliding_window=64,
        ),
        case(
            "mixed batch", ragged_page_attention, paged_calls.ragged_page_call, "bfloat16",
            {"queries": (24, *query[1:]), "kv_pages": (pages, size, 2 * heads, 64)}, mixed,
        ),
        case(
            "chunk of 50", prefill_page_attention, paged_calls.prefill_call, "bfloat16",
            {"query": (50, *query[1:]), **caches}, chunk,
        ),
        case(
            "pages of 16", decode_attention, paged_calls.decode_call, "bfloat16",
            {"query": query, "key_buffer": flat, "value_buffer": flat}, {"req_to_tokens": table, "seq_lens": lens},
            page_size=size,
        ),
        case(
            "starts and ends", ragged_decode_attention, paged_calls.ragged_decode_call, "bfloat16",
            {"query": query, "key": whole, "value": whole}, spans,
        ),
    ]  # fmt: skip


# Mean pooling -----------------------------------------------------------------------------------------------


def _pooled(call: Call, dtype: Any) -> jax.Array:
    return pooling_reference.mean_pooling(call).astype(dtype)


def _pooling(name: str, shape: tuple[int, ...], dtype: str, fixed: Any = (), **static: Any) -> Case:
    trained = {"x": shape}
    return Case(name, mean_pooling, pooling_spec.canonicalise, _pooled, None, dtype, trained, dict(fixed), dict(static))


def _pooling_cases() -> list[Case]:
    ends = jnp.array([0, 100, 101, 500])
    return [
        _pooling("chunks of 32", (2, 500, 4, 64), "float32", chunk_size=32),
        _pooling("packed sequences", (1, 512, 4, 64), "bfloat16", {"cu_seqlens": ends}, chunk_size=16),
    ]


def all_cases() -> list[Case]:
    """Every case, in the order shown."""
    return [*_softmax_cases(), *_paged_cases(), *_pooling_cases()]
