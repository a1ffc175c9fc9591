"""Every operation on every platform that works here, against its definition: numbers, gradients and time.

Compiling is most of the work, and is done side by side; what is compiled runs one after another, in the order shown.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from ejkernel.about.answers import Error, Truth
from ejkernel.about.family import Arrays, Check
from ejkernel.cli.families import family_of
from ejkernel.ops import PLATFORMS, explain
from ejkernel.ops.tuning import median_seconds

Function = Callable[[Arrays, Any], Any]
# for programs that run once, by backend: what takes long to compile there and makes them faster only
QUICKLY: dict[str, Any] = {
    "cpu": {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    "gpu": {"xla_gpu_autotune_level": 0},
}
REPEATS = 3


@dataclass(frozen=True)
class Outcome:
    """How one check went on one platform.

    Seconds are of a forward and, where there is one, a backward; `clock` measures them, and those of jax.nn.
    """

    check: Check
    platform: str
    output: Error | None = None
    gradient: Error | None = None
    seconds: float | None = None
    peer_seconds: float | None = None
    crash: str = ""
    clock: Callable[[], tuple[float, float | None]] | None = None

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


def _step(function: Function, differentiable: bool) -> Callable[..., tuple[Arrays, Arrays]]:
    """(arrays, fixed, cotangents) -> the outputs and every gradient there is."""

    def outputs(arrays: Arrays, fixed: Any) -> Arrays:
        return {f"output {n}": out for n, out in enumerate(jax.tree.leaves(function(arrays, fixed)))}

    def both(arrays: Arrays, fixed: Any, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        if not differentiable:
            return outputs(arrays, fixed), {}
        found, pull = jax.vjp(lambda given: outputs(given, fixed), arrays)
        return found, pull({name: cotangents[name].astype(out.dtype) for name, out in found.items()})[0]

    return both


def _worst(truth: Truth, got: Arrays) -> Error:
    """The worst of several results of one kind (the output, or the gradients), by how near its limit it is."""
    return max((truth.error(name, got[name]) for name in truth.exact), key=lambda error: error.severity)


class _Case:
    """A check with its inputs. What it compiles is for the caller to keep."""

    def __init__(self, check: Check):
        self.check, self.family = check, family_of(check.operation)
        arrays = check.arrays()
        wide = {name: jnp.asarray(np.asarray(x, np.float32)) for name, x in arrays.items()}
        shapes = jax.eval_shape(lambda a, f: self._defined(a, f, jnp.float32), wide, check.fixed)
        draw = np.random.default_rng(1).standard_normal
        cotangents = {
            f"output {n}": jnp.asarray(draw(x.shape, np.float32)) for n, x in enumerate(jax.tree.leaves(shapes))
        }
        self.inputs = arrays, check.fixed, cotangents
        self.wide = wide, check.fixed, cotangents

    def _call(self, arrays: Arrays, fixed: Any) -> Any:
        canonicalise = self.family.functions[self.check.operation].canonicalise
        assert canonicalise is not None  # a check is of one call
        return canonicalise(**arrays, **fixed, **self.check.static)

    def _defined(self, arrays: Arrays, fixed: Any, dtype: Any) -> Any:
        return self.check.definition(self._call(arrays, fixed), dtype)

    def _compiled(self, function: Function, inputs: Any, options: Any = None) -> Compiled:
        return jax.jit(_step(function, self.check.differentiable), compiler_options=options).lower(*inputs).compile()

    def truths(self) -> tuple[Truth, Truth | None]:
        """What the outputs should be, and the gradients where there are any: the same for all platforms."""
        exact = self._by_definition(jnp.float32, self.wide)
        # in float32 the naive computation is the definition itself
        dtype = jnp.dtype(self.check.dtype)
        naive = exact if dtype == jnp.float32 else self._by_definition(dtype, self.inputs)
        output = Truth.of(exact[0], naive[0])
        return output, Truth.of(exact[1], naive[1]) if self.check.differentiable else None

    def _by_definition(self, dtype: Any, inputs: Any) -> tuple[Arrays, Arrays]:
        options = QUICKLY.get(jax.default_backend())
        return jax.device_get(self._compiled(lambda a, f: self._defined(a, f, dtype), inputs, options)(*inputs))

    def ours(self, platform: str) -> Compiled:
        """The public function on a platform."""
        function, static = self.family.function(self.check.operation), self.check.static
        return self._compiled(lambda a, f: function(**a, **f, **static, platform=platform), self.inputs)

    def peer(self) -> Compiled | None:
        """jax.nn, where it has such a thing."""
        peer = self.check.peer
        return None if peer is None else self._compiled(lambda a, f: peer(self._call(a, f)), self.inputs)


class _Work:
    """A check, whose programs a pool compiles as it gets to them."""

    def __init__(self, pool: ThreadPoolExecutor, check: Check, platforms: list[str]):
        def submit(task: Callable[[], Any]) -> Future[Any]:
            return pool.submit(copy_context().run, task)

        self.check = check
        # before what waits for it, which therefore never waits in vain
        self.case: Future[_Case] = submit(lambda: _Case(check))
        self.truths: Future[tuple[Truth, Truth | None]] = submit(lambda: self.case.result().truths())
        self.ours: dict[str, Future[Compiled]] = {
            platform: submit(lambda platform=platform: self.case.result().ours(platform)) for platform in platforms
        }
        self.peer: Future[Compiled | None] = submit(lambda: self.case.result().peer())

    def outcome(self, platform: str) -> Outcome:
        """Run the check on a platform."""
        try:
            outputs, gradients = jax.device_get(self.ours[platform].result()(*self.case.result().inputs))
            output, gradient = self.truths.result()
            errors = _worst(output, outputs), None if gradient is None else _worst(gradient, gradients)
        except Exception as crash:  # a kernel may raise anything, and the others are still to be checked
            return Outcome(self.check, platform, crash=_described(crash))
        return Outcome(self.check, platform, *errors, clock=lambda: self._seconds(self.ours[platform].result()))

    def _seconds(self, program: Compiled) -> tuple[float, float | None]:
        inputs = self.case.result().inputs
        return median_seconds(program, *inputs, repeats=REPEATS), self._peer_seconds

    @cached_property
    def _peer_seconds(self) -> float | None:
        peer = self.peer.result()
        return None if peer is None else median_seconds(peer, *self.case.result().inputs, repeats=REPEATS)


def _described(crash: Exception) -> str:
    return f"{type(crash).__name__}: {crash}"


def verify(work: list[tuple[Check, list[str]]]) -> Iterator[Outcome]:
    """The outcome of every check on each of its platforms, in order, as they come; `timed` adds their times.

    When it ends, nothing is compiled any more: that would slow what is timed.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for one, platforms in [(_Work(pool, check, platforms), platforms) for check, platforms in work if platforms]:
            yield from map(one.outcome, platforms)
        pool.shutdown()
    finally:  # after Ctrl-C nobody waits for what is being compiled
        pool.shutdown(wait=False, cancel_futures=True)


def timed(outcome: Outcome) -> Outcome:
    """The outcome with its times, where it did not crash."""
    if outcome.clock is None:
        return outcome
    try:
        seconds, peer_seconds = outcome.clock()
    except Exception as crash:  # as above; jax.nn may crash too
        return replace(outcome, crash=f"while it was timed: {_described(crash)}")
    return replace(outcome, seconds=seconds, peer_seconds=peer_seconds)
