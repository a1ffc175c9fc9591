"""Rooflines of linear attention on TPUs, from the kernels' blocks and default configs."""

from itertools import product

import jax
import jax.numpy as jnp

from ejkernel.kernels.common.pallas_tpu import CHIPS, MIB
from ejkernel.kernels.common.pallas_tpu_cost import costs
from ejkernel.kernels.linear import pallas_tpu
from ejkernel.kernels.linear.spec import ARRAYS, Spec
from ejkernel.ops import Call, Target

HEAD_DIMS = (64, 128, 256)


def _call(batch: int, length: int, heads: int, dim: int, decay: str, kind: str) -> Call:
    shapes = dict.fromkeys(("query", "key", "value"), (batch, length, heads, dim))
    shapes |= {"g_gamma": (1, heads)} if decay == "head" else {"gk": (batch, length, heads, dim)}
    arrays = {name: jax.ShapeDtypeStruct(shapes[name], jnp.bfloat16) for name in ARRAYS if name in shapes}
    return Call(Spec(dim**-0.5, constant_gamma=True), arrays, Target("tpu", kind, "tpu"))  # pyright: ignore


def table(batch: int = 8, length: int = 2048, width: int = 2048) -> str:
    """The rooflines as Markdown: chunks, and milliseconds of each scan and of a forward and backward together.

    Decays are those of heads, as lightning attention has them, or of key channels, as GLA has them.

    >>> table(batch=1).splitlines()[0]
    '| chip | D | decays | chunk | VMEM, MiB | forward | dv | dq | dk | all |'
    """
    if any(width % dim for dim in HEAD_DIMS):
        raise ValueError(f"width {width} must be a multiple of the head dims {', '.join(map(str, HEAD_DIMS))}")
    lines = ["| chip | D | decays | chunk | VMEM, MiB | forward | dv | dq | dk | all |", "| --- " * 10 + "|"]
    for (kind, chip), dim, decay in product(CHIPS.items(), HEAD_DIMS, ("head", "channel")):
        call = _call(batch, length, width // dim, dim, decay, kind)
        config = pallas_tpu.LINEAR.default_config(call)
        times = [1e3 * cost.seconds(chip) for cost in costs(pallas_tpu.IMPLEMENTATION, call, config)]
        vmem = pallas_tpu.LINEAR.vmem_bytes(call, config) / MIB
        cells = [chip.name, str(dim), decay, str(config.chunk), f"{vmem:.1f}"]
        lines.append("| " + " | ".join([*cells, *(f"{time:.2f}" for time in (*times, sum(times)))]) + " |")
    return "\n".join(lines)
