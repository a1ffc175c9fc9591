"""Mask and score functions of a call over a cache, bound to its query tokens.

`b` is the sequence, `i` and `j` are positions in it. What depends on no key is computed once for each token and head,
and read as an operand of its row. Arrays that are read at keys are tables, as they are: their indices are computed in
kernels. So heads, sequences and tokens are split over devices as those of the queries, and tables not at all.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.checks.arrays import bool_array
from ejkernel.expressions.binding import Rule, renumbered, rule_value, worth_binding
from ejkernel.expressions.nodes import (
    BOOL,
    CONST,
    FLOAT,
    INT,
    LOAD,
    SCORE,
    TRUE,
    B,
    Dtype,
    Expression,
    I,
    J,
    apply,
    const,
    load,
    lookup,
    operand,
    rebuilt,
    score,
    select,
)
from ejkernel.kernels.common.rules import Rules, TileOperands, of_tile_shape
from ejkernel.types.recognition import band_of, chunk_of, conditions

# to their dimensions: (batch, head, number of the operand, token), and (batch, entry)
ARRAYS = {"int_rows": "B H IR* T", "float_rows": "B H FR* T", "int_tables": "B IT", "float_tables": "B FT"}

Shape = tuple[int, ...]


class Plan(NamedTuple):
    """What is computed before any kernel: operands of rows, and the numbers of arrays that are tables, by dtype."""

    rows: tuple[tuple[Dtype, tuple[Expression, ...]], ...]
    tables: tuple[tuple[Dtype, tuple[int, ...]], ...]

    def operands(self, given: Sequence[jax.Array], sequence: Any, position: Any, H: int) -> dict[str, jax.Array]:
        """The arrays, for the tokens (T,) of these sequences at these positions."""
        arrays = {}
        axes = {"b": sequence, "h": jnp.arange(H, dtype=jnp.int32)[:, None], "i": position}
        for dtype, nodes in self.rows:
            values = [jnp.asarray(rule_value(Rule(node, tuple(given)), axes)) for node in nodes]
            heads = max(1 if x.ndim < 2 else x.shape[0] for x in values)
            values = [jnp.broadcast_to(x.astype(dtype), (heads, *position.shape)) for x in values]
            arrays[f"{_word(dtype)}_rows"] = jnp.stack(values, 1)[None]
        for dtype, numbers in self.tables:
            arrays[f"{_word(dtype)}_tables"] = jnp.concatenate(
                [given[n].astype(dtype).reshape(1, -1) for n in numbers], 1
            )
        return arrays


def _word(dtype: Dtype) -> str:
    return "float" if dtype == FLOAT else "int"


def bound_rules(mask: Rule | None, scores: Rule | None, by_token: bool) -> tuple[Rules, Plan, tuple[jax.Array, ...]]:
    """The rules of a call, what they read, and the arrays of which that is made.

    With `by_token`, positions of queries are operands too, for calls in which tokens stand elsewhere.
    """
    given = () if mask is None else mask.arrays
    binder = _Binder([x.shape[1:] for x in (*given, *(() if scores is None else scores.arrays))], by_token)
    seen = None if mask is None else binder.bound(mask.expression)
    logits = None
    if scores is not None:
        logits, given = binder.bound(renumbered(scores.expression, len(given))), (*given, *scores.arrays)
    rules = Rules(None if seen is TRUE else seen, None if logits in (None, score()) else of_tile_shape(logits))
    return rules, binder.plan, tuple(given)


class _Binder:
    """Binds expressions of one call, which share operands; `shapes` are those of the arrays that they load from."""

    def __init__(self, shapes: list[Shape], by_token: bool):
        self.shapes, self.by_token = shapes, by_token
        self.rows: dict[Dtype, list[Expression]] = {}
        self.tables: dict[Dtype, list[int]] = {}

    @property
    def plan(self) -> Plan:
        rows = ((dtype, tuple(pool)) for dtype, pool in self.rows.items())
        return Plan(tuple(rows), tuple((dtype, tuple(pool)) for dtype, pool in self.tables.items()))

    def bound(self, expression: Expression) -> Expression:
        done: dict[Expression, Expression] = {}

        def visit(node: Expression) -> Expression:
            if node not in done:
                done[node] = self._leaf(node, visit) or rebuilt(node, tuple(map(visit, node.args)))
            return done[node]

        return visit(expression)

    def _leaf(self, node: Expression, visit: Any) -> Expression | None:
        """What a node is read as, if it is."""
        dtype, read = FLOAT if node.dtype == FLOAT else INT, None
        if (
            not node.axes & {"j", SCORE}
            and node.name != CONST
            and (worth_binding(node) or (self.by_token and node is I))
        ):
            read = operand("row", _number(self.rows.setdefault(dtype, []), node), dtype)
        elif node.name == LOAD:
            tables = self.tables.setdefault(dtype, [])
            before = tables[: _number(tables, node.data)]
            offset = sum(prod(self.shapes[n]) for n in before)
            # the first index is that of a batch, of which there is one
            read = lookup(offset, self.shapes[node.data], tuple(map(visit, node.args[1:])), dtype)
        elif not node.args:
            return node
        return apply("ne", read, const(0, INT)) if read is not None and node.dtype == BOOL else read


def _number(pool: list[Any], x: Any) -> int:
    if x not in pool:
        pool.append(x)
    return pool.index(x)


def row_operands(arrays: dict[str, Any]) -> TileOperands:
    """Those of rows whose operands are (..., number, row), and tables (entries,)."""
    none = lambda name, n: None  # noqa: E731
    return TileOperands(none, lambda name, n: arrays[name][..., n, :, None], none, lambda name: arrays[name])


class Limits(NamedTuple):
    """A mask function as options, and what is left of it."""

    window: int | None
    chunk: int | None
    rest: Rule | None


def limits(rule: Rule, window: int | None, chunk: int | None) -> Limits:
    """A known window and chunk, and those among the conditions of a mask function, which come on top of causality."""
    windows, rest = [] if window is None else [window], TRUE
    for term in conditions(rule.expression):
        low, high = band_of(term) or (1, None)
        if (high is None or high >= 0) and (low is None or low <= 0):
            windows += [] if low is None else [-low]
        elif chunk is None and (size := chunk_of(term)) is not None:
            chunk = size
        else:
            rest &= term
    return Limits(min(windows, default=None), chunk, None if rest is TRUE else Rule(rest, rule.arrays))


def tree_rule(tree_mask: Any, lens: Any, S: int) -> tuple[Rule, int]:
    """Which of the newest n keys of a sequence its newest n queries see, as bits of a number of each; and n.

    `tree_mask` is (N|1, n, n), or (n, n) for all sequences; `lens` (N,) are the keys of each, S at most.
    """
    x = bool_array("tree_mask", tree_mask)
    N, n = lens.shape[0], x.shape[-1] if x.ndim else 0
    if x.ndim not in (2, 3) or x.shape[-2] != n or n == 0 or (x.ndim == 3 and x.shape[0] not in (1, N)):
        raise ValueError(f"tree_mask {x.shape} must be (sequences, n, n) with {N} sequences, or (n, n) for all of them")
    length = apply("min", apply("max", load(0, (B, B), INT), const(0, INT)), const(S, INT))
    start = length - n
    at, rows = J - start, B if x.ndim == 3 and x.shape[0] > 1 else const(0, INT)
    words = [load(1, (B, rows, I - start, const(w, INT)), INT) for w in range(-(-n // 32))]
    word = words[-1]
    for w in reversed(range(len(words) - 1)):
        word = select(at < 32 * (w + 1), words[w], word)
    bit = apply("and", apply("shift_right", word, apply("and", at, const(31, INT))), const(1, INT))
    seen = (at < 0) | apply("ne", bit, const(0, INT))
    return Rule(seen, (jnp.asarray(lens, jnp.int32)[None], _as_bits(jnp.asarray(x).reshape(-1, n, n))[None])), n


@jax.jit
def _as_bits(x: jax.Array) -> jax.Array:
    """(..., n) to numbers of 32 each."""
    n = x.shape[-1]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % 32)])
    x = padded.reshape(*x.shape[:-1], -(-n // 32), 32).astype(jnp.uint32)
    bits = (x << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, jnp.int32)
