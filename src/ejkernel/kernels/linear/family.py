"""What the family of linear attention says about itself: its functions, their sizes, which are worth tuning."""

from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp

from ejkernel.family import Dtype, Family, Option, PublicFunction, Roofline, Size, TypicalCall, check_documents, struct
from ejkernel.kernels.linear.checks import GATES, checks
from ejkernel.kernels.linear.delta.family import DELTA_RULES, delta_arguments, mamba2_arguments
from ejkernel.kernels.linear.spec import canonicalise, gla_call, lightning_call, mamba2_call


def arguments(
    operation: str,
    *,
    batch: Size = 1,
    length: Size = 1024,
    heads: Size = 8,
    key_heads: Annotated[
        int | None, Option("Of the delta rule and Mamba-2, heads of queries and keys; default: as many.", least=1)
    ] = None,
    dim: Annotated[int, Option("Head dimension of queries and keys.", least=1)] = 64,
    value_dim: Annotated[int | None, Option("Head dimension of values; default: of keys.", least=1)] = None,
    dtype: Dtype = "bfloat16",
    documents: Annotated[int | None, Option("Packed documents in a row.", least=1)] = None,
    decays: Annotated[str | None, Option(f"Of linear attention, some of {','.join(GATES)}, with commas.")] = None,
    state: Annotated[bool, Option("Of linear attention, an initial state, and the final one.")] = False,
    reverse: Annotated[bool, Option("From the last token to the first.")] = False,
) -> dict[str, Any]:
    """From sizes and words to the arguments of a public function."""
    B, T, H, D, Dv = batch, length, heads, dim, value_dim or dim
    if documents is not None and B != 1:
        raise ValueError(f"documents are packed into one row; the batch is {B}")
    if documents is not None:
        check_documents(documents, T)
    if operation in DELTA_RULES:
        if reverse:
            raise ValueError(f"{operation} runs from the first token to the last")
        return delta_arguments(operation, B, T, H, key_heads, D, Dv, dtype, documents, decays, state)
    if operation == "mamba2_attention":
        return mamba2_arguments(B, T, H, key_heads, D, Dv, dtype, documents, state)
    if key_heads not in (None, H):
        raise ValueError(f"{operation} has as many heads of keys as of values, {H}")
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


def typical_calls(backend: str, quick: bool) -> list[TypicalCall]:
    """Decays per head and per channel, and a decode step. A CPU gets sizes that it can do."""

    def call(operation: str, batch: int, length: int, more: dict[str, Any], **sizes: Any) -> TypicalCall:
        return TypicalCall((operation,), {"batch": batch, "length": length, **more, **sizes})

    if backend == "cpu":
        length, heads, dim = (128, 2, 16) if quick else (8192, 4, 64)
        sizes: dict[str, Any] = {"heads": heads, "dim": dim, "dtype": "float32"}
        rows, sequences = [(1, length)], 4
    else:
        sizes = {"heads": 16, "dim": 128}
        rows, sequences = [(8, 2048)] if quick else [(8, 2048), (1, 16384)], 64
    names = ("lightning_attention", "gla_attention", "gated_delta_rule", "kimi_delta_attention")
    lightning, gla, delta, kimi = (partial(call, name, more=sizes) for name in names)
    calls = [make(*row) for row in rows for make in (lightning, gla, delta, kimi)]
    calls += [make(sequences, 1, state=True) for make in (lightning, delta)]
    if backend == "cpu":
        return [*calls, lightning(1, length, documents=16)]
    return calls if quick else [*calls, lightning(1, 65536), lightning(1, 16384, documents=16)]


def _roofline(batch: int = 8, length: int = 2048, width: int = 2048) -> Roofline:
    from ejkernel.kernels.linear.pallas_tpu.roofline import table  # loads the kernels for TPUs

    title = f"Linear attention, batch {batch}, {length} tokens, heads * head_dim {width}"
    return Roofline(title, table(batch, length, width))


FAMILY = Family(
    name="linear",
    functions={
        "recurrent_attention": PublicFunction("ejkernel.modules", canonicalise),
        "gla_attention": PublicFunction("ejkernel.modules", gla_call),
        "lightning_attention": PublicFunction("ejkernel.modules", lightning_call),
        "mamba2_attention": PublicFunction("ejkernel.modules", mamba2_call),
        **DELTA_RULES,
    },
    arguments=arguments,
    checks=checks,
    typical_calls=typical_calls,
    roofline=_roofline,
)
