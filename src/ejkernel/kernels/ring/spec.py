"""The canonical call of attention over a split sequence: that of softmax attention, and how its tokens are split."""

import dataclasses
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
from jax import lax

from ejkernel.checks.arrays import float_array
from ejkernel.expressions.nodes import LOAD, I, J, nodes
from ejkernel.kernels.common.batch import folded_broadcast
from ejkernel.kernels.ring.layout import LAYOUTS, token_indices
from ejkernel.kernels.softmax import spec as softmax
from ejkernel.kernels.softmax.spec import Indices, dimensions
from ejkernel.ops import Call, Dims
from ejkernel.ops.operation import Arrays
from ejkernel.types import MaskInfo

METHODS = ("auto", "ring", "all_to_all", "all_gather")

# C: keys of all devices. Rows of bias and mask are split like queries, their columns never
ARRAYS = {name: dims for name, dims in softmax.ARRAYS.items() if name not in ("pattern", "q_offsets", "kv_offsets")}
ARRAYS |= {"bias": Dims("B H T C", grad=True), "mask": Dims("B H T C")}
OUTPUTS = {"out": "B T H Dv", "lse": "B H T"}


@dataclass(frozen=True)
class Spec(softmax.Spec):
    """The static facts of a call: those of softmax attention, how tokens lie, and what travels.

    Attributes:
        layout: of the tokens on the devices.
        method: what travels; "auto" is resolved when the devices are known.
    """

    layout: str = "contiguous"
    method: str = "auto"

    @property
    def softmax(self) -> softmax.Spec:
        """The facts of a device's own calls."""
        return softmax.Spec(**{field.name: getattr(self, field.name) for field in fields(softmax.Spec)})


def moving(arrays: Arrays) -> Arrays:
    """What is of keys, and travels with them."""
    return {name: x for name, x in arrays.items() if "S" in ARRAYS[name].axes}


class Part(NamedTuple):
    """What the arrays of a call have of the sequence: all of it, or what `device` has of so many `devices`.

    `around` are the devices along the ring's axis.
    """

    around: int = 1
    devices: int = 1
    device: Any = 0

    def indices(self, layout: str, T: int, S: int) -> Indices:
        """The tokens that arrays of these lengths have."""

        def one(length: int) -> jax.Array:
            whole = token_indices(layout, self.around, length * self.devices)
            return whole if self.devices == 1 else lax.dynamic_slice_in_dim(whole, self.device * length, length, axis=1)

        return Indices(one(T), one(S), (T * self.devices, S * self.devices))


WHOLE = Part()

# with these a call computes with the indices of tokens; traced windows are among them
_BY_INDEX = ("mask_fn", "score_fn", "alibi_slopes", "sliding_window")


def canonicalise(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    softmax_aux: Any = None,
    *,
    part: Part = WHOLE,
    layout: str = "contiguous",
    method: str = "auto",
    **options: Any,
) -> Call:
    """Check a call on a sequence or a part of it."""
    for name, given, known in (("layout", layout, LAYOUTS), ("method", method, METHODS)):
        if not isinstance(given, str) or given not in known:
            raise ValueError(f"{name}={given!r} is unknown; use one of {', '.join(map(repr, known))}")
    mask: Any = options.get("mask_info")
    with_rule = isinstance(mask, MaskInfo) and mask.rule is not None
    if with_rule or any(options.get(name) is not None for name in _BY_INDEX):
        T, S = (x.shape[1] for x in softmax.checked_tokens(query, key, value)[:2])
        options["indices"] = part.indices(layout, T, S)
        if with_rule:
            options["mask_info"] = _placed(mask, options["indices"], part)
    call = softmax.canonicalise(query, key, value, None, None, None, softmax_aux, **options)
    if "pattern" in call:
        raise NotImplementedError(
            "ring_attention takes no block pattern: give it as a mask, or as segments or a window"
        )
    if "mask" in call and part.devices > 1:
        raise NotImplementedError(
            "inside a shard_map ring_attention takes no dense mask, for its columns are of one device: give mask_fn"
        )
    arrays = dict(call.arrays)
    if bias is not None:
        arrays["bias"] = _bias(bias, call, query.shape[:-3], part.devices)
    return Call(Spec(**vars(call.spec), layout=layout, method=method), arrays)


def _placed(mask: MaskInfo, indices: Indices, part: Part) -> MaskInfo:
    """A mask whose rule computes with indices in the sequence; one that reads an array of pairs is dense."""
    mask = mask.canonical()
    assert mask.rule is not None
    if part.devices > 1 and mask.q_len != mask.kv_len:  # a rule has the difference as a number
        raise NotImplementedError(
            f"inside a shard_map ring_attention takes no mask of functions, bounds or unions for {mask.q_len} queries "
            f"and {mask.kv_len} keys on a device: give mask_fn, or as many of both"
        )
    loads = [node for node in nodes(mask.rule.expression) if node.name == LOAD]
    for node in loads if part.devices > 1 else ():
        for index, size in zip(node.args, mask.rule.arrays[node.data].shape, strict=True):
            if (length := {I: mask.q_len, J: mask.kv_len}.get(index, size)) != size:
                raise ValueError(
                    f"inside a shard_map mask_info has numbers for the {length} tokens of a device: a function that "
                    f"reads one of {size} by token is for mask_fn"
                )
    mask = dataclasses.replace(mask, rule=indices.placed(mask.rule))
    return mask.with_dense_rule() if any({I, J} <= {*node.args} for node in loads) else mask


def _bias(bias: Any, call: Call, batch: tuple[int, ...], devices: int) -> Any:
    """As softmax attention has it, but with columns for the keys of all devices."""
    dims = dimensions(call)
    bias = float_array("bias", bias)
    wanted = (*(batch or (1,)), dims.H, dims.T, dims.S * devices)
    shape = (1,) * (len(wanted) - bias.ndim) + bias.shape
    if len(shape) != len(wanted) or any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
        raise ValueError(
            f"bias {bias.shape} does not broadcast to (batch, heads, q_len, kv_len) = {wanted}"
            + (f"; kv_len counts the keys of all {devices} devices" if devices > 1 else "")
        )
    return folded_broadcast(bias, batch)
