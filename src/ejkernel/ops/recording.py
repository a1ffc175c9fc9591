"""`explain`: a function is traced, and every call of an operation in it recorded in place of being run.

While a recorder is open, an operation's forward and backward are replaced by jitted functions of the same inputs and
outputs that compute nothing, and whose names say which call they stand for. So the program of the function shows where
the calls stand: in loops, in branches, in gradients.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxprs_in_params

from ejkernel.ops.explanation import Explanation, combined
from ejkernel.ops.operation import Arrays, Call, Operation, Plan
from ejkernel.ops.settings import changed, settings
from ejkernel.ops.sharding import varying_like
from ejkernel.ops.target import named_target

_PREFIX = "ejkernel_recorded"
FORWARD, BACKWARD = "forward", "backward"


@dataclass(eq=False)
class Recorder:
    """The calls of a function that is being traced.

    Attributes:
        explanations: of every call so far.
        operations: of each, in whose order the arrays are shown.
        names: of the arrays of each, as a program has them.
        part_of: the public function of several calls that is being traced.
    """

    explanations: list[Explanation] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    names: list[tuple[str, ...]] = field(default_factory=list)
    part_of: str = ""

    def record(self, plan: Plan, explanation: Explanation, call: Call) -> Plan:
        """The plan that stands in for a call's."""
        self.explanations.append(replace(explanation, part_of=self.part_of))
        self.operations.append(plan.operation)
        self.names.append(tuple(sorted(call.arrays)))
        return replace(plan, gradient=None, implicit=False, recorded=len(self.explanations) - 1)

    def order(self, number: int) -> list[str]:
        """The arrays of a call as its operation lists them."""
        return [name for name in self.operations[number].arrays if name in self.names[number]]

    @contextmanager
    def inside(self, function: str) -> Iterator[None]:
        """Within, calls are recorded as those of a public function."""
        outer, self.part_of = self.part_of, self.part_of or function
        try:
            yield
        finally:
            self.part_of = outer


def recorder() -> Recorder | None:
    """The open one."""
    return settings().recorder


Forward = Callable[[Plan, Arrays], tuple[Arrays, Arrays]]


@lru_cache(maxsize=512)
def _result_shapes(forward: Forward, plan: Plan, shapes: tuple[tuple[str, tuple[int, ...], Any], ...]) -> Any:
    """Outputs and residuals by the shapes of the arrays, as that plan has them."""
    with changed(recorder=None):
        return jax.eval_shape(lambda x: forward(plan, x), {n: jax.ShapeDtypeStruct(*rest) for n, *rest in shapes})


def stand_in_forward(plan: Plan, forward: Forward) -> Callable[[Arrays], tuple[Arrays, Arrays]]:
    """A forward that computes nothing, with the outputs and residuals of the one that it stands in for."""

    def stand_in(arrays: Arrays) -> tuple[Arrays, Arrays]:
        shapes = tuple((name, x.shape, x.dtype) for name, x in sorted(arrays.items()))
        return _stand_in(plan, FORWARD, _result_shapes(forward, replace(plan, recorded=None), shapes))(arrays)

    return stand_in


def stand_in_backward(plan: Plan) -> Callable[[Arrays, Arrays, Arrays], Arrays]:
    """A backward that computes nothing, from the residuals: rematerialisation runs the forward again for them."""

    def stand_in(arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
        trained = [name for name, dims in plan.operation.arrays.items() if dims.grad and name in arrays]
        return _stand_in(plan, BACKWARD, {name: arrays[name] for name in trained})(arrays, residuals, cotangents)

    return stand_in


def _stand_in(plan: Plan, which: str, results: Any) -> Callable[..., Any]:
    """A function of any arrays with results of these shapes, which a program shows under the name of the call."""
    leaves, tree = jax.tree.flatten(results)
    shapes = [(x.shape, x.dtype) for x in leaves]

    def stand_in(*arrays: Arrays) -> Any:
        zeros = jax.tree.unflatten(tree, [jnp.zeros(*shape) for shape in shapes])
        # results depend on arguments: JAX must not take the call for a constant
        return lax.optimization_barrier((varying_like(zeros, arrays), arrays))[0]

    stand_in.__name__ = f"{_PREFIX}_{which}_{plan.recorded}"
    return jax.jit(stand_in)


@dataclass
class _Occurrences:
    """How often a recorded call runs."""

    arrays: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=lambda: {FORWARD: 0, BACKWARD: 0})
    conditions: dict[str, None] = field(default_factory=dict)


