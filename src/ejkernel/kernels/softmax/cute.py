"""FlashAttention-4's kernels, through the package fa4-jax, for exactly the calls they can do.

Nothing else uses that package. Seen in 0.1; `AttnConfig`, `fa4_fwd_p` and `fa4_vjp_p` are not in its documentation. A
public call of its backward alone would replace them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.softmax.gradients import output_cotangent
from ejkernel.kernels.softmax.other_packages import missing_options
from ejkernel.kernels.softmax.spec import Spec, dimensions
from ejkernel.ops import Call, Implementation, fusion_barrier

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Config:
    """The package chooses its own tiles."""


def unsupported(call: Call) -> list[str]:
    spec: Spec = call.spec
    dims, capability = dimensions(call), call.target.capability
    lo, hi = spec.band
    widest = 128 if capability // 10 == 10 else 256
    packed = "q_offsets" in call
    ahead = 0 if packed else dims.S - dims.T  # keys before the first query's own position
    limits = {
        f"compute capability {capability / 10}: only 8.x, 9.x, 10.x and 12.x": capability // 10 not in (8, 9, 10, 12),
        f"dtype {call['query'].dtype}: only bfloat16 and float16": call["query"].dtype == jnp.float32,
        f"head_dim {dims.D}: only multiples of 8 up to {widest}": dims.D % 8 != 0 or widest < dims.D,
        f"value head_dim {dims.Dv}: only multiples of 8 up to {widest}": dims.Dv % 8 != 0 or widest < dims.Dv,
        # tiles of keys this narrow leave no room for the output's
        f"value head_dim {dims.Dv} above twice {dims.D} on 12.x": capability // 10 == 12 and dims.Dv > 2 * dims.D,
        f"band {tuple(spec.band)}: it must hold the query's own position": (lo or 0) > 0 or (hi or 0) < 0,
        # it reads them and multiplies by zero, which does not remove a nan
        f"queries that see no key, T={dims.T} S={dims.S}": hi is not None and ahead + hi < 0,
        f"keys that no query sees, T={dims.T} S={dims.S}": lo is not None and ahead + lo > 0,
        f"softmax_scale {spec.scale}: only above 0": spec.scale <= 0,
    } | missing_options(call)
    return [reason for reason, holds in limits.items() if holds]


def _options(call: Call) -> Any:
    """What forward and backward share. Like ours, its bands align the ends of queries and keys."""
    from fa4_jax.attention import AttnConfig

    lo, hi = call.spec.band
    causal = lo is None and hi == 0
    local = not causal and (lo is not None or hi is not None)
    return AttnConfig(
        causal=causal,
        local=local,
        window=(None if lo is None else -lo, hi) if local else (None, None),
        scale=call.spec.scale,
        mask=None,
        backend="cute",
        varlen="q_offsets" in call,
    )


def _lengths(call: Call) -> tuple[jax.Array, ...]:
    """Packed sequences of the whole batch: where those of queries and keys begin, then their lengths.

    A row has N + 2: past its last offset come queries that see no key, then keys that no query sees, so that the
    kernels write zeros there too.
    """
    if "q_offsets" not in call:
        return ()
    dims = dimensions(call)
    q = call["q_offsets"]  # (B|1, N + 1)
    k = call["kv_offsets" if "kv_offsets" in call else "q_offsets"]
    starts = (jnp.pad(q, ((0, 0), (0, 1)), constant_values=dims.T), jnp.pad(k, ((0, 0), (0, 1)), mode="edge"))

    def whole(starts: jax.Array, length: int) -> jax.Array:
        rows = jnp.arange(dims.B, dtype=jnp.int32)[:, None] * length + starts
        return jnp.append(rows.reshape(-1), jnp.int32(dims.B * length))

    ends = [whole(rows, length) for rows, length in zip(starts, (dims.T, dims.S), strict=True)]
    return (*ends, *(jnp.diff(x) for x in ends))


def _tokens(call: Call, *arrays: jax.Array) -> list[jax.Array]:
    """Arrays (B, T, H, D) as the kernels take them: packed sequences are of all rows together, (B * T, H, D)."""
    return [x.reshape(-1, *x.shape[2:]) for x in arrays] if "q_offsets" in call else list(arrays)


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    from fa4_jax.attention import fa4_fwd_p

    B, T, _, H, _, _, Dv = dimensions(call)
    qkv = _tokens(call, call["query"], call["key"], call["value"])
    kernel = partial(fa4_fwd_p.bind, cfg=_options(call), need_lse=True)
    out, lse = fusion_barrier(kernel)(*qkv, *_lengths(call))
    lse = lse.reshape(H, B, T).swapaxes(0, 1) if "q_offsets" in call else lse
    outputs = {"out": out.reshape(B, T, H, Dv), "lse": lse}
    return outputs, outputs


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    # the package has no public call for the backward alone (0.1); through jax.vjp the forward would run twice
    from fa4_jax.attention import fa4_vjp_p

    names = ("query", "key", "value")
    lse = residuals["lse"]  # (B, H, T)
    lse = lse.swapaxes(0, 1).reshape(lse.shape[1], -1) if "q_offsets" in call else lse
    qkv = _tokens(call, *(call[name] for name in names))
    out, dout = _tokens(call, residuals["out"], output_cotangent(residuals, cotangents))
    kernel = partial(fa4_vjp_p.bind, cfg=_options(call), has_d_lse=False)
    gradients = fusion_barrier(kernel)(*qkv, out, lse, dout, *_lengths(call))
    return {name: x.reshape(call[name].shape) for name, x in zip(names, gradients, strict=True)}


# dq is added in any order, and so are dk and dv of grouped heads
IMPLEMENTATION = Implementation(
    Config, unsupported, lambda call: Config(), lambda call: [], forward, backward, deterministic=False
)
