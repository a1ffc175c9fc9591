"""Rooflines of softmax attention on TPUs, from the kernels' own schedules and default configs."""

from itertools import product
from typing import Any

import jax

from ejkernel.kernels.common.pallas_tpu import CHIPS
from ejkernel.kernels.common.pallas_tpu_cost import costs
from ejkernel.kernels.softmax import pallas_tpu
from ejkernel.kernels.softmax.spec import Band, Spec
from ejkernel.ops import Call, Target

HEAD_DIMS = (64, 128, 256)


def table(batch: int = 2, length: int = 8192, width: int = 2048) -> str:
    """Full and causal attention in bfloat16 with `width` = heads * head_dim on every chip, as Markdown.

    Shown are the default tiles, and milliseconds that each kernel, and all together, cannot beat.

    >>> table(length=1024).splitlines()[0]
    '| chip | D | mask | tiles | forward | dq | dk, dv | all |'
    """
    if any(width % dim for dim in HEAD_DIMS):
        raise ValueError(f"width {width} must be a multiple of the head dims {', '.join(map(str, HEAD_DIMS))}")
    lines = ["| chip | D | mask | tiles | forward | dq | dk, dv | all |", "| --- " * 8 + "|"]
    for (kind, chip), dim, causal in product(CHIPS.items(), HEAD_DIMS, (False, True)):
        array: Any = jax.ShapeDtypeStruct((batch, length, width // dim, dim), "bfloat16")
        spec = Spec(scale=dim**-0.5, band=Band(None, 0 if causal else None))
        call = Call(spec, {"query": array, "key": array, "value": array}, Target("tpu", kind, "tpu"))
        config = pallas_tpu.default_config(call)
        seconds = {cost.kernel: cost.seconds(chip) for cost in costs(pallas_tpu.IMPLEMENTATION, call, config)}
        times = [1e3 * seconds[f"softmax_{name}"] for name in ("forward", "dq", "dkv")]
        tiles = [f"{q} x {k}" for q, k in dict.fromkeys((config.forward, config.backward))]
        cells = [chip.name, str(dim), "causal" if causal else "full", ", ".join(tiles)]
        lines.append("| " + " | ".join([*cells, *(f"{time:.2f}" for time in (*times, sum(times)))]) + " |")
    return "\n".join(lines)
