"""cuDNN's fused attention, through JAX's own calls, for exactly the calls it can do."""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.softmax.gradients import output_cotangent
from ejkernel.kernels.softmax.spec import Dimensions, Spec, dimensions
from ejkernel.ops import Call, Implementation


@dataclass(frozen=True)
class Config:
    """cuDNN chooses its own tiles."""


def unsupported(call: Call) -> list[str]:
    spec: Spec = call.spec
    dims = dimensions(call)
    banded = spec.band.lo is not None or spec.band.hi is not None
    hi = _causal(dims)
    head_dim = 256 if call.target.capability >= 90 else 128
    limits = {
        f"dtype {call['query'].dtype}: only bfloat16 and float16": call["query"].dtype == jnp.float32,
        f"head_dim {dims.D}: only multiples of 8 up to {head_dim}": dims.D % 8 != 0 or head_dim < dims.D,
        f"value head_dim {dims.Dv} != {dims.D}": dims.Dv != dims.D,
        "causal or window with T != S: it aligns the starts, not the ends": banded and spec.band.hi == 0 != hi,
        f"band {tuple(spec.band)}: only causal, and windows to the left of it": banded and spec.band.hi not in (0, hi),
        f"band {tuple(spec.band)}: keys must reach the query": spec.band.lo is not None and spec.band.lo > hi,
        "a gradient of lse": spec.with_lse or spec.with_argmax,
        "chunks": spec.chunk is not None,
        "soft cap": spec.soft_cap is not None,
        "the dropout of this library (its bits differ)": spec.dropout > 0,
        f"logits_dtype {spec.logits_dtype}": spec.logits_dtype != "float32",
        "bias": "bias" in call,
        "sinks": "sinks" in call,
        "segments, lengths and packed sequences": "q_segments" in call,
        "explicit positions": "q_positions" in call,
        "dense masks": "mask" in call,
        "block patterns": "pattern" in call,
    }
    return [reason for reason, holds in limits.items() if holds]


def default_config(call: Call) -> Config:
    return Config()


def search_space(call: Call) -> list[Config]:
    return []


def _causal(dims: Dimensions) -> int:
    """How far a query sees where it sees no later key than itself, the starts of queries and keys being aligned."""
    return dims.T - dims.S


def _options(call: Call) -> dict[str, Any]:
    """What forward and backward say alike; cuDNN counts the query's own position in the window."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    spec, hi = call.spec, _causal(dimensions(call))
    return {
        "scale": spec.scale,
        "mask_type": fused.MaskType.CAUSAL if spec.band.hi == hi else fused.MaskType.NO_MASK,
        "sliding_window_length": None if spec.band.lo is None else hi + 1 - spec.band.lo,
    }


def forward(call: Call, config: Config) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    # jax.nn.dot_product_attention calls this too, but rounds the lse it returns to the inputs' dtype (0.10 to 0.12)
    from jax._src.cudnn import fused_attention_stablehlo as fused

    qkv = call["query"], call["key"], call["value"]
    results: Any = fused.dot_product_attention(*qkv, **_options(call), return_residual=True)
    outputs: dict[str, jax.Array] = {"out": results[0], "lse": results[1]}
    return outputs, outputs


def backward(call: Call, residuals: Any, cotangents: Any, config: Config) -> dict[str, jax.Array]:
    # JAX has no public call for the backward alone (0.10 to 0.12); through jax.vjp the forward would run twice.
    # No flag for determinism here: XLA overwrites force_deterministic with what the program's options say
    from jax._src.cudnn import fused_attention_stablehlo as fused

    none = jnp.zeros(0, call["query"].dtype)
    # JAX 0.12 asks for a function of the scores
    wanted = inspect.signature(fused._dot_product_attention_bwd_impl).parameters
    unmodified = {"score_mod": None} if "score_mod" in wanted else {}
    gradients = fused._dot_product_attention_bwd_p_wrapper.bind(
        call["query"],
        call["key"],
        call["value"],
        *([none] * 7),  # bias, lengths, offsets and page tables
        residuals["lse"],
        residuals["out"],
        output_cotangent(residuals, cotangents),
        **_options(call),
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        layout=fused.AttentionLayout.BTNH.value,
        **unmodified,
    )
    return dict(zip(("query", "key", "value"), gradients, strict=True))


# dq is added in any order
IMPLEMENTATION = Implementation(
    Config, unsupported, default_config, search_space, forward, backward, deterministic=False, deterministic_by_xla=True
)
