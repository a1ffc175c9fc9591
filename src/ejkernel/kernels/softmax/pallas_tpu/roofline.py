"""Rooflines of softmax attention on TPUs, from the kernels' own schedules and default configs."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import jax

from ejkernel.kernels.common.pallas_tpu import CHIPS, Chip
from ejkernel.kernels.common.pallas_tpu_cost import costs
from ejkernel.kernels.softmax import pallas_tpu
from ejkernel.kernels.softmax.spec import Band, Spec
from ejkernel.ops import Call, Target

HEAD_DIMS = (64, 128, 256)


class Row(NamedTuple):
    """The kernels of a call on one chip, with milliseconds that they cannot beat."""

    chip: Chip
    dim: int
    causal: bool
    config: pallas_tpu.Config
    milliseconds: dict[str, float]


def _rows(batch: int, length: int, width: int) -> Iterator[Row]:
    """bfloat16 attention with `width` = heads * head_dim, full and causal, on every chip."""
    if any(width % dim for dim in HEAD_DIMS):
        raise ValueError(f"width {width} must be a multiple of the head dims {', '.join(map(str, HEAD_DIMS))}")
    for kind, chip in CHIPS.items():
        for dim, causal in product(HEAD_DIMS, (False, True)):
            array: Any = jax.ShapeDtypeStruct((batch, length, width // dim, dim), "bfloat16")
            spec = Spec(scale=dim**-0.5, band=Band(None, 0 if causal else None))
            call = Call(spec, {"query": array, "key": array, "value": array}, Target("tpu", kind, "tpu"))
            config = pallas_tpu.default_config(call)
            times = {cost.kernel: 1e3 * cost.seconds(chip) for cost in costs(pallas_tpu.IMPLEMENTATION, call, config)}
            yield Row(chip, dim, causal, config, times)


def table(batch: int = 2, length: int = 8192, width: int = 2048) -> str:
    """The rooflines as Markdown: tiles, and milliseconds of each kernel and of a forward and backward together.

    >>> table(length=1024).splitlines()[0]
    '| chip | D | mask | tiles | forward | dq | dk, dv | all |'
    """
    lines = ["| chip | D | mask | tiles | forward | dq | dk, dv | all |", "| --- " * 8 + "|"]
    for row in _rows(batch, length, width):
        tiles = [f"{q} x {k}" for q, k in dict.fromkeys((row.config.forward, row.config.backward))]
        times = [row.milliseconds[f"softmax_{name}"] for name in ("forward", "dq", "dkv")]
        cells = [row.chip.name, str(row.dim), "causal" if row.causal else "full", ", ".join(tiles)]
        lines.append("| " + " | ".join([*cells, *(f"{time:.2f}" for time in (*times, sum(times)))]) + " |")
    return "\n".join(lines)
