"""cuDNN's fused attention, through JAX's own calls, for exactly the calls it can do."""

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.softmax.gradients import output_cotangent
from ejkernel.kernels.softmax.other_packages import missing_options
from ejkernel.kernels.softmax.spec import Dimensions, Spec, dimensions
from ejkernel.ops import Call, Implementation
from ejkernel.ops.private_jax import cudnn_attention, cudnn_takes_offsets

Arrays = dict[str, jax.Array]

# of packed sequences it keeps T log-sum-exps each: with more, that is several times the query
MOST_SEQUENCES = 128
# before JAX 0.11.1 the offsets of packed keys are counted in query heads (jax #39521), without an error
FINDS_KEYS = jax.__version_info__ >= (0, 11, 1)


@dataclass(frozen=True)
class Config:
    """cuDNN chooses its own tiles."""


def unsupported(call: Call) -> list[str]:
    spec: Spec = call.spec
    dims = dimensions(call)
    banded = spec.band.lo is not None or spec.band.hi is not None
    hi = _causal(dims)
    head_dim = 256 if call.target.capability >= 90 else 128
    packed = "q_offsets" in call
    limits = {
        f"dtype {call['query'].dtype}: only bfloat16 and float16": call["query"].dtype == jnp.float32,
        f"head_dim {dims.D}: only multiples of 8 up to {head_dim}": dims.D % 8 != 0 or head_dim < dims.D,
        f"value head_dim {dims.Dv} != {dims.D}": dims.Dv != dims.D,
        "causal or window with T != S: it aligns the starts, not the ends": banded and spec.band.hi == 0 != hi,
        f"band {tuple(spec.band)}: only causal, and windows to the left of it": banded and spec.band.hi not in (0, hi),
        f"band {tuple(spec.band)}: keys must reach the query": spec.band.lo is not None and spec.band.lo > hi,
        f"scale {spec.scale}: only positive ones, others give nan": spec.scale <= 0.0,
    } | missing_options(call, "the dropout of this library (its bits differ)")
    reasons = [reason for reason, holds in limits.items() if holds]
    return reasons + (_unsupported_packing(call, dims) if packed else [])


def _unsupported_packing(call: Call, dims: Dimensions) -> list[str]:
    """What of packed sequences JAX's call of cuDNN cannot do."""
    sequences = call["q_offsets"].shape[1] - 1
    words = dims.B * max(dims.T, dims.S) * dims.H * dims.D
    limits = {
        f"packed sequences on compute capability {call.target.capability / 10}: only 9.0 and later": (
            call.target.capability < 90
        ),
        "windows of packed sequences: gradients of float16 came out less exact than they should": (
            call.spec.band.lo is not None
        ),
        "packed keys of other lengths than the queries'": "kv_offsets" in call or dims.T != dims.S,
        f"{sequences} packed sequences: only up to {MOST_SEQUENCES}": sequences > MOST_SEQUENCES,
        f"{words} numbers in packed queries: only below 2^31": words >= 2**31,
        f"JAX {jax.__version__}: its call of cuDNN takes no packed sequences": not cudnn_takes_offsets(),
        f"packed sequences with G={dims.G}: JAX {jax.__version__} looks for their keys in the wrong place": (
            dims.G > 1 and not FINDS_KEYS
        ),
    }
    return [reason for reason, holds in limits.items() if holds]


def _causal(dims: Dimensions) -> int:
    """How far a query sees where it sees no later key than itself, the starts of queries and keys being aligned."""
    return dims.T - dims.S


def _options(call: Call) -> dict[str, Any]:
    """What forward and backward share; cuDNN counts the query's own position in the window."""
    fused = cudnn_attention()
    spec, hi = call.spec, _causal(dimensions(call))
    return {
        "scale": spec.scale,
        "mask_type": fused.MaskType.CAUSAL if spec.band.hi == hi else fused.MaskType.NO_MASK,
        "sliding_window_length": None if spec.band.lo is None else hi + 1 - spec.band.lo,
    }


