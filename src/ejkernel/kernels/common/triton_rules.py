"""Device functions of Triton from expressions: the source of one is written, and handed to kernels as a constant.

The operands of a (batch, head) lie one after the other, those of integers and those of floats apart:

    scalars, rows (each T long), columns (each S long), tables
"""

import hashlib
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ejkernel.expressions.nodes import (
    AXIS,
    BOOL,
    CONST,
    FLOAT,
    INT,
    LOOKUP,
    OPERAND,
    SCORE,
    Expression,
    nodes,
)


class Layout(NamedTuple):
    """How many operands of a dtype there are, and at which index those of rows are read: a parameter."""

    scalars: int = 0
    rows: int = 0
    columns: int = 0
    row_index: str = "o_i"


class Layouts(NamedTuple):
    """Where the operands of a call lie."""

    ints: Layout = Layout()
    floats: Layout = Layout()


@dataclass(frozen=True)
class DeviceFunction:
    """An expression as a function of Triton, `C.RULE.call(...)` in kernels.

    Its parameters are the query and key indices, the logits (or anything, where it does not depend on them), where the
    operands of its (batch, head) begin, and both lengths; `o_row`, if a layout reads rows there.
    """

    expression: Expression
    layouts: Layouts

    @property
    def call(self) -> Any:
        return _compiled(self.expression, self.layouts)

    def __repr__(self) -> str:  # Triton keeps compiled kernels by the text of their constants
        return _source(self.expression, self.layouts)[0]


NAMES = ("scalars", "rows", "columns", "tables")


def layouts_of(arrays: Mapping[str, Any]) -> Layouts:
    """Where the operands among the arrays of a call lie."""
    counts = [[arrays.get(f"{dtype}_{name}") for name in NAMES[:3]] for dtype in ("int", "float")]
    return Layouts(*(Layout(*(0 if x is None else x.shape[2] for x in parts)) for parts in counts))


def flat_operands(arrays: Mapping[str, Any], xp: Any = jnp) -> tuple[Layouts, dict[str, Any]]:
    """Where operands lie, and all of them, (B|1, H|1, n) for each dtype, by the names that kernels have for them."""
    flat = {}
    for dtype in ("int", "float"):
        parts = {name: arrays.get(f"{dtype}_{name}") for name in NAMES}
        given = [x for x in parts.values() if x is not None]
        flat[f"p_{dtype}s"] = None
        if given:
            B, H = (max(x.shape[axis] for x in given) for axis in (0, 1))
            rows = [xp.broadcast_to(x, (B, H, *x.shape[2:])).reshape(B, H, prod(x.shape[2:])) for x in given]
            flat[f"p_{dtype}s"] = xp.concatenate(rows, 2)
    return layouts_of(arrays), flat


@cache
def _compiled(expression: Expression, layouts: Layouts) -> Any:
    import triton

    name, source = _source(expression, layouts)
    file = f"<{name}>"
    # what inspect reads sources from
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {}
    exec(compile(source, file, "exec"), _globals(), namespace)
    function = namespace[name]
    function.__globals__[name] = function
    return triton.jit(function)


def _globals() -> dict[str, Any]:
    import triton.language as tl

    from ejkernel.kernels.common.triton_tiles import tanh

    return {"tl": tl, "tanh": tanh, "__name__": __name__, "__builtins__": __builtins__}


