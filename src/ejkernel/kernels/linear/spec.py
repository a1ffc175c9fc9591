"""The canonical call of linear attention: every check and every default is here."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core

from ejkernel.checks.arrays import float_array
from ejkernel.checks.options import flag, static_int
from ejkernel.kernels.common.batch import Batch, folded, unfolded
from ejkernel.kernels.common.scale import with_static_scale
from ejkernel.kernels.linear.sequences import first_states, packing, segmented, without_padding_tokens
from ejkernel.ops import Call, Dims

ARRAYS = {
    "query": Dims("B T H D", grad=True, broadcasts=False),
    "key": Dims("B T H D", grad=True, broadcasts=False),
    "value": Dims("B T H Dv", grad=True, broadcasts=False),
    "g": Dims("B T H", grad=True, broadcasts=False),
    "g_gamma": Dims("B H", grad=True),
    "gk": Dims("B T H D", grad=True, broadcasts=False),
    "gv": Dims("B T H Dv", grad=True, broadcasts=False),
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
        reverse: whether the state runs from the last token to the first.
        with_out: whether the output is wanted, or the state alone.
        with_state: whether the final state is.
        constant_gamma: whether `g_gamma` is known while tracing: nobody can ask for its gradient then.
    """

    scale: float
    reverse: bool = False
    with_out: bool = True
    with_state: bool = False
    constant_gamma: bool = False


class Dimensions(NamedTuple):
    """The sizes of a call, by their letters."""

    B: int
    T: int
    H: int
    D: int
    Dv: int
    N: int


def dimensions(call: Call) -> Dimensions:
    B, T, H, D = call["query"].shape
    N = call["cu_seqlens"].shape[1] - 1 if "cu_seqlens" in call else 1
    return Dimensions(B, T, H, D, call["value"].shape[3], N)


def canonicalise(
    query: Any,
    key: Any,
    value: Any,
    g: Any = None,
    g_gamma: Any = None,
    gk: Any = None,
    gv: Any = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    *,
    softmax_scale: Any = None,
    reverse: bool = False,
    return_state: bool = False,
    segment_ids: Any = None,
) -> Call:
    """Check everything about a call and bring it to its one canonical form."""
    query, key, value = float_array("query", query), float_array("key", key), float_array("value", value)
    batch = _check_shapes(query, key, value)
    *_, T, H, D = query.shape
    Dv = value.shape[-1]
    shapes = {"g": (*batch, T, H), "gk": (*batch, T, H, D), "gv": (*batch, T, H, Dv)}
    if g is not None and float_array("g", g).ndim == query.ndim:
        g = of_shape("g", g, shapes["gk"])
        g, gk = None, g if gk is None else g.astype(jnp.float32) + float_array("gk", gk).astype(jnp.float32)
    query, scale = scaled(query, softmax_scale)
    arrays = {"query": folded(query), "key": folded(key), "value": folded(value)}
    for name, gate in {"g": g, "gk": gk, "gv": gv}.items():
        if gate is not None:
            arrays[name] = folded(of_shape(name, gate, shapes[name]), len(shapes[name]) - len(batch))
    if g_gamma is not None:
        if isinstance(g_gamma, int | float) and not isinstance(g_gamma, bool):
            g_gamma = np.full(H, g_gamma, np.float32)
        gamma = float_array("g_gamma", g_gamma)
        arrays["g_gamma"] = of_shape("g_gamma", gamma if gamma.ndim else gamma[None], (H,)).astype(jnp.float32)[None]
    arrays = first_states(packing(arrays, cu_seqlens, query), initial_state, batch, (H, D, Dv))
    arrays = segmented(arrays, segment_ids, batch, reverse)
    spec = Spec(
        scale,
        flag("reverse", reverse),
        with_state=flag("return_state", return_state),
        constant_gamma=not isinstance(g_gamma, jax_core.Tracer),
    )
    return Call(spec, {name: arrays[name] for name in ARRAYS if name in arrays})


def scaled(query: jax.Array, softmax_scale: Any) -> tuple[jax.Array, float]:
    """The queries and a static scale, which is not 0: gradients of states are kept without it."""
    query, scale = with_static_scale("softmax_scale", query, softmax_scale)
    if not _SCALES.tiny <= abs(scale) <= _SCALES.max:
        raise ValueError(f"softmax_scale={scale} must not be 0, the output would be, and lie within float32")
    return query, scale


def gla_call(
    query: Any,
    key: Any,
    value: Any,
    g: Any = None,
    g_gamma: Any = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    **options: Any,
) -> Call:
    """The canonical call of gated linear attention; the options are those of `canonicalise`."""
    return canonicalise(query, key, value, g, g_gamma, None, None, initial_state, cu_seqlens, **options)


def lightning_call(
    query: Any,
    key: Any,
    value: Any,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    *,
    layer_idx: Any,
    num_layers: Any,
    **options: Any,
) -> Call:
    """The canonical call of lightning attention: a decay per head that the layer decides."""
    shape = float_array("query", query).shape
    heads = shape[-2] if len(shape) > 1 else 0  # where there are none, the shape is refused below
    with jax.transfer_guard("allow"):  # made on the host: sending it is meant
        decay = jnp.asarray(lightning_decay(heads, layer_idx, num_layers))
    call = canonicalise(query, key, value, None, decay, None, None, initial_state, cu_seqlens, **options)
    return replace(call, spec=replace(call.spec, constant_gamma=True))


