"""The expressions that say what a query sees and what is done to a logit: numbers over batch, head, query and key.

An expression is a tree of nodes with a dtype each: bool, int32 or float32. Equal ones are the same object, so that they
are hashed and compared by identity. No node holds an array: `load` names one by its number, and whoever has the
expression has the arrays beside it. So two functions that differ in the values they close over are one expression.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Dtype = str
BOOL, INT, FLOAT = "bool", "int32", "float32"

# what a node may be, beside an operation of `OPERATIONS`
AXIS = "axis"  # data: "b", "h", "i" or "j", the index of batch, query head, query or key
SCORE = "score"  # the logit
CONST = "const"  # data: a number
LOAD = "load"  # data: the number of an array; args: an index for each of its dimensions, clamped to what there is
OPERAND = "operand"  # data: (kind, number), of a bound expression: see `binding.py`
LOOKUP = "lookup"  # data: (offset, shape), likewise; args: an index for each dimension, clamped


class Expression:
    """A node: what it does, to what, with which static data, and of which dtype."""

    __slots__ = ("args", "axes", "data", "dtype", "name")

    name: str
    args: tuple["Expression", ...]
    data: Any  # hashable
    dtype: Dtype
    axes: frozenset[str]  # which axes, and whether the score, its value depends on

    def __repr__(self) -> str:
        return shown(self)

    def __reduce__(self) -> Any:
        return _made, (self.name, self.args, self.data, self.dtype)

    def __copy__(self) -> "Expression":
        return self

    def __deepcopy__(self, memo: Any) -> "Expression":
        return self

    def __add__(self, other: "Expression | float") -> "Expression":
        return apply("add", self, as_expression(other, self.dtype))

    def __sub__(self, other: "Expression | float") -> "Expression":
        return apply("sub", self, as_expression(other, self.dtype))

    def __mul__(self, other: "Expression | float") -> "Expression":
        return apply("mul", self, as_expression(other, self.dtype))

    def __truediv__(self, other: "Expression | float") -> "Expression":
        return apply("div", self, as_expression(other, self.dtype))

    def __floordiv__(self, other: "Expression | int") -> "Expression":
        return apply("floordiv", self, as_expression(other, self.dtype))

    def __neg__(self) -> "Expression":
        return apply("neg", self)

    def __and__(self, other: "Expression") -> "Expression":
        return apply("and", self, other)

    def __or__(self, other: "Expression") -> "Expression":
        return apply("or", self, other)

    def __le__(self, other: "Expression | float") -> "Expression":
        return apply("le", self, as_expression(other, self.dtype))

    def __lt__(self, other: "Expression | float") -> "Expression":
        return apply("lt", self, as_expression(other, self.dtype))

    def __ge__(self, other: "Expression | float") -> "Expression":
        return apply("ge", self, as_expression(other, self.dtype))

    def __gt__(self, other: "Expression | float") -> "Expression":
        return apply("gt", self, as_expression(other, self.dtype))

    def equals(self, other: "Expression | float") -> "Expression":
        """Where both are equal; `==` compares the nodes."""
        return apply("eq", self, as_expression(other, self.dtype))


_NODES: dict[Any, Expression] = {}


def _made(name: str, args: tuple[Expression, ...], data: Hashable, dtype: Dtype) -> Expression:
    # 0.0 and -0.0 are equal and not the same, nan is not equal to itself
    key = (name, args, repr(data) if name == CONST else data, dtype)
    node = _NODES.get(key)
    if node is None:
        node = object.__new__(Expression)
        node.name, node.args, node.data, node.dtype = name, args, data, dtype
        own = {AXIS: frozenset([data]), SCORE: frozenset([SCORE])}.get(name, frozenset())
        node.axes = own.union(*(arg.axes for arg in args))
        node = _NODES.setdefault(key, node)
    return node


def axis(name: str) -> Expression:
    return _made(AXIS, (), name, INT)


def score() -> Expression:
    return _made(SCORE, (), None, FLOAT)


_TYPES: dict[Dtype, Callable[[Any], Any]] = {
    BOOL: bool,
    INT: lambda x: int(np.int32(x)),
    FLOAT: lambda x: float(np.float32(x)),
}


def const(value: Any, dtype: Dtype) -> Expression:
    return _made(CONST, (), _TYPES[dtype](value), dtype)


def load(array: int, index: tuple[Expression, ...], dtype: Dtype) -> Expression:
    return _made(LOAD, index, array, dtype)


def operand(kind: str, number: int, dtype: Dtype) -> Expression:
    return _made(OPERAND, (), (kind, number), dtype)


def lookup(offset: int, shape: tuple[int, ...], index: tuple[Expression, ...], dtype: Dtype) -> Expression:
    return _made(LOOKUP, index, (offset, shape), dtype)


def as_expression(x: Any, dtype: Dtype) -> Expression:
    return x if isinstance(x, Expression) else const(x, dtype)


I, J, B, H = axis("i"), axis("j"), axis("b"), axis("h")
TRUE, FALSE = const(True, BOOL), const(False, BOOL)


# Operations -------------------------------------------------------------------------------------------------


def _floordiv(x: Any, y: Any) -> Any:
    return np.where(y == 0, -1, x // np.where(y == 0, 1, y)) if isinstance(y, np.ndarray | np.generic) else x // y


# of numpy, on numbers of the node's dtype; `evaluation.py` has those of jax.numpy
_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "floordiv": _floordiv,  # rounds down; by 0 it is anything
    "mod": lambda x, y: np.where(y == 0, x, np.mod(x, np.where(y == 0, 1, y))),  # of the divisor's sign
    "quotient": lambda x, y: np.where(y == 0, -1, np.trunc(x / np.where(y == 0, 1, y))),  # rounds to zero
    "rem": lambda x, y: np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y))),  # of the dividend's sign
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "floor": np.floor,
    "ceil": np.ceil,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "pow": np.power,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "select": np.where,
    "cast": lambda x: x,
    "stop": lambda x: x,  # it has no gradient
}
OPERATIONS = tuple(_NUMPY)
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
# what costs a multiple of an addition, or is not exact on every device
TRANSCENDENTAL = (
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "sigmoid", "sin", "cos", "sqrt", "rsqrt", "pow",
)  # fmt: skip


def cast(x: Expression, dtype: Dtype) -> Expression:
    return x if x.dtype == dtype else apply("cast", x, dtype=dtype)


def select(condition: Expression, yes: Expression, no: Expression) -> Expression:
    return apply("select", condition, yes, no)


def apply(name: str, *args: Expression, dtype: Dtype | None = None) -> Expression:
    """The node of an operation, or what is simpler and the same for indices that are not negative."""
    if dtype is None:
        operands = args[name == "select" :]
        if any(arg.dtype != operands[0].dtype for arg in operands):
            raise TypeError(f"{name} of {' and '.join(f'{arg.dtype} {arg}' for arg in operands)}: cast them first")
        dtype = BOOL if name in COMPARISONS else args[-1].dtype
    if all(arg.name == CONST for arg in args):
        return _folded(name, args, dtype)
    return _simplified(name, args) or _made(name, args, None, dtype)


def _folded(name: str, args: tuple[Expression, ...], dtype: Dtype) -> Expression:
    with np.errstate(all="ignore"):
        return const(np.asarray(_NUMPY[name](*(np.asarray(arg.data, arg.dtype) for arg in args))).item(), dtype)


def _is(x: Expression, value: Any) -> bool:
    return x.name == CONST and x.data == value


def _simplified(name: str, args: Sequence[Expression]) -> Expression | None:
    x = args[0]
    y = args[1] if len(args) > 1 else x
    exact = x.dtype != FLOAT  # x + 0.0 is not x where x is -0.0, nor x * 0.0 zero where it is nan
    if name in ("and", "or") and x.dtype == BOOL:
        if x is y:
            return x
        for one, other in ((x, y), (y, x)):
            if one.name == CONST:
                return other if one.data == (name == "and") else one
    if name == "not" and x.name == "not":
        return x.args[0]
    if name == "select":
        if x.name == CONST:
            return args[1] if x.data else args[2]
        return args[1] if args[1] is args[2] else None
    if name in ("add", "sub") and exact and _is(y, 0):
        return x
    if name == "add" and exact and _is(x, 0):
        return y
    if name in ("mul", "div", "floordiv") and _is(y, 1):
        return x
    if name == "mul" and _is(x, 1):
        return y
    if name == "mul" and exact and (_is(x, 0) or _is(y, 0)):
        return const(0, x.dtype)
    # what indexing does for negative indices, of which there are none
    if name == "lt" and _is(y, 0) and nonnegative(x):
        return FALSE
    if name == "ge" and _is(y, 0) and nonnegative(x):
        return TRUE
    if name == "max" and exact and nonnegative(x) and _is(y, 0):
        return x
    return None


def nonnegative(x: Expression) -> bool:
    """Whether an integer is known to be at least 0, for up to 2^30 rows, heads, queries and keys."""
    return x.dtype == INT and _most(x) is not None


def _most(x: Expression) -> int | None:
    """The most that an integer can be which is never negative; None where it may be, or may wrap around."""
    if x.name == CONST:
        return x.data if x.data >= 0 else None
    if x.name == AXIS:
        return 2**30 - 1
    args = [_most(arg) for arg in x.args]
    if x.name == "max":  # one that is not suffices
        return 2**31 - 1 if args != [None, None] else None
    known = [most for most in args if most is not None]
    if len(known) < len(args):
        return None
    if x.name in ("add", "mul"):
        most = sum(known) if x.name == "add" else known[0] * known[1]
        return most if most < 2**31 else None
    if x.name in ("floordiv", "quotient") and not (x.args[1].name == CONST and x.args[1].data > 0):
        return None  # by 0 it is negative
    return known[0] if x.name in ("min", "floordiv", "quotient", "mod", "rem", "shift_right") else None


# Whole expressions ------------------------------------------------------------------------------------------


def nodes(*expressions: Expression | None) -> Iterator[Expression]:
    """Every node once, arguments before what they are arguments of."""
    seen: set[Expression] = set()
    stack = [(x, False) for x in reversed(expressions) if x is not None]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.args))


def rewritten(expression: Expression, rule: Callable[[Expression], Expression | None]) -> Expression:
    """The expression with nodes replaced from the leaves up: by what `rule` says, or kept where it says None."""
    done: dict[Expression, Expression] = {}
    for node in nodes(expression):
        args = tuple(done[arg] for arg in node.args)
        again = node if args == node.args else rebuilt(node, args)
        done[node] = rule(again) or again
    return done[expression]


def rebuilt(node: Expression, args: tuple[Expression, ...]) -> Expression:
    """A node with other arguments."""
    if node.name in (LOAD, LOOKUP):
        return _made(node.name, args, node.data, node.dtype)
    return apply(node.name, *args, dtype=node.dtype)


def substituted(expression: Expression, values: Mapping[Expression, Expression]) -> Expression:
    """The expression with some of its leaves replaced."""
    return rewritten(expression, values.get)


_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "shift_left": "<<", "shift_right": ">>",
}  # fmt: skip


def shown(x: Expression) -> str:
    """As Python would write it."""
    if x.name == CONST:
        return repr(x.data)
    if x.name in (AXIS, SCORE):
        return str(x.data or SCORE)
    if x.name == OPERAND:
        return "{}[{}]".format(*x.data)
    args = [shown(arg) for arg in x.args]
    if x.name in (LOAD, LOOKUP):
        array = f"x{x.data}" if x.name == LOAD else f"table{x.data}"
        return f"{array}[{', '.join(args)}]"
    if x.name in _INFIX:
        within = [f"({text})" if arg.name in _INFIX else text for arg, text in zip(x.args, args, strict=True)]
        return f" {_INFIX[x.name]} ".join(within)
    return f"{x.dtype if x.name == 'cast' else x.name}({', '.join(args)})"
