"""Intersection and union of two masks: field by field where the fields allow it, else as one rule."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from ejkernel.checks.arrays import common_batch, concrete
from ejkernel.expressions.binding import Rule
from ejkernel.types import segments
from ejkernel.types.mask_fields import MaskFields
from ejkernel.types.mask_rules import both as both_rules
from ejkernel.types.mask_rules import pattern_rule, position_rule, rule_of
from ejkernel.types.pattern import BlockPattern

M = TypeVar("M", bound=MaskFields)


def intersect(left: M, right: M) -> M:
    """What both masks show; the left one's explicit positions are kept, else the right one's."""
    a, b, positioned = _partners(left, right)
    a, b = _on_positions_of(a, positioned), _on_positions_of(b, positioned)
    q_ids, kv_ids = _intersect_ids(a, b)
    pattern, pattern_rest = _intersect_patterns(a, b)
    merged = dataclasses.replace(
        a,
        q_ids=q_ids,
        kv_ids=kv_ids,
        dense=both(a.dense, b.dense),
        pattern=pattern,
        rule=both_rules(both_rules(a.rule, b.rule), pattern_rest),
        cross=a.cross or b.cross,
    ).narrowed(b.band)
    return merged if b.chunk is None else chunked(merged, b.chunk)


def chunked(mask: M, size: int) -> M:
    """The mask in chunks of that size: by a rule where it is in others already that do not nest with them."""
    if mask.chunk is None or max(mask.chunk, size) % min(mask.chunk, size) == 0:
        return dataclasses.replace(mask, chunk=min(mask.chunk or size, size))
    other = position_rule(dataclasses.replace(mask, band=(None, None), chunk=size))
    return dataclasses.replace(mask, rule=both_rules(mask.rule, other))


def unite(left: M, right: M) -> M:
    """What either mask shows; the left one's explicit positions are kept, else the right one's.

    By fields where one mask shows all that the other does, field by field, or where they differ in one field that has a
    union of its kind. Elsewhere they are a rule together, but for the fields in which they agree.
    """
    a, b, positioned = _partners(left, right)
    cross = a.cross or b.cross
    if _rests_on(a, positioned) and _rests_on(b, positioned):
        a, b = (dataclasses.replace(x, q_pos=positioned.q_pos, kv_pos=positioned.kv_pos, cross=cross) for x in (a, b))
        orders = {field: order(a, b) for field, order in _ORDERS.items()}
        differing = {field: order for field, order in orders.items() if order != "same"}
        if set(differing.values()) <= {"narrower"}:
            return b
        if set(differing.values()) <= {"wider"}:
            return a
        if len(differing) == 1:
            (field,) = differing
            if (united := _UNIONS[field](a, b)) is not None:
                return united
    shared = {name: getattr(a, name) for name in _agreeing_fields(a, b)}
    a, b = (dataclasses.replace(x, **{name: _HIDES_NOTHING.get(name) for name in shared}) for x in (a, b))
    alone = dataclasses.replace(positioned, **{name: _HIDES_NOTHING.get(name) for name in _RESTRICTIONS})
    return dataclasses.replace(alone, rule=rule_of(a) | rule_of(b), cross=cross, **shared)


def _partners(left: M, right: M) -> tuple[M, M, M]:
    """Both at full rank and the same lengths, and the one whose positions count; ValueError if they do not fit."""
    left, right = left.with_lengths(right.q_len, right.kv_len), right.with_lengths(left.q_len, left.kv_len)
    a, b = left.shape, right.shape
    if a[2:] != b[2:]:
        raise ValueError(f"masks must have the same lengths (T, S), got {a[2:]} and {b[2:]}")
    common_batch({"left mask": a[0], "right mask": b[0]})
    if a[1] != b[1] and 1 not in (a[1], b[1]):
        raise ValueError(f"masks must have one head or as many, got {a[1]} and {b[1]}")
    left, right = left.canonical(), right.canonical()
    return left, right, left if left.q_pos is not None else right


def same(a: Any, b: Any) -> bool:
    """Whether two arrays (or Nones) are known to be equal; traced ones only if they are the same object."""
    if a is b:
        return True
    if a is None or b is None or a.shape != b.shape:
        return False
    a, b = concrete(a), concrete(b)
    return a is not None and b is not None and np.array_equal(a, b)


def both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """`a & b`, where None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _on_positions_of(mask: M, positioned: M) -> M:
    """The same mask on another's positions: band and chunk become a rule if they rest on different ones."""
    moved = dataclasses.replace(mask, q_pos=positioned.q_pos, kv_pos=positioned.kv_pos)
    if _rests_on(mask, positioned):
        return moved
    return dataclasses.replace(moved, rule=both_rules(mask.rule, position_rule(mask)), band=(None, None), chunk=None)


def _rests_on(mask: M, positioned: M) -> bool:
    """Whether a mask says the same on another's positions."""
    return not mask.uses_positions() or (same(mask.q_pos, positioned.q_pos) and same(mask.kv_pos, positioned.kv_pos))


def _intersect_ids(a: M, b: M) -> tuple[Any, Any]:
    if b.q_ids is None or (a.q_ids is b.q_ids and a.kv_ids is b.kv_ids):
        return a.q_ids, a.kv_ids
    if a.q_ids is None:
        return b.q_ids, b.kv_ids
    return segments.intersect(a.q_ids, a.kv_ids, b.q_ids, b.kv_ids)


