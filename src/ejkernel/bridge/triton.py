"""triton_call: one JAX primitive for every Triton launch.

The platform a launch is lowered for decides what happens: jax-triton on NVIDIA, Triton's interpreter on a CPU.
Being a primitive, a launch shows in the jaxpr, which is how `collect_launches` finds those of a whole operation.
"""

import numbers
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.core
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir, xla

from ejkernel.bridge.launch import Launch, Slot
from ejkernel.ops import fusion_barrier

Grid = int | tuple[int, ...]

# Triton parses what it compiles, and until Python 3.11.8 and 3.12.2 one thread alone can (python/cpython#106905)
_PARSES_ALONE = sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2)
_COMPILING = threading.RLock() if _PARSES_ALONE else nullcontext()


def triton_call(
    kernel: Any,
    *arguments: Any,
    out_shape: Any,
    grid: Grid | Callable[[dict[str, Any]], Grid],
    num_warps: int = 4,
    num_stages: int = 2,
    input_output_aliases: Mapping[int, int] | None = None,
    **constexprs: Any,
) -> Any:
    """Launch a `@triton.jit` kernel: inputs, then one pointer per output, then constexprs by name.

    Args:
        arguments: the kernel's leading parameters in order. Arrays become pointers to contiguous row-major memory.
            Python and numpy scalars are passed by value (int32 or int64, float32; a bool becomes an int).
            None becomes a pointer that must not be read: tell the kernel by a constexpr flag, not by `is None`.
            So does an aliased array.
        out_shape: a `ShapeDtypeStruct`, or a sequence of them. An output starts out undefined, unless aliased.
        grid: program counts, or a function of the constexprs that gives them. An empty grid launches nothing
            and gives zeros.
        input_output_aliases: position in `arguments` to output index. The output starts with the input's contents.
        constexprs: every other parameter of the kernel, none missing and none unknown.

    Has neither a derivative nor a batching rule: operations bring their own.
    """
    single = hasattr(out_shape, "dtype")
    outputs = tuple(
        jax.ShapeDtypeStruct(struct.shape, struct.dtype) for struct in ([out_shape] if single else out_shape)
    )
    static = {name: v.item() if isinstance(v, np.generic) else v for name, v in constexprs.items()}
    slots = tuple(_slot(a) for a in arguments)
    _check_parameters(kernel, len(arguments), len(outputs), set(static))
    launch = Launch(
        kernel=kernel,
        arguments=slots,
        outputs=outputs,
        grid=_three(grid(dict(static)) if callable(grid) else grid),
        num_warps=num_warps,
        num_stages=num_stages,
        aliases=_operand_aliases(slots, outputs, input_output_aliases or {}),
        constexprs=tuple(sorted(static.items())),
    )
    arrays = [jnp.asarray(a) for a, slot in zip(arguments, slots, strict=True) if slot is Slot.ARRAY]
    results = launch_p.bind(*arrays, launch=launch) if min(launch.grid) > 0 else _not_launched(launch, arrays)
    return results[0] if single else tuple(results)


def triton_call_by_name(
    kernel: Any, given: Mapping[str, Any], *, aliases: Mapping[str, int] | None = None, **options: Any
) -> Any:
    """`triton_call` with those of the arguments `given` that the kernel's signature names, in its order.

    `aliases` are arguments to output indices; all other options are those of `triton_call`.
    """
    values = {name: given[name] for name in kernel.arg_names if name in given}
    numbers_of = {name: number for number, name in enumerate(values)}
    shared = {numbers_of[name]: output for name, output in (aliases or {}).items()}
    return triton_call(kernel, *values.values(), input_output_aliases=shared, **options)


def _slot(argument: Any) -> Slot | int | float:
    if argument is None:
        return Slot.ABSENT
    if isinstance(argument, bool | np.bool_ | numbers.Integral):
        return int(argument)
    if isinstance(argument, numbers.Real):
        # rounded here, so that every path sees the same float32
        return float(np.float32(argument))
    if not hasattr(argument, "dtype"):
        raise TypeError(f"a kernel argument must be an array, a scalar or None, not {type(argument).__name__}")
    return Slot.ARRAY


