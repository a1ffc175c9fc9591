"""Mask and score functions as rules of a call, and their values in jax.numpy: what the families share."""

from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

from jax.core import Tracer

from ejkernel.checks.arrays import traced_number
from ejkernel.checks.options import soft_cap
from ejkernel.expressions.binding import Rule, renumbered
from ejkernel.expressions.evaluation import JAX, Namespace, clamped, evaluate
from ejkernel.expressions.nodes import (
    CONST,
    FLOAT,
    LOOKUP,
    SCORE,
    B,
    Expression,
    apply,
    load,
    score,
    select,
    substituted,
)
from ejkernel.expressions.tracing import traced


class Rules(NamedTuple):
    """What is computed of each pair beyond the mask's other parts; None: nothing.

    Attributes:
        mask: whether a pair is visible.
        score: the logit, from the one so far.
    """

    mask: Expression | None = None
    score: Expression | None = None


def mask_rule(function: Any, name: str = "mask_fn") -> Rule:
    """A user's function of (b, h, i, j)."""
    body = traced(function, name, scores=False)
    return Rule(body.expression, body.arrays)


def score_rule(function: Any, name: str = "score_fn") -> Rule:
    """A user's function of (score, b, h, i, j)."""
    body = traced(function, name, scores=True)
    return Rule(body.expression, body.arrays)


def array_name(node: Expression) -> str:
    """The array in which an operand lies, or a table."""
    kind = "table" if node.name == LOOKUP else node.data[0]
    return f"{'float' if node.dtype == FLOAT else 'int'}_{kind}s"


class TileOperands(NamedTuple):
    """How the operands of a tile are read, of whatever shape broadcasts with its pairs.

    Attributes:
        scalar, row, column: `(array name, number)` to values.
        table: an array's name to its entries (..., n).
        namespace: of the arrays.
    """

    scalar: Callable[[str, int], Any]
    row: Callable[[str, int], Any]
    column: Callable[[str, int], Any]
    table: Callable[[str], Any] | None = None
    namespace: Namespace = JAX

    def value(self, expression: Expression, i: Any, j: Any, logits: Any = None) -> Any:
        """An expression at query indices i and key indices j."""

        def operand(node: Expression) -> Any:
            kind, number = node.data
            return getattr(self, kind)(array_name(node), number)

        def load(node: Expression, index: tuple[Any, ...]) -> Any:
            assert self.table is not None
            return self.table(array_name(node))[..., table_index(node, index)]

        axes = {"i": i, "j": j}
        return evaluate(expression, axes, score=logits, operand=operand, load=load, namespace=self.namespace)


def table_index(node: Expression, index: tuple[Any, ...]) -> Any:
    """Where an entry lies among all tables of its dtype."""
    offset, shape = node.data
    at = 0
    for size, i in zip(shape, clamped(index, shape), strict=True):
        at = at * size + i
    return at + offset


def recognised_cap(expression: Expression) -> float | None:
    """c, of `c * tanh(score / c)` with a known one, which kernels have as an option."""
    if expression.name != "mul":
        return None
    for cap, other in (expression.args, expression.args[::-1]):
        if cap.name != CONST or cap.data <= 0 or other.name != "tanh":
            continue
        (inside,) = other.args
        if inside is score() / cap:
            return cap.data
    return None


def conjunction(*given: Rule | None) -> Rule | None:
    """The mask rule of what all show."""
    rules = [rule for rule in given if rule is not None]
    return reduce(and_, rules) if rules else None


def composed(outer: Rule | None, inner: Rule | None) -> Rule | None:
    """The score rule that applies one after the other."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    later = renumbered(outer.expression, len(inner.arrays))
    return Rule(substituted(later, {score(): inner.expression}), (*inner.arrays, *outer.arrays))


def cap_rule(cap: Any) -> tuple[float | None, Rule | None]:
    """A known soft cap, or the rule of a traced one."""
    if not isinstance(cap, Tracer):
        return soft_cap(cap), None
    value = traced_number("logits_soft_cap", cap)
    by = load(0, (B,), FLOAT)
    return None, Rule(by * apply("tanh", score() / by), (value[None],))


def of_tile_shape(logits: Expression) -> Expression:
    """Logits that do not depend on those before have the shape of a tile too, and are nan where those are."""
    return logits if SCORE in logits.axes else select(score().equals(score()), logits, score())
