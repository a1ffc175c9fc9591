"""What each method of splitting a sequence costs: the arithmetic by which one is chosen, and that of the scaling table.

Of `n` devices each has `t` queries and `s` keys of a sequence. Times are those of the busiest device, forward:

    ring        (hops + 1) * max(compute of t x s, bytes of a device's keys and values / link)
    all_to_all  compute / n + bytes of what a device sends, queries, keys, values and output, through the network
    all_gather  compute / n + bytes of the keys and values of all devices through the network

The backward has 2.5 times the compute. A ring sends keys and values again, and their gradients in float32.
"""

from typing import Any, NamedTuple

import jax

from ejkernel.kernels.ring.layout import hops_needed
from ejkernel.kernels.ring.spec import moving
from ejkernel.kernels.softmax.spec import Band, Dimensions, dimensions
from ejkernel.ops import Call, Target


class Chip(NamedTuple):
    """What a chip can do: published figures, and what attention makes of them.

    Attributes:
        flops: bfloat16 operations per second.
        link: bytes per second to a neighbour, one way.
        memory: bytes.
        switched: whether any two devices are neighbours; else they form a torus, of which a mesh axis is a ring.
        latency: seconds before a collective moves anything.
        share: of `flops` that the kernels reach.
    """

    flops: float
    link: float
    memory: float
    switched: bool = False
    latency: float = 2e-6
    share: float = 0.6


CHIPS = {
    "v5e": Chip(197e12, 45e9, 16e9),
    "v5p": Chip(459e12, 90e9, 95e9),
    "v6e": Chip(918e12, 90e9, 32e9),
    "H100": Chip(989e12, 450e9, 80e9, switched=True, latency=10e-6),
    "H200": Chip(989e12, 450e9, 141e9, switched=True, latency=10e-6),
}
_KINDS = {"v5_lite": "v5e", "v5e": "v5e", "v5p": "v5p", "v5": "v5p", "v6": "v6e", "h100": "H100", "h200": "H200"}
_ANY = Chip(1e11, 1e10, 16e9, switched=True, latency=10e-6)

# of the memory, what gathered keys may take
_GATHERED = 1 / 16
# operations of a backward over those of its forward
BACKWARD = 2.5


def chip_of(target: Target) -> Chip:
    """The chip of a device; a modest one where it is unknown."""
    return next((CHIPS[name] for kind, name in _KINDS.items() if kind in target.kind), _ANY)


class Problem(NamedTuple):
    """One device's shard of a call, on shapes alone: `dims` are its own, and `itemsize` the bytes of an element."""

    dims: Dimensions
    devices: int
    itemsize: int
    band: Band = Band()
    chunk: int | None = None
    layout: str = "contiguous"
    beside: int = 0  # bytes that travel with keys and values: their segments, positions, numbers that functions read

    @property
    def hops(self) -> int:
        d, n = self.dims, self.devices
        return hops_needed(self.layout, n, d.T * n, d.S * n, self.band, self.chunk).number

    @property
    def key_bytes(self) -> int:
        """Of one device's keys and values, and what goes with them."""
        d = self.dims
        return d.B * d.S * d.Hkv * (d.D + d.Dv) * self.itemsize + self.beside

    @property
    def tile_flops(self) -> float:
        """Of a device's queries against one device's keys, all visible."""
        d = self.dims
        return 2.0 * d.B * d.H * d.T * d.S * (d.D + d.Dv)

    @property
    def seen(self) -> float:
        """How much of the pairs that meet the busiest device computes: with zigzag half of what causality hides."""
        return 0.5 if self.band.hi == 0 and self.band.lo is None and self.layout == "zigzag" else 1.0


class Cost(NamedTuple):
    """Seconds of a forward, of which so many are spent waiting; bytes that a device sends; bytes that it holds."""

    seconds: float
    waiting: float
    sent: float
    held: float


def compute_seconds(problem: Problem, chip: Chip) -> float:
    """Of one hop."""
    return problem.seen * problem.tile_flops / (chip.flops * chip.share)


