"""A few representative calls of linear attention, each with its definition."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.family import Arrays, Check
from ejkernel.kernels.linear.delta.reference import reference as delta_reference
from ejkernel.kernels.linear.reference import reference
from ejkernel.kernels.linear.spec import at_last_write
from ejkernel.ops import Call

GATES = ("g", "g_gamma", "gk", "gv")
# of decays, and of what is about as much: RWKV-7's `w`, Mamba-2's `A`
NEGATIVE = (*GATES, "w", "A")


class _Decaying(Check):
    """A check whose log decays are negative, and of the delta rule keys of length 1 and betas between 0 and 1."""

    def arrays(self) -> Arrays:
        drawn = super().arrays()
        # by numpy: JAX would compile a program for each shape
        host = {name: np.asarray(x, np.float32) for name, x in drawn.items()}
        changed = {name: -abs(host[name]) / 8 for name in drawn if name in NEGATIVE}
        changed |= {name: 1 / (1 + np.exp(-host[name])) for name in drawn if name in ("beta", "dt")}
        if "beta" in drawn:
            changed["key"] = host["key"] / np.linalg.norm(host["key"], axis=-1, keepdims=True)
        if "a" in drawn:
            changed["a"] = host["a"] / np.linalg.norm(host["a"], axis=-1, keepdims=True)
            changed["b"] = -changed["a"] / 2
        return drawn | {name: jnp.asarray(x, drawn[name].dtype) for name, x in changed.items()}


def _defined(call: Call, dtype: Any, definition: Any = reference, writes: int = 1) -> tuple[jax.Array, ...]:
    """As many outputs as the public function has, in its shapes, where every token is so many of the call's."""
    results = definition(call, dtype)
    state = results["state"][0] if "cu_seqlens" in call else results["state"][:, 0]
    out = at_last_write(results, writes)["out"]
    return (out, state) if call.spec.with_state else (out,)


_DEFINITIONS = {
    **dict.fromkeys(("gated_delta_rule", "kimi_delta_attention"), partial(_defined, definition=delta_reference)),
    **dict.fromkeys(
        ("gated_delta_product", "rwkv7_attention"), partial(_defined, definition=delta_reference, writes=2)
    ),
}


def check(name: str, operation: str, dims: str, dtype: str, *gates: str, fixed: Any = (), **static: Any) -> Check:
    """A check from sizes such as "B2 T130 H4 D64"; with a number N of states if one is returned."""
    size = {word.rstrip("0123456789"): int(word.lstrip("BTHkDvN")) for word in dims.split()}
    B, T, H, D = (size[letter] for letter in "BTHD")
    Dv, N = size.get("Dv", D), size.get("N", B)
    shapes = {"g": (B, T, H), "gk": (B, T, H, D), "gv": (B, T, H, Dv)}
    if operation in ("gla_attention", "kimi_delta_attention"):
        shapes["g"] = (B, T, H, D)
    shapes["beta"] = (B, T, H)
    Hk = size.get("Hk", H)
    trained = {"query": (B, T, Hk, D), "key": (B, T, Hk, D), "value": (B, T, H, Dv)}
    trained |= {gate: shapes[gate] for gate in gates}
    trained |= {"initial_state": (N, H, D, Dv)} if static.get("return_state") else {}
    defined = _DEFINITIONS.get(operation, _defined)
    return _Decaying(name, operation, defined, dtype, trained, dict(fixed), static)


def _of_shapes(name: str, operation: str, **shapes: tuple[int, ...]) -> Check:
    return _Decaying(name, operation, _DEFINITIONS.get(operation, _defined), "bfloat16", shapes)


def checks() -> list[Check]:
    """Every check, in the order shown."""
    ends = {"cu_seqlens": jnp.array([0, 9, 9, 75, 82])}
    layer = {"layer_idx": 2, "num_layers": 12}
    return [
        check(
            "every channel, states", "recurrent_attention", "B1 T70 H2 D40 Dv24", "float32", "g", "gk", "gv",
            return_state=True,
        ),
        check(
            "packed sequences, reverse", "recurrent_attention", "B1 T90 H2 D64 N4", "bfloat16", "gk",
            fixed=ends, return_state=True, reverse=True,
        ),
        check("per channel", "gla_attention", "B1 T70 H2 D64", "bfloat16", "g"),
        check("layer 2 of 12", "lightning_attention", "B1 T70 H2 D64", "bfloat16", **layer),
        check("shared keys", "gated_delta_rule", "B1 T70 H4 Hk2 D64", "bfloat16", "g", "beta", return_state=True),
        check("packed, D96 x 192", "gated_delta_rule", "B1 T90 H2 D96 Dv192 N4", "float32", "g", "beta", fixed=ends),
        check("per channel", "kimi_delta_attention", "B1 T70 H2 D64", "bfloat16", "g", "beta"),
        _of_shapes("two writes", "gated_delta_product", key=(1, 40, 2, 1, 16), value=(1, 40, 2, 2, 16),
                   query=(1, 40, 1, 16), beta=(1, 40, 2, 2)),
        _of_shapes("a and b", "rwkv7_attention", **dict.fromkeys("rwkvab", (1, 40, 2, 16))),
        _of_shapes("shared B and C", "mamba2_attention", x=(1, 70, 4, 16), dt=(1, 70, 4), A=(4,),
                   B=(1, 70, 1, 32), C=(1, 70, 1, 32)),
        replace(
            check("a decode step", "gated_delta_rule", "B4 T1 H2 D64", "bfloat16", "g", "beta", return_state=True),
            differentiable=False,
        ),
        replace(
            check("a decode step", "lightning_attention", "B4 T1 H2 D64", "bfloat16", return_state=True, **layer),
            differentiable=False,
        ),
    ]  # fmt: skip
