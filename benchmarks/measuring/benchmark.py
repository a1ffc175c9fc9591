"""What a benchmark is made of: cases, contenders, and the programs that contenders compile for a case."""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from benchmarks.measuring.device_lock import DeviceLock
from ejkernel.family import Family, Truth

FORWARD, BOTH = "forward", "forward + backward"
# forward and backward, and then a step of gradient descent
TRAINING = "training step"
LEARNING_RATE = 1e-3

Arrays = dict[str, Any]
# (result by array, calls), see `jax_program`
Chain = tuple[dict[str, str], int]


class Unit(NamedTuple):
    """What a rate is counted in, and how it is written."""

    amount: float
    digits: str


# where the unit is "ms", tables show times, and the rate in the file is in 10^12 per second
UNITS = {
    "ms": Unit(1e12, ".3g"),
    "TFLOP/s": Unit(1e12, ".0f"),
    "TB/s": Unit(1e12, ".2f"),
    "ktoken/s": Unit(1e3, ".4g"),
}


class Case(Protocol):
    """One problem. Cases of a group belong in one table.

    The first of `operations` is measured; the others run the same kernels, and its times are theirs.
    """

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def passes(self) -> tuple[str, ...]: ...
    @property
    def operations(self) -> tuple[str, ...]: ...
    def structs(self) -> Arrays:
        """The arrays of its problem, on shapes alone."""
        ...

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        """Of the public function, by name, from those arrays."""
        ...

    def facts(self) -> dict[str, Any]:
        """Sizes and options for the record.

        Among them are `group`, `unit` (one of `UNITS`), and `memory` where that is worth a table.
        """
        ...

    def amount(self, what: str) -> float:
        """Floating-point operations, bytes or tokens that a pass is worth."""
        ...


class Problem(Protocol):
    """A case with its inputs on the device."""

    arrays: Arrays

    def truths(self, device_lock: DeviceLock) -> list[Truth]:
        """Of the outputs, then of the gradients where there are any."""
        ...


@dataclass(frozen=True)
class Program:
    """One pass of a case, compiled by a contender and run once.

    Attributes:
        seconds: wall-clock time of so many calls, back to back.
        results: the results of a call, by name.
        first_call_seconds: tracing, compiling and the first run.
        temporary_bytes: memory beside inputs and results, where it is known.
    """

    seconds: Callable[[int], float]
    results: Callable[[], Mapping[str, jax.Array]]
    first_call_seconds: float
    temporary_bytes: int | None = None


def _nothing(_: Any) -> Any:
    return None


@dataclass(frozen=True)
class Contender:
    """Something that computes cases: ours on a platform, or a peer.

    Attributes:
        key: what selects it on the command line.
        name: what tables call it.
        build: (case, pass, arrays, device_lock) to a program.
        missing: why it cannot take part on a backend at all, or None.
        refusal: why it cannot do a case, or None.
        tuning: for ours, where a time belongs in the tuned file.
        platform: for ours, the platform.
    """

    key: str
    name: str
    build: Callable[[Any, str, Arrays, DeviceLock], Program]
    missing: Callable[[str], str | None] = _nothing
    refusal: Callable[[Any], str | None] = _nothing
    tuning: Callable[[Any], dict[str, Any] | None] = _nothing
    platform: str | None = None


def _no_chain(case: Any, what: str) -> None:
    return None


