"""Every operation on every platform that works here, against its definition: numbers, gradients and time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.about.answers import Error, Truth
from ejkernel.about.family import Arrays, Check
from ejkernel.cli.families import family_of
from ejkernel.ops import PLATFORMS, explain
from ejkernel.ops.tuning import median_seconds


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
        return self.output is not None and self.output.ok and (self.gradient is None or self.gradient.ok)


def platforms_for(check: Check) -> tuple[list[str], dict[str, list[str]]]:
    """Platforms that can do a check here, and the reasons of the others."""
    function = family_of(check.operation).function(check.operation)
    explanation = explain(function, **check.structs(), **check.fixed, **check.static)
    return [p for p in PLATFORMS if p not in explanation.refusals], explanation.refusals


def _step(
    function: Callable[[Arrays, Any], Any], differentiable: bool, once: bool = False
) -> Callable[..., tuple[Arrays, Arrays]]:
    """(arrays, fixed, cotangents) -> the outputs and every gradient there is, compiled; quickly if it runs `once`."""
    options: Any = {"xla_backend_optimization_level": 0} if once and jax.default_backend() == "cpu" else None

    def outputs(arrays: Arrays, fixed: Any) -> Arrays:
        return {f"output {n}": out for n, out in enumerate(jax.tree.leaves(function(arrays, fixed)))}

    @jax.jit(compiler_options=options)
    def both(arrays: Arrays, fixed: Any, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        if not differentiable:
            return outputs(arrays, fixed), {}
        found, pull = jax.vjp(lambda given: outputs(given, fixed), arrays)
        return found, pull({name: cotangents[name].astype(out.dtype) for name, out in found.items()})[0]

    return both


def _worst(truth: Truth, got: Arrays) -> Error:
    """The worst of several results of one kind (the output, or the gradients), by how near its limit it is."""
    return max((truth.error(name, got[name]) for name in truth.exact), key=lambda error: error.severity)


class Answers:
    """What a check should give, and jax.nn's time, computed once for all platforms."""

    def __init__(self, check: Check, repeats: int):
        self.check, self.repeats = check, repeats
        self.family = family_of(check.operation)
        self.arrays = check.arrays()
        wide = {name: x.astype(jnp.float32) for name, x in self.arrays.items()}
        shapes = jax.eval_shape(lambda a, f: self._defined(a, f, jnp.float32), wide, check.fixed)
        draw = np.random.default_rng(1).standard_normal
        self.cotangents = {
            f"output {n}": jnp.asarray(draw(x.shape, np.float32)) for n, x in enumerate(jax.tree.leaves(shapes))
        }
        exact = self._step(lambda arrays, fixed: self._defined(arrays, fixed, jnp.float32), once=True)
        naive = self._step(lambda arrays, fixed: self._defined(arrays, fixed, jnp.dtype(check.dtype)), once=True)
        outputs, gradients = exact(wide, check.fixed, self.cotangents)
        # in float32 the naive computation is the definition itself
        is_exact = check.dtype == "float32"
        naives = (outputs, gradients) if is_exact else naive(self.arrays, check.fixed, self.cotangents)
        self.output = Truth.of(outputs, naives[0])
        self.gradient = Truth.of(gradients, naives[1]) if check.differentiable else None
        self.peer_seconds = None if check.peer is None else self._seconds(self._step(self._peer))

    def _step(self, function: Callable[[Arrays, Any], Any], once: bool = False) -> Callable[..., tuple[Arrays, Arrays]]:
        return _step(function, self.check.differentiable, once)

    def _call(self, arrays: Arrays, fixed: Any) -> Any:
        canonicalise = self.family.functions[self.check.operation].canonicalise
        assert canonicalise is not None  # a check is of one call
        return canonicalise(**arrays, **fixed, **self.check.static)

    def _defined(self, arrays: Arrays, fixed: Any, dtype: Any) -> Any:
        return self.check.definition(self._call(arrays, fixed), dtype)

    def _peer(self, arrays: Arrays, fixed: Any) -> Any:
        assert self.check.peer is not None
        return self.check.peer(self._call(arrays, fixed))

    def _seconds(self, step: Callable[..., Any]) -> float:
        return median_seconds(step, self.arrays, self.check.fixed, self.cotangents, repeats=self.repeats)

    def on(self, platform: str) -> Outcome:
        """Run the check on a platform."""
        check, function = self.check, self.family.function(self.check.operation)
        step = self._step(lambda arrays, fixed: function(**arrays, **fixed, **check.static, platform=platform))
        try:
            outputs, gradients = step(self.arrays, check.fixed, self.cotangents)
            output = _worst(self.output, outputs)
            gradient = None if self.gradient is None else _worst(self.gradient, gradients)
            seconds = self._seconds(step)
        except (RuntimeError, ValueError, TypeError) as crash:  # NotImplementedError and XLA's errors are RuntimeErrors
            return Outcome(check, platform, crash=f"{type(crash).__name__}: {crash}")
        return Outcome(check, platform, output, gradient, seconds, self.peer_seconds)


def verify(work: list[tuple[Check, list[str]]], repeats: int = 3) -> Iterator[Outcome]:
    """The outcome of every check on each of its platforms, as they come."""
    for check, platforms in work:
        if platforms:
            answers = Answers(check, repeats)
            yield from (answers.on(platform) for platform in platforms)