def _three(grid: Grid) -> tuple[int, int, int]:
    counts = tuple(grid) if isinstance(grid, Sequence) else (grid,)
    if len(counts) > 3 or any(n < 0 for n in counts):
        raise ValueError(f"{grid=} must be at most three non-negative program counts")
    x, y, z = (*(int(n) for n in counts), 1, 1, 1)[:3]
    # the driver refuses more, after everything has been compiled
    if x >= 2**31 or max(y, z) >= 2**16:
        raise ValueError(f"{grid=} exceeds CUDA's limits of 2**31 - 1 in the first and 65535 in the other dimensions")
    return x, y, z


def _check_parameters(kernel: Any, num_inputs: int, num_outputs: int, constexprs: set[str]) -> None:
    if not hasattr(kernel, "arg_names") or not hasattr(kernel, "params"):
        raise TypeError(f"kernel must be a @triton.jit function, not {type(kernel).__name__}")
    positional = num_inputs + num_outputs
    required = {p.name for p in kernel.params[positional:] if not p.has_default}
    missing, unknown = required - constexprs, constexprs - set(kernel.arg_names[positional:])
    if positional > len(kernel.params) or missing or unknown:
        raise TypeError(
            f"{kernel.__name__} takes {kernel.arg_names}; given {num_inputs} arguments and {num_outputs} outputs, "
            f"missing constexprs {sorted(missing)}, unknown constexprs {sorted(unknown)}"
        )


def _operand_aliases(
    slots: Sequence[Any], outputs: Sequence[jax.ShapeDtypeStruct], aliases: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """Aliases by array operand instead of argument position."""
    operands = {position: n for n, position in enumerate(i for i, slot in enumerate(slots) if slot is Slot.ARRAY)}
    for position, output in aliases.items():
        if position not in operands or not 0 <= output < len(outputs):
            raise ValueError(f"input_output_aliases {position}: {output} must map an array argument to an output")
    return tuple((operands[position], output) for position, output in aliases.items())


def _not_launched(launch: Launch, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    aliased = {output: arrays[operand] for operand, output in launch.aliases}
    return [aliased.get(i, jnp.zeros(struct.shape, struct.dtype)) for i, struct in enumerate(launch.outputs)]


launch_p = jex.core.Primitive("ejkernel_triton_launch")
launch_p.multiple_results = True
launch_p.def_impl(partial(xla.apply_primitive, launch_p))


@launch_p.def_abstract_eval
def _abstract_eval(*operands: Any, launch: Launch) -> list[jax.core.ShapedArray]:
    for operand, output in launch.aliases:
        x, y = operands[operand], launch.outputs[output]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(f"cannot alias {x.dtype}{x.shape} with output {output}, {y.dtype}{y.shape}")
    return [jax.core.ShapedArray(struct.shape, struct.dtype) for struct in launch.outputs]


def _lower(ctx: Any, *operands: Any, launch: Launch) -> Any:
    platforms = tuple(ctx.module_context.platforms)
    rules = {("cpu",): partial(_interpreted, launch), ("cuda",): fusion_barrier(partial(_compiled, launch))}
    if platforms not in rules:
        raise NotImplementedError(f"{launch.kernel.__name__} is a Triton kernel: it cannot be lowered for {platforms}")
    with _COMPILING:
        return mlir.lower_fun(rules[platforms], multiple_results=True)(ctx, *operands)


mlir.register_lowering(launch_p, _lower)


def _interpreted(launch: Launch, *arrays: jax.Array) -> Sequence[jax.Array]:
    from ejkernel.bridge.interpreter import interpret_launch

    return jax.pure_callback(partial(interpret_launch, launch), launch.outputs, *arrays)


def _compiled(launch: Launch, *arrays: jax.Array) -> Sequence[jax.Array]:
    from ejkernel.bridge.private_jax_triton import launch_on_gpu

    return launch_on_gpu(launch, arrays)


def _no_derivative(*_: Any, launch: Launch) -> Any:
    raise NotImplementedError(f"{launch.kernel.__name__}: a Triton launch has no derivative; its operation brings one")


def _no_batching(*_: Any, launch: Launch) -> Any:
    raise NotImplementedError(f"{launch.kernel.__name__}: a Triton launch has no vmap; its operation folds the batch")


ad.primitive_jvps[launch_p] = _no_derivative
batching.primitive_batchers[launch_p] = _no_batching
