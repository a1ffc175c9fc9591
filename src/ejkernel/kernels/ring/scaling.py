"""How a ring scales: what a hop computes and sends on each chip, and from which length on sending hides.

`python -m ejkernel.kernels.ring.scaling docs/images/ring_scaling.svg` draws it.
"""

import sys
from typing import NamedTuple

from ejkernel.kernels.ring.cost import BACKWARD, CHIPS, Chip, Problem, compute_seconds
from ejkernel.kernels.softmax.spec import Band, Dimensions

# what a backward sends on a hop over what a forward does: keys and values again, and both gradients in float32
SENT_BACK = 3


class Hop(NamedTuple):
    """Seconds of one hop."""

    compute: float
    send: float


def problem(
    tokens: int, batch: int = 1, heads: int = 32, key_heads: int = 8, dim: int = 128, devices: int = 8
) -> Problem:
    """One device's shard of a causal call in bfloat16, balanced by zigzag."""
    dims = Dimensions(batch, tokens, tokens, heads, key_heads, dim, dim)
    return Problem(dims, devices, 2, Band(None, 0), layout="zigzag")


def hops(problem: Problem, chip: Chip) -> tuple[Hop, Hop]:
    """Of the forward and of the backward."""
    compute, send = compute_seconds(problem, chip), problem.key_bytes / chip.link
    return Hop(compute, send), Hop(BACKWARD * compute, SENT_BACK * send)


def hidden_from(chip: Chip, backward: bool) -> int:
    """Tokens on a device from which on a hop takes as long to compute as to send: both grow with the keys."""
    hop = hops(problem(1024), chip)[backward]
    return round(1024 * hop.send / hop.compute)


def table(batch: int = 1, length: int = 8192, width: int = 4096) -> str:
    """Milliseconds of a hop with `length` tokens on a device, and the lengths from which on sending hides.

    >>> table().splitlines()[0].startswith("| chip | forward: compute | send |")
    True
    """
    if width % 512:
        raise ValueError(f"width {width} must be a multiple of 512: head_dim 128, four query heads to a key head")
    heads = width // 128
    head = [
        "chip",
        "forward: compute",
        "send",
        "backward: compute",
        "send",
        "hidden from, a device",
        "8 devices",
        "256",
    ]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for name, chip in CHIPS.items():
        forward, backward = hops(problem(length, batch, heads, heads // 4), chip)
        least = max(hidden_from(chip, False), hidden_from(chip, True))
        cells = [f"{1e3 * x:.2f}" for x in (*forward, *backward)]
        lines.append("| " + " | ".join([name, *cells, *(f"{least * n:,}" for n in (1, 8, 256))]) + " |")
    return "\n".join(lines)


def draw(path: str) -> None:
    """The share of a ring's time that is computing, by tokens on a device."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "ejkernel", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    tokens = [2**i for i in range(7, 16)]
    for name, chip in CHIPS.items():
        if name == "H200":  # as H100
            continue
        both = [hops(problem(n), chip) for n in tokens]
        share = [sum(hop.compute for hop in two) / sum(max(hop) for hop in two) for two in both]
        axes.plot(tokens, share, marker="o", markersize=3, label="H100, H200" if name == "H100" else name)
    axes.set(xscale="log", xlabel="tokens on a device", ylabel="computing / all time", ylim=(0, 1.05))
    axes.set_xticks(tokens, [str(n) for n in tokens])
    axes.minorticks_off()
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(sys.argv[1])
