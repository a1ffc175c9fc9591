"""Measuring: every contender's programs for a case are built and checked, then timed with interleaved samples."""

import dataclasses
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import jax

from benchmarks.measuring.benchmark import FORWARD, UNITS, Benchmark, Case, Contender, DeviceLock, Problem, Program
from benchmarks.measuring.contenders import all_contenders
from benchmarks.measuring.timing import PAUSE_SECONDS, interleaved_samples
from ejkernel.cli.workers import TOO_LATE, Lost, device_works, spread


@dataclass(frozen=True)
class Result:
    """How a contender did one pass of a case.

    `status` is "ok", "wrong", "refused" (it says that it cannot), "failed" or "skipped"; the last three have a reason.
    `rate` is in the case's unit, of "ms" in 10^12 operations or bytes a second. `alone`: timed as soon as it was built,
    and no time was left to interleave it with the others.
    """

    case: str
    what: str
    contender: str
    status: str
    reason: str = ""
    milliseconds: float | None = None
    rate: float | None = None
    samples: list[float] = field(default_factory=list)
    calls: int | None = None
    first_call_seconds: float | None = None
    temporary_megabytes: float | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    tuning: dict[str, Any] | None = None
    alone: bool = False


class Measured(NamedTuple):
    """Results of a case, and the contender that took the device down with it, if one did."""

    results: list[Result]
    culprit: str | None = None


def _short(error: Exception) -> str:
    lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' ... '.join(dict.fromkeys([*lines[:1], *lines[-1:]]))}"


class _CaseOnDevice:
    """One case on this process's device, with its exact results."""

    def __init__(self, case: Case, problem: Problem, device_lock: DeviceLock):
        self.case, self.problem, self.device_lock = case, problem, device_lock
        self.truths = problem.truths(device_lock)

    def build(self, contender: Contender, what: str) -> tuple[Program | None, Result]:
        """The program, or None where it failed, and its result without a time."""
        blank = Result(self.case.name, what, contender.name, "ok", tuning=contender.tuning(self.case))
        try:
            program = contender.build(self.case, what, self.problem.arrays, self.device_lock)
            with self.device_lock:
                got = jax.block_until_ready(program.results())
            truths = self.truths[:1] if what == FORWARD else self.truths
            errors = {name: truth.error(name, got[name]) for truth in truths for name in truth.exact}
        except Exception as error:  # a contender may raise anything, and the others are still to be measured
            traceback.print_exc()
            return None, dataclasses.replace(blank, status="failed", reason=_short(error))
        memory = program.temporary_bytes
        return program, dataclasses.replace(
            blank,
            status="ok" if all(e.ok for e in errors.values()) else "wrong",
            first_call_seconds=program.first_call_seconds,
            temporary_megabytes=None if memory is None else memory / 1e6,
            errors={n: {"error": e.error, "limit": e.limit} for n, e in errors.items()},
        )

    def time(self, built: list[tuple[Program, Result]], repeats: int) -> list[Result]:
        """The results of one pass with their times."""
        pause = PAUSE_SECONDS if jax.default_backend() == "cpu" else 0.0
        with self.device_lock:
            samples = interleaved_samples(
                {result.contender: program.seconds for program, result in built}, repeats, pause
            )
        per = UNITS[self.case.facts()["unit"]].amount
        sampled = [(result, samples[result.contender]) for _, result in built]
        return [
            dataclasses.replace(
                result,
                milliseconds=one.median * 1e3,
                rate=self.case.amount(result.what) / one.median / per,
                samples=[seconds * 1e3 for seconds in one.seconds],
                calls=one.calls,
            )
            for result, one in sampled
        ]


def _unmeasured(case: Case, contenders: list[str], status: str, reason: str) -> list[Result]:
    return [Result(case.name, what, name, status, reason) for name in contenders for what in case.passes]


# samples of a contender that is first timed alone
ALONE_REPEATS = 3


