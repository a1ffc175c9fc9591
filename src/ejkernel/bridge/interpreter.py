"""Triton's interpreter over numpy memory: no torch, no environment variable, and compiling still works afterwards.

`TRITON_INTERPRET=1` turns every `@triton.jit` function of a process into an interpreted one when it is defined.
Here a launch borrows the interpreter instead: for its duration, under a lock, `triton.language` is patched and a
call of a `@triton.jit` function runs its rewritten source. Afterwards everything is as it was.
"""

import ast
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as base
from triton.runtime.jit import JITFunction

from ejkernel.bridge.launch import TRITON_TYPES, Launch

# held by whoever patches triton.language, and by whoever compiles and must not see it patched
LOCK = threading.RLock()

# more than a tile's overhang in any test, so that a stray access lands in poison rather than in the heap
GUARD_BYTES = 1 << 16

# Triton keeps these as bits in unsigned integers, on which its own arithmetic, rounding and dot are wrong
_NUMPY_TYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
}


class Memory:
    """An array between guard zones; everything not copied in is NaN, or 0x5a bytes for integers."""

    def __init__(self, name: str, shape: Sequence[int], dtype: Any):
        self.name = name
        self.dtype = np.dtype(dtype)
        # all ones is NaN in every floating type
        self.poison = 0xFF if TRITON_TYPES[self.dtype.name].startswith(("fp", "bf")) else 0x5A
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize
        self.raw = np.full(self.nbytes + 2 * GUARD_BYTES + 64, self.poison, np.uint8)
        self.start = GUARD_BYTES + -(self.raw.ctypes.data + GUARD_BYTES) % 64
        self.array = self.raw[self.start : self.start + self.nbytes].view(self.dtype).reshape(tuple(shape))

    @property
    def pointer(self) -> Any:
        type_: Any = tl.str_to_ty("*" + TRITON_TYPES[self.dtype.name], None)
        return tl.tensor(base.TensorHandle(np.array([self.array.ctypes.data], np.uint64), type_), type_)

    def check_guards(self, kernel: str) -> None:
        outside = np.concatenate([self.raw[: self.start], self.raw[self.start + self.nbytes :]])
        if (outside != self.poison).any():
            raise RuntimeError(f"{kernel} wrote outside of {self.name} {self.dtype}{self.array.shape}")

    def check_unchanged(self, kernel: str, original: np.ndarray) -> None:
        if self.array.tobytes() != original.tobytes():
            raise RuntimeError(f"{kernel} wrote to its input {self.name}; name it in input_output_aliases")


_ABSENT = Memory("an absent array", (0,), np.int8)


def interpret_launch(launch: Launch, *arrays: jax.Array) -> tuple[np.ndarray, ...]:
    """Run a launch, program by program, and return its outputs."""
    kernel, names = launch.kernel, launch.kernel.arg_names
    originals = [np.asarray(x) for x in arrays]
    inputs = launch.fill(originals, None)
    inputs = [
        Memory(n, x.shape, x.dtype) if isinstance(x, np.ndarray) else x for n, x in zip(names, inputs, strict=False)
    ]
    operands = [m for m in inputs if isinstance(m, Memory)]
    for memory, original in zip(operands, originals, strict=True):
        memory.array[...] = original
    aliased = {output: operands[operand] for operand, output in launch.aliases}
    outputs = [
        aliased.get(i) or Memory(names[len(inputs) + i], struct.shape, struct.dtype)
        for i, struct in enumerate(launch.outputs)
    ]
    with np.errstate(all="ignore"), _patched() as call:
        given = [None if x in aliased.values() else x for x in inputs]
        _run_grid(launch, call, [_as_tensor(x) for x in [*given, *outputs]])
    for memory in {*operands, *outputs}:
        memory.check_guards(kernel.__name__)
    for memory, original in zip(operands, originals, strict=True):
        if memory not in aliased.values():
            memory.check_unchanged(kernel.__name__, original)
    # a poisoned bool is no bool
    return tuple(m.array.view(np.uint8) != 0 if m.dtype == bool else m.array for m in outputs)


def _as_tensor(argument: Memory | int | float | None) -> Any:
    if isinstance(argument, Memory):
        return argument.pointer
    if argument is None:
        return _ABSENT.pointer
    return _SEMANTIC.to_tensor(argument)


def _run_grid(launch: Launch, call: Callable[..., Any], arguments: list[Any]) -> None:
    _BUILDER.set_grid_dim(*launch.grid)
    for index in product(*map(range, launch.grid)):
        _BUILDER.set_grid_idx(*index)
        with _Located(f"in Triton kernel {launch.kernel.__name__}, program {index} of {launch.grid}"):
            call(launch.kernel, *arguments, **dict(launch.constexprs))


class _Located:
    """Says in an error where it happened."""

    def __init__(self, place: str):
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            error.add_note(self.place)


