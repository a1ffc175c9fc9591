"""A benchmark of the toy family: one case."""

import dataclasses

import jax
import jax.numpy as jnp

from benchmarks.measuring.benchmark import BOTH, FORWARD, Benchmark
from ejkernel.family import Truth
from toy_family.checks import canonicalise, definition
from toy_family.family import FAMILY


@dataclasses.dataclass(frozen=True)
class Case:
    T: int = 8
    group: str = "toy"
    unit: str = "ms"
    passes: tuple = (FORWARD, BOTH)
    operations: tuple = ("decayed_sum",)

    @property
    def name(self):
        return f"toy T{self.T}"

    def facts(self):
        return dataclasses.asdict(self)

    def amount(self, what):
        return float(self.T)

    def structs(self):
        return {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in Problem(self).arrays.items()
        }

    def arguments(self, arrays):
        return {name: arrays[name] for name in ("x", "state", "lengths")}


class Problem:
    def __init__(self, case):
        x = jnp.sin(jnp.arange(2 * case.T * 3.0)).reshape(2, case.T, 3)
        self.arrays = {
            "x": x,
            "state": x[:, 0],
            "lengths": jnp.array([case.T, 5]),
            "dout": jnp.cos(x),
        }

    def truths(self, device_lock):
        def attend(x, state):
            return definition(canonicalise(x, state, self.arrays["lengths"]), jnp.float32)[0]

        out, pull = jax.vjp(attend, self.arrays["x"], self.arrays["state"])
        truths = [
            {"out": out},
            dict(zip(("dx", "dstate"), pull(self.arrays["dout"]), strict=True)),
        ]
        return [Truth.of(exact, exact) for exact in truths]


BENCHMARK = Benchmark(
    family=FAMILY,
    module=__name__,
    help="A toy.",
    cases=lambda backend, quick: [Case()],
    problem=Problem,
    platforms={"cpu": ("xla",)},
    peers=list,
    trained=("x", "state"),
)
