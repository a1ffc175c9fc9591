"""A few representative calls of softmax attention, each with its definition."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.family import Check
from ejkernel.kernels.softmax.blocks import pattern_mask
from ejkernel.kernels.softmax.reference import reference, visible, weighted_values, weights
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Call
from ejkernel.types import BlockPattern, MaskInfo


def pattern_call(*, query: Any, key: Any, value: Any, block_mask: Any) -> Call:
    """The canonical call of `blocksparse_attention`."""
    mask = pattern_mask(query, key, block_mask, None, None)
    return canonicalise(query, key, value, mask_info=mask, causal=True)


def dot_product_call(*, query: Any, key: Any, value: Any, is_causal: bool) -> Call:
    """The canonical call of `dot_product_attention`."""
    return canonicalise(query, key, value, causal=is_causal)


def _defined(call: Call, dtype: Any) -> jax.Array:
    return reference(call, dtype)["out"]


def _defined_with_weights(call: Call, dtype: Any) -> tuple[jax.Array, jax.Array]:
    probabilities = weights(call, dtype)[0].astype(dtype)
    return weighted_values(call, probabilities).astype(dtype), probabilities


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


def attention(
    name: str,
    dims: str,
    *,
    dtype: str,
    operation: str = "flash_attention",
    peer: bool = True,
    bias: bool = False,
    sinks: bool = False,
    fixed: Any = (),
    **static: Any,
) -> Check:
    """A check from sizes such as "B2 T512 H8 Hkv2 D64"; S, Hkv and Dv default to T, H and D."""
    size = {word.rstrip("0123456789"): int(word.lstrip("BTSHDkv")) for word in dims.split()}
    B, T, H, D = (size[letter] for letter in "BTHD")
    S, Hkv, Dv = size.get("S", T), size.get("Hkv", H), size.get("Dv", D)
    trained = {"query": (B, T, H, D), "key": (B, S, Hkv, D), "value": (B, S, Hkv, Dv)}
    trained |= {"bias": (1, H, T, S)} if bias else {}
    trained |= {"softmax_aux": (H,)} if sinks else {}
    return Check(name, operation, _defined, dtype, trained, dict(fixed), static, _jax_nn if peer else None)


def _documents(length: int, *lengths: int) -> MaskInfo:
    """Packed documents of those lengths; the rest is padding."""
    ids = [jnp.full(n, i) for i, n in enumerate(lengths)] + [jnp.full(length - sum(lengths), -1)]
    return MaskInfo.from_segments(jnp.concatenate(ids)[None])


def checks() -> list[Check]:
    """Every check, in the order shown. XLA's tiles are of 512 where a query sees most keys, all others are smaller.

    One float32 check has head dim 64; the others have 32, which a GPU's kernels compile for in half the time.
    """
    documents = _documents(500, 150, 17, 166, 125)
    stride = BlockPattern.local_stride(4, num_blocks=8, local_blocks=2, vert_stride=4, block_size=64)
    # "highest": on a GPU or TPU float32 matmuls are otherwise rounded, and the definition's are not
    flash = partial(attention, dtype="float32", precision="highest")
    half = partial(attention, peer=False)
    sparse = partial(attention, operation="blocksparse_attention", dtype="bfloat16")
    sdpa = partial(attention, operation="scaled_dot_product_attention", dtype="bfloat16")
    return [
        flash("causal", "B1 T1000 H2 D64", causal=True),
        flash("window of 128", "B1 T1024 H2 D32", causal=True, sliding_window=(127, 0)),
        flash("packed documents", "B1 T500 H4 D32", causal=True, fixed={"mask_info": documents}),
        flash("bias, sinks, cap", "B1 T384 H4 D32", bias=True, sinks=True, logits_soft_cap=20.0, peer=False),
        flash("dropout", "B1 T256 H4 D32", dropout_prob=0.2, dropout_seed=7, peer=False),
        half("causal, GQA", "B2 T500 H4 Hkv2 D64", dtype="bfloat16", causal=True),
        half("T != S, Dv != D", "B2 T129 S417 H4 Hkv1 D40 Dv72", dtype="float16"),
        sparse("local-stride pattern", "B1 T512 H4 D64", fixed={"block_mask": stride}),
        sdpa("causal", "B1 T1000 H2 D64", causal=True),
        attention("causal", "B2 T500 H4 Hkv2 D64", dtype="bfloat16", operation="dot_product_attention", is_causal=True),
        replace(
            attention("causal", "B1 T200 H2 D32", dtype="bfloat16", operation="attention", peer=False, causal=True),
            definition=_defined_with_weights,
        ),
    ]