@cache
def _source(expression: Expression, layouts: Layouts) -> tuple[str, str]:
    """Name and source of the function."""
    names: dict[Expression, str] = {}
    lines = []
    for node in nodes(expression):
        text = _text(node, [names[arg] for arg in node.args], layouts)
        if node.name in (AXIS, SCORE, CONST):
            names[node] = text
        else:
            names[node] = f"x{len(lines)}"
            lines.append(f"    {names[node]} = {text}\n")
    body = "".join(lines) + f"    return {names[expression]}\n"
    name = f"rule_{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    return name, f"def {name}(o_i, o_j, b_s, p_ints, p_floats, T, S, o_row=None):\n{body}"


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "quotient": "//", "rem": "%", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "shift_left": "<<", "shift_right": ">>",
}  # fmt: skip
_CALLS = {
    "max": "tl.maximum", "min": "tl.minimum", "abs": "tl.abs", "floor": "tl.floor", "ceil": "tl.ceil", "exp": "tl.exp",
    "exp2": "tl.exp2", "log": "tl.log", "sin": "tl.sin", "cos": "tl.cos", "sqrt": "tl.sqrt", "tanh": "tanh",
    "select": "tl.where",
}  # fmt: skip
_TEXTS: dict[str, Callable[..., str]] = {
    "floordiv": lambda x, y: f"{x} // {y} - (({x} % {y} != 0) & (({x} % {y} < 0) != ({y} < 0))).to(tl.int32)",
    "mod": lambda x, y: f"({x} % {y} + {y}) % {y}",
    "neg": lambda x: f"-{x}",
    "not": lambda x: f"{x} == 0",
    "stop": lambda x: x,
    "rsqrt": lambda x: f"1.0 / tl.sqrt({x})",
    "sigmoid": lambda x: f"1.0 / (1.0 + tl.exp(-{x}))",
    "log1p": lambda x: f"tl.log(1.0 + {x})",
    "expm1": lambda x: f"tl.exp({x}) - 1.0",
    "pow": lambda x, y: f"tl.exp2({y} * tl.log2({x}))",
}
_TYPES = {BOOL: "tl.int1", INT: "tl.int32", FLOAT: "tl.float32"}


def _text(node: Expression, args: list[str], layouts: Layouts) -> str:
    if node.name == CONST:
        return _number(node.data)
    if node.name == AXIS:
        return f"o_{node.data}"
    if node.name == SCORE:
        return "b_s"
    if node.name in (OPERAND, LOOKUP):
        return _loaded(node, args, layouts.floats if node.dtype == FLOAT else layouts.ints)
    if node.name == "floordiv" and node.args[1].name == CONST and node.args[1].data > 0:
        return f"tl.where({args[0]} >= 0, {args[0]}, {args[0]} - ({args[1]} - 1)) // {args[1]}"
    if node.name in _INFIX:
        return f"{args[0]} {_INFIX[node.name]} {args[1]}"
    if node.name in _CALLS:
        return f"{_CALLS[node.name]}({', '.join(args)})"
    if node.name == "sign":
        return f"tl.where({args[0]} > 0, 1, tl.where({args[0]} < 0, -1, 0)).to({_TYPES[node.dtype]})"
    if node.name == "cast":
        return f"{args[0]} != 0" if node.dtype == BOOL else f"{args[0]}.to({_TYPES[node.dtype]})"
    return _TEXTS[node.name](*args)


def _number(value: Any) -> str:
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    return f"({value!r})" if not isinstance(value, bool) and value < 0 else repr(value)


def _loaded(node: Expression, args: list[str], layout: Layout) -> str:
    pointer = "p_floats" if node.dtype == FLOAT else "p_ints"
    scalars, rows, columns, index_of_row = layout
    if node.name == LOOKUP:
        offset, shape = node.data
        index = "0"
        for size, arg in zip(shape, args, strict=True):
            index = f"({index} * {size} + tl.minimum(tl.maximum({arg}, 0), {size - 1}).to(tl.int64))"
        return f"tl.load({pointer} + {scalars} + {rows} * T + {columns} * S + {offset} + {index})"
    kind, number = node.data
    if kind == "scalar":
        return f"tl.load({pointer} + {number})"
    if kind == "row":
        return f"tl.load({pointer} + {scalars} + {number} * T + {index_of_row}, mask={index_of_row} < T, other=0)"
    return f"tl.load({pointer} + {scalars} + {rows} * T + {number} * S + o_j, mask=o_j < S, other=0)"


def unsupported_operations(*expressions: Expression | None) -> list[str]:
    """Operations that have no function in Triton: there are none but powers of numbers that may be negative."""
    powers = [node for node in nodes(*expressions) if node.name == "pow" and node.axes]
    return [f"{node}: the base of a power may be negative" for node in powers]