def _intersect_patterns(a: M, b: M) -> tuple[BlockPattern | None, Rule | None]:
    """One pattern, or the left one and a rule for the right one where their block sizes do not nest."""
    if a.pattern is None or b.pattern is None:
        return (b.pattern if a.pattern is None else a.pattern), None
    pattern = a.pattern.combine(b.pattern, a.q_len, a.kv_len, operator.and_)
    if pattern is not None:
        return pattern, None
    return a.pattern, pattern_rule(b.pattern)


# Unions: how one mask's field compares with the other's, and what both are together -------------------------------

Order = Literal["same", "narrower", "wider", "neither"]

_RESTRICTIONS = ("q_ids", "kv_ids", "pattern", "dense", "rule", "band", "chunk")
_HIDES_NOTHING: dict[str, Any] = {"band": (None, None)}  # where that is not None


def _agreeing_fields(a: M, b: M) -> list[str]:
    """The fields that hide the same in both, and may be left out of their union and applied to it after."""
    agreeing = ["q_ids", "kv_ids"] if _order_ids(a, b) == "same" and a.q_ids is not None else []
    agreeing += ["pattern"] if _order_patterns(a, b) == "same" and a.pattern is not None else []
    if same(a.q_pos, b.q_pos) and same(a.kv_pos, b.kv_pos):
        agreeing += [name for name in ("band", "chunk") if getattr(a, name) == getattr(b, name)]
    return agreeing


def _order(a: Any, b: Any, equal: bool) -> Order:
    """Of two fields where None hides nothing."""
    if equal:
        return "same"
    return "wider" if a is None else "narrower" if b is None else "neither"


def _order_ids(a: M, b: M) -> Order:
    return _order(a.q_ids, b.q_ids, same(a.q_ids, b.q_ids) and same(a.kv_ids, b.kv_ids))


def _order_dense(a: M, b: M) -> Order:
    return _order(a.dense, b.dense, same(a.dense, b.dense))


def _order_rules(a: M, b: M) -> Order:
    if a.rule is None or b.rule is None:
        return _order(a.rule, b.rule, a.rule is b.rule)
    equal = a.rule.expression is b.rule.expression and all(map(same, a.rule.arrays, b.rule.arrays))
    return _order(a.rule, b.rule, equal)


def _order_patterns(a: M, b: M) -> Order:
    if a.pattern is None or b.pattern is None:
        return _order(a.pattern, b.pattern, a.pattern is b.pattern)
    equal = a.pattern.block_shape == b.pattern.block_shape and same(a.pattern.blocks, b.pattern.blocks)
    return "same" if equal else "neither"


def _order_chunks(a: M, b: M) -> Order:
    if a.chunk is None or b.chunk is None or a.chunk == b.chunk:
        return _order(a.chunk, b.chunk, a.chunk == b.chunk)
    small, large = sorted((a.chunk, b.chunk))
    return "neither" if large % small else "wider" if a.chunk == large else "narrower"


def _order_bands(a: M, b: M) -> Order:
    (a_lo, a_hi), (b_lo, b_hi) = _limits(a.band), _limits(b.band)
    if (a_lo, a_hi) == (b_lo, b_hi) or (a_lo > a_hi and b_lo > b_hi):
        return "same"
    if a_lo > a_hi or (b_lo <= a_lo and a_hi <= b_hi):
        return "narrower"
    return "wider" if b_lo > b_hi or (a_lo <= b_lo and b_hi <= a_hi) else "neither"


def _limits(band: tuple[int | None, int | None]) -> tuple[float, float]:
    lo, hi = band
    return -math.inf if lo is None else lo, math.inf if hi is None else hi


def _unite_bands(a: M, b: M) -> M | None:
    """One band, where no distance lies between the two."""
    (a_lo, a_hi), (b_lo, b_hi) = _limits(a.band), _limits(b.band)
    if max(a_lo, b_lo) > min(a_hi, b_hi) + 1:
        return None
    lo, hi = min(a_lo, b_lo), max(a_hi, b_hi)
    return dataclasses.replace(a, band=(None if lo == -math.inf else int(lo), None if hi == math.inf else int(hi)))


def _unite_patterns(a: M, b: M) -> M | None:
    pattern = a.pattern.combine(b.pattern, a.q_len, a.kv_len, operator.or_)
    return None if pattern is None else dataclasses.replace(a, pattern=pattern)


def _unite_dense(a: M, b: M) -> M:
    return dataclasses.replace(a, dense=a.dense | b.dense)


def _no_union(a: M, b: M) -> None:
    return None


_ORDERS: dict[str, Callable[..., Order]] = {
    "ids": _order_ids,
    "pattern": _order_patterns,
    "dense": _order_dense,
    "rule": _order_rules,
    "band": _order_bands,
    "chunk": _order_chunks,
}
_UNIONS: dict[str, Callable[..., Any]] = {
    "ids": _no_union,
    "pattern": _unite_patterns,
    "dense": _unite_dense,
    "rule": _no_union,
    "band": _unite_bands,
    "chunk": _no_union,
}
