"""Every operation on every platform that works here, against its definition: numbers, gradients and time.

Compiling is most of the work, on a GPU mostly Python's. Workers share it: there fresh processes, of which one that
dies takes a single answer with it, elsewhere threads of this process. Each keeps what it compiled; when all is checked,
and nothing is compiled any more, they take times one after another.
"""

import inspect
import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from ejkernel.cli.families import family_of
from ejkernel.cli.workers import Lost, device_works, spread
from ejkernel.family import Arrays, Check, Error, Truth
from ejkernel.ops import PLATFORMS, explain
from ejkernel.ops.settings import with_these_settings
from ejkernel.ops.tuning import median_seconds

Function = Callable[[Arrays, Any], Any]
# by backend: without what takes long to compile there and makes only XLA's own programs faster
FAST_COMPILE: dict[str, Any] = {
    "cpu": {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    "gpu": {"xla_gpu_autotune_level": 0},
}
REPEATS = 3


@dataclass(frozen=True)
class Outcome:
    """How one check went on one platform. Seconds are of a forward and, where there is one, a backward."""

    check: Check
    platform: str
    output: Error | None = None
    gradient: Error | None = None
    seconds: float | None = None
    peer_seconds: float | None = None
    crash: str = ""

    @property
    def ok(self) -> bool:
        if self.crash or self.output is None:
            return False
        return self.output.ok and (self.gradient is None or self.gradient.ok)


def platforms_for(check: Check) -> tuple[list[str], dict[str, list[str]]]:
    """Platforms that can do a check here, and the reasons of the others."""
    function = family_of(check.operation).function(check.operation)
    explanation = explain(function, **check.structs(), **check.fixed, **check.static)
    return [p for p in PLATFORMS if p not in explanation.refusals], explanation.refusals


def _both_passes(function: Function, differentiable: bool) -> Callable[..., tuple[Arrays, Arrays]]:
    """(arrays, fixed, cotangents) -> the outputs and every gradient there is."""

    def outputs(arrays: Arrays, fixed: Any) -> Arrays:
        return {f"output {n}": out for n, out in enumerate(jax.tree.leaves(function(arrays, fixed)))}

    def both(arrays: Arrays, fixed: Any, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        if not differentiable:
            return outputs(arrays, fixed), {}
        named, pull = jax.vjp(lambda given: outputs(given, fixed), arrays)
        return named, pull({name: cotangents[name].astype(out.dtype) for name, out in named.items()})[0]

    return both


def _worst(truth: Truth, got: Arrays) -> Error:
    """The worst of several results of one kind (the output, or the gradients), by how near its limit it is."""
    return max((truth.error(name, got[name]) for name in truth.exact), key=lambda error: error.severity)


@contextmanager
def _usual_promotion() -> Iterator[None]:
    """For definitions and peers, which need JAX's default rules. Ours are checked under the rules that the user set."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class _Case:
    """A check with its inputs. What it compiles is for the caller to keep."""

    def __init__(self, check: Check):
        backend = jax.default_backend()
        self.fast_compile = FAST_COMPILE.get(backend)
        # on a GPU, trying out XLA's matmuls takes longest of all, and does nothing for our kernels
        self.our_options = self.fast_compile if backend == "gpu" else None
        self.check, self.family = check, family_of(check.operation)
        arrays = check.arrays()
        wide = {name: jnp.asarray(np.asarray(x, np.float32)) for name, x in arrays.items()}
        with _usual_promotion():
            shapes = jax.eval_shape(lambda a, f: self._defined(a, f, jnp.float32), wide, check.fixed)
        draw = np.random.default_rng(1).standard_normal
        cotangents = {
            f"output {n}": jnp.asarray(draw(x.shape, np.float32)) for n, x in enumerate(jax.tree.leaves(shapes))
        }
        self.inputs = arrays, check.fixed, cotangents
        self.float32_inputs = wide, check.fixed, cotangents

    def _call(self, arrays: Arrays, fixed: Any) -> Any:
        canonicalise = self.family.functions[self.check.operation].canonicalise
        assert canonicalise is not None  # a check is of one call
        return canonicalise(**arrays, **fixed, **self.check.static)

    def _defined(self, arrays: Arrays, fixed: Any, dtype: Any) -> Any:
        return self.check.definition(self._call(arrays, fixed), dtype)

    def _compiled(self, function: Function, inputs: Any, options: Any = None) -> Compiled:
        return (
            jax.jit(_both_passes(function, self.check.differentiable), compiler_options=options)
            .lower(*inputs)
            .compile()
        )

    @cached_property
    def truths(self) -> tuple[Truth, Truth | None]:
        """What the outputs should be, and the gradients where there are any: the same for all platforms."""
        exact = self._by_definition(jnp.float32, self.float32_inputs)
        # in float32 the naive computation is the definition itself
        dtype = jnp.dtype(self.check.dtype)
        naive = exact if dtype == jnp.float32 else self._by_definition(dtype, self.inputs)
        output = Truth.of(exact[0], naive[0])
        return output, Truth.of(exact[1], naive[1]) if self.check.differentiable else None

    def _by_definition(self, dtype: Any, inputs: Any) -> tuple[Arrays, Arrays]:
        with _usual_promotion():
            program = self._compiled(lambda a, f: self._defined(a, f, dtype), inputs, self.fast_compile)
        return jax.device_get(program(*inputs))

    def ours(self, platform: str) -> Compiled:
        """The public function on a platform."""
        return self._compiled(self.public(platform), self.inputs, self.our_options)

    def public(self, platform: str) -> Function:
        """The same, not compiled. What has one platform, as `attention` does, has no such argument."""
        function, static = self.family.function(self.check.operation), dict(self.check.static)
        if "platform" in inspect.signature(function).parameters:
            static["platform"] = platform
        return lambda a, f: function(**a, **f, **static)

    def peer(self) -> Compiled:
        """jax.nn, which has such a thing."""
        peer = self.check.peer
        assert peer is not None
        with _usual_promotion():
            return self._compiled(lambda a, f: peer(self._call(a, f)), self.inputs)


# Workers ----------------------------------------------------------------------------------------------------


class _Job(NamedTuple):
    """What a worker does at a time: a check, with its number, on a platform; None as a platform stands for jax.nn."""

    number: int
    check: Check
    platform: str | None


# what a worker may be asked to do with a job
CHECK, TIME = "check", "time"
# its answer: fields of an `Outcome`
Fields = dict[str, Any]


class _Worker:
    """Does jobs: checks them, and later times the programs that it kept."""

    def __init__(self, jobs: list[_Job]):
        self.jobs = jobs
        self.cases: dict[int, _Case] = {}
        self.programs: dict[int, Compiled] = {}

    def do(self, step: str, n: int) -> Fields:
        number, check, platform = self.jobs[n]
        if step == TIME:
            return {"seconds": median_seconds(self.programs[n], *self.cases[number].inputs, repeats=REPEATS)}
        if number not in self.cases:
            self.cases[number] = _Case(check)
        case = self.cases[number]
        self.programs[n] = case.peer() if platform is None else case.ours(platform)
        if platform is None:
            return {}
        outputs, gradients = jax.device_get(self.programs[n](*case.inputs))
        output, gradient = case.truths
        return {
            "output": _worst(output, outputs),
            "gradient": None if gradient is None else _worst(gradient, gradients),
        }


def _described(crash: BaseException) -> str:
    return f"{type(crash).__name__}: {crash}"


def _serve(jobs: list[_Job], item: tuple[int, Connection]) -> Iterator[Fields | Lost]:
    """A worker's answer to each request, until there are no more or its device is down."""
    worker, (_, requests) = _Worker(jobs), item
    while True:
        try:
            step, n = requests.recv()
        except EOFError:
            return
        try:
            fields = worker.do(step, n)
        except Exception as crash:  # a kernel may raise anything, and the others are still to be checked
            if not device_works():
                yield Lost(_described(crash))
                return
            fields = {"crash": _described(crash)}
        yield fields


def _in_threads(task: Callable[[Any], Iterator[Any]], items: deque[Any]) -> Generator[tuple[Any, Any], None, None]:
    """As `spread` does, in threads of this process, all at once; after Ctrl-C nobody waits for what they compile."""
    answers: SimpleQueue[tuple[Any, Any] | None] = SimpleQueue()
    running = 0

    def work(item: Any) -> None:
        try:
            for answer in task(item):
                answers.put((item, answer))
        except BaseException as crash:  # or all would wait for it
            answers.put((item, Lost(_described(crash))))
        answers.put(None)

    while items or running:
        while items:
            Thread(target=with_these_settings(work), args=(items.popleft(),), daemon=True).start()
            running += 1
        answer = answers.get()
        if answer is None:
            running -= 1
        else:
            yield answer


class _Scheduler:
    """Starts workers and sends them requests: jobs to check while there are any, then one at a time to time.

    Attributes:
        starting: workers that are to start, each with where it receives its requests.
        unchecked: jobs to check, those of checks with many jobs first.
        known: by worker, the checks that it has the inputs and the exact results of.
        busy: by worker, the request it works on.
        untimed: by job, the worker that has its program.
    """

    def __init__(self, jobs: list[_Job], checked: Callable[[Outcome], None]):
        self.jobs, self.checked = jobs, checked
        self.starting: deque[tuple[int, Connection]] = deque()
        self.requests: dict[int, Connection] = {}
        jobs_of = Counter(job.number for job in jobs)
        self.unchecked = sorted(range(len(jobs)), key=lambda n: -jobs_of[jobs[n].number])
        self.known: dict[int, set[int]] = {}
        self.busy: dict[int, tuple[str, int]] = {}
        self.untimed: dict[int, int] = {}
        self.answers: dict[tuple[str, int], Fields] = {}

    def start_worker(self) -> None:
        """One more, for one of the jobs to check."""
        worker, (receiver, sender) = len(self.known), Pipe(duplex=False)
        self.starting.append((worker, receiver))
        self.requests[worker], self.known[worker] = sender, set()
        self._request_check(worker)

    def on_answer(self, worker: int, answer: Fields | Lost) -> None:
        """Note a worker's answer, and send out what comes next."""
        if isinstance(answer, Lost):
            del self.requests[worker]
            self.untimed = {n: who for n, who in self.untimed.items() if who != worker}
        if worker in self.busy:
            self._note(worker, {"crash": answer.reason} if isinstance(answer, Lost) else answer)
        if self.unchecked and worker in self.requests:
            self._request_check(worker)
        elif self.unchecked:
            self.start_worker()
        elif self.untimed and not self.busy:
            n, owner = self.untimed.popitem()
            self._request(owner, TIME, n)
        elif not self.busy:
            for requests in self.requests.values():
                requests.close()

    def _request_check(self, worker: int) -> None:
        """Slow ones first; by preference a job of a check that the worker knows, then of one that nobody knows."""
        mine, known_to_some = self.known[worker], set().union(*self.known.values())
        numbers = {n: self.jobs[n].number for n in self.unchecked}

        def cost(n: int) -> tuple[bool, bool, bool]:
            return not self.jobs[n].check.slow, numbers[n] not in mine, numbers[n] in known_to_some

        n = min(self.unchecked, key=cost)
        self.unchecked.remove(n)
        mine.add(numbers[n])
        self._request(worker, CHECK, n)

    def _request(self, worker: int, step: str, n: int) -> None:
        self.busy[worker] = step, n
        self.requests[worker].send((step, n))

    def _note(self, worker: int, fields: Fields) -> None:
        step, n = self.busy.pop(worker)
        self.answers[step, n] = fields
        _, check, platform = self.jobs[n]
        if step == CHECK and "crash" not in fields:
            self.untimed[n] = worker
        if step == CHECK and platform is not None:
            self.checked(Outcome(check, platform, **fields))

    def outcomes(self) -> list[Outcome]:
        """The outcome of every job on a platform of ours."""
        peers = {job.number: n for n, job in enumerate(self.jobs) if job.platform is None}
        return [
            self._outcome(n, job.check, job.platform, peers.get(job.number))
            for n, job in enumerate(self.jobs)
            if job.platform is not None
        ]

    def _outcome(self, n: int, check: Check, platform: str, peer: int | None) -> Outcome:
        checked, timed = self.answers[CHECK, n], self.answers.get((TIME, n), {})
        peers = {} if peer is None else {**self.answers[CHECK, peer], **self.answers.get((TIME, peer), {})}
        timing_crash = timed.get("crash") or peers.get("crash")
        crash = {"crash": f"while it was timed: {timing_crash}"} if timing_crash else {}
        return Outcome(check, platform, **{"peer_seconds": peers.get("seconds"), **timed, **crash, **checked})


def _processes() -> int:
    """How many share the work. 0 where threads do: a TPU belongs to one process, and for a CPU mostly XLA compiles."""
    return max(1, min(14, (os.cpu_count() or 1) - 2)) if jax.default_backend() == "gpu" else 0


def verify(work: list[tuple[Check, list[str]]], checked: Callable[[Outcome], None]) -> list[Outcome]:
    """The outcome of every check on each of its platforms, in order; `checked` gets each as it comes, untimed."""
    jobs = [
        _Job(number, check, platform)
        for number, (check, platforms) in enumerate(work)
        for platform in (*platforms, *([None] if platforms and check.peer else []))
    ]
    scheduler, processes = _Scheduler(jobs, checked), _processes()
    workers = min(len(jobs), processes or os.cpu_count() or 1)
    for _ in range(workers):
        scheduler.start_worker()
    task = partial(_serve, jobs)
    answers = (
        spread(task, scheduler.starting, workers, float("inf")) if processes else _in_threads(task, scheduler.starting)
    )
    with closing(answers):  # ends the processes, after Ctrl-C too
        for (worker, _), answer in answers:
            scheduler.on_answer(worker, answer)
    return scheduler.outcomes()
