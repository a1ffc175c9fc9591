"""A few representative calls of linear attention, each with its definition."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.family import Arrays, Check
from ejkernel.kernels.linear.reference import reference
from ejkernel.ops import Call

GATES = ("g", "g_gamma", "gk", "gv")


class _Decaying(Check):
    """A check whose log decays are negative."""

    def arrays(self) -> Arrays:
        drawn = super().arrays()
        # by numpy: JAX would compile a program for each shape
        return drawn | {name: jnp.asarray(-abs(np.asarray(drawn[name])) / 8) for name in drawn if name in GATES}


def _defined(call: Call, dtype: Any) -> tuple[jax.Array, ...]:
    """As many outputs as the public function has, in its shapes."""
    results = reference(call, dtype)
    state = results["state"][0] if "cu_seqlens" in call else results["state"][:, 0]
    return (results["out"], state) if call.spec.with_state else (results["out"],)


def check(name: str, operation: str, dims: str, dtype: str, *gates: str, fixed: Any = (), **static: Any) -> Check:
    """A check from sizes such as "B2 T130 H4 D64"; with a number N of states if one is returned."""
    size = {word.rstrip("0123456789"): int(word.lstrip("BTHDvN")) for word in dims.split()}
    B, T, H, D = (size[letter] for letter in "BTHD")
    Dv, N = size.get("Dv", D), size.get("N", B)
    shapes = {"g": (B, T, H), "gk": (B, T, H, D), "gv": (B, T, H, Dv)}
    if operation == "gla_attention":
        shapes["g"] = (B, T, H, D)
    trained = {"query": (B, T, H, D), "key": (B, T, H, D), "value": (B, T, H, Dv)}
    trained |= {gate: shapes[gate] for gate in gates}
    trained |= {"initial_state": (N, H, D, Dv)} if static.get("return_state") else {}
    return _Decaying(name, operation, _defined, dtype, trained, dict(fixed), static)


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
        replace(
            check("a decode step", "lightning_attention", "B4 T1 H2 D64", "bfloat16", return_state=True, **layer),
            differentiable=False,
        ),
    ]  # fmt: skip
