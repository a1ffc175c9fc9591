"""What an expression can be over a block of queries and a block of keys, by interval arithmetic.

Every node has an interval: the least and the largest number it can be anywhere in the block, and a bool whether it can
be false and whether it can be true. Intervals are sound and may be wide: a block that is "none" has no visible pair,
one that is "all" has no hidden one, and the rest needs the mask. They are arrays that broadcast to (B, H, blocks of
queries, blocks of keys), of numpy where the expression has no operands, else of jax.numpy.
"""

from collections.abc import Callable, Mapping
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
    Expression,
    nodes,
)


class Interval(NamedTuple):
    """The least and largest number; of a bool, whether it is true everywhere, and whether it is true somewhere.

    What is nan has no part in them: `nan` says whether there may be any, of which every comparison but `!=` is false.
    """

    low: Any
    high: Any
    nan: Any = np.False_


_INT32 = np.iinfo(np.int32)
_FAR = 2**30  # beyond every index


def has_operands(expression: Expression) -> bool:
    """Whether its value depends on arrays."""
    return any(node.name in (OPERAND, LOOKUP) for node in nodes(expression))


def is_exact(expression: Expression) -> bool:
    """Whether blocks can be bounded well: not so where a table is read at indices of query and key."""
    return not any(node.name == LOOKUP for node in nodes(expression))


def bounds(
    expression: Expression, axes: Mapping[str, Interval], operand: Callable[[Expression], Interval], xp: Any
) -> Interval:
    """The interval of an expression from those of "i", "j", and of its operands."""
    values: dict[Expression, Interval] = {}
    for node in nodes(expression):
        if node.name == CONST:
            value = np.dtype(node.dtype).type(node.data)
            values[node] = Interval(value, value)
        elif node.name == AXIS:
            values[node] = axes[node.data]
        elif node.name == OPERAND:
            values[node] = operand(node)
        else:
            values[node] = _bounded(node, [values[arg] for arg in node.args], xp)
    return values[expression]


def anything(dtype: str) -> Interval:
    """The interval of what nothing is known of."""
    if dtype == BOOL:
        return Interval(np.False_, np.True_)
    if dtype == INT:
        return Interval(np.int32(_INT32.min), np.int32(_INT32.max))
    return Interval(np.float32(-np.inf), np.float32(np.inf), np.True_)


def _bounded(node: Expression, args: list[Interval], xp: Any) -> Interval:
    """The interval of an operation."""
    rule = _RULES.get(node.name, _unknown)
    with np.errstate(all="ignore"):
        result = rule(node, *args, xp=xp)
        if node.dtype == INT:
            return _within_int32(result, node, args, xp)
        if node.dtype != FLOAT:
            return _without_nan(result, node, args)
        # a bound that is nan says nothing
        low, high = xp.where(result.low != result.low, -np.inf, result.low), result.high
        high = xp.where(high != high, np.inf, high)
        return Interval(low, high, result.nan | _makes_nan(node, args))


def _within_int32(x: Interval, node: Expression, args: list[Interval], xp: Any) -> Interval:
    """A sum or product that leaves int32 wraps around, and may be anything."""
    if node.args[0].dtype == FLOAT:  # a cast, of nan to whatever the device takes
        known, least, most = ~args[0].nan, x.low, x.high
    elif node.name in ("add", "sub", "mul", "neg", "abs", "quotient"):
        wide = [Interval(*(xp.asarray(b).astype(np.float32) for b in arg[:2])) for arg in args]
        least, most = _RULES[node.name](node, *wide, xp=xp)[:2]
        known = (least > -_MOST) & (most < _MOST)
    else:
        return x
    unknown = anything(INT)
    return Interval(xp.where(known, x.low, unknown.low), xp.where(known, x.high, unknown.high))


# below 2^31 by more than float32 rounds
_MOST = 2.0**31 * (1 - 1e-5)


def _without_nan(x: Interval, node: Expression, args: list[Interval]) -> Interval:
    """A comparison is not true everywhere where there may be nan; a cast of nan is true."""
    if node.name in ("lt", "le", "gt", "ge", "eq"):
        return Interval(x.low & ~(args[0].nan | args[1].nan), x.high)
    if node.name == "ne":
        return Interval(x.low, x.high | args[0].nan | args[1].nan)
    return Interval(x.low, x.high | args[0].nan) if node.name == "cast" else x


