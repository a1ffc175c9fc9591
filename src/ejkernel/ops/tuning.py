"""Measuring configs, on request only, and keeping the winner."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import core as jax_core

from ejkernel.ops.autodiff import execute
from ejkernel.ops.config import UNGIVEN, USERS, choose_config
from ejkernel.ops.operation import Arrays, Call, Operation, Plan
from ejkernel.ops.settings import forget_traced_configs
from ejkernel.ops.tuned_files import TunedConfigs, keep, user_file
from ejkernel.ops.tuning_session import Session, opened, paused, session

REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What was measured for a bucket on a platform.

    Attributes:
        seconds: of a forward, and of a forward and a backward where there is one, by config.
        failed: the configs that could not be measured, and why.
    """

    operation: str
    bucket: str
    platform: str
    default: Any
    seconds: dict[Any, tuple[float, ...]]
    failed: dict[Any, str]

    @property
    def best(self) -> Any:
        """The fastest config, both passes together."""
        return min(self.seconds, key=lambda config: sum(self.seconds[config]))

    def entry(self, operation: str) -> TunedConfigs:
        """The fastest config for a tuned file, as that of an operation with the same kernels."""
        microseconds = [seconds * 1e6 for seconds in self.seconds[self.best]]
        fields = dataclasses.asdict(self.best)
        return TunedConfigs().add(operation, self.bucket, self.platform, fields, *microseconds)


@contextmanager
def autotune(*, save: bool = True, progress: bool = True, again: bool = True) -> Iterator[list[Tuned]]:
    """Measure the search space of every operation called inside, on the shapes of the call, and keep the winner.

    The winner is used at once and, with `save`, written to the user's tuned file for later runs, and for programs of
    this one that were traced before: they are traced again. Where the file cannot be written, a warning says so and
    the winner serves this process. Without `again`, what that file
    has is used as it is. The list that `as` names grows by what was measured.
    Of a call that is split over devices, a device's part is measured, on one of them.
    Inside jit the arrays' values are unknown, so an example of the operation in the same shapes is measured.

    >>> import jax.numpy as jnp
    >>> from ejkernel.modules import flash_attention
    >>> from ejkernel.ops import autotune
    >>> q = jnp.ones((1, 64, 2, 16))
    >>> with autotune(save=False, progress=False):
    ...     flash_attention(q, q, q).shape
    (1, 64, 2, 16)
    """
    new = Session(save, progress, again)
    try:
        with opened(new):
            yield new.found
    finally:
        if new.found and save:
            forget_traced_configs()


def _concrete(operation: Operation, call: Call) -> Arrays:
    """The arrays of a call, or those of an example where one of them is being traced."""
    if any(isinstance(x, jax_core.Tracer) for x in call.arrays.values()):
        return operation.example(call)
    return call.arrays


def median_seconds(function: Any, *args: Any, repeats: int = REPEATS) -> float:
    """Median wall-clock time of a compiled function, after one call to warm up."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _measure(operation: Operation, implementation: Any, call: Call, config: Any, arrays: Arrays) -> tuple[float, ...]:
    """Seconds of a forward, and of a forward and a backward where there is one, with that config."""
    plan = Plan(operation, implementation, config, call.spec, call.target)
    learned = [n for n, d in operation.arrays.items() if d.grad and n in arrays and implementation.backward is not None]
    trained = {name: arrays[name] for name in learned}
    # given to the program as well: what it holds as constants, XLA computes while it compiles
    untrained = {name: x for name, x in arrays.items() if name not in trained}

    def loss(trained: Arrays, untrained: Arrays) -> Any:
        outputs: Arrays = execute(plan, {**untrained, **trained})  # pyright: ignore[reportAssignmentType]
        return sum(x.astype(jnp.float32).sum() for x in outputs.values() if jnp.issubdtype(x.dtype, jnp.floating))

    steps = [jax.jit(loss), jax.jit(jax.value_and_grad(loss))] if trained else [jax.jit(loss)]
    return tuple(median_seconds(step, trained, untrained) for step in steps)


def tune(operation: Operation, implementation: Any, platform: str, call: Call) -> Any:
    """The fastest config of the search space for a call; measured once per bucket in a context."""
    current = session()
    assert current is not None
    key = (operation.measured_as, operation.bucket(call), platform)
    if key in current.done:
        return current.done[key]
    if not current.again:
        config, source = choose_config(operation, implementation, platform, call, UNGIVEN)
        if source == USERS:
            return config
    # measured configs must not start a tuning of their own; tracing around this call must not swallow it
    with paused(), jax.ensure_compile_time_eval():
        if isinstance(jnp.zeros(()), jax_core.Tracer):
            raise RuntimeError(
                f"autotune() cannot measure {operation.name} in a shard_map outside of jit, where every step is one of "
                "all devices: put jax.jit around the shard_map"
            )
        winner = _search(operation, implementation, platform, call, current.progress)
    current.found.append(winner)
    current.done[key] = winner.best
    if current.save:
        keep(winner.entry(operation.measured_as), user_file(call.target.kind))
    return winner.best


def _search(operation: Operation, implementation: Any, platform: str, call: Call, progress: bool) -> Tuned:
    """Measure every candidate; `RuntimeError` where none can be."""
    default = implementation.default_config(call)
    candidates = list(dict.fromkeys([default, *implementation.search_space(call)]))
    arrays = _concrete(operation, call)
    seconds: dict[Any, tuple[float, ...]] = {}
    failed: dict[Any, str] = {}
    for config in _tracked(candidates, f"tuning {operation.name} on {platform}", progress):
        try:
            seconds[config] = _measure(operation, implementation, call, config, arrays)
        except Exception as error:  # a kernel that does not fit may raise anything, and the others are still to come
            failed[config] = f"{type(error).__name__}: {error}"
    if not seconds:
        reasons = "\n".join(f"  {config}: {reason}" for config, reason in failed.items())
        raise RuntimeError(f"no config of {operation.name} on {platform} could be measured:\n{reasons}")
    return Tuned(operation.name, operation.bucket(call), platform, default, seconds, failed)


def _tracked(candidates: list[Any], title: str, progress: bool) -> Any:
    if not progress:
        return candidates
    from rich.progress import track

    return track(candidates, description=title)
