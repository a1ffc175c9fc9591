"""What a benchmark is made of: cases, contenders, and the programs that contenders compile for a case."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from ejkernel.bench.answers import Truth

FORWARD, BOTH = "forward", "forward + backward"

Arrays = dict[str, Any]
# entered for everything that runs on the device, so that processes which compile do not disturb one that measures
Quiet = AbstractContextManager[Any]


class Case(Protocol):
    """One problem. Cases of a group belong in one table."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def passes(self) -> tuple[str, ...]: ...
    def facts(self) -> dict[str, Any]:
        """Sizes and options for the record; among them `group`, and `unit`: "ms", "TFLOP/s" or "TB/s"."""
        ...

    def amount(self, what: str) -> float:
        """Floating-point operations, or bytes, that a pass is worth."""
        ...


class Problem(Protocol):
    """A case with its inputs on the device."""

    arrays: Arrays

    def truths(self, quiet: Quiet) -> list[Truth]:
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
        build: (case, pass, arrays, quiet) to a program.
        missing: why it cannot take part on a backend at all, or None.
        refusal: why it cannot do a case, or None.
        tuning: for ours, where a time belongs in the tuned file.
        platform: for ours, the platform.
    """

    key: str
    name: str
    build: Callable[[Any, str, Arrays, Quiet], Program]
    missing: Callable[[str], str | None] = _nothing
    refusal: Callable[[Any], str | None] = _nothing
    tuning: Callable[[Any], dict[str, Any] | None] = _nothing
    platform: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """A family's benchmark.

    Attributes:
        cases: (backend, quick) to cases, the most telling first.
        contenders: (backend, our platforms or None for those worth measuring) to everybody, present or not.
        problem: puts a case on the device.
        choice: the platforms that our `platform="auto"` takes for a case, by pass.
    """

    name: str
    cases: Callable[[str, bool], list[Any]]
    contenders: Callable[[str, list[str] | None], list[Contender]]
    problem: Callable[[Any], Problem]
    choice: Callable[[Any], dict[str, str | None]]


def jax_program(
    function: Callable[[Arrays], Arrays], arrays: Arrays, quiet: Quiet, chain: tuple[str, str, int] | None = None
) -> Program:
    """Compile a function of named arrays.

    `chain` is for calls shorter than the host takes to start one: (array, result, calls) makes a program of so many
    calls, in which the result of each is the next one's array, and times that.
    """
    start = time.perf_counter()
    compiled = jax.jit(function).lower(arrays).compile()
    compiling = time.perf_counter() - start
    timed, links = compiled, 1
    if chain is not None:
        array, result, links = chain

        def chained(arrays: Arrays) -> jax.Array:
            def link(_: Any, x: jax.Array) -> jax.Array:
                return function({**arrays, array: x})[result].astype(x.dtype)

            return jax.lax.fori_loop(0, links, link, arrays[array])

        timed = jax.jit(chained).lower(arrays).compile()

    def seconds(calls: int) -> float:
        runs = -(-calls // links)
        start, results = time.perf_counter(), None
        for _ in range(runs):
            results = timed(arrays)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) * calls / (runs * links)

    with quiet:
        start = time.perf_counter()
        jax.block_until_ready(compiled(arrays))
        running = time.perf_counter() - start
        seconds(1)
    memory = compiled.memory_analysis()
    temporary = None if memory is None else memory.temp_size_in_bytes
    return Program(seconds, lambda: compiled(arrays), compiling + running, temporary)