def _makes_nan(node: Expression, args: list[Interval]) -> Any:
    """Whether a float may be nan, from what its arguments may be."""
    nan: Any = np.False_
    floats = [arg for arg, x in zip(args, node.args, strict=True) if x.dtype == FLOAT]
    for arg in floats:
        nan = nan | arg.nan
    if node.name in ("add", "sub", "mul", "div", "sin", "cos"):
        for arg in floats:
            nan = nan | (arg.low == -np.inf) | (arg.high == np.inf)
    if node.name == "div":
        nan = nan | ((args[1].low <= 0) & (args[1].high >= 0))
    lowest = {"sqrt": 0.0, "rsqrt": 0.0, "log": 0.0, "log1p": -1.0}.get(node.name)
    return nan if lowest is None else nan | (args[0].low < lowest)


def _unknown(node: Expression, *args: Interval, xp: Any) -> Interval:
    return anything(node.dtype)


def _add(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return Interval(x.low + y.low, x.high + y.high)


def _sub(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return (
        Interval(x.low - y.high, x.high - y.low) if node.args[0] is not node.args[1] else Interval(x.low * 0, x.low * 0)
    )


def _mul(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    corners = [a * b for a in x[:2] for b in y[:2]]
    least, most = _least(corners, xp), _most(corners, xp)
    if node.args[0] is node.args[1]:  # a square
        inside = (x.low <= 0) & (x.high >= 0)
        least = xp.where(inside, least * 0, xp.minimum(corners[0], corners[3]))
    return Interval(least, most)


def _div(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    apart = (y.low > 0) | (y.high < 0)
    low, high = (xp.where(apart, b, 1) for b in y[:2])
    corners = [a / b for a in x[:2] for b in (low, high)]
    return Interval(xp.where(apart, _least(corners, xp), -np.inf), xp.where(apart, _most(corners, xp), np.inf))


def _floordiv(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    if not (node.args[1].name == CONST and node.args[1].data > 0):
        return anything(INT)
    return Interval(x.low // y.low, x.high // y.low)


def _quotient(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    if not (node.args[1].name == CONST and node.args[1].data > 0):
        return anything(INT)
    low, high = (xp.where(a < 0, -(-a // y.low), a // y.low) for a in x[:2])
    return Interval(low, high)


def _mod(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    if not (node.args[1].name == CONST and node.args[1].data > 0):
        return anything(INT)
    n = y.low
    together = x.low // n == x.high // n
    return Interval(xp.where(together, x.low % n, 0), xp.where(together, x.high % n, n - 1))


def _rem(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    if not (node.args[1].name == CONST and node.args[1].data > 0):
        return anything(INT)
    positive = _mod(node, x, y, xp)
    n = y.low
    return Interval(xp.where(x.low >= 0, positive.low, 1 - n), xp.where(x.low >= 0, positive.high, n - 1))


def _neg(node: Expression, x: Interval, xp: Any) -> Interval:
    return Interval(-x.high, -x.low)


def _stop(node: Expression, x: Interval, xp: Any) -> Interval:
    return x


def _abs(node: Expression, x: Interval, xp: Any) -> Interval:
    inside = (x.low <= 0) & (x.high >= 0)
    ends = xp.abs(x.low), xp.abs(x.high)
    return Interval(xp.where(inside, ends[0] * 0, xp.minimum(*ends)), xp.maximum(*ends))


def _max(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return Interval(xp.maximum(x.low, y.low), xp.maximum(x.high, y.high))


def _min(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return Interval(xp.minimum(x.low, y.low), xp.minimum(x.high, y.high))


def _growing(name: str, lowest: float = -np.inf) -> Callable[..., Interval]:
    """Of a function that never falls, of numbers from `lowest` on."""

    def rule(node: Expression, x: Interval, xp: Any) -> Interval:
        values = {"sigmoid": lambda v: 1.0 / (1.0 + xp.exp(-v))}.get(name) or getattr(xp, name)
        with np.errstate(all="ignore"):
            low, high = (values(xp.maximum(b, lowest)) for b in x[:2])
        # rounded otherwise than in a kernel
        return Interval(low - xp.abs(low) * 1e-5, high + xp.abs(high) * 1e-5)

    return rule


def _whole(name: str) -> Callable[..., Interval]:
    def rule(node: Expression, x: Interval, xp: Any) -> Interval:
        return Interval(getattr(xp, name)(x.low), getattr(xp, name)(x.high))

    return rule


def _lt(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return Interval(x.high < y.low, x.low < y.high)


def _le(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return Interval(x.high <= y.low, x.low <= y.high)


def _gt(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return _lt(node, y, x, xp)


def _ge(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return _le(node, y, x, xp)


def _eq(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    if node.args[0].dtype == BOOL:
        return _not(node, _xor(node, x, y, xp), xp)
    every = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
    return Interval(every, (x.low <= y.high) & (y.low <= x.high))


def _ne(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return _not(node, _eq(node, x, y, xp), xp)


def _and(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return Interval(x.low & y.low, x.high & y.high) if node.dtype == BOOL else anything(INT)


def _or(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    return Interval(x.low | y.low, x.high | y.high) if node.dtype == BOOL else anything(INT)


def _xor(node: Expression, x: Interval, y: Interval, xp: Any) -> Interval:
    if x.low.dtype != np.bool_:
        return anything(INT)
    # true everywhere: one is, and the other nowhere
    return Interval((x.low & ~y.high) | (y.low & ~x.high), (x.high & ~y.low) | (y.high & ~x.low))


def _not(node: Expression, x: Interval, xp: Any) -> Interval:
    return Interval(~x.high, ~x.low) if node.dtype == BOOL else Interval(-1 - x.high, -1 - x.low)


def _select(node: Expression, condition: Interval, yes: Interval, no: Interval, xp: Any) -> Interval:
    if node.dtype == BOOL:
        hull = Interval(yes.low & no.low, yes.high | no.high)
    else:
        hull = Interval(xp.minimum(yes.low, no.low), xp.maximum(yes.high, no.high))
    either = zip(yes[:2], no[:2], hull[:2], strict=True)
    low, high = (xp.where(condition.low, y, xp.where(condition.high, h, n)) for y, n, h in either)
    return Interval(low, high, yes.nan | no.nan)


def _cast(node: Expression, x: Interval, xp: Any) -> Interval:
    source = node.args[0].dtype
    if node.dtype == BOOL:
        zero_inside = (x.low <= 0) & (x.high >= 0)
        return Interval(~zero_inside, ~((x.low == 0) & (x.high == 0)))
    if node.dtype == INT and source == FLOAT:
        low, high = (xp.clip(b, -_FAR, _FAR).astype(np.int32) for b in map(xp.asarray, x[:2]))
        far_low, far_high = xp.asarray(x.low) < -_FAR, xp.asarray(x.high) > _FAR
        return Interval(xp.where(far_low, _INT32.min, low), xp.where(far_high, _INT32.max, high))
    return Interval(*(xp.asarray(b).astype(node.dtype) for b in x[:2]))


def _least(values: list[Any], xp: Any) -> Any:
    return xp.minimum(xp.minimum(values[0], values[1]), xp.minimum(values[2], values[3]))


def _most(values: list[Any], xp: Any) -> Any:
    return xp.maximum(xp.maximum(values[0], values[1]), xp.maximum(values[2], values[3]))


_RULES: dict[str, Callable[..., Interval]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "floordiv": _floordiv,
    "quotient": _quotient,
    "mod": _mod,
    "rem": _rem,
    "neg": _neg,
    "abs": _abs,
    "stop": _stop,
    "sign": _whole("sign"),
    "max": _max,
    "min": _min,
    "floor": _whole("floor"),
    "ceil": _whole("ceil"),
    "exp": _growing("exp"),
    "exp2": _growing("exp2"),
    "log": _growing("log", 0.0),
    "log1p": _growing("log1p", -1.0),
    "expm1": _growing("expm1"),
    "tanh": _growing("tanh"),
    "sigmoid": _growing("sigmoid"),
    "sqrt": _growing("sqrt", 0.0),
    "lt": _lt,
    "le": _le,
    "gt": _gt,
    "ge": _ge,
    "eq": _eq,
    "ne": _ne,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": _not,
    "select": _select,
    "cast": _cast,
}


# Blocks -----------------------------------------------------------------------------------------------------


def axis_interval(length: int, block: int, xp: Any = np) -> Interval:
    """The first and the last index of each block."""
    first = np.arange(0, length, block, dtype=np.int32)
    return Interval(xp.asarray(first), xp.asarray(np.minimum(first + block, length) - 1))


def operand_interval(values: Any, block: int | None, xp: Any = jnp) -> Interval:
    """The least and largest of an operand (..., length) in each block, of a scalar (...) itself; nan says nothing."""
    if xp.issubdtype(values.dtype, np.floating):
        unknown = values != values
        low, high = xp.where(unknown, -np.inf, values), xp.where(unknown, np.inf, values)
    else:
        unknown, low, high = values != values, values, values
    if block is None:
        return Interval(*(x[..., None, None] for x in (low, high, unknown)))
    length = values.shape[-1]
    # past the end an entry counts again
    at = np.minimum(np.arange(-(-length // block) * block), length - 1).reshape(-1, block)
    return Interval(xp.min(low[..., at], axis=-1), xp.max(high[..., at], axis=-1), xp.any(unknown[..., at], axis=-1))


__all__ = ["Interval", "anything", "axis_interval", "bounds", "has_operands", "is_exact", "operand_interval"]