class Builder(base.InterpreterBuilder):
    """Triton's numpy builder, with real bfloat16 and with the GPU's treatment of NaN in min and max."""

    def __init__(self) -> None:
        super().__init__()
        # as compiled by default; overflow checks also forbid the wrapping arithmetic of hashes
        self.options = base.InterpreterOptions(sanitize_overflow=False)

    # what follows the mask says how to cache, in one argument from Triton 3.9 on, in two before;
    # since then a mask & (0 <= 1) is one of integers
    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        type_ = ptrs.get_element_ty()
        wanted = _numpy_type(type_)
        filled = np.zeros(ptrs.data.shape, wanted) if other is None else other.data
        loaded = base._interpreter.load(ptrs.data, mask.data.astype(np.bool_), _bits(filled), _bits_type(wanted))
        return base.TensorHandle(loaded.view(wanted), type_)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> Any:
        return base._interpreter.store(ptrs.data, _bits(value.data), mask.data.astype(np.bool_))

    def get_bf16(self, value: float) -> Any:
        return base.TensorHandle(np.array([value], ml_dtypes.bfloat16), tl.bfloat16)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return base.TensorHandle(src.data.astype(_numpy_type(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return self.cast_impl(src, dst_type)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        accumulated = a.data.astype(d.data.dtype) @ b.data.astype(d.data.dtype) + d.data
        return base.TensorHandle(accumulated, d.dtype.scalar)

    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)


class Reduce(base.ReduceOps):
    """Reductions; max and min skip NaN as np.nanmax does, without its warning when all are NaN."""

    def apply_impl(self, input: Any) -> Any:
        if self.combine_fn is tl.standard._elementwise_max:
            return self.min_max(input[0], val_reduce_op=np.fmax.reduce)
        if self.combine_fn is tl.standard._elementwise_min:
            return self.min_max(input[0], val_reduce_op=np.fmin.reduce)
        return super().apply_impl(input)


_BUILDER = Builder()
_SEMANTIC = TritonSemantic(_BUILDER)
_triton_numpy_type = base._get_np_dtype
_FOUND_TYPES = dict(_NUMPY_TYPES)


def _numpy_type(type_: Any) -> np.dtype:
    element: Any = type_.element_ty if isinstance(type_, tl.block_type) else type_
    if element.name not in _FOUND_TYPES:  # Triton makes a table at every question
        _FOUND_TYPES[element.name] = _triton_numpy_type(element)
    return _FOUND_TYPES[element.name]


def _bits_type(type_: np.dtype) -> np.dtype:
    """What memory is read as: Triton 3.9 takes no types but numpy's own."""
    return np.dtype(f"u{type_.itemsize}") if type_ in _NUMPY_TYPES.values() else type_


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(_bits_type(x.dtype))


@contextmanager
def _patched() -> Iterator[Callable[..., Any]]:
    """Patch `triton.language` for numpy; yields the function that calls a `@triton.jit` function."""
    # by the plain function: hashing a JITFunction reads the language, and would find it patched
    functions: dict[Callable[..., Any], Callable[..., Any]] = {}

    def call(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
        if function.fn not in functions:
            functions[function.fn] = _rewritten(function)
        return functions[function.fn](*args, **kwargs)

    with LOCK:
        # scopes undo in reverse order; `base` is patched first because its own patching reads the builder there
        ours = base._LangPatchScope()
        scope = None
        try:
            ours.set_attr(base, "interpreter_builder", _BUILDER)
            ours.set_attr(base, "interpreter_semantic", _SEMANTIC)
            ours.set_attr(base, "_get_np_dtype", _numpy_type)
            scope = base._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            ours.set_attr(JITFunction, "__call__", call)
            _patch_language(ours)
            yield call
        finally:
            ours.restore()
            if scope is not None:
                scope.restore()


def _patch_language(scope: Any) -> None:
    """What Triton's own patching leaves out when functions are not interpreted from the start."""

    def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: bool = False, **_: Any) -> Any:
        return Reduce(axis, combine_fn, keep_dims).apply(input)

    # every shape has a type, which only the compiler reads, and making it takes long
    untyped = tl.core.tuple_type([])
    scope.set_attr(tl.core, "_type_for_tuple_values", lambda values, fields=None: untyped)
    for module in (tl, tl.core):
        scope.set_attr(module, "reduce", reduce)
        scope.set_attr(module, "range", _counted)
    # int() of a one-element array is an error in numpy 2.4
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    # a JITFunction is no descriptor: as a method it would not be given its tensor
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, JITFunction):
            scope.set_attr(tl.tensor, name, lambda *args, member=member, **kwargs: member(*args, **kwargs))


def _counted(start: Any, stop: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """A loop's index is a tensor, as in compiled code: it has a type and takes `.to(tl.int64)`."""
    start, stop = (0, start) if stop is None else (start, stop)
    for i in range(start, stop, step):
        yield _SEMANTIC.to_tensor(i)


def _rewritten(function: JITFunction) -> Callable[..., Any]:
    """The function on numpy tensors. Its globals are a copy: Triton's rewriter would add its own to the module."""
    # a constexpr times a tensor is a constexpr, from which Triton 3.9 makes no tensor
    plain = {n: x.value if isinstance(x, tl.constexpr) else x for n, x in function.get_capture_scope().items()}
    namespace = {**plain, "interpreter_semantic": _SEMANTIC, "range": _counted}
    if function.fn not in _CODE:
        _CODE[function.fn] = _compile(function)
    exec(_CODE[function.fn], namespace)
    return namespace[function.fn.__name__]


_CODE: dict[Callable[..., Any], types.CodeType] = {}


def _compile(function: JITFunction) -> types.CodeType:
    tree = base.ASTTransformer().visit(ast.parse(function.src))
    (definition,) = tree.body
    # annotations are types of the compiler; evaluating them could need names that are not there
    for argument in definition.args.args:
        argument.annotation = None
    definition.returns = None
    # `raw_src` starts at the decorators, `src` at the def
    decorators = next(i for i, line in enumerate(function.raw_src) if line.lstrip().startswith("def "))
    ast.increment_lineno(ast.fix_missing_locations(tree), function.starting_line_number + decorators - 1)
    return compile(tree, function.fn.__code__.co_filename, "exec")
