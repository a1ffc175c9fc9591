"""Expressions from functions of PyTorch: a function is called once, with proxies that record what is done to them.

That takes microseconds for each operation, so it is done at every call, and what a function closes over is what it is
at that time. Tensors that it indexes become loads. What kernels cannot compute raises, in the line that asked for it.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ejkernel.expressions.binding import Rule
from ejkernel.expressions.nodes import (
    BOOL,
    CONST,
    FLOAT,
    INT,
    B,
    Dtype,
    Expression,
    H,
    I,
    J,
    apply,
    cast,
    const,
    load,
    score,
    select,
)
from ejkernel.expressions.tracing import NotAnExpression

# what numbers are computed in, whatever tensors hold
_DTYPES = {BOOL: torch.bool, INT: torch.int32, FLOAT: torch.float32}
_CASTS = {torch.bool: BOOL, torch.int32: INT, torch.int64: INT, torch.float32: FLOAT, torch.float64: FLOAT}


def traced(function: Any, name: str, *, scores: bool, device: torch.device) -> Rule:
    """The rule of `function(b, h, q_idx, kv_idx)`, or with `scores` of `function(score, b, h, q_idx, kv_idx)`."""
    if not callable(function):
        raise TypeError(f"{name} must be a function, got {type(function).__name__}: {function!r:.80}")
    trace = _Trace(f"{name}({'score, ' if scores else ''}b, h, q_idx, kv_idx)", device)
    with _TraceMode(trace):
        result = function(*(ScalarProxy(trace, x) for x in ((score(),) if scores else ()) + (B, H, I, J)))
    if not isinstance(result, ScalarProxy | Tensor | bool | int | float):
        raise TypeError(f"{trace.signature} must give one number, it gives {type(result).__name__}")
    expression = trace.expression(result)
    wanted = FLOAT if scores else BOOL
    if expression.dtype != wanted:
        raise TypeError(f"{trace.signature} must give a {wanted}, it gives {expression.dtype}")
    return Rule(expression, tuple(trace.arrays))


class ScalarProxy:
    """A number inside a function, which records what is done to it."""

    # NumPy's numbers leave operators to this class
    __array_ufunc__ = None
    __hash__ = object.__hash__
    shape = torch.Size(())
    ndim = 0

    def __init__(self, trace: "_Trace", expression: Expression):
        self.trace, self.expression = trace, expression

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.expression.dtype]

    @property
    def device(self) -> torch.device:
        return self.trace.device

    def __getattr__(self, name: str) -> Any:
        if _ALIASES.get(name, name) not in _OPERATIONS:
            raise AttributeError(f"{self.trace.signature}: {name} of a number; {_WHAT_WORKS}")
        return partial(self.trace.called, name, self)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """That it is there makes PyTorch take numbers in place of tensors; `_TraceMode` is asked first."""
        raise TypeError("a number of a mask_mod or score_mod is used after that has returned")

    def _unknown(self, *_: Any) -> Any:
        raise TypeError(
            f"{self.trace.signature} asks for the value of a number, which is not known while a function is traced: "
            "say torch.where, & and | in place of if, and, or, and functions of torch in place of those of math"
        )

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = item = tolist = _unknown


class _TensorProxy:
    """A tensor whose leading dimensions are indexed already, and others are not yet."""

    def __init__(self, trace: "_Trace", values: Tensor, index: tuple[Expression, ...]):
        self.trace, self.values, self.index = trace, values, index

    def __getitem__(self, index: Any) -> Any:
        return self.trace.indexed(self, index)

    __torch_function__ = ScalarProxy.__torch_function__


def _has_proxies(x: Any) -> bool:
    return isinstance(x, ScalarProxy | _TensorProxy) or (isinstance(x, tuple | list) and any(map(_has_proxies, x)))


class _TraceMode(TorchFunctionMode):
    """While it is on, functions of PyTorch on proxies are recorded; those on tensors alone are computed."""

    def __init__(self, trace: "_Trace"):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(_has_proxies, (*args, *kwargs.values()))):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", repr(function)).strip("_")
        return self.trace.indexed(*args) if name == "getitem" else self.trace.called(name, *args, **kwargs)


class _Trace:
    """What a function does, and the tensors that it reads, (1, ...) each: the first index of a load is of the batch."""

    def __init__(self, signature: str, device: torch.device):
        self.signature, self.device = signature, device
        self.arrays: list[Tensor] = []
        self._read: list[Tensor] = []  # as they were given

    def called(self, name: str, *args: Any, **kwargs: Any) -> ScalarProxy:
        operation = _OPERATIONS.get(_ALIASES.get(name, name))
        if operation is None:
            raise NotAnExpression(f"{self.signature}: {name} has no counterpart in kernels; {_WHAT_WORKS}")
        return ScalarProxy(self, operation(self, *args, **kwargs))

    def expression(self, x: Any) -> Expression:
        x = x.item() if isinstance(x, np.generic) else x
        if isinstance(x, ScalarProxy):
            return x.expression
        if isinstance(x, bool | int | float):
            return const(x, BOOL if isinstance(x, bool) else INT if isinstance(x, int) else FLOAT)
        if isinstance(x, Tensor) and x.dim() == 0:
            return self._loaded(x, ())
        shape = tuple(x.shape) if isinstance(x, Tensor) else x.values.shape[len(x.index) :] if _has_proxies(x) else None
        what = f"a tensor of shape {tuple(shape)}" if shape is not None else type(x).__name__
        raise NotAnExpression(f"{self.signature} computes with {what}: index it to one number first; {_WHAT_WORKS}")

    def indexed(self, x: Any, index: Any) -> Any:
        if isinstance(x, ScalarProxy):
            raise NotAnExpression(f"{self.signature}: an index of a number")
        values, chosen = (x.values, x.index) if isinstance(x, _TensorProxy) else (x, ())
        index = index if isinstance(index, tuple) else (index,)
        if len(chosen) + len(index) > values.dim():
            raise IndexError(f"{self.signature}: {len(index)} more indices for a tensor {tuple(values.shape)}")
        chosen += tuple(self._index(i, values.shape[len(chosen) + n]) for n, i in enumerate(index))
        return (
            ScalarProxy(self, self._loaded(values, chosen))
            if len(chosen) == values.dim()
            else _TensorProxy(self, values, chosen)
        )

    def _index(self, i: Any, size: int) -> Expression:
        index = None if i is None or isinstance(i, slice | list) or i is Ellipsis else self.expression(i)
        if index is None or index.dtype != INT:
            raise NotAnExpression(f"{self.signature}: a tensor is indexed by {i!r:.40}, needed integers; {_WHAT_WORKS}")
        if index.name == CONST and not -size <= index.data < size:
            raise IndexError(f"{self.signature}: index {index.data} of {size}")
        # a negative one counts from the end
        return select(index < 0, index + size, index)

    def _loaded(self, x: Tensor, index: tuple[Expression, ...]) -> Expression:
        number = next((n for n, known in enumerate(self._read) if known is x), len(self._read))
        if number == len(self._read):
            if x.device != self.device and x.dim():
                raise ValueError(f"{self.signature} reads a tensor on {x.device}, query is on {self.device}")
            self._read.append(x)
            self.arrays.append(self._narrowed(x.to(self.device))[None])
        return load(number, (B, *index), _dtype_of(self.arrays[number]))

    def _narrowed(self, x: Tensor) -> Tensor:
        """In int32 or float32, or bool."""
        if x.dtype.is_complex:
            raise TypeError(f"{self.signature} reads a tensor of {x.dtype}: bool, integers and floats can be read")
        if x.dtype == torch.bool:
            return x
        if x.dtype.is_floating_point:
            return x.float()
        return x.clamp(-(2**31), 2**31 - 1).to(torch.int32) if x.dtype == torch.int64 else x.to(torch.int32)


def _dtype_of(x: Tensor) -> Dtype:
    return BOOL if x.dtype == torch.bool else FLOAT if x.dtype.is_floating_point else INT


# Operations -------------------------------------------------------------------------------------------------

_Operation = Callable[..., Expression]  # of the trace, and of what PyTorch's function is given
_WHAT_WORKS = (
    "what works: arithmetic, comparisons, logic, torch.where, exp, log, tanh, sqrt and their kin, casts to int32 and "
    "float32, and tensors indexed to one number"
)


def _promoted(trace: _Trace, *args: Any, least: Dtype = BOOL) -> list[Expression]:
    """Operands in one dtype, as PyTorch promotes numbers."""
    numbers = [trace.expression(x) for x in args]
    order = (BOOL, INT, FLOAT)
    dtype = max((least, *(x.dtype for x in numbers)), key=order.index)
    return [cast(x, dtype) for x in numbers]


def _same(name: str, least: Dtype = BOOL) -> _Operation:
    return lambda trace, *args: apply(name, *_promoted(trace, *args, least=least))


def _sum(name: str) -> _Operation:
    def operation(trace: _Trace, x: Any, y: Any, *, alpha: Any = 1) -> Expression:
        a, b, factor = _promoted(trace, x, y, alpha, least=INT)
        return apply(name, a, b * factor)

    return operation


def _floor_divide(trace: _Trace, x: Any, y: Any) -> Expression:
    a, b = _promoted(trace, x, y, least=INT)
    return apply("floordiv", a, b) if a.dtype == INT else apply("floor", a / b)


def _div(trace: _Trace, x: Any, y: Any, *, rounding_mode: str | None = None) -> Expression:
    if rounding_mode == "floor":
        return _floor_divide(trace, x, y)
    a, b = _promoted(trace, x, y, least=FLOAT if rounding_mode is None else INT)
    if rounding_mode is None:
        return a / b
    return (
        apply("quotient", a, b) if a.dtype == INT else select(a / b < 0.0, apply("ceil", a / b), apply("floor", a / b))
    )


def _remainder(trace: _Trace, x: Any, y: Any) -> Expression:
    a, b = _promoted(trace, x, y, least=INT)
    return apply("mod", a, b) if a.dtype == INT else a - apply("floor", a / b) * b


def _pow(trace: _Trace, x: Any, y: Any) -> Expression:
    a, b = trace.expression(x), trace.expression(y)
    if b.name == CONST and b.data in range(17):
        a = cast(a, FLOAT) if b.dtype == FLOAT else a
        return reduce(lambda product, _: product * a, range(int(b.data)), const(1, a.dtype))
    if a.dtype != FLOAT and b.dtype != FLOAT:
        raise NotAnExpression(f"{trace.signature}: an integer to the power of {b}: cast one of them to float32")
    a, b = cast(a, FLOAT), cast(b, FLOAT)
    if a.name == CONST and a.data > 0:
        return apply("exp2", b * float(np.log2(a.data)))
    return apply("pow", a, b)


def _where(trace: _Trace, condition: Any, yes: Any, no: Any) -> Expression:
    which = trace.expression(condition)
    if which.dtype != BOOL:
        raise TypeError(f"{trace.signature}: torch.where needs a bool, got {which.dtype}")
    return select(which, *_promoted(trace, yes, no))


def _clamp(trace: _Trace, x: Any, min: Any = None, max: Any = None) -> Expression:
    clipped = trace.expression(x)
    for limit, name in ((min, "max"), (max, "min")):
        if limit is not None:
            clipped = apply(name, *_promoted(trace, ScalarProxy(trace, clipped), limit))
    return clipped


def _to(trace: _Trace, x: Any, *args: Any, dtype: Any = None, **_: Any) -> Expression:
    for given in (*args, dtype):
        wanted = given.dtype if isinstance(given, Tensor | ScalarProxy) else given
        if isinstance(wanted, torch.dtype):
            if wanted not in _CASTS:
                raise NotAnExpression(f"{trace.signature}: a cast to {wanted}; numbers are int32 and float32")
            return cast(trace.expression(x), _CASTS[wanted])
    return trace.expression(x)


def _cast_to(dtype: torch.dtype) -> _Operation:
    return lambda trace, x: _to(trace, x, dtype)


def _filled(value: Any) -> _Operation:
    """Of a number like another; `value` None: it is an argument."""

    def operation(trace: _Trace, x: Any, *args: Any, dtype: Any = None, device: Any = None, **named: Any) -> Expression:
        size, *given = (*args, *named.values()) if args or named else ((),)
        if value is None and not given:  # a value, and no size
            size, given = (), [size]
        if tuple(size):
            raise NotAnExpression(f"{trace.signature}: an array of shape {tuple(size)}: compute with single numbers")
        made = trace.expression(given[0] if value is None else value)
        like = made.dtype if value is None else trace.expression(x).dtype
        return cast(made, _CASTS[dtype] if dtype else like)

    return operation


def _invert(trace: _Trace, x: Any) -> Expression:
    return apply("not", trace.expression(x))


def _logical(name: str) -> _Operation:
    return lambda trace, *args: apply(name, *(cast(trace.expression(x), BOOL) for x in args))


def _relu(trace: _Trace, x: Any, inplace: bool = False) -> Expression:
    return _clamp(trace, x, 0)


def _rounded(name: str) -> _Operation:
    def operation(trace: _Trace, x: Any) -> Expression:
        number = trace.expression(x)
        return apply(name, number) if number.dtype == FLOAT else number

    return operation


def _isfinite(trace: _Trace, x: Any) -> Expression:
    (a,) = _promoted(trace, x, least=FLOAT)
    return (a - a).equals(a - a)


def _square(trace: _Trace, x: Any) -> Expression:
    a = trace.expression(x)
    return a * a


def _detach(trace: _Trace, x: Any) -> Expression:
    number = trace.expression(x)
    return apply("stop", number) if number.dtype == FLOAT else number


_SMOOTH = ("exp", "exp2", "log", "log1p", "expm1", "tanh", "sigmoid", "sin", "cos", "sqrt", "rsqrt")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_OPERATIONS: dict[str, _Operation] = {
    **{name: _same(name, FLOAT) for name in _SMOOTH},
    **{name: _same(name) for name in _COMPARED},
    **{name: _same(name, INT) for name in ("mul", "neg", "abs", "sign", "max", "min")},
    **{f"logical_{name}": _logical(name) for name in ("and", "or", "xor", "not")},
    **{f"bitwise_{name}": _same(name) for name in ("and", "or", "xor")},
    **{name: _cast_to(dtype) for name, dtype in (("float", torch.float32), ("int", torch.int32), ("bool", torch.bool))},
    "bitwise_not": _invert,
    "bitwise_left_shift": _same("shift_left", INT),
    "bitwise_right_shift": _same("shift_right", INT),
    "add": _sum("add"),
    "sub": _sum("sub"),
    "div": _div,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "fmod": _same("rem", INT),
    "pow": _pow,
    "where": _where,
    "masked_fill": lambda trace, x, mask, value: _where(trace, mask, value, x),
    "clamp": _clamp,
    "to": _to,
    "zeros_like": _filled(0),
    "ones_like": _filled(1),
    "full_like": _filled(None),
    "relu": _relu,
    "floor": _rounded("floor"),
    "ceil": _rounded("ceil"),
    "isfinite": _isfinite,
    "isnan": lambda trace, x: apply("ne", trace.expression(x), trace.expression(x)),
    "square": _square,
    "reciprocal": lambda trace, x: _div(trace, 1.0, x),
    "detach": _detach,
    "clone": lambda trace, x, **_: trace.expression(x),
}
# other names for them, of PyTorch and of Python's operators
_ALIASES = {
    "subtract": "sub", "multiply": "mul", "true_divide": "div", "divide": "div", "truediv": "div", "mod": "remainder",
    "floordiv": "floor_divide", "negative": "neg", "absolute": "abs", "maximum": "max", "minimum": "min",
    "clip": "clamp",
    "invert": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "type": "to",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "not_equal": "ne", "long": "int", "double": "float", "type_as": "to", "contiguous": "clone",
    "new_zeros": "zeros_like", "new_ones": "ones_like", "new_full": "full_like", "new_tensor": "full_like",
}  # fmt: skip


def _operator(name: str, *, swapped: bool = False) -> Callable[..., ScalarProxy]:
    def method(self: ScalarProxy, *others: Any) -> ScalarProxy:
        return self.trace.called(name, *others, self) if swapped else self.trace.called(name, self, *others)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(ScalarProxy, f"__{_name}__", _operator(_name))
    setattr(ScalarProxy, f"__r{_name}__", _operator(_name, swapped=True))
for _name in (*_COMPARED, "neg", "abs", "invert"):
    setattr(ScalarProxy, f"__{_name}__", _operator(_name))
