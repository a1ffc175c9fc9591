"""Mask and score functions of a call: as they are bound to it, and their values in jax.numpy."""

from collections.abc import Callable
from functools import lru_cache, partial, reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.expressions.binding import OPERAND_ARRAYS, Binder, Rule, Sizes, renumbered
from ejkernel.expressions.derivatives import derivatives
from ejkernel.expressions.evaluation import evaluate
from ejkernel.expressions.nodes import (
    CONST,
    FLOAT,
    LOOKUP,
    OPERAND,
    SCORE,
    TRUE,
    Expression,
    nodes,
    score,
    select,
    substituted,
)
from ejkernel.expressions.tracing import traced
from ejkernel.ops import Dims

ARRAYS = {name: Dims(names, grad=name.startswith("float")) for name, names in OPERAND_ARRAYS.items()}


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


def bound_rules(mask: Rule | None, scores: Rule | None, sizes: Sizes) -> tuple[Rules, dict[str, jax.Array]]:
    """The rules of a call, and the arrays that they read."""
    if mask is None and scores is None:
        return Rules(), {}
    given = mask, scores
    shapes = tuple((x.shape, jnp.result_type(x)) for x in jax.tree.leaves(given))
    return _bound(jax.tree.structure(given), shapes, sizes), _operands(given, sizes)