@dataclass(frozen=True)
class Benchmark:
    """What is measured of a family, and against whom. Of several outputs the first counts.

    Attributes:
        family: whose functions are measured; its name is what the command line calls the benchmark.
        module: where this stands as `BENCHMARK` (`__name__`): other processes find it there.
        help: a line for the command line.
        cases: (backend, quick) to cases, the most telling first.
        problem: puts a case on the device.
        platforms: ours worth measuring, by backend.
        peers: everybody else, present or not.
        trained: the arrays that a backward has gradients for, where a case has them, `d` before their names; `dout`
            among the arrays is the gradient of the output.
        chain: (case, pass) to what `jax_program` is given, for calls that are short.
        side_by_side: whether a case may be compiled while another is measured: not where XLA has large matmuls of its
            own, which it runs on the GPU to choose among them.
    """

    family: Family
    module: str
    help: str
    cases: Callable[[str, bool], list[Any]]
    problem: Callable[[Any], Problem]
    platforms: Mapping[str, tuple[str, ...]]
    peers: Callable[[], list[Contender]]
    trained: tuple[str, ...] = ()
    chain: Callable[[Any, str], Chain | None] = _no_chain
    side_by_side: bool = True


def passes_of(function: Callable[[Arrays], Any], what: str, trained: tuple[str, ...]) -> Callable[[Arrays], Arrays]:
    """One pass of a function of named arrays: its output, and with a backward the gradients of those trained it has.

    Further outputs of a forward are called `out 1` and so on. A training step has the new values of those trained too.
    """

    def forward(arrays: Arrays) -> Arrays:
        out, *more = jax.tree.leaves(function(arrays))
        return {"out": out, **{f"out {n}": x for n, x in enumerate(more, 1)}}

    def both(arrays: Arrays) -> Arrays:
        present = {name: arrays[name] for name in trained if name in arrays}
        out, pull = jax.vjp(lambda given: jax.tree.leaves(function(arrays | given))[0], present)
        return {"out": out} | {f"d{name}": dx for name, dx in pull(arrays["dout"])[0].items()}

    def training(arrays: Arrays) -> Arrays:
        results = both(arrays)
        moved = {f"new {n}": arrays[n] - LEARNING_RATE * results[f"d{n}"] for n in trained if n in arrays}
        return results | moved

    return {FORWARD: forward, BOTH: both, TRAINING: training}[what]


def jax_program(
    function: Callable[[Arrays], Arrays],
    arrays: Arrays,
    device_lock: DeviceLock,
    chain: Chain | None = None,
    compiler_options: dict[str, Any] | None = None,
    autotunes: bool = False,
) -> Program:
    """Compile a function of named arrays; `autotunes` where XLA runs kernels on a GPU to choose among them.

    `chain` is for calls shorter than the host takes to start one: (result by array, calls) makes a program of so many
    calls, in which these results of each are arrays of the next, and times that.
    """

    def compile(function: Callable[[Arrays], Any]) -> tuple[Any, float]:
        """The program, and the seconds to compile it, without those of waiting for the device."""
        with device_lock.shared() if autotunes else nullcontext():
            start = time.perf_counter()
            compiled = jax.jit(function).lower(arrays).compile(compiler_options)
            return compiled, time.perf_counter() - start

    compiled, compiling = compile(function)
    timed, links = compiled, 1
    if chain is not None:
        results_of, links = chain

        def chained(arrays: Arrays) -> Arrays:
            def link(_: Any, given: Arrays) -> Arrays:
                results = function({**arrays, **given})
                return {array: results[result].astype(given[array].dtype) for array, result in results_of.items()}

            # a state that a loop carries would be copied in every iteration
            unroll = len(results_of) > 1
            return jax.lax.fori_loop(0, links, link, {array: arrays[array] for array in results_of}, unroll=unroll)

        timed, _ = compile(chained)

    def seconds(calls: int) -> float:
        runs = -(-calls // links)
        start, results = time.perf_counter(), None
        for _ in range(runs):
            results = timed(arrays)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) * calls / (runs * links)

    with device_lock:
        start = time.perf_counter()
        jax.block_until_ready(compiled(arrays))
        running = time.perf_counter() - start
        seconds(1)
    memory = compiled.memory_analysis()
    temporary = None if memory is None else memory.temp_size_in_bytes
    return Program(seconds, lambda: compiled(arrays), compiling + running, temporary)
