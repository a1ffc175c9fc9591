"""Expressions from JAX functions: the function is traced on four integers, and its jaxpr read.

Arrays and tracers that the function closes over become loads. What has no counterpart is refused, with the line of the
user's code that asked for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ejkernel.expressions.nodes import (
    BOOL,
    CONST,
    FLOAT,
    INT,
    Dtype,
    Expression,
    apply,
    as_expression,
    axis,
    cast,
    const,
    load,
    score,
    select,
)

# whose results are the same for the numbers of narrower dtypes
_COMPARES = ("lt", "le", "gt", "ge", "eq", "ne", "min", "max", "and", "or", "xor", "select_n", "sign", "clamp")

# of jaxprs, to operations
_SAME_NAME = (
    "add", "sub", "mul", "neg", "sign", "max", "min", "floor", "ceil", "exp", "exp2", "log", "log1p", "expm1", "tanh",
    "sin", "cos", "sqrt", "rsqrt", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not", "abs", "rem",
)  # fmt: skip
_PRIMITIVES = {name: name for name in _SAME_NAME} | {
    "logistic": "sigmoid",
    "shift_left": "shift_left",
    "shift_right_arithmetic": "shift_right",
}
_TRANSPARENT = ("copy", "copy_p", "optimization_barrier", "pvary")
_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "remat", "checkpoint")


class NotAnExpression(ValueError):
    """A function computes what no expression can say."""


@dataclass(frozen=True)
class Traced:
    """A function as an expression, and the arrays that its loads name; their first axis is the batch, of size 1."""

    expression: Expression
    arrays: tuple[jax.Array, ...]


def traced(function: Callable[..., Any], name: str, *, scores: bool) -> Traced:
    """The expression of `function(b, h, i, j)`, or with `scores` of `function(score, b, h, i, j)`.

    Errors call the function by `name`, the argument that it was given as.
    """
    if not callable(function):
        raise TypeError(f"{name} must be a function, got {type(function).__name__}: {function!r:.80}")
    signature = f"{name}({'score, ' if scores else ''}b, h, i, j)"
    structs = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    structs = [jax.ShapeDtypeStruct((), jnp.float32), *structs] if scores else structs
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            closed = jax.make_jaxpr(function)(*structs)
        except (TypeError, IndexError, OverflowError) as error:
            kind = IndexError if isinstance(error, IndexError) else TypeError
            is_traced = isinstance(error, jax.errors.ConcretizationTypeError)
            how = "; indices are traced: say jnp.where, & and | in place of if, and, or" if is_traced else ""
            raise kind(f"{name}, called as {signature}, raised {type(error).__name__}: {error}{how}") from error
    if len(closed.out_avals) != 1 or closed.out_avals[0].shape != ():
        shapes = [x.str_short() for x in closed.out_avals]
        raise ValueError(f"{signature} must give one {'number' if scores else 'bool'}, it gives {shapes}")
    given = closed.out_avals[0].dtype
    if not scores and given != jnp.bool_:
        raise TypeError(f"{signature} must give a bool, it gives {given}: say what a query sees, not a logit")
    if scores and not jnp.issubdtype(given, jnp.floating):
        raise TypeError(f"{signature} must give a floating-point number, it gives {given}")
    reader = _Reader(signature, [])
    inputs: list[_Value] = [axis(name) for name in "bhij"]
    (result,) = reader.read(closed.jaxpr, [_Array(x) for x in closed.consts], [score(), *inputs] if scores else inputs)
    if isinstance(result, _Array):  # it depends on no index
        result = reader.entry(result, ())
    assert isinstance(result, Expression)
    arrays = tuple(jnp.asarray(x, _dtype_of(x, signature))[None] for x in reader.arrays)
    return Traced(cast(result, FLOAT if scores else BOOL), arrays)


class _Array:
    """An array that a function closes over, and the index of the part of it that a variable holds.

    `index` has an expression for each leading dimension that is chosen already.
    """

    def __init__(self, values: Any, index: tuple[Expression, ...] = ()):
        self.values, self.index = values, index

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.values)[len(self.index) :]


class _Vector:
    """A few scalars in a row, such as indices."""

    def __init__(self, entries: list[Expression]):
        self.entries = entries


_Value = Expression | _Array | _Vector


def _closed_over(x: _Value) -> _Array | _Vector:
    """What no index has a part in as an array; else a vector."""
    if isinstance(x, Expression):
        return _Array(np.asarray(x.data, x.dtype)) if x.name == CONST else _Vector([x])
    return x


def _dtype_of(x: Any, what: str) -> Dtype:
    dtype = jnp.result_type(x)
    if dtype == jnp.bool_:
        return BOOL
    if jnp.issubdtype(dtype, jnp.integer) and dtype not in (jnp.uint32, jnp.uint64):
        return INT
    if jnp.issubdtype(dtype, jnp.floating):
        return FLOAT
    raise TypeError(f"{what} has {dtype}: bool, floating-point numbers, and integers of up to 32 bits can be read")


@cache
def _divisions() -> dict[str, str]:
    """How jax.numpy computes floor division and remainder of integers, to the operation."""
    index, texts = jax.ShapeDtypeStruct((), jnp.int32), {}
    for name, function in (("floordiv", jnp.floor_divide), ("mod", jnp.remainder)):
        for closed in (
            jax.make_jaxpr(function)(index, index),
            jax.make_jaxpr(lambda i, function=function: function(i, 3))(index),
            jax.make_jaxpr(lambda i, function=function: function(3, i))(index),
        ):
            texts[str(closed.jaxpr.eqns[-1].params["jaxpr"])] = name
    return texts


class _Reader:
    """Reads jaxprs, and collects the arrays that are loaded from."""

    def __init__(self, function: str, arrays: list[Any]):
        self.function, self.arrays = function, arrays

    def read(self, jaxpr: Any, consts: list[_Value], inputs: list[_Value]) -> list[_Value]:
        values: dict[Any, _Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def value(atom: Any) -> _Value:
            if isinstance(atom, core.Literal):
                aval: Any = atom.aval
                return _literal(np.asarray(atom.val, aval.dtype))
            return values[atom]

        for equation in jaxpr.eqns:
            outputs = self.equation(equation, [value(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, outputs, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
        name = equation.primitive.name
        if name in _CALLS:
            return self.call(equation, inputs)
        method = getattr(self, f"_{name}", None)
        known = name in _PRIMITIVES or name in _TRANSPARENT or method is not None
        numbers = known and all(isinstance(x, Expression) for x in inputs)
        if not numbers and not any(isinstance(x, _Vector) or x.index for x in map(_closed_over, inputs)):
            return self.computed(equation, inputs)
        if method is not None:
            return [method(equation, *inputs)]
        if name in _TRANSPARENT:
            return inputs
        self.check_dtypes(equation)
        scalars = [self.scalar(x, equation) for x in inputs]
        if name in _PRIMITIVES:
            return [apply(_PRIMITIVES[name], *scalars)]
        raise self.refusal(equation, f"{name} has no counterpart in kernels")

    def computed(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
        """What depends on no index is computed once, before any kernel."""
        arrays = [x.values if isinstance(x, _Array) else x for x in map(_closed_over, inputs)]
        results = equation.primitive.bind(*arrays, **equation.params)
        return [_Array(x) for x in (results if equation.primitive.multiple_results else [results])]

    def call(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
        if equation.primitive.name == "custom_jvp_call" and not _is_of_jax(equation):
            raise self.refusal(equation, "a derivative of one's own (jax.custom_jvp)")
        inner = next(equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params)
        if equation.params.get("name") in ("floor_divide", "remainder") and str(inner) in _divisions():
            return [apply(_divisions()[str(inner)], *(self.scalar(x, equation) for x in inputs))]
        jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])
        return self.read(jaxpr, [_Array(x) for x in consts], inputs)

    def check_dtypes(self, equation: Any) -> None:
        """Kernels compute in int32 and float32: narrower numbers are read and compared, which is the same there."""
        if equation.primitive.name in _COMPARES:
            return
        for variable in equation.outvars:
            if variable.aval.dtype not in (jnp.bool_, jnp.int32, jnp.float32):
                what = f"{equation.primitive.name} in {variable.aval.dtype}: cast to int32 or float32 first"
                raise self.refusal(equation, what)

    def scalar(self, x: _Value, equation: Any) -> Expression:
        if isinstance(x, Expression):
            return x
        if isinstance(x, _Array) and x.shape == ():
            return self.entry(x, ())
        if isinstance(x, _Vector) and len(x.entries) == 1:
            return x.entries[0]
        what = f"an array of shape {x.shape}" if isinstance(x, _Array) else f"{len(x.entries)} numbers"
        raise self.refusal(equation, f"{equation.primitive.name} of {what}: index it to one number first")

    def entry(self, x: _Array, index: tuple[Expression, ...]) -> Expression:
        """An entry of an array: a constant where that is a number of numpy, else a load."""
        if x.values is not None and np.ndim(x.values) == 0 and isinstance(x.values, np.ndarray | np.generic):
            return const(x.values.item(), _dtype_of(x.values, self.function))
        dtype = _dtype_of(x.values, self.function)
        number = next((n for n, known in enumerate(self.arrays) if known is x.values), None)
        if number is None:
            number = len(self.arrays)
            self.arrays.append(x.values)
        return load(number, (axis("b"), *x.index, *index), dtype)

    def refusal(self, equation: Any, why: str) -> NotAnExpression:
        return NotAnExpression(
            f"{self.function}: {why}{_where(equation)}. What works: arithmetic, comparisons, logic, "
            "jnp.where, exp, log, tanh, sqrt and their kin, casts, and arrays indexed to one number"
        )

    # primitives with rules of their own

    def _stop_gradient(self, equation: Any, x: _Value) -> Expression:
        return apply("stop", self.scalar(x, equation))

    def _convert_element_type(self, equation: Any, x: _Value) -> _Value:
        if not (isinstance(x, _Array) and x.shape != ()):
            self.check_dtypes(equation)
        if isinstance(x, _Array) and x.shape != ():
            return _Array(jnp.asarray(x.values, equation.params["new_dtype"]), x.index)
        return cast(self.scalar(x, equation), _dtype_of(equation.outvars[0].aval, self.function))

    def _div(self, equation: Any, x: _Value, y: _Value) -> Expression:
        a, b = self.scalar(x, equation), self.scalar(y, equation)
        return apply("div" if a.dtype == FLOAT else "quotient", a, b)

    def _pow(self, equation: Any, x: _Value, y: _Value) -> Expression:
        power = self.scalar(y, equation)  # which may be an integer
        return apply("pow", self.scalar(x, equation), cast(power, FLOAT))

    def _square(self, equation: Any, x: _Value) -> Expression:
        a = self.scalar(x, equation)
        return a * a

    def _integer_pow(self, equation: Any, x: _Value) -> Expression:
        a, power = self.scalar(x, equation), equation.params["y"]
        if abs(power) > 16 or (power < 0 and a.dtype != FLOAT):
            raise self.refusal(equation, f"a power of {power}")
        result = const(1, a.dtype)
        for _ in range(abs(power)):
            result = result * a
        return result if power >= 0 else const(1, a.dtype) / result

    def _select_n(self, equation: Any, which: _Value, *cases: _Value) -> Expression:
        condition, (first, *more) = self.scalar(which, equation), [self.scalar(x, equation) for x in cases]
        if condition.name == "cast" and condition.args[0].dtype == BOOL and len(more) == 1:
            condition = condition.args[0]
        if condition.dtype == BOOL:
            return select(condition, more[0], first)
        for number, case in enumerate(more, 1):
            first = select(condition >= number, case, first)
        return first

    def _clamp(self, equation: Any, *limited: _Value) -> Expression:
        low, x, high = (self.scalar(v, equation) for v in limited)
        return apply("min", apply("max", x, low), high)

    def _cond(self, equation: Any, which: _Value, *inputs: _Value) -> Expression:
        branches = [
            self.read(b.jaxpr, [_Array(x) for x in b.consts], list(inputs)) for b in equation.params["branches"]
        ]
        if any(len(outputs) != 1 for outputs in branches):
            raise self.refusal(equation, "a condition with several results")
        return self._select_n(equation, which, *(outputs[0] for outputs in branches))

    def _is_finite(self, equation: Any, x: _Value) -> Expression:
        a = self.scalar(x, equation)
        return (a - a).equals(a - a)

    def _broadcast_in_dim(self, equation: Any, x: _Value) -> _Value:
        return self.reshaped(equation, x)

    def _reshape(self, equation: Any, x: _Value) -> _Value:
        return self.reshaped(equation, x)

    def _squeeze(self, equation: Any, x: _Value) -> _Value:
        return self.reshaped(equation, x)

    def reshaped(self, equation: Any, x: _Value) -> _Value:
        shape = equation.outvars[0].aval.shape
        if isinstance(x, _Array) and x.shape != ():
            if shape == x.shape:
                return x
            raise self.refusal(equation, f"{equation.primitive.name} of an array of shape {x.shape}")
        entries = x.entries if isinstance(x, _Vector) else [self.scalar(x, equation)]
        if shape == ():
            return self.scalar(x, equation)
        if len(shape) == 1 and shape[0] == len(entries):
            return _Vector(entries)
        raise self.refusal(equation, f"an array of shape {shape}: compute with single numbers")

    def _concatenate(self, equation: Any, *parts: _Value) -> _Vector:
        if any(isinstance(x, _Array) and x.shape != () for x in parts):
            raise self.refusal(equation, "arrays cannot be joined")
        return _Vector(
            [e for x in parts for e in (x.entries if isinstance(x, _Vector) else [self.scalar(x, equation)])]
        )

    _stack = _concatenate

    def _dynamic_slice(self, equation: Any, x: _Value, *starts: _Value) -> _Value:
        if not isinstance(x, _Array):
            raise self.refusal(equation, "a slice of numbers that depend on b, h, i or j")
        sizes, indices = equation.params["slice_sizes"], [self.scalar(s, equation) for s in starts]
        chosen = len(sizes)
        while chosen and sizes[chosen - 1] == x.shape[chosen - 1] != 1:
            chosen -= 1  # a whole dimension, of which an entry is chosen later
        if any(size != 1 for size in sizes[:chosen]):
            raise self.refusal(equation, f"a slice of {sizes}: index to one number")
        entry = _Array(x.values, (*x.index, *indices[:chosen]))
        return entry if entry.shape else self.entry(_Array(x.values, x.index), tuple(indices))

    def _gather(self, equation: Any, x: _Value, indices: _Value) -> _Value:
        given = equation.params["dimension_numbers"]
        entries = indices.entries if isinstance(indices, _Vector) else [self.scalar(indices, equation)]
        if (
            not isinstance(x, _Array)
            or given.operand_batching_dims
            or given.offset_dims != tuple(range(len(given.offset_dims)))
        ):
            raise self.refusal(equation, "this way of indexing")
        leading = given.start_index_map == tuple(range(len(entries))) == given.collapsed_slice_dims
        if not leading or any(size != 1 for size in equation.params["slice_sizes"][: len(entries)]):
            raise self.refusal(equation, "this way of indexing: give the leading dimensions one index each")
        part = _Array(x.values, (*x.index, *entries))
        if part.shape:
            return part
        value = self.entry(x, tuple(entries))
        if equation.params["mode"] != jax.lax.GatherScatterMode.FILL_OR_DROP:
            return value
        fill = equation.params["fill_value"]
        inside = [(e >= 0) & (e < n) for e, n in zip(entries, x.shape, strict=True)]
        fallback = const(_usual_fill(value.dtype) if fill is None else fill, value.dtype)
        for condition in inside:
            value = select(condition, value, fallback)
        return value


def _is_of_jax(equation: Any) -> bool:
    """Whether a function with a derivative of its own is one of JAX's, such as jax.nn.silu."""
    return "/jax/" in str(equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info)


def _where(equation: Any) -> str:
    """The line of the user's code that an equation is of, if it is known."""
    frames = getattr(equation.source_info.traceback, "frames", ())
    own = [f for f in frames if not any(part in f.file_name for part in ("/jax/", "/ejkernel/expressions/"))]
    return f" ({own[0].file_name}:{own[0].line_num})" if own else ""


def _usual_fill(dtype: Dtype) -> Any:
    """What jax.numpy gives for an index that is out of range."""
    return {BOOL: True, INT: np.iinfo(np.int32).min, FLOAT: np.nan}[dtype]


def _literal(array: np.ndarray) -> Expression | _Array:
    if array.dtype not in (np.bool_, np.int32, np.float32):
        return _Array(array)
    return as_expression(array.item(), _dtype_of(array, "a constant"))
