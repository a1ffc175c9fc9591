"""The canonical call of the delta rule: every check and every default is here."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.checks.arrays import float_array
from ejkernel.checks.options import flag
from ejkernel.kernels.common.batch import Batch, folded
from ejkernel.kernels.linear.sequences import first_states, packing, segmented, without_padding_tokens
from ejkernel.kernels.linear.spec import LAYOUT, of_shape, scaled
from ejkernel.ops import Call, Dims

ARRAYS = {
    "query": Dims("B T Hk D", grad=True, broadcasts=False),
    "key": Dims("B T Hk D", grad=True, broadcasts=False),
    "value": Dims("B T H Dv", grad=True, broadcasts=False),
    "g": Dims("B T H", grad=True, broadcasts=False),
    "gk": Dims("B T H D", grad=True, broadcasts=False),
    "beta": Dims("B T H", grad=True, broadcasts=False),
    "erase_key": Dims("B T H D", grad=True, broadcasts=False),
    "write_gate": Dims("B T H Dv", grad=True, broadcasts=False),
    # of every sequence: N is 1 unless they are packed
    "initial_state": Dims("B N H D Dv", grad=True, broadcasts=False),
    "cu_seqlens": Dims("B N+1"),
}

OUTPUTS = {"out": "B T H Dv", "state": "B N H D Dv"}


@dataclass(frozen=True)
class Spec:
    """The static facts of a call.

    Attributes:
        scale: of the output.
        with_out: whether the output is wanted, or the state alone.
        with_state: whether the final state is.
    """

    scale: float
    with_out: bool = True
    with_state: bool = False


class Dimensions(NamedTuple):
    """The sizes of a call, by their letters."""

    B: int
    T: int
    H: int
    Hk: int
    D: int
    Dv: int
    N: int


def dimensions(call: Call) -> Dimensions:
    B, T, Hk, D = call["query"].shape
    _, _, H, Dv = call["value"].shape
    N = call["cu_seqlens"].shape[1] - 1 if "cu_seqlens" in call else 1
    return Dimensions(B, T, H, Hk, D, Dv, N)


def canonicalise(
    query: Any,
    key: Any,
    value: Any,
    g: Any = None,
    beta: Any = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    *,
    segment_ids: Any = None,
    erase_key: Any = None,
    write_gate: Any = None,
    qk_norm: bool = False,
    softmax_scale: Any = None,
    return_state: bool = False,
) -> Call:
    """Check everything about a call and bring it to its one canonical form."""
    query, key, value = float_array("query", query), float_array("key", key), float_array("value", value)
    batch = _check_shapes(query, key, value)
    *_, T, Hk, D = query.shape
    H, Dv = value.shape[-2:]
    if beta is not None and erase_key is not None and write_gate is not None:
        raise ValueError("beta says nothing beside both erase_key (beta * key without it) and write_gate (beta)")
    if flag("qk_norm", qk_norm):
        query, key = without_padding_tokens((query, key), segment_ids, cu_seqlens, batch, T)
        query, key = _normalised(query), _normalised(key)
    query, scale = scaled(query, softmax_scale)
    arrays = {"query": folded(query), "key": folded(key), "value": folded(value)}
    per_channel = g is not None and float_array("g", g).ndim == query.ndim
    shapes = {
        "gk" if per_channel else "g": (g, (*batch, T, H, D) if per_channel else (*batch, T, H)),
        "beta": (beta, (*batch, T, H)),
        "erase_key": (_for_all_heads(erase_key, Hk, H), (*batch, T, H, D)),
        "write_gate": (write_gate, (*batch, T, H, Dv)),
    }
    for name, (x, shape) in shapes.items():
        if x is not None:
            arrays[name] = folded(of_shape("g" if name == "gk" else name, x, shape), len(shape) - len(batch))
    arrays = first_states(packing(arrays, cu_seqlens, query), initial_state, batch, (H, D, Dv))
    arrays = segmented(arrays, segment_ids, batch)
    spec = Spec(scale, with_state=flag("return_state", return_state))
    return Call(spec, {name: arrays[name] for name in ARRAYS if name in arrays})


def kimi_call(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    **options: Any,
) -> Call:
    """The canonical call of Kimi delta attention: decays of channels. The options are those of `canonicalise`."""
    if beta is None:
        raise ValueError("beta is needed; gated_delta_rule is without")
    if float_array("g", g).ndim != float_array("query", query).ndim:
        raise ValueError(f"g has shape {g.shape}, needed log decays of every channel, (batch, length, heads, head_dim)")
    return canonicalise(query, key, value, g, beta, initial_state, cu_seqlens, **options)


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> Batch:
    """The leading dimensions, which all three share."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} must have 4 dimensions, got shape {x.shape}; {LAYOUT}")
        if 0 in x.shape[-2:]:
            raise ValueError(f"{name} has an empty dimension: shape {x.shape}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, query has {query.dtype}: they must be the same")
    if key.shape != query.shape:
        raise ValueError(f"key {key.shape} must have the shape of query {query.shape}; {LAYOUT}")
    if value.shape[:-2] != query.shape[:-2]:
        raise ValueError(f"value {value.shape} must have the batch and length of query {query.shape}; {LAYOUT}")
    if value.shape[-2] % query.shape[-2]:
        raise ValueError(
            f"value heads H={value.shape[-2]} must be a multiple of query and key heads Hk={query.shape[-2]}"
        )
    return query.shape[:-3]


# compiled: outside jit, its constants would be sent to the device one by one
@jax.jit
def _normalised(x: jax.Array) -> jax.Array:
    """Divided by its norm."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _for_all_heads(x: Any, Hk: int, H: int) -> Any:
    """Erase keys of key heads, repeated for the heads that share them."""
    if x is None or float_array("erase_key", x).ndim < 2 or x.shape[-2] != Hk:
        return x
    return jnp.repeat(x, H // Hk, -2)
