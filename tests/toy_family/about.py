"""What the toy family says about itself: sizes to a call, a check, and a benchmark of one case."""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from ejkernel.about.answers import Truth
from ejkernel.about.benchmark import BOTH, FORWARD, Benchmark
from ejkernel.about.family import Check, Family, PublicFunction
from ejkernel.about.sizes import Option, Size, struct
from ejkernel.ops import Call
from toy_family.operations import Spec


def canonicalise(x, state, lengths, *, decay=0.5):
    return Call(Spec(decay), {"x": x, "state": state, "lengths": lengths})


def definition(call, dtype):
    h, out = call["state"].astype(dtype), []
    for t in range(call["x"].shape[1]):
        h = call.spec.decay * h + jnp.where(t < call["lengths"][:, None], call["x"][:, t].astype(dtype), 0)
        out.append(h)
    return jnp.stack(out, 1), h


def arguments(
    operation,
    *,
    batch: Size = 2,
    length: Size = 8,
    dim: Size = 3,
    decay: Annotated[float, Option("Of the toy, per token.")] = 0.5,
):
    x, state = struct("float32", batch, length, dim), struct("float32", batch, dim)
    return {"x": x, "state": state, "lengths": jax.ShapeDtypeStruct((batch,), jnp.int32), "decay": decay}


def checks():
    lengths = {"lengths": jnp.array([8, 5])}
    return [Check("short", "decayed_sum", definition, "float32", {"x": (2, 8, 3), "state": (2, 3)}, lengths)]


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
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in Problem(self).arrays.items()}

    def arguments(self, arrays):
        return {name: arrays[name] for name in ("x", "state", "lengths")}


class Problem:
    def __init__(self, case):
        x = jnp.sin(jnp.arange(2 * case.T * 3.0)).reshape(2, case.T, 3)
        self.arrays = {"x": x, "state": x[:, 0], "lengths": jnp.array([case.T, 5]), "dout": jnp.cos(x)}

    def truths(self, device_lock):
        def attend(x, state):
            return definition(canonicalise(x, state, self.arrays["lengths"]), jnp.float32)[0]

        out, pull = jax.vjp(attend, self.arrays["x"], self.arrays["state"])
        found = [{"out": out}, dict(zip(("dx", "dstate"), pull(self.arrays["dout"]), strict=True))]
        return [Truth.of(exact, exact) for exact in found]


FAMILY = Family(
    name="toy",
    module=__name__,
    functions={"decayed_sum": PublicFunction("toy_family.operations", canonicalise)},
    arguments=arguments,
    checks=checks,
    benchmark=Benchmark(
        help="A toy.",
        cases=lambda backend, quick: [Case()],
        problem=Problem,
        platforms={"cpu": ("xla",)},
        peers=list,
        trained=("x", "state"),
    ),
)