@lru_cache(maxsize=256)
def _bound(tree: Any, shapes: tuple[Any, ...], sizes: Sizes) -> Rules:
    """The bound rules, which depend on the shapes of their arrays alone."""
    bound: list[Rules] = []

    def bind(arrays: list[jax.Array]) -> None:
        mask, scores = jax.tree.unflatten(tree, arrays)
        bound.append(_bind(mask, scores, sizes)[0])

    jax.eval_shape(bind, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    return bound[0]


@partial(jax.jit, static_argnums=1)
def _operands(given: tuple[Rule | None, Rule | None], sizes: Sizes) -> dict[str, jax.Array]:
    return _bind(*given, sizes)[1].arrays()


def _bind(mask: Rule | None, scores: Rule | None, sizes: Sizes) -> tuple[Rules, Binder]:
    binder = Binder(sizes)
    seen = None if mask is None else binder.bound(Rule(mask.expression, jax.lax.stop_gradient(mask.arrays)))
    logits = None if scores is None else binder.bound(scores)
    if logits is not None and SCORE not in logits.axes:
        logits = select(score().equals(score()), logits, score())  # of the shape of a tile, and nan where that is
    return Rules(None if seen is TRUE else seen, None if logits is score() else logits), binder


def array_name(node: Expression) -> str:
    """The array in which an operand lies, or a table."""
    kind = "table" if node.name == LOOKUP else node.data[0]
    return f"{'float' if node.dtype == FLOAT else 'int'}_{kind}s"


def trained_operands(expression: Expression) -> list[Expression]:
    """The operands of an expression that have gradients."""
    return [node for node in nodes(expression) if node.name in (OPERAND, LOOKUP) and node.dtype == FLOAT]


class Slopes(NamedTuple):
    """Derivatives of a score rule."""

    score: Expression
    operands: tuple[tuple[Expression, Expression], ...]  # the operand, and the derivative by it


@lru_cache(maxsize=256)
def slopes(rule: Expression) -> Slopes:
    operands = trained_operands(rule)
    by_node = derivatives(rule, [score(), *operands])
    return Slopes(by_node[score()], tuple((node, by_node[node]) for node in operands))


class TileOperands(NamedTuple):
    """How the operands of a tile are read, of whatever shape broadcasts with its pairs.

    Attributes:
        scalar, row, column: `(array name, number)` to values.
        table: an array's name to its entries (..., n).
    """

    scalar: Callable[[str, int], Any]
    row: Callable[[str, int], Any]
    column: Callable[[str, int], Any]
    table: Callable[[str], Any] | None = None

    def value(self, expression: Expression, i: Any, j: Any, logits: Any = None) -> Any:
        """An expression at query indices i and key indices j."""

        def operand(node: Expression) -> Any:
            kind, number = node.data
            return getattr(self, kind)(array_name(node), number)

        def load(node: Expression, index: tuple[Any, ...]) -> Any:
            assert self.table is not None
            return self.table(array_name(node))[..., table_index(node, index)]

        return evaluate(expression, {"i": i, "j": j}, score=logits, operand=operand, load=load)


def table_index(node: Expression, index: tuple[Any, ...]) -> Any:
    """Where an entry lies among all tables of its dtype."""
    offset, shape = node.data
    at = 0
    for size, i in zip(shape, index, strict=True):
        at = at * size + jnp.clip(i, 0, size - 1)
    return at + offset


def whole_operands(arrays: dict[str, Any]) -> TileOperands:
    """Those of all pairs of a call, (B|1, H|1, T, S)."""
    return TileOperands(
        lambda name, n: arrays[name][:, :, n, None, None],
        lambda name, n: arrays[name][:, :, n, :, None],
        lambda name, n: arrays[name][:, :, n, None, :],
        lambda name: arrays[name],
    )


def head_operands(arrays: dict[str, Any], queries: Any, keys: Any) -> TileOperands:
    """Those of one (batch, head), whose arrays lack these axes, at query and key indices."""
    return TileOperands(
        lambda name, n: arrays[name][n],
        lambda name, n: arrays[name][n, queries][:, None],
        lambda name, n: arrays[name][n, keys][None],
        lambda name: arrays[name],
    )


def at_keys(arrays: dict[str, Any], keys: jax.Array) -> TileOperands:
    """Those of one key of each query, (B, H, T)."""

    def column(name: str, n: int) -> Any:
        x = arrays[name][:, :, n]
        return jnp.take_along_axis(jnp.broadcast_to(x, (*keys.shape[:2], x.shape[-1])), keys, axis=-1)

    return TileOperands(
        lambda name, n: arrays[name][:, :, n, None],
        lambda name, n: arrays[name][:, :, n],
        column,
        lambda name: _PerHead(arrays[name]),
    )


class _PerHead:
    """A table (B|1, H|1, n) that is read at indices (B, H, T)."""

    def __init__(self, table: Any):
        self.table = table

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        index = jnp.asarray(at[1])
        table = jnp.broadcast_to(self.table, (*index.shape[:2], self.table.shape[-1]))
        return jnp.take_along_axis(table, index, axis=-1)


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


def has_table_gradient(expression: Expression) -> bool:
    """Whether a score rule reads a table whose entries have a gradient."""
    return any(node.name == LOOKUP for node in trained_operands(expression))


def operand_gradients(
    call: Any, summed: Callable[[bool, Expression], jax.Array], table_gradients: Callable[[], dict[str, jax.Array]]
) -> dict[str, jax.Array]:
    """The gradients of a score function's operands.

    Args:
        call: the call.
        summed: of a derivative by an operand, times those of the logits, the sums (B, H, S) over queries, where the
            first argument is true, else (B, H, T) over keys.
        table_gradients: those of tables, all in one.
    """
    rule = call.spec.rules.score
    totals = {
        name: jnp.zeros(x.shape, jnp.float32) for name, x in call.arrays.items() if name in ARRAYS and ARRAYS[name].grad
    }
    for node, slope in slopes(rule).operands:
        if node.name == LOOKUP:
            continue
        name, (kind, number) = array_name(node), node.data
        sums = summed(kind == "column", slope)
        if kind == "scalar":
            sums = sums.sum(-1)
        for axis in (0, 1):
            if totals[name].shape[axis] == 1:
                sums = sums.sum(axis, keepdims=True)
        totals[name] = totals[name].at[:, :, number].set(sums)
    return totals | (table_gradients() if has_table_gradient(rule) else {})
