"""Bands, chunks and segments among the conditions of a rule: kernels are faster for these."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.expressions.binding import Rule
from ejkernel.expressions.nodes import CONST, INT, LOAD, TRUE, B, Expression, I, J
from ejkernel.types.visibility import Band


class Recognised(NamedTuple):
    """A rule as fields of a mask, band and chunk of plain indices, and what is left of it."""

    band: Band
    chunk: int | None
    q_ids: jax.Array | None
    kv_ids: jax.Array | None
    rest: Rule | None


class Linear(NamedTuple):
    """`i * of_i + j * of_j + constant`."""

    of_i: int
    of_j: int
    constant: int


def recognised(rule: Rule, q_len: int, kv_len: int, *, differences_alone: bool = False) -> Recognised:
    """What a rule says, of conditions that all must hold; with `differences_alone`, those of `j - i` only."""
    low, high, chunk, ids, rest = [], [], None, None, []
    for term in conditions(rule.expression):
        if (band := band_of(term)) is not None:
            low += [] if band[0] is None else [band[0]]
            high += [] if band[1] is None else [band[1]]
        elif not differences_alone and chunk is None and (size := chunk_of(term)) is not None:
            chunk = size
        elif not differences_alone and ids is None and (numbers := segments_of(term, rule)) is not None:
            ids = numbers
        else:
            rest.append(term)
    left = None
    if rest:
        expression = rest[0]
        for term in rest[1:]:
            expression &= term
        left = Rule(expression, rule.arrays)
    q_ids = kv_ids = None
    if ids is not None:
        arrays = {n: rule.arrays[n] if rule.arrays[n].ndim == 2 else rule.arrays[n][0] for n in set(ids)}
        q_ids, kv_ids = _of_length(arrays[ids[0]], q_len), _of_length(arrays[ids[1]], kv_len)
        same = ids[0] == ids[1] and q_len == kv_len
        q_ids, kv_ids = nonnegative(q_ids, q_ids if same else kv_ids)
    return Recognised((max(low, default=None), min(high, default=None)), chunk, q_ids, kv_ids, left)


def conditions(expression: Expression) -> list[Expression]:
    """The expressions that all must hold."""
    if expression.name == "and":
        return [term for arg in expression.args for term in conditions(arg)]
    return [] if expression is TRUE else [expression]


def linear(x: Expression) -> Linear | None:
    """An integer as a sum of multiples of the indices of query and key, if it is one."""
    if x is I or x is J:
        return Linear(int(x is I), int(x is J), 0)
    if x.name == CONST and x.dtype == INT:
        return Linear(0, 0, x.data)
    if x.name not in ("add", "sub", "neg", "mul") or x.dtype != INT:
        return None
    args = [part for arg in x.args if (part := linear(arg)) is not None]
    if len(args) < len(x.args):
        return None
    if x.name == "neg":
        return _times(args[0], -1)
    a, b = args
    if x.name == "mul":
        factor, other = (b, a) if b[:2] == (0, 0) else (a, b)
        return _times(other, factor.constant) if factor[:2] == (0, 0) else None
    b = _times(b, 1 if x.name == "add" else -1)
    return Linear(*(m + n for m, n in zip(a, b, strict=True)))


def _times(x: Linear, factor: int) -> Linear:
    return Linear(*(n * factor for n in x))


def band_of(term: Expression) -> Band | None:
    """The limits of `j - i`, inclusive, that a comparison says."""
    if term.name not in ("lt", "le", "gt", "ge", "eq"):
        return None
    left, right = term.args
    if left.name == "abs" and term.name in ("lt", "le") and (bound := linear(right)) is not None and not any(bound[:2]):
        distance, most = linear(left.args[0]), bound.constant - (term.name == "lt")
        if distance is None or distance.of_i != -distance.of_j or abs(distance.of_i) != 1:
            return None
        middle = -distance.constant * distance.of_j  # where the distance is 0
        return middle - most, middle + most
    a, b = linear(left), linear(right)
    if a is None or b is None:
        return None
    # of_j * (j - i) + constant, compared with 0
    of_i, of_j, constant = (m - n for m, n in zip(a, b, strict=True))
    if of_i != -of_j or abs(of_j) != 1:
        return None
    name = term.name if of_j == 1 else {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(term.name, term.name)
    limit = -constant * of_j
    return {
        "lt": (None, limit - 1),
        "le": (None, limit),
        "gt": (limit + 1, None),
        "ge": (limit, None),
        "eq": (limit, limit),
    }[name]


def chunk_of(term: Expression) -> int | None:
    """c, of `i // c == j // c`."""
    if term.name != "eq" or any(arg.name not in ("floordiv", "quotient") for arg in term.args):
        return None
    (x, c), (y, d) = (arg.args for arg in term.args)
    if {x, y} != {I, J} or c is not d or c.name != CONST or c.data <= 0:
        return None
    return c.data


def segments_of(term: Expression, rule: Rule) -> tuple[int, int] | None:
    """The arrays of `ids[b, i] == ids[b, j]`, of integers (B|1, length)."""
    if term.name != "eq" or any(arg.name != LOAD or arg.dtype != INT for arg in term.args):
        return None
    if any(rule.arrays[arg.data].shape[0] > 1 and len(arg.args) > 2 for arg in term.args):
        return None
    by_index = {arg.args: arg.data for arg in term.args}
    for index in ((B,), (B, B)):  # of all rows, or of each: the first index is that of rows that broadcast
        q, k = (by_index.get((*index, axis)) for axis in (I, J))
        if q is not None and k is not None:
            return q, k
    return None


@partial(jax.jit, static_argnums=1)
def _of_length(x: jax.Array, length: int) -> jax.Array:
    """(B, length): what indexing gives, which stays at the last entry past the end."""
    return x if x.shape[1] == length else x[:, jnp.minimum(jnp.arange(length), x.shape[1] - 1)]


def nonnegative(q_ids: jax.Array, kv_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids that are equal where these are, none of them negative, which would be padding."""
    if q_ids is kv_ids:
        ids = _nonnegative(q_ids)
        return ids, ids
    rows = max(q_ids.shape[0], kv_ids.shape[0])
    joined = jnp.concatenate([jnp.broadcast_to(x, (rows, x.shape[1])) for x in (q_ids, kv_ids)], axis=1)
    ids = _nonnegative(joined)
    return ids[:, : q_ids.shape[1]], ids[:, q_ids.shape[1] :]


@jax.jit
def _nonnegative(ids: jax.Array) -> jax.Array:
    """(B, n); ranks among the numbers of a row where any is negative, which is rare and takes a sort."""

    def ranks(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: jnp.searchsorted(jnp.sort(row), row).astype(jnp.int32))(x)

    if not ids.size:
        return ids
    return jax.lax.cond(ids.min() < 0, ranks, lambda x: x, ids)
