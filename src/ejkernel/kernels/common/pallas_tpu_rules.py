"""Mask and score expressions in the operations that Mosaic, the compiler of Pallas kernels for TPUs, has."""

from collections.abc import Callable
from functools import lru_cache

from ejkernel.expressions.nodes import (
    BOOL,
    CONST,
    INT,
    LOOKUP,
    Expression,
    apply,
    cast,
    const,
    nodes,
    rewritten,
    select,
)


@lru_cache(maxsize=256)
def for_mosaic(expression: Expression) -> Expression:
    """The same value by operations that Mosaic has."""

    def replaced(node: Expression) -> Expression | None:
        rule = _RULES.get(node.name)
        return None if rule is None else rule(*node.args)

    return rewritten(expression, replaced)


def unsupported_operations(*expressions: Expression | None) -> list[str]:
    """Why a TPU cannot compute mask and score functions; empty if it can."""
    reasons = []
    for node in nodes(*expressions):
        if node.name == LOOKUP:
            reasons.append(f"a table that is read at query and key: {node}")
        if node.name == "pow":
            reasons.append(f"{node}: the base of a power may be negative")
    return reasons


def _not(x: Expression) -> Expression:
    return apply("not", x)


def _bool_select(condition: Expression, yes: Expression, no: Expression) -> Expression | None:
    return (condition & yes) | (_not(condition) & no) if yes.dtype == BOOL else None


def _sign(x: Expression) -> Expression:
    # nan stays, as a product
    return select(x > 0, const(1, x.dtype), select(x < 0, const(-1, x.dtype), x * 0))


def _floordiv(x: Expression, y: Expression) -> Expression | None:
    if y.name == CONST and y.data > 0:  # pyright: ignore[reportOperatorIssue]
        return None
    remainder = apply("rem", x, y)
    below = apply("ne", remainder, const(0, INT)) & apply("ne", remainder < 0, y < 0)
    return apply("quotient", x, y) - cast(below, INT)


def _of_bools(rule: Callable[[Expression, Expression], Expression]) -> Callable[..., Expression | None]:
    return lambda x, y: rule(x, y) if x.dtype == BOOL else None


_RULES: dict[str, Callable[..., Expression | None]] = {
    "select": _bool_select,
    "sign": _sign,
    "floordiv": _floordiv,
    "expm1": lambda x: apply("tanh", x * 0.5) * (apply("exp", x) + 1.0),
    "lt": _of_bools(lambda x, y: _not(x) & y),
    "le": _of_bools(lambda x, y: _not(x) | y),
    "gt": _of_bools(lambda x, y: x & _not(y)),
    "ge": _of_bools(lambda x, y: x | _not(y)),
}
