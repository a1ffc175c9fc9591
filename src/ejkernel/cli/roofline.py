"""Rooflines: what the kernels of a family cost on each TPU, from their own schedules and default configs."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import jax

from ejkernel.kernels.common.pallas_tpu import CHIPS, MIB, Chip
from ejkernel.kernels.paged import pallas_tpu as paged_tpu
from ejkernel.kernels.paged.operations import page_structs
from ejkernel.kernels.softmax import pallas_tpu
from ejkernel.kernels.softmax.pallas_tpu_cost import costs
from ejkernel.kernels.softmax.spec import Band, Spec
from ejkernel.ops import Call, Target


class Row(NamedTuple):
    """The kernels of a call on one chip, with milliseconds that they cannot beat."""

    chip: Chip
    dim: int
    causal: bool
    config: pallas_tpu.Config
    milliseconds: dict[str, float]


def softmax(batch: int = 2, length: int = 8192, width: int = 2048, dtype: str = "bfloat16") -> Iterator[Row]:
    """Attention with `width` = heads * head_dim, full and causal, on every chip."""
    for kind, chip in CHIPS.items():
        for dim, causal in product((64, 128, 256), (False, True)):
            array: Any = jax.ShapeDtypeStruct((batch, length, width // dim, dim), dtype)
            spec = Spec(scale=dim**-0.5, band=Band(None, 0 if causal else None))
            call = Call(spec, {"query": array, "key": array, "value": array}, Target("tpu", kind, "tpu"))
            config = pallas_tpu.default_config(call)
            times = {cost.kernel: 1e3 * cost.seconds(chip) for cost in costs(call, config)}
            yield Row(chip, dim, causal, config, times)


def softmax_table(batch: int = 2, length: int = 8192, width: int = 2048) -> str:
    """The rooflines as Markdown: tiles, and milliseconds of each kernel and of a forward and backward together.

    >>> softmax_table(length=1024).splitlines()[0]
    '| chip | D | mask | tiles | forward | dq | dk, dv | all |'
    """
    lines = ["| chip | D | mask | tiles | forward | dq | dk, dv | all |", "| --- " * 8 + "|"]
    for row in softmax(batch, length, width):
        tiles = [f"{q} x {k}" for q, k in dict.fromkeys((row.config.forward, row.config.backward))]
        times = [row.milliseconds[f"softmax_{name}"] for name in ("forward", "dq", "dkv")]
        cells = [row.chip.name, str(row.dim), "causal" if row.causal else "full", ", ".join(tiles)]
        lines.append("| " + " | ".join([*cells, *(f"{time:.2f}" for time in (*times, sum(times)))]) + " |")
    return "\n".join(lines)


def paged_table(batch: int = 32, keys: int = 4096, heads: int = 32, key_heads: int = 8, dim: int = 128) -> str:
    """Rooflines of a decode step of one layer as Markdown: what is copied, at the bandwidth of each chip.

    >>> paged_table().splitlines()[2]
    '| v4 | bfloat16 | 1 x 512 | 12.1 | 512.5 | 0.437 |'
    """
    lines = ["| chip | cache | tiles | VMEM, MiB | copied, MiB | milliseconds |", "| --- " * 6 + "|"]
    for (kind, chip), cache in product(CHIPS.items(), ("bfloat16", "int8")):
        call = page_structs(N=batch, W=keys // 64, L=64, H=heads, Hkv=key_heads, D=dim, cache=cache)
        call = call.on(Target("tpu", kind, "tpu"))
        config, copied = paged_tpu.default_config(call), paged_tpu.cost(call).bytes_accessed
        sizes = (
            f"{paged_tpu.vmem_bytes(call, config) / MIB:.1f} | {copied / MIB:.1f} | {1e3 * copied / chip.bandwidth:.3f}"
        )
        lines.append(f"| {chip.name} | {cache} | {config.block_q} x {config.block_k} | {sizes} |")
    return "\n".join(lines)
