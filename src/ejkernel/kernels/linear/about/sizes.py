"""From sizes and words to the arguments of linear attention."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp

from ejkernel.about.sizes import Dtype, Option, Size, struct

GATES = ("g", "g_gamma", "gk", "gv")


def arguments(
    operation: str,
    *,
    batch: Size = 1,
    length: Size = 1024,
    heads: Size = 8,
    dim: Annotated[int, Option("Head dimension of queries and keys.", least=1)] = 64,
    value_dim: Annotated[int | None, Option("Head dimension of values; default: of keys.", least=1)] = None,
    dtype: Dtype = "bfloat16",
    documents: Annotated[int | None, Option("Packed documents in a row.", least=1)] = None,
    decays: Annotated[str | None, Option(f"Of linear attention, some of {','.join(GATES)}, with commas.")] = None,
    state: Annotated[bool, Option("Of linear attention, an initial state, and the final one.")] = False,
    reverse: Annotated[bool, Option("From the last token to the first.")] = False,
) -> dict[str, Any]:
    """Arguments of a public function."""
    B, T, H, D, Dv = batch, length, heads, dim, value_dim or dim
    if documents is not None and B != 1:
        raise ValueError(f"documents are packed into one row; the batch is {B}")
    shapes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, D), "gv": (B, T, H, Dv)}
    if operation == "gla_attention":
        shapes["g"] = (B, T, H, D)
        decays = "g" if decays is None else decays
    layer = {"layer_idx": 0, "num_layers": 12} if operation == "lightning_attention" else {}
    return {
        "query": struct(dtype, B, T, H, D),
        "key": struct(dtype, B, T, H, D),
        "value": struct(dtype, B, T, H, Dv),
        **{name: struct(dtype, *shapes[name]) for name in _gates(decays)},
        "initial_state": struct("float32", documents or B, H, D, Dv) if state else None,
        "cu_seqlens": None if documents is None else jax.ShapeDtypeStruct((documents + 1,), jnp.int32),
        "return_state": state or None,
        "reverse": reverse or None,
        **layer,
    }


def _gates(decays: str | None) -> list[str]:
    names = [name.strip() for name in (decays or "").split(",") if name.strip()]
    if unknown := [name for name in names if name not in GATES]:
        raise ValueError(f"decays {', '.join(unknown)} are unknown; there are {', '.join(GATES)}")
    return names