# Packed sequences -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """The packed sequences of a call, at least two a row: JAX takes a single one for no packing.

    Attributes:
        ids: the sequence of each token (B, T), negative beyond the last one.
        starts: (B, M), from the row's first token.
        lengths: (B, M).
    """

    ids: jax.Array
    starts: jax.Array
    lengths: jax.Array

    @classmethod
    def of(cls, call: Call) -> "Packing | None":
        if "q_offsets" not in call:
            return None
        dims, offsets = dimensions(call), call["q_offsets"]
        offsets = jnp.broadcast_to(offsets, (dims.B, offsets.shape[1]))
        if offsets.shape[1] == 2:
            offsets = jnp.pad(offsets, ((0, 0), (0, 1)), mode="edge")
        ids = jnp.broadcast_to(call["q_segments"], (dims.B, dims.T))
        return cls(ids, offsets[:, :-1], jnp.diff(offsets))

    def operands(self) -> dict[str, jax.Array]:
        """As JAX's call names them; it wants no end of the last sequence, but room for it."""
        offsets = jnp.pad(self.starts, ((0, 0), (0, 1)), constant_values=-1)
        return {"q_seqlen": self.lengths, "kv_seqlen": self.lengths, "q_offsets": offsets, "kv_offsets": offsets}

    def zero_beyond(self, x: jax.Array) -> jax.Array:
        """(B, T, H, D) without the tokens of no sequence: cuDNN writes nothing there, and what it reads there stays."""
        return jnp.where((self.ids >= 0)[..., None, None], x, 0)

    def by_token(self, stats: jax.Array) -> jax.Array:
        """The log-sum-exp (B, H, T) from cuDNN's (B * M, H, T): sequence by sequence, each from its first token."""
        B, M = self.starts.shape
        _, H, T = stats.shape
        ids = jnp.maximum(self.ids, 0)
        at = jnp.arange(T, dtype=jnp.int32) - jnp.take_along_axis(self.starts, ids, axis=1)  # (B, T)
        rows, heads = jnp.arange(B)[:, None, None], jnp.arange(H)[None, :, None]
        lse = stats.reshape(B, M, H, T)[rows, ids[:, None], heads, jnp.maximum(at, 0)[:, None]]
        return jnp.where((self.ids >= 0)[:, None], lse, -jnp.inf)

    def by_sequence(self, lse: jax.Array) -> jax.Array:
        """cuDNN's (B * M, H, T) from the log-sum-exp (B, H, T)."""
        _, H, T = lse.shape
        index = jnp.arange(T, dtype=jnp.int32)
        at = jnp.minimum(self.starts[..., None] + index, T - 1)[:, :, None]  # (B, M, 1, T)
        stats = jnp.take_along_axis(lse[:, None], at, axis=3)
        inside = (index < self.lengths[..., None])[:, :, None]
        return jnp.where(inside, stats, 0.0).reshape(-1, H, T)


# The two passes ---------------------------------------------------------------------------------------------


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    # jax.nn.dot_product_attention calls this too, but rounds the lse it returns to the inputs' dtype (0.10 to 0.12)
    fused = cudnn_attention()
    attend: Any = partial(fused.dot_product_attention, **_options(call), return_residual=True)
    qkv = [call["query"], call["key"], call["value"]]
    packing = Packing.of(call)
    if packing is None:
        out, lse = attend(*qkv)
    else:
        out, stats = attend(*qkv, **packing.operands())
        out, lse = packing.zero_beyond(out), packing.by_token(stats)
    outputs: Arrays = {"out": out, "lse": lse}
    return outputs, outputs


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    # JAX has no public call for the backward alone (0.10 to 0.12); through jax.vjp the forward would run twice.
    # No flag for determinism here: XLA overwrites force_deterministic with what the program's options say
    fused = cudnn_attention()
    none = jnp.zeros(0, call["query"].dtype)
    lengths, lse, packing = [none] * 4, residuals["lse"], Packing.of(call)
    if packing is not None:
        lengths, lse = list(packing.operands().values()), packing.by_sequence(lse)
    # JAX 0.12 asks for a function of the scores
    wanted = inspect.signature(fused._dot_product_attention_bwd_impl).parameters
    unmodified = {"score_mod": None} if "score_mod" in wanted else {}
    gradients = fused._dot_product_attention_bwd_p_wrapper.bind(
        *(call["query"], call["key"], call["value"], none),  # no bias
        *lengths,
        *(none, none),  # no page tables
        *(lse, residuals["out"], output_cotangent(residuals, cotangents)),
        **_options(call),
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        layout=fused.AttentionLayout.BTNH.value,
        **unmodified,
    )
    if packing is not None:
        gradients = [packing.zero_beyond(x) for x in gradients]
    return dict(zip(("query", "key", "value"), gradients, strict=True))


# dq is added in any order
IMPLEMENTATION = Implementation(
    Config,
    unsupported,
    lambda call: Config(),
    lambda call: [],
    forward,
    backward,
    deterministic=False,
    deterministic_by_xla=True,
)
