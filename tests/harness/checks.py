"""Outputs and every gradient of a function of named arrays, against its definition."""

import os
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tolerances import FLOOR, assert_close, spread

# undoes conftest.py
AS_USERS_COMPILE: dict[str, int | bool] = {"xla_backend_optimization_level": 3}
QUICKLY: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
    AS_USERS_COMPILE["xla_cpu_use_fusion_emitters"] = True

# from one rounding of float32 to those of a whole sum: numbers cross their boundaries one by one, then together
NUDGES = [1 + sign * FLOOR / parts for parts in (64, 16, 4, 1) for sign in (-1, 1)]

Arrays = dict[str, Any]
Function = Callable[[Arrays], Arrays]


def normal(name: str, shape: tuple[int, ...], dtype: Any = "float32") -> jax.Array:
    """Random numbers that depend on the name, so that no two arrays are alike."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)


def with_gradients(
    function: Function, options: dict[str, int | bool] | None = None
) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """One compiled program from (arrays, cotangents) to outputs, and gradients of every array."""

    def both(arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        outputs, pull = jax.vjp(function, arrays)
        given = {name: cotangents[name].astype(x.dtype) for name, x in outputs.items()}
        return outputs, pull(given)[0]

    return jax.jit(both, compiler_options=options)


def evaluate(function: Function, arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
    """Outputs, and gradients of every array."""
    return with_gradients(function)(arrays, cotangents)


def on_host(function: Function) -> Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]:
    """`with_gradients` on the CPU, which compiles a definition faster than an accelerator and multiplies in full."""
    program = with_gradients(function, QUICKLY)

    def run(arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
        with jax.default_device(jax.devices("cpu")[0]):
            return program(*jax.tree.map(np.asarray, (arrays, cotangents)))

    return run


def cotangents_for(function: Function, arrays: Arrays, dtype: Any) -> Arrays:
    """A random cotangent for every output, in the dtype of the inputs so that it is the same number everywhere."""
    shapes = jax.eval_shape(function, arrays)
    return {name: normal(f"cotangent of {name}", x.shape, dtype) for name, x in shapes.items()}


def by_case(cases: Iterable[Any], for_gpus: Container[Any] = ()) -> Any:
    """A parameter `case`, those of `for_gpus` on GPUs alone.

    One worker takes all tests of a case, so that its definition is computed once.
    """

    def param(case: Any) -> Any:
        marks = [pytest.mark.xdist_group(case.id)] + [pytest.mark.gpu] * (case in for_gpus)
        return pytest.param(case, id=case.id, marks=marks)

    return pytest.mark.parametrize("case", [param(case) for case in cases])


class Expected(NamedTuple):
    """What a definition gives for these cotangents: outputs and gradients in float32, in the dtype, and nudged."""

    cotangents: Arrays
    exact: tuple[Arrays, Arrays]
    naive: tuple[Arrays | None, Arrays | None]
    nudged: list[tuple[Arrays, Arrays]]


# by the name of a case: its platforms are tested by one worker (`by_case`)
_EXPECTED: dict[str, Expected] = {}


def expected_results(
    definition: Callable[[Arrays, Any], Arrays], arrays: Arrays, dtype: Any, rounded: str = ""
) -> Expected:
    cotangents = cotangents_for(lambda a: definition(a, jnp.dtype(dtype)), arrays, dtype)
    widened = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    in_float32 = on_host(lambda a: definition(a, jnp.float32))
    naive = (None, None)
    if jnp.dtype(dtype) != jnp.float32:
        naive = on_host(lambda a: definition(a, jnp.dtype(dtype)))(arrays, cotangents)
    nudges = NUDGES if rounded else []
    nudged = [in_float32(widened | {rounded: widened[rounded] * by}, cotangents) for by in nudges]
    return Expected(cotangents, in_float32(widened, cotangents), naive, nudged)


def check(
    function: Function,
    definition: Callable[[Arrays, Any], Arrays],
    arrays: Mapping[str, Any],
    dtype: Any = "float32",
    *,
    rounded: str = "",
    optimised: bool = False,
    poison: Callable[[Arrays], Arrays] | None = None,
    poison_only: bool = False,
    name: str | None = None,
) -> None:
    """Check outputs and gradients of `function` against `definition(arrays, dtype)`.

    The exact result is the definition in float32 on the same numbers; the naive one is the definition in `dtype`,
    its gradient by autodiff.

    Rounding may be part of a definition. What lies near a boundary then falls on either side, by the order of a sum.
    `rounded` names an array to which the rounded numbers are proportional: the definition with that array a little
    larger and smaller (`NUDGES`) shows, entry by entry, what else the result may be.

    `poison` puts what must not be read into the arrays; the same program must give the same answers then. With
    `poison_only` it runs on these alone: the same path, where every step is slow.
    Checks of one `name` share what the definition gives.
    """
    arrays = dict(arrays)
    expected = _EXPECTED.get(name or "") or expected_results(definition, arrays, dtype, rounded)
    if name is not None:
        _EXPECTED[name] = expected
    options = AS_USERS_COMPILE if optimised and jax.default_backend() == "cpu" else None
    program = with_gradients(function, options)
    cotangents, exact, naive, nudged = expected
    given = {} if poison is None else {"poisoned: ": poison(arrays)}
    if not given or not poison_only:
        given[""] = arrays
    for how, numbers in given.items():
        ours = program(numbers, cotangents)
        for i, kind in enumerate(("output", "gradient of")):
            either = spread([n[i] for n in nudged], exact[i]) if nudged else None
            assert_close(ours[i], exact[i], naive[i], how + kind, either)
        for array, x in arrays.items():
            assert ours[1][array].dtype == x.dtype, f"gradient of {array} is {ours[1][array].dtype}, not {x.dtype}"
