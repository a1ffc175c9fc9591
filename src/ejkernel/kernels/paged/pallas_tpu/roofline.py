"""Rooflines of attention over a cache on TPUs."""

from itertools import product
from math import gcd

from ejkernel.kernels.common.pallas_tpu import CHIPS, MIB
from ejkernel.kernels.paged import pallas_tpu
from ejkernel.kernels.paged.operations import page_structs
from ejkernel.ops import Target

HEAD_DIM, PAGE = 128, 64


def table(batch: int = 32, length: int = 4096, width: int = 4096) -> str:
    """Rooflines of a decode step of one layer as Markdown: what is copied, at the bandwidth of each chip.

    Four query heads share the keys of one, where their number can be divided so.

    >>> table().splitlines()[2]
    '| v4 | bfloat16 | 1 x 512 | 12.1 | 512.5 | 0.437 |'
    """
    if width % HEAD_DIM:
        raise ValueError(f"width {width} must be a multiple of the head dim, {HEAD_DIM}")
    heads = width // HEAD_DIM
    key_heads = heads // gcd(heads, 4)
    lines = ["| chip | cache | tiles | VMEM, MiB | copied, MiB | milliseconds |", "| --- " * 6 + "|"]
    for (kind, chip), cache in product(CHIPS.items(), ("bfloat16", "int8")):
        call = page_structs(N=batch, W=-(-length // PAGE), L=PAGE, H=heads, Hkv=key_heads, D=HEAD_DIM, cache=cache)
        call = call.on(Target("tpu", kind, "tpu"))
        config, copied = pallas_tpu.default_config(call), pallas_tpu.cost(call).bytes_accessed
        vmem = pallas_tpu.vmem_bytes(call, config) / MIB
        numbers = f"{vmem:.1f} | {copied / MIB:.1f} | {1e3 * copied / chip.bandwidth:.3f}"
        lines.append(f"| {chip.name} | {cache} | {config.block_q} x {config.block_k} | {numbers} |")
    return "\n".join(lines)
