"""Derivatives of an expression, which are expressions."""

from collections.abc import Callable, Iterable

from ejkernel.expressions.nodes import (
    BOOL,
    FLOAT,
    Expression,
    apply,
    const,
    nodes,
    select,
)

_ZERO, _ONE, _TWO = const(0.0, FLOAT), const(1.0, FLOAT), const(2.0, FLOAT)
_LN_2 = const(0.6931471805599453, FLOAT)


def derivatives(expression: Expression, leaves: Iterable[Expression]) -> dict[Expression, Expression]:
    """The derivative of a float expression by each of some nodes, such as the score or a float operand.

    Where it is not smooth, it is what JAX takes: half for equal arguments of a maximum, 0 for the absolute value of 0.
    """
    order = list(nodes(expression))
    wanted = set(leaves)
    adjoints = dict.fromkeys(order, _ZERO) | {expression: _ONE}
    # a node needs one only where a wanted leaf lies below it
    below = {node: node in wanted for node in order}
    for node in order:
        below[node] = below[node] or any(below[arg] for arg in node.args)
    for node in reversed(order):
        if adjoints[node] is _ZERO or node in wanted or not below[node] or node.dtype != FLOAT:
            continue
        for arg, slope in zip(node.args, _slopes(node), strict=True):
            if slope is not None and arg.dtype == FLOAT and below[arg]:
                adjoints[arg] = _sum(adjoints[arg], _product(adjoints[node], slope))
    return {leaf: adjoints.get(leaf, _ZERO) for leaf in wanted}


def is_zero(x: Expression) -> bool:
    return x is _ZERO


def _sum(x: Expression, y: Expression) -> Expression:
    return y if x is _ZERO else x if y is _ZERO else x + y


def _product(x: Expression, y: Expression) -> Expression:
    if x is _ZERO or y is _ZERO:
        return _ZERO
    return y if x is _ONE else x if y is _ONE else x * y


def _where(condition: Expression, yes: Expression, no: Expression) -> Expression:
    return select(condition, yes, no)


def _slopes(node: Expression) -> list[Expression | None]:
    """The derivative of a node by each of its arguments; None where there is none."""
    rule = _RULES.get(node.name)
    return [None] * len(node.args) if rule is None else rule(node, *node.args)


def _larger(node: Expression, x: Expression, y: Expression) -> list[Expression | None]:
    half = const(0.5, FLOAT)
    first = _where(x > y if node.name == "max" else x < y, _ONE, _where(x.equals(y), half, _ZERO))
    return [first, _ONE - first]


def _pow(node: Expression, x: Expression, y: Expression) -> list[Expression | None]:
    by_x = y * apply("pow", x, y - _ONE)
    by_y = _where(x > _ZERO, node * apply("log", _where(x > _ZERO, x, _ONE)), _ZERO)
    return [_where(y.equals(_ZERO), _ZERO, by_x), by_y]


_RULES: dict[str, Callable[..., list[Expression | None]]] = {
    "add": lambda node, x, y: [_ONE, _ONE],
    "sub": lambda node, x, y: [_ONE, -_ONE],
    "mul": lambda node, x, y: [y, x],
    "div": lambda node, x, y: [_ONE / y, -(node / y)],
    "neg": lambda node, x: [-_ONE],
    "abs": lambda node, x: [apply("sign", x)],
    "max": _larger,
    "min": _larger,
    "exp": lambda node, x: [node],
    "exp2": lambda node, x: [node * _LN_2],
    "expm1": lambda node, x: [node + _ONE],
    "log": lambda node, x: [_ONE / x],
    "log1p": lambda node, x: [_ONE / (x + _ONE)],
    "tanh": lambda node, x: [_ONE - node * node],
    "sigmoid": lambda node, x: [node * (_ONE - node)],
    "sin": lambda node, x: [apply("cos", x)],
    "cos": lambda node, x: [-apply("sin", x)],
    "sqrt": lambda node, x: [const(0.5, FLOAT) / node],
    "rsqrt": lambda node, x: [const(-0.5, FLOAT) * node / x],
    "pow": _pow,
    "select": lambda node, condition, yes, no: [None, _where(condition, _ONE, _ZERO), _where(condition, _ZERO, _ONE)],
}

__all__ = ["BOOL", "derivatives", "is_zero"]