def measure(
    benchmark: Benchmark,
    case: Case,
    contenders: list[Contender],
    repeats: int,
    device_lock: DeviceLock,
    deadline: float = float("inf"),
    alone_first: bool = False,
) -> Iterator[Measured]:
    """Build and check every contender on a case, in their order, then time all of them, interleaved.

    One is built only if that should end before the deadline, judging by those before. `alone_first` also times each
    alone, as soon as it is built: that time is kept if the deadline comes before the interleaved samples.
    """
    able, refused = [], []
    for contender in contenders:
        reason = contender.refusal(case)
        refused += [Result(case.name, what, contender.name, "refused", reason) for what in case.passes if reason]
        able += [] if reason else [contender]
    yield Measured(refused)
    if not able:
        return
    on_device = _CaseOnDevice(case, benchmark.problem(case), device_lock)
    built: dict[str, list[tuple[Program, Result]]] = {what: [] for what in case.passes}
    longest = 0.0
    for number, contender in enumerate(able):
        start = time.monotonic()
        if start + longest > deadline:
            remaining = [contender.name for contender in able[number:]]
            yield Measured(_unmeasured(case, remaining, "skipped", TOO_LATE.reason))
            break
        results: list[Result] = []
        for what in case.passes:
            program, result = on_device.build(contender, what)
            if program is None:
                results.append(result)
                if not device_works():
                    yield Measured(_unmeasured(case, [contender.name], "failed", result.reason), contender.name)
                    return
                continue
            built[what].append((program, result))
            if alone_first and contender is not able[-1]:
                timed = on_device.time([(program, result)], min(repeats, ALONE_REPEATS))
                results += [dataclasses.replace(one, alone=True) for one in timed]
        yield Measured(results)
        longest = max(longest, time.monotonic() - start)
    for what in case.passes:
        yield Measured(on_device.time(built[what], repeats))


# Many cases -------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A case for a process of its own; everything in it can be sent there. `benchmark` is a module's name."""

    benchmark: str
    backend: str
    case: Any
    platforms: list[str] | None
    contenders: list[str]
    repeats: int
    lock: str
    deadline: float


def _in_a_process(job: Job) -> Iterator[Measured]:
    benchmark: Benchmark = import_module(job.benchmark).BENCHMARK
    chosen = [c for c in all_contenders(benchmark, job.backend, job.platforms) if c.name in job.contenders]
    ours_first = job.deadline < float("inf")  # no peer that tunes itself may use up the time of all
    device_lock = DeviceLock(job.lock, measures_first=ours_first)
    yield from measure(benchmark, job.case, chosen, job.repeats, device_lock, job.deadline, alone_first=ours_first)


def measure_in_this_process(
    benchmark: Benchmark, cases: list[Any], contenders: list[Contender], repeats: int, deadline: float
) -> Iterator[list[Result]]:
    """Case after case in this process. One is begun only where it should end in time, judging by those before."""
    longest, culprit = 0.0, None
    for case in cases:
        start = time.monotonic()
        names = [contender.name for contender in contenders]
        if culprit is not None:
            yield _unmeasured(case, names, "skipped", f"the device went down under {culprit}")
        elif start + longest > deadline:
            yield _unmeasured(case, names, "skipped", TOO_LATE.reason)
        else:
            for measured in measure(benchmark, case, contenders, repeats, DeviceLock(), deadline):
                culprit = measured.culprit
                yield measured.results
            longest = max(longest, time.monotonic() - start)


def measure_in_processes(jobs: list[Job], processes: int, deadline: float) -> Iterator[list[Result]]:
    """Cases compiled side by side, and measured one at a time.

    Where a contender takes the device down, the case starts again without it. What comes later for a cell replaces
    what came before.
    """
    queue = deque(jobs)
    reported: dict[str, set[tuple[str, str]]] = {job.case.name: set() for job in jobs}
    for job, outcome in spread(_in_a_process, queue, processes, deadline):
        cells = reported[job.case.name]
        if isinstance(outcome, Lost):
            status = "skipped" if outcome is TOO_LATE else "failed"
            lost = _unmeasured(job.case, job.contenders, status, outcome.reason)
            yield [result for result in lost if (result.what, result.contender) not in cells]
            continue
        cells |= {(result.what, result.contender) for result in outcome.results}
        if outcome.culprit is not None:
            remaining = [name for name in job.contenders if name != outcome.culprit]
            queue.appendleft(job._replace(contenders=remaining))
        yield outcome.results