def ring_cost(problem: Problem, chip: Chip) -> Cost:
    compute, hops = compute_seconds(problem, chip), problem.hops
    hop = chip.latency + problem.key_bytes / chip.link if hops else 0.0
    seconds = compute + hops * max(compute, hop)
    return Cost(seconds, seconds - (hops + 1) * compute, hops * problem.key_bytes, 2 * problem.key_bytes)


def _network_seconds(sent: float, problem: Problem, chip: Chip, share: float) -> float:
    """Of bytes that go from every device to all others; on a ring of links each way, they cross `share` of it."""
    n = problem.devices
    if chip.switched:
        return chip.latency + sent / chip.link
    return chip.latency + sent * n / (n - 1) * share * n / chip.link


def all_to_all_cost(problem: Problem, chip: Chip) -> Cost:
    d, n = problem.dims, problem.devices
    heads = max(d.Hkv, n)  # fewer key heads are repeated
    elements = d.B * (d.T * d.H + d.S * heads) * (d.D + d.Dv)
    sent = elements * problem.itemsize * (n - 1) / n
    # all tokens of some heads: causal work is even in any layout
    half = 0.5 if problem.band.hi == 0 and problem.band.lo is None else 1.0
    compute = n * half * problem.tile_flops / (chip.flops * chip.share)
    waiting = 2 * _network_seconds(sent / 2, problem, chip, 1 / 8)
    return Cost(compute + waiting, waiting, sent, elements * problem.itemsize)


def all_gather_cost(problem: Problem, chip: Chip) -> Cost:
    n = problem.devices
    sent = problem.key_bytes * (n - 1)
    compute = min(n, problem.hops + 1) * compute_seconds(problem, chip)
    waiting = _network_seconds(sent if chip.switched else problem.key_bytes * (n - 1) / n, problem, chip, 1 / 2)
    return Cost(compute + waiting, waiting, sent, n * problem.key_bytes)


class Choice(NamedTuple):
    """The method taken, and why."""

    method: str
    costs: dict[str, Cost]
    refused: dict[str, str]

    def __str__(self) -> str:
        if not self.costs:
            return f"{self.method} (nothing travels)"
        times = [
            f"{name} {cost.seconds * 1e6:.0f} us, {cost.waiting * 1e6:.0f} of them waiting"
            for name, cost in self.costs.items()
        ]
        times += [f"not {name}: {reason}" for name, reason in self.refused.items()]
        return f"{self.method} (by arithmetic, forward: {'; '.join(times)})"


def choose(call: Call, devices: int) -> Choice:
    """The fastest method for a call of which this is one device's shard, by arithmetic; a ring where they are equal."""
    d, itemsize = dimensions(call), jax.numpy.dtype(call["query"].dtype).itemsize
    explicit: Any = "q_positions" in call
    band, chunk = (Band(), None) if explicit else (call.spec.band, call.spec.chunk)
    columns = {name: x for name, x in moving(call.arrays).items() if name not in ("key", "value")}
    beside = sum(x.size * x.dtype.itemsize for x in columns.values())
    problem = Problem(d, devices, itemsize, band, chunk, call.spec.layout, beside)
    chip = chip_of(call.target)
    if devices == 1:
        return Choice("ring", {}, {})
    costs = {"ring": ring_cost(problem, chip)}
    refused = {}
    if d.H % devices or (d.Hkv % devices and devices % d.Hkv):
        refused["all_to_all"] = f"{d.H} query and {d.Hkv} key heads do not divide over {devices} devices"
    else:
        costs["all_to_all"] = all_to_all_cost(problem, chip)
    gathered = all_gather_cost(problem, chip)
    if gathered.held > _GATHERED * chip.memory:
        refused["all_gather"] = f"keys of all devices take {gathered.held / 2**30:.1f} GiB"
    else:
        costs["all_gather"] = gathered
    return Choice(min(costs, key=lambda name: costs[name].seconds), costs, refused)
