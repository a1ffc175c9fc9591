"""All that this package uses of Triton beyond its documented language: nothing else imports it.

Seen in Triton 3.6.0 and 3.9.0. What is used:

- to run kernels on numpy memory, without `TRITON_INTERPRET=1`, which decides for a process once and for all:
  of `triton.runtime.interpreter` the builder, reductions, handles, the transformer of sources, the two functions that
  patch the language and the globals they read, and the loads and stores of `triton._C.libtriton.interpreter`; of
  `triton.language` its `semantic`, `core._type_for_tuple_values`, `tensor.handle`, `standard._elementwise_max` and
  `_min`; of a `JITFunction` `fn`, `src`, `raw_src`, `starting_line_number` and `get_capture_scope`.
  An interpreter that is chosen at each launch would replace all of these.
- to compile for GPUs that are not there: `ASTSource`, `GPUTarget`, and of what `triton.compile` gives `metadata` and
  `asm`. A documented compiler ahead of time would replace them.
- for registers and spills: where `ptxas` and `cuobjdump` are. `n_regs` and `n_spills`, which need a GPU today, would
  replace them.
- for a launch that costs the host less: what a launch returns can be launched again. A cheaper `kernel[grid](...)`
  would replace it.
"""

import ast
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as base
from triton.runtime.jit import JITFunction

# held by whoever patches triton.language, and by whoever compiles and must not see it patched
LOCK = threading.RLock()


# Launches ---------------------------------------------------------------------------------------------------


def launch_and_keep(kernel: Any, grid: tuple[int, int, int], values: Sequence[Any], **options: Any) -> Callable:
    """Launch; returns what launches the compiled kernel again on `(*values)`, without looking at their types."""
    return kernel[grid](*values, **options)[grid]


# Compiling for GPUs that are not there ----------------------------------------------------------------------


class Compiled(NamedTuple):
    ptx: str
    cubin: bytes
    shared_bytes: int
    tensor_memory_columns: int
    scratch_bytes: int


def compile_ahead(
    kernel: Any,
    signature: dict[str, str],
    constants: Mapping[str, Any],
    aligned: Sequence[int],
    capability: int,
    options: dict[str, Any],
) -> Compiled:
    """A kernel for a GPU of NVIDIA; the parameters `aligned` are pointers to multiples of 16 bytes."""
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    with LOCK:
        source = ASTSource(kernel, signature, dict(constants), attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    meta = compiled.metadata
    return Compiled(
        compiled.asm["ptx"],
        compiled.asm["cubin"],
        meta.shared,
        getattr(meta, "tmem_size", None) or 0,
        getattr(meta, "global_scratch_size", None) or 0,
    )


def cuobjdump() -> str:
    return knobs.nvidia.cuobjdump.path


def ptxas(capability: int) -> list[str]:
    """The assembler, and its option for a GPU."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    return [get_ptxas(capability).path, f"--gpu-name={sm_arch_from_capability(capability)}"]


# The interpreter --------------------------------------------------------------------------------------------

# Triton keeps these as bits in unsigned integers, on which its own arithmetic, rounding and dot are wrong
_NUMPY_TYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
}


class _Builder(base.InterpreterBuilder):
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


class _Reduce(base.ReduceOps):
    """Reductions; max and min skip NaN as np.nanmax does, without its warning when all are NaN."""

    def apply_impl(self, input: Any) -> Any:
        if self.combine_fn is tl.standard._elementwise_max:
            return self.min_max(input[0], val_reduce_op=np.fmax.reduce)
        if self.combine_fn is tl.standard._elementwise_min:
            return self.min_max(input[0], val_reduce_op=np.fmin.reduce)
        return super().apply_impl(input)


_BUILDER = _Builder()
_SEMANTIC = TritonSemantic(_BUILDER)
_triton_numpy_type = base._get_np_dtype
_numpy_types_by_name = dict(_NUMPY_TYPES)


def _numpy_type(type_: Any) -> np.dtype:
    element: Any = type_.element_ty if isinstance(type_, tl.block_type) else type_
    if element.name not in _numpy_types_by_name:  # Triton makes a table at every question
        _numpy_types_by_name[element.name] = _triton_numpy_type(element)
    return _numpy_types_by_name[element.name]


def _bits_type(type_: np.dtype) -> np.dtype:
    """What memory is read as: Triton 3.9 takes no types but numpy's own."""
    return np.dtype(f"u{type_.itemsize}") if type_ in _NUMPY_TYPES.values() else type_


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(_bits_type(x.dtype))


def interpreted_pointer(address: int, element: str) -> Any:
    """A pointer to numpy memory of a Triton type, such as "fp32"."""
    type_: Any = tl.str_to_ty("*" + element, None)
    return tl.tensor(base.TensorHandle(np.array([address], np.uint64), type_), type_)


def interpreted_scalar(value: int | float) -> Any:
    return _SEMANTIC.to_tensor(value)


def set_grid(grid: tuple[int, int, int]) -> None:
    _BUILDER.set_grid_dim(*grid)


def set_program(index: tuple[int, ...]) -> None:
    _BUILDER.set_grid_idx(*index)


@contextmanager
def interpreted_language() -> Iterator[Callable[..., Any]]:
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
        return _Reduce(axis, combine_fn, keep_dims).apply(input)

    # every shape has a type, which only the compiler reads, and making it takes long
    untyped = tl.core.tuple_type([])
    scope.set_attr(tl.core, "_type_for_tuple_values", lambda values, fields=None: untyped)
    for module in (tl, tl.core):
        scope.set_attr(module, "reduce", reduce)
        scope.set_attr(module, "range", _range_of_tensors)
    # int() of a one-element array is an error in numpy 2.4
    scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
    # a JITFunction is no descriptor: as a method it would not be given its tensor
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, JITFunction):
            scope.set_attr(tl.tensor, name, lambda *args, member=member, **kwargs: member(*args, **kwargs))


def _range_of_tensors(start: Any, stop: Any = None, step: Any = 1, **_: Any) -> Iterator[Any]:
    """A loop's index is a tensor, as in compiled code: it has a type and takes `.to(tl.int64)`."""
    start, stop = (0, start) if stop is None else (start, stop)
    for i in range(start, stop, step):
        yield interpreted_scalar(i)


def _rewritten(function: JITFunction) -> Callable[..., Any]:
    """The function on numpy tensors. Its globals are a copy: Triton's rewriter would add its own to the module."""
    # a constexpr times a tensor is a constexpr, from which Triton 3.9 makes no tensor
    plain = {n: x.value if isinstance(x, tl.constexpr) else x for n, x in function.get_capture_scope().items()}
    namespace = {**plain, "interpreter_semantic": _SEMANTIC, "range": _range_of_tensors}
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
