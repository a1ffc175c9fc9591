"""The fields of a mask as one rule, for what they cannot say one by one: unions, and positions of two kinds."""

from functools import reduce
from operator import and_
from typing import Any

import jax.numpy as jnp

from ejkernel.expressions.binding import Rule, distance
from ejkernel.expressions.nodes import BOOL, INT, TRUE, B, H, I, J, load
from ejkernel.types.mask_fields import MaskFields


def rule_of(mask: MaskFields) -> Rule:
    """What a mask shows, as one rule."""
    m = mask.canonical()
    rules = [_segments(m.q_ids, m.kv_ids), position_rule(m), *_cells(m), m.rule]
    return reduce(and_, (rule for rule in rules if rule is not None), Rule(TRUE))


def position_rule(mask: MaskFields) -> Rule | None:
    """What band and chunk show."""
    m = mask.canonical()
    away = distance(m.q_pos, m.kv_pos, m.kv_len - m.q_len)
    lo, hi = m.band
    rules = [] if lo is None else [Rule(away.expression >= lo, away.arrays)]
    rules += [] if hi is None else [Rule(away.expression <= hi, away.arrays)]
    if m.chunk is not None:
        q, k = (I + (m.kv_len - m.q_len), J) if m.q_pos is None else (load(0, (B, I), INT), load(1, (B, J), INT))
        rules.append(Rule((q // m.chunk).equals(k // m.chunk), away.arrays))
    return reduce(and_, rules) if rules else None


def causal_rule(mask: MaskFields, offsets: Any) -> Rule:
    """`k <= q + offset`, in positions, for an offset of each row (B|1,)."""
    m = mask.canonical()
    away = distance(m.q_pos, m.kv_pos, m.kv_len - m.q_len)
    return Rule(away.expression <= load(len(away.arrays), (B,), INT), (*away.arrays, offsets))


def bounds_rule(starts: Any, ends: Any, *, of_keys: bool) -> Rule:
    """Keys in [starts, ends) of each query, or queries in [starts, ends) of each key; None is open."""
    index, other = (J, I) if of_keys else (I, J)
    rules = []
    for x, after in ((starts, True), (ends, False)):
        if x is not None:
            limit = load(0, (B, index) if x.ndim == 2 else (B, H, index), INT)
            rules.append(Rule(other >= limit if after else other < limit, (x,)))
    return reduce(and_, rules) if rules else Rule(TRUE)


def both(a: Rule | None, b: Rule | None) -> Rule | None:
    """What both show; None hides nothing."""
    return a & b if a is not None and b is not None else b if a is None else a


def pattern_rule(pattern: Any) -> Rule:
    height, width = pattern.block_shape
    return Rule(load(0, (B, H, I // height, J // width), BOOL), (jnp.asarray(pattern.blocks),))


def _segments(q_ids: Any, kv_ids: Any) -> Rule | None:
    if q_ids is None:
        return None
    q, k = load(0, (B, I), INT), load(1, (B, J), INT)
    return Rule(q.equals(k) & (q >= 0), (q_ids, kv_ids))


def _cells(m: MaskFields) -> list[Rule]:
    rules = [] if m.pattern is None else [pattern_rule(m.pattern)]
    return rules if m.dense is None else [*rules, Rule(load(0, (B, H, I, J), BOOL), (m.dense,))]