def mamba2_call(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    *,
    segment_ids: Any = None,
    **options: Any,
) -> Call:
    """The canonical call of Mamba-2: B are keys and C queries, groups of heads share them; dt multiplies the values."""
    x, dt, A, B, C = (
        float_array(name, y) for name, y in zip(("x", "dt", "A", "B", "C"), (x, dt, A, B, C), strict=True)
    )
    if x.ndim < 3 or dt.shape != x.shape[:-1]:
        raise ValueError(f"dt {dt.shape} must have the shape of x {x.shape} without its channels; {LAYOUT}")
    if A.shape != x.shape[-2:-1]:
        raise ValueError(f"A has shape {A.shape}, needed one number a head, {x.shape[-2:-1]}")
    if (
        0 in B.shape[-2:]
        or B.shape != C.shape
        or B.ndim != x.ndim
        or B.shape[:-2] != x.shape[:-2]
        or x.shape[-2] % B.shape[-2]
    ):
        raise ValueError(
            f"B {B.shape} and C {C.shape} must be (batch, length, groups, state), and groups divide the heads of "
            f"x {x.shape}"
        )
    x, dt, B, C = without_padding_tokens((x, dt, B, C), segment_ids, cu_seqlens, x.shape[:-3], x.shape[-3])
    values, decays, key, query = _mamba2_arrays(x, dt, A, B, C)
    given = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "softmax_scale": 1.0, "segment_ids": segment_ids}
    return canonicalise(query, key, values, decays, **given, **options)


# compiled: outside jit, constants would be sent to the device one by one
@jax.jit
def _mamba2_arrays(x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array) -> tuple[jax.Array, ...]:
    step = dt.astype(jnp.float32)
    values = (x.astype(jnp.float32) * step[..., None]).astype(x.dtype)
    key, query = (jnp.repeat(y.astype(x.dtype), x.shape[-2] // y.shape[-2], -2) for y in (B, C))
    return values, step * A.astype(jnp.float32).reshape(*(1,) * (step.ndim - 1), -1), key, query


def lightning_decay(heads: int, layer_idx: Any, num_layers: Any) -> np.ndarray:
    """The decay of every head in a layer, in logarithms: none of head 0, less in later layers."""
    num_layers = static_int("num_layers", num_layers, 1)
    layer_idx = static_int("layer_idx", layer_idx, 0)
    if layer_idx >= num_layers:
        raise ValueError(f"layer_idx={layer_idx} must be below num_layers={num_layers}")
    slope = (8.0 / max(1, heads)) * (1.0 - layer_idx / num_layers)
    return (-slope * np.arange(heads)).astype(np.float32)


_SCALES = np.finfo(np.float32)
LAYOUT = "the layout is (batch, length, heads, head_dim)"


def _check_shapes(query: jax.Array, key: jax.Array, value: jax.Array) -> Batch:
    """The leading dimensions, which all three share."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name} must have 4 dimensions, got shape {x.shape}; {LAYOUT}")
        if 0 in x.shape[-2:]:
            raise ValueError(f"{name} has an empty dimension: shape {x.shape}")
        if x.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, query has {query.dtype}: they must be the same")
    groups, remainder = divmod(query.shape[-2], key.shape[-2])
    if remainder == 0 and groups > 1 and (*key.shape[:-2], key.shape[-1]) == (*query.shape[:-2], query.shape[-1]):
        raise ValueError(
            f"key has {key.shape[-2]} heads, query has {query.shape[-2]}: every head has a state, so repeat "
            f"keys and values (jnp.repeat(key, {groups}, -2))"
        )
    if key.shape != query.shape:
        raise ValueError(f"key {key.shape} must have the shape of query {query.shape}; {LAYOUT}")
    if value.shape[:-1] != query.shape[:-1]:
        raise ValueError(f"value {value.shape} must have the batch, length and heads of query {query.shape}; {LAYOUT}")
    return query.shape[:-3]


def of_shape(name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    """Log decays broadcast to a shape of as many dimensions."""
    x = float_array(name, x)
    if x.ndim != len(shape) or any(size not in (1, needed) for size, needed in zip(x.shape, shape, strict=True)):
        raise ValueError(f"{name} has shape {x.shape}, needed {shape}, where any size may be 1")
    return jnp.broadcast_to(x, shape)


def at_last_write(outputs: dict[str, jax.Array], writes: int) -> dict[str, jax.Array]:
    """The outputs of tokens that are several each."""
    return outputs | {"out": outputs["out"][:, writes - 1 :: writes]}


def with_skipped(
    outputs: dict[str, jax.Array], x: jax.Array, D: Any, segment_ids: Any, cu_seqlens: Any
) -> dict[str, jax.Array]:
    """Mamba-2's outputs with D * x, where D is (H,) or (H, P)."""
    if D is None:
        return outputs
    D = float_array("D", D)
    if D.shape not in (x.shape[-2:-1], x.shape[-2:]):
        raise ValueError(f"D has shape {D.shape}, needed {x.shape[-2:-1]} or {x.shape[-2:]}")
    (x,) = without_padding_tokens((x,), segment_ids, cu_seqlens, x.shape[:-3], x.shape[-3])
    return outputs | {"out": _skipped(outputs["out"], folded(x), D)}


@jax.jit
def _skipped(out: jax.Array, x: jax.Array, D: jax.Array) -> jax.Array:
    wide = D.astype(jnp.float32).reshape(1, 1, D.shape[0], -1)
    return (out.astype(jnp.float32) + wide * x.astype(jnp.float32)).astype(out.dtype)


def finish(call: Call, outputs: dict[str, jax.Array], shape: tuple[int, ...]) -> Any:
    """From the canonical outputs to what the caller asked for, whose query has that shape."""
    out = unfolded(outputs["out"], shape[:-3])
    if not call.spec.with_state:
        return out
    state = outputs["state"]
    return out, state[0] if "cu_seqlens" in call else unfolded(state[:, 0], shape[:-3])