def _short(x: Any) -> str:
    """Dtype and shape in few characters."""
    return re.sub(r"^(b?f)loat|^(u?i)nt", lambda match: match[1] or match[2], x.str_short())


def _occurrences(recorder: Recorder, program: Any) -> dict[int, _Occurrences]:
    """Of each call that stands in a program, in order."""
    occurrences: dict[int, _Occurrences] = {}

    def visit(jaxpr: Any, times: int, conditions: tuple[str, ...]) -> None:
        for equation in jaxpr.eqns:
            name = str(equation.params.get("name", ""))
            if name.startswith(_PREFIX):
                which, number = name.removeprefix(f"{_PREFIX}_").split("_")
                names = recorder.names[int(number)]
                seen = occurrences.setdefault(int(number), _Occurrences())
                seen.times[which] += times
                seen.conditions |= dict.fromkeys(conditions)
                # behind the arrays of a backward are residuals and cotangents
                shapes = {n: _short(x.aval) for n, x in zip(names, equation.invars, strict=False)}
                seen.arrays = seen.arrays or {n: shapes[n] for n in recorder.order(int(number))}
                continue
            kind = equation.primitive.name
            inner = times * equation.params["length"] if kind == "scan" else times
            more = {"while": "in every iteration of a while loop", "cond": "where its branch is taken"}.get(kind)
            for sub in jaxprs_in_params(equation.params):
                visit(sub, inner, conditions if more is None else (*conditions, more))

    visit(program, 1, ())
    return occurrences


def explain(function: Callable[..., Any], *args: Any, device: str | None = None, **kwargs: Any) -> Explanation:
    """What a function would run of ours: platform, config, and every other platform's refusal, of every call in it.

    Any function may be asked about: a public one, a loss, a training step. Nothing is computed; arrays may be
    `jax.ShapeDtypeStruct`s. Of several calls the answer prints a table, with how often each runs in loops, forward and
    backward, and has them as `.calls`. `device`, such as "h200" or "v6e", asks about a device that need not be here,
    with all packages that its platforms need.

    >>> import jax
    >>> from ejkernel import explain
    >>> from ejkernel.modules import flash_attention
    >>> q = jax.ShapeDtypeStruct((1, 128, 8, 64), "float32")
    >>> explain(flash_attention, q, q, q, causal=True).platform
    'xla'
    >>> explain(flash_attention, q, q, q, causal=True, device="v6e").platform
    'pallas'
    >>> def layers(x):
    ...     return jax.lax.scan(lambda x, _: (flash_attention(x, x, x), None), x, length=12)[0].sum()
    >>> once = explain(jax.grad(layers), q)
    >>> once.operation, once.forward_calls, once.backward_calls
    ('flash_attention', 12, 12)
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    dynamic = [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]

    def traced(structs: list[Any]) -> None:
        given = iter(structs)
        merged = [next(given) if is_struct else leaf for leaf, is_struct in zip(leaves, dynamic, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, merged)
        function(*args, **kwargs)

    opened = Recorder()
    there = {} if device is None else {"device": named_target(device)}
    # without jit nothing would show what a call stands in for
    with changed(recorder=opened, tuning=None, **there), jax.disable_jit(False):
        program = jax.make_jaxpr(traced)([leaf for leaf, struct in zip(leaves, dynamic, strict=True) if struct])
    calls = tuple(
        replace(
            opened.explanations[number],
            arrays=seen.arrays,
            forward_calls=seen.times[FORWARD],
            backward_calls=seen.times[BACKWARD],
            conditions=tuple(seen.conditions),
        )
        for number, seen in _occurrences(opened, program.jaxpr).items()
    )
    name = getattr(function, "__name__", repr(function))
    if not calls:
        raise TypeError(f"{name} calls no operation of ejkernel")
    functions = {call.part_of for call in calls}
    if functions != {""}:  # one public function that makes several calls is known by its name
        return combined(functions.pop() if len(functions) == 1 else name, calls)
    return calls[0] if len(calls) == 1 else combined(name, calls)
