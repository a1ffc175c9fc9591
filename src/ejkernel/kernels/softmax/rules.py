"""Mask and score functions of a call: as they are bound to it, and their values in jax.numpy."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.expressions.binding import OPERAND_ARRAYS, Binder, Rule, Sizes
from ejkernel.expressions.derivatives import derivatives
from ejkernel.expressions.nodes import FLOAT, LOOKUP, OPERAND, TRUE, Expression, nodes, score
from ejkernel.kernels.common.rules import Rules, TileOperands, array_name, of_tile_shape
from ejkernel.ops import Dims

ARRAYS = {name: Dims(names, grad=name.startswith("float")) for name, names in OPERAND_ARRAYS.items()}


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
        bound.append(bound_by(Binder(sizes), mask, scores))

    jax.eval_shape(bind, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    return bound[0]


@partial(jax.jit, static_argnums=1)
def _operands(given: tuple[Rule | None, Rule | None], sizes: Sizes) -> dict[str, jax.Array]:
    binder = Binder(sizes)
    bound_by(binder, *given)
    return binder.arrays()


def bound_by(binder: Binder, mask: Rule | None, scores: Rule | None) -> Rules:
    """The rules as a binder binds them, which has their operands then."""
    stop = binder.namespace.stop
    seen = None if mask is None else binder.bound(Rule(mask.expression, tuple(map(stop, mask.arrays))))
    logits = None if scores is None else binder.bound(scores)
    return Rules(None if seen is TRUE else seen, None if logits in (None, score()) else of_tile_shape(logits))


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


def whole_operands(arrays: dict[str, Any]) -> TileOperands:
    """Those of all pairs of a call, (B|1, H|1, T, S)."""
    return TileOperands(
        lambda name, n: arrays[name][:, :, n, None, None],
        lambda name, n: arrays[name][:, :, n, :, None],
        lambda name, n: arrays[name][:, :, n, None, :],
        lambda name: _PerHead(arrays[name], 2),
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
        lambda name: _PerHead(arrays[name], 1),
    )


class _PerHead:
    """A table (B|1, H|1, n) that is read at indices of which so many dimensions are behind batch and head."""

    def __init__(self, table: Any, behind: int):
        self.table, self.behind = table, behind

    def __getitem__(self, at: tuple[Any, Any]) -> Any:
        b, h = (
            jnp.arange(n).reshape(-1, *[1] * (self.behind + 1 - axis)) for axis, n in enumerate(self.table.shape[:2])
        )
        return self.table[b, h, at[1]]


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
