"""What the delta rule's functions, and Mamba-2, are called with on the command line."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.family import PublicFunction, struct
from ejkernel.kernels.linear.delta.members import product_call, rwkv7_call
from ejkernel.kernels.linear.delta.spec import canonicalise, kimi_call

DELTA_RULES = {
    "gated_delta_rule": PublicFunction("ejkernel.modules", canonicalise),
    "kimi_delta_attention": PublicFunction("ejkernel.modules", kimi_call),
    "gated_delta_product": PublicFunction("ejkernel.modules", product_call),
    "rwkv7_attention": PublicFunction("ejkernel.modules", rwkv7_call),
}
# of a gated delta product, where nothing says how many
WRITES = 2


def delta_arguments(
    operation: str,
    B: int,
    T: int,
    H: int,
    key_heads: int | None,
    D: int,
    Dv: int,
    dtype: str,
    documents: int | None,
    decays: str | None,
    state: bool,
) -> dict[str, Any]:
    """From sizes to the arguments of one of the delta rule's functions."""
    if operation in ("kimi_delta_attention", "rwkv7_attention") and decays not in (None, "gk"):
        raise ValueError(f"{operation} has decays of channels, gk")
    shapes = {"g": (B, T, H), "gk": (B, T, H, D), "none": None}
    default = "gk" if operation == "kimi_delta_attention" else "g"
    if (decays or default) not in shapes:
        raise ValueError(f"decays {decays} are unknown; the delta rule has {', '.join(shapes)}")
    sequences = _sequences(B, H, D, Dv, documents, state)
    Hk = key_heads or H
    if operation == "rwkv7_attention":
        if Hk != H:
            raise ValueError(f"rwkv7_attention has as many heads of keys as of values, {H}")
        return {name: struct(dtype, B, T, H, D) for name in "rwkab"} | {"v": struct(dtype, B, T, H, Dv)} | sequences
    writes = (WRITES,) if operation == "gated_delta_product" else ()
    shape = shapes[decays or default]
    return {
        "query": struct(dtype, B, T, Hk, D),
        "key": struct(dtype, B, T, *writes, Hk, D),
        "value": struct(dtype, B, T, *writes, H, Dv),
        "g": None if shape is None else struct("float32", *shape),
        "beta": struct(dtype, B, T, *writes, H),
        **sequences,
    }


def mamba2_arguments(
    B: int, T: int, H: int, groups: int | None, D: int, Dv: int, dtype: str, documents: int | None, state: bool
) -> dict[str, Any]:
    """From sizes to the arguments of `mamba2_attention`: D numbers of a state, Dv channels of a head."""
    keys = struct(dtype, B, T, groups or 1, D)
    steps = {"x": struct(dtype, B, T, H, Dv), "dt": struct("float32", B, T, H), "A": struct("float32", H)}
    return steps | {"B": keys, "C": keys} | _sequences(B, H, D, Dv, documents, state)


def _sequences(B: int, H: int, D: int, Dv: int, documents: int | None, state: bool) -> dict[str, Any]:
    return {
        "initial_state": struct("float32", documents or B, H, D, Dv) if state else None,
        "cu_seqlens": None if documents is None else jax.ShapeDtypeStruct((documents + 1,), jnp.int32),
        "return_state": state or None,
    }
