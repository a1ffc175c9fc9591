"""Expressions for a call: what depends on one side alone is computed once, before any kernel, and read as an operand.

A kernel sees a bound expression. Its axes are "i" and "j" alone: whatever belongs to a batch row and a head lies in an
array (B|1, H|1, ...), so that batches, heads, vmap and devices split it as they split queries. Operands are

    scalar  a number for a (batch, head): slopes, temperatures, `2.0 ** -h`
    row     a number for each query, (T,): document ids, positions, the start of what a query sees
    column  a number for each key, (S,)
    table   an array that is indexed by query and key together: a relative bias, a matrix

each as int32 (without gradients; a bool is one) and as float32 (with). Gradients go through what was computed before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.expressions.evaluation import JAX, Namespace, clamped, evaluate, gather
from ejkernel.expressions.nodes import (
    AXIS,
    BOOL,
    CONST,
    FLOAT,
    INT,
    LOAD,
    SCORE,
    TRANSCENDENTAL,
    B,
    Expression,
    H,
    I,
    J,
    apply,
    const,
    load,
    lookup,
    nodes,
    operand,
    rebuilt,
    rewritten,
)

Kind = Literal["scalar", "row", "column"]
KINDS: tuple[Kind, ...] = ("scalar", "row", "column")

# the arrays of a bound expression, to their dimensions: (batch, head, number of the operand, index)
OPERAND_ARRAYS = {
    f"{dtype}_{kind}s": f"B H {dtype[0].upper()}{kind[0].upper()}* {index}".strip()
    for dtype in ("int", "float")
    for kind, index in (("scalar", ""), ("row", "T"), ("column", "S"), ("table", ""))
}


@dataclass(frozen=True)
class Rule:
    """An expression, and the arrays that its loads name: (B|1, ...), the first index of a load is that of the batch."""

    expression: Expression
    arrays: tuple[Any, ...] = ()

    def __and__(self, other: "Rule") -> "Rule":
        theirs = renumbered(other.expression, len(self.arrays))
        return Rule(self.expression & theirs, (*self.arrays, *other.arrays))

    def __or__(self, other: "Rule") -> "Rule":
        theirs = renumbered(other.expression, len(self.arrays))
        return Rule(self.expression | theirs, (*self.arrays, *other.arrays))


jax.tree_util.register_dataclass(Rule, data_fields=["arrays"], meta_fields=["expression"])


def renumbered(expression: Expression, by: int) -> Expression:
    """The expression with its arrays counted from a later number on."""

    def later(node: Expression) -> Expression | None:
        return load(node.data + by, node.args, node.dtype) if node.name == LOAD else None

    return rewritten(expression, later) if by else expression


def with_indices(rule: Rule, q: Any, k: Any, *, of_tokens: bool = False) -> Rule:
    """The rule with other numbers (B|1, T) and (B|1, S) for the indices of queries and keys.

    With `of_tokens`, arrays that are indexed by query or key alone have an entry for each token there is, whatever its
    number.
    """
    if not rule.expression.axes & {"i", "j"}:
        return rule
    first = len(rule.arrays)
    at = {I: load(first, (B, I), INT), J: load(first + 1, (B, J), INT)}
    tokens = {number: index for index, number in at.items()} if of_tokens else {}

    def replaced(node: Expression) -> Expression | None:
        if node.name == LOAD:
            return load(node.data, tuple(tokens.get(index, index) for index in node.args), node.dtype)
        return at.get(node)

    return Rule(rewritten(rule.expression, replaced), (*rule.arrays, q, k))


def distance(q_pos: Any, kv_pos: Any, offset: int) -> Rule:
    """Key position minus query position: explicit ones (B|1, T) and (B|1, S), or indices whose ends are aligned."""
    if q_pos is None:
        return Rule(J - (I + offset))
    return Rule(load(1, (B, J), INT) - load(0, (B, I), INT), (q_pos, kv_pos))


def full_rank(rule: Rule, rows: int = 1) -> Rule:
    """The rule with the batch axis of each array, which it lacks inside a vmap, and of which it has two after.

    `rows` is the batch of whatever is used with it; an array that has one row for several of these repeats it.
    """
    dims = array_dims(rule)
    folded = [_with_rank(x, len(dims[n])) for n, x in enumerate(rule.arrays)]
    rows = max([rows, *(x.shape[0] for x in folded)])
    mapped = [x.ndim > len(dims[n]) and 1 < folded[n].shape[0] < rows for n, x in enumerate(rule.arrays)]
    repeated = (jnp.repeat(x, rows // x.shape[0], axis=0) if m else x for x, m in zip(folded, mapped, strict=True))
    return Rule(rule.expression, tuple(repeated))


def _with_rank(x: Any, rank: int) -> Any:
    if x.ndim == rank:
        return x
    return x[None] if x.ndim < rank else x.reshape(-1, *x.shape[x.ndim - rank + 1 :])


def array_dims(rule: Rule) -> list[tuple[str, ...]]:
    """The dimensions of each array of a rule: "b", "h", "i" and "j" where these index it, else ""."""
    dims: list[tuple[str, ...]] = [()] * len(rule.arrays)
    for node in nodes(rule.expression):
        if node.name == LOAD:
            dims[node.data] = tuple(str(index.data) if index.name == AXIS else "" for index in node.args)
    return [d or ("b", *[""] * (x.ndim - 1)) for d, x in zip(dims, rule.arrays, strict=True)]


def head_counts(rule: Rule) -> set[int]:
    """How many heads its arrays have that are indexed by head."""
    loads = [node for node in nodes(rule.expression) if node.name == LOAD]
    sizes = {rule.arrays[node.data].shape[n] for node in loads for n, index in enumerate(node.args) if index is H}
    return sizes - {1}


def has_single_head(rule: Rule) -> bool:
    """Whether heads only index arrays, each of which has one."""
    loads = [node for node in nodes(rule.expression) if node.name == LOAD]
    used = [node for node in nodes(rule.expression) if H in node.args and node.name != LOAD]
    sizes = [rule.arrays[node.data].shape[n] for node in loads for n, index in enumerate(node.args) if index is H]
    return not used and rule.expression is not H and set(sizes) == {1}


def rule_value(rule: Rule, axes: Mapping[str, Any], namespace: Namespace = JAX) -> Any:
    """The value of a rule at indices "b", "h", "i", "j" that broadcast against each other."""

    def read(node: Expression, index: tuple[Any, ...]) -> Any:
        array = rule.arrays[node.data]
        return gather(array, _batch_free(array, index))

    return evaluate(rule.expression, axes, load=read, stop=namespace.stop, namespace=namespace)


class Sizes(NamedTuple):
    """Of a call: batch, query heads, queries and keys."""

    B: int
    H: int
    T: int
    S: int


def kind_of(node: Expression) -> Kind | None:
    """Which operand a node could be: None where it depends on query and key together, or on the score."""
    if SCORE in node.axes or {"i", "j"} <= node.axes:
        return None
    return "row" if "i" in node.axes else "column" if "j" in node.axes else "scalar"


def worth_binding(node: Expression) -> bool:
    """Whether a kernel could not compute a node, or would compute it dearly in every tile."""
    return any(n.name in (LOAD, *TRANSCENDENTAL) or n.axes & {"b", "h"} for n in nodes(node))


class Binder:
    """Binds expressions of one call, which share operands.

    A subclass may have other arrays than JAX's, in whose module `xp` functions are called as in jax.numpy.
    """

    xp: Any = jnp
    namespace = JAX

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.operands: dict[tuple[str, str], dict[Any, jax.Array]] = {}

    def converted(self, x: Any, dtype: str) -> Any:
        return jnp.asarray(x, dtype)

    def numbers(self, n: int) -> Any:
        return jnp.arange(n, dtype=jnp.int32)

    def bound(self, rule: Rule) -> Expression:
        """The bound expression of a rule."""
        done: dict[Expression, Expression] = {}

        def visit(node: Expression) -> Expression:
            if node not in done:
                kind = kind_of(node)
                if kind is not None and node.name != CONST and worth_binding(node):
                    done[node] = self._operand(kind, node, rule.arrays)
                elif node.name == LOAD:
                    done[node] = self._lookup(node, rule.arrays, visit)
                else:
                    done[node] = rebuilt(node, tuple(map(visit, node.args))) if node.args else node
            return done[node]

        return visit(rule.expression)

    def _operand(self, kind: Kind, node: Expression, arrays: Sequence[Any]) -> Expression:
        dtype = FLOAT if node.dtype == FLOAT else INT
        pool = self.operands.setdefault((dtype, kind), {})
        key = (node, tuple(id(arrays[n.data]) for n in nodes(node) if n.name == LOAD))
        if key not in pool:
            length = {"row": (self.sizes.T,), "column": (self.sizes.S,)}.get(kind, ())
            value = self.converted(self._value(node, arrays), dtype)
            value = value.reshape((1,) * (3 - value.ndim) + value.shape)
            value = self.xp.broadcast_to(value, (*value.shape[:2], *length)) if length else value[:, :, 0]
            pool[key] = value
        read = operand(kind, list(pool).index(key), dtype)
        return _nonzero(read) if node.dtype == BOOL else read

    def _value(self, node: Expression, arrays: Sequence[Any]) -> Any:
        """Over (batch, head, index), each of size 1 where nothing depends on it."""
        b, h, i, j = map(self.numbers, self.sizes)
        axes = {"b": b[:, None, None], "h": h[:, None], "i": i, "j": j}
        return rule_value(Rule(node, tuple(arrays)), axes, self.namespace)

    def _lookup(self, node: Expression, arrays: Sequence[Any], visit: Any) -> Expression:
        """A load whose indices depend on query and key; those that do not choose a part of the array beforehand."""
        array, dtype = arrays[node.data], FLOAT if node.dtype == FLOAT else INT
        fixed = [n for n, index in enumerate(node.args) if not index.axes & {"i", "j"}]
        free = [n for n in range(array.ndim) if n not in fixed]
        chosen = [self._value(node.args[n], arrays) for n in fixed]
        chosen = [x if x.ndim == 0 else x.reshape((1,) * (3 - x.ndim) + x.shape)[..., 0] for x in chosen]
        moved = self.xp.moveaxis(array, tuple(fixed), tuple(range(len(fixed))))
        leading = _batch_free(array, chosen) if fixed[:1] == [0] else chosen
        part = moved[tuple(clamped(leading, moved.shape))] if fixed else moved
        shape = tuple(array.shape[n] for n in free)
        part = part.reshape((*(1,) * (2 + len(shape) - part.ndim), *part.shape))
        pool = self.operands.setdefault((dtype, "table"), {})
        key = (id(array), tuple(node.args[n] for n in fixed), shape)
        pool.setdefault(key, self.converted(part, dtype).reshape(*part.shape[:2], prod(shape)))
        offset = sum(x.shape[2] for x in list(pool.values())[: list(pool).index(key)])
        read = lookup(offset, shape, tuple(visit(node.args[n]) for n in free), dtype)
        return _nonzero(read) if node.dtype == BOOL else read

    def arrays(self) -> dict[str, jax.Array]:
        """The operands of all expressions that were bound, by `OPERAND_ARRAYS`."""
        packed = {}
        for (dtype, kind), pool in self.operands.items():
            parts = list(pool.values())
            leading = tuple(max(x.shape[n] for x in parts) for n in (0, 1))
            parts = [self.xp.broadcast_to(x, (*leading, *x.shape[2:])) for x in parts]
            joined = self.xp.concatenate(parts, 2) if kind == "table" else self.xp.stack(parts, 2)
            packed[f"{'float' if dtype == FLOAT else 'int'}_{kind}s"] = joined
        return packed


def _nonzero(x: Expression) -> Expression:
    """A bool that is kept as a number."""
    return apply("ne", x, const(0, x.dtype))


def _batch_free(array: Any, index: Sequence[Any]) -> Sequence[Any]:
    """Indices of which that of the batch is 0 where there is one row."""
    return (0, *index[1:]) if array.shape[0] == 1 else index
