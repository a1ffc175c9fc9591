"""The canonical call of attention over a split sequence: that of softmax attention, and how its tokens are split."""

from dataclasses import dataclass, fields
from typing import Any

from ejkernel.checks.arrays import float_array
from ejkernel.kernels.common.batch import folded_broadcast
from ejkernel.kernels.ring.layout import LAYOUTS
from ejkernel.kernels.softmax import spec as softmax
from ejkernel.kernels.softmax.spec import dimensions
from ejkernel.ops import Call, Dims

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


def canonicalise(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    softmax_aux: Any = None,
    *,
    devices: int = 1,
    layout: str = "contiguous",
    method: str = "auto",
    **options: Any,
) -> Call:
    """Check a call; where arrays are one device's shard already, `devices` is how many there are."""
    for name, given, known in (("layout", layout, LAYOUTS), ("method", method, METHODS)):
        if not isinstance(given, str) or given not in known:
            raise ValueError(f"{name}={given!r} is unknown; use one of {', '.join(map(repr, known))}")
    if (mask := options.get("mask_info")) is not None:
        options["mask_info"] = mask.with_dense_rule()
    call = softmax.canonicalise(query, key, value, None, None, None, softmax_aux, **options)
    if call.spec.rules != (None, None):
        raise NotImplementedError(
            "ring_attention takes no traced window or soft cap: give numbers, or split heads and batch alone"
        )
    if "pattern" in call:
        raise NotImplementedError(
            "ring_attention takes no block pattern: give it as a mask, or as segments or a window"
        )
    arrays = dict(call.arrays)
    if bias is not None:
        arrays["bias"] = _bias(bias, call, query.shape[:-3], devices)
    return Call(Spec(**vars(call.spec), layout=layout, method=method), arrays)


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
