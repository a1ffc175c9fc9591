"""The block schedule as a TPU grid: one step per visited tile, and no step for any other.

A TPU runs a grid one step after another, so the schedule is laid out flat: step s works on tile (row, column). The
rows are query blocks (forward, dq), or key blocks, each of whose tiles is done for every query head that shares it (dk
and dv); where the schedule differs between those heads, a row is a pair of a key block and a head.
Every row has at least one step, for something must write its zeros.
"""

from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.expressions.bounds import has_operands
from ejkernel.expressions.nodes import TRUE, Expression
from ejkernel.kernels.common.rules import Rules
from ejkernel.kernels.softmax.schedule import Lists, Ranges, Schedule, Side, plan
from ejkernel.ops import Call

FIRST, LAST, VISIT, MASKED = 1, 2, 4, 8
_FLAG_BITS = 4

Scalars = dict[str, Any]  # what lies in scalar memory, by name: arrays of one dimension, or inside a kernel their refs


def divided(x: Any, n: int) -> Any:
    """x // n, for x that is not negative."""
    return x if n == 1 else lax.div(x, jnp.int32(n))


def remainder(x: Any, n: int) -> Any:
    """x % n, for x that is not negative."""
    return 0 if n == 1 else lax.rem(x, jnp.int32(n))


class GridSchedule(NamedTuple):
    """The grid steps of every (batch, head) whose schedule differs.

    `rows` and `columns` are int32 (batches * heads * length), made for scalar memory; `columns` holds its flags too.
    """

    rows: Any
    columns: Any
    batches: int
    heads: int
    length: int  # the most steps of one (batch, head)
    number: Any  # steps of the grid: an int, or an array when it depends on values
    group: int  # query heads that share a row's key block
    repeats: int  # how often the grid does each step: once for each head of `group`, or 1 where each head has rows
    masked: bool  # whether a step may need the element mask, and whether one may do without
    unmasked: bool

    @property
    def scalars(self) -> Scalars:
        return {"rows": self.rows, "columns": self.columns}

    def _slot(self, b: Any, h: Any, step: Any) -> Any:
        first = (b if self.batches > 1 else 0) * self.heads + (h if self.heads > 1 else 0)
        return first * self.length + divided(step, self.repeats)

    def row(self, scalars: Scalars, b: Any, h: Any, step: Any) -> tuple[Any, Any]:
        """The row of a step of the grid, and which head of the group it is."""
        row = scalars["rows"][self._slot(b, h, step)]
        if self.repeats > 1:
            return row, remainder(step, self.repeats)
        return divided(row, self.group), remainder(row, self.group)

    def column(self, scalars: Scalars, b: Any, h: Any, step: Any) -> tuple[Any, Any]:
        """The column of a step of the grid, and its flags."""
        word = scalars["columns"][self._slot(b, h, step)]
        column = word >> _FLAG_BITS
        if self.repeats > 1:
            head = remainder(step, self.repeats)
            word &= jnp.where(head == 0, -1, ~FIRST) & jnp.where(head == self.repeats - 1, -1, ~LAST)
        return column, word


def flatten(call: Call, block_q: int, block_k: int, side: Side, group: int = 1) -> GridSchedule:
    """The steps of a call; with `group`, every tile is done for as many query heads that share a key block."""
    schedule = plan(call, block_q, block_k, side, _namespace(call))
    repeats = group if schedule[0].shape[1] == 1 else 1
    rows_each = group // repeats  # rows that a block has
    table, index = _tables(schedule, rows_each)
    blocks = -(-call["key"].shape[1] // block_k) if side == "q" else -(-call["query"].shape[1] // block_q)
    numpy = isinstance(table, np.ndarray)
    if isinstance(schedule, Ranges):
        unmasked, total = table[..., 2] - table[..., 1], table[..., 3] - table[..., 0]
    else:
        unmasked, total = table[..., 0], table[..., 1]
    batches, heads, R = total.shape
    xp = np if numpy else jnp
    counts = xp.maximum(total, 1)
    ends = xp.cumsum(counts, axis=-1)
    length = int(ends.max()) if numpy else _most_steps(call, block_q, block_k, side, rows_each, R * blocks)
    step = xp.arange(length, dtype=np.int32)
    row = _rows(ends, length, xp)

    def of_row(x: Any) -> Any:
        return xp.take_along_axis(x, row, axis=-1)

    real = step < ends[..., -1:]
    n = xp.where(real, step - of_row(ends - counts), of_row(counts) - 1)  # steps past the end stay where the last was
    column = xp.clip(_columns(table, index, row, n, xp), 0, blocks - 1)  # an empty range may lie outside
    flags = (
        FIRST * ((n == 0) & (row % rows_each == 0))
        + LAST * ((n == of_row(counts) - 1) & (row % rows_each == rows_each - 1))
        + VISIT * (n < of_row(total))
        + MASKED * (n >= of_row(unmasked))
    )
    word = (column << _FLAG_BITS) + xp.where(real, flags, 0)
    number = repeats * (length if numpy else ends[..., -1].max().astype(jnp.int32))
    return GridSchedule(
        jnp.asarray(row.reshape(-1), jnp.int32),
        jnp.asarray(word.reshape(-1), jnp.int32),
        batches,
        heads,
        length,
        number,
        group,
        repeats,
        masked=bool((total > unmasked).any()) if numpy else True,
        unmasked=bool((unmasked > 0).any()) if numpy else True,
    )


def _rows(ends: Any, length: int, xp: Any) -> Any:
    """The row of each step, from where the steps of every row end: (batches, heads, length)."""
    if xp is np:  # a schedule known now is the same for every batch row and head
        counts = np.diff(ends[0, 0], prepend=0)
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)[None, None]
    passed = jnp.arange(length)[:, None] >= ends[..., None, :]
    return jnp.minimum(passed.sum(-1, dtype=jnp.int32), ends.shape[-1] - 1)


def _tables(schedule: Schedule, group: int) -> tuple[Any, Any]:
    """The schedule's rows (batches, heads, rows, ...) and, of lists, their blocks; rows of a group side by side."""

    def grouped(x: Any) -> Any:
        Bs, Hs, n, m = x.shape
        return x.reshape(Bs, Hs // group, group, n, m).swapaxes(2, 3).reshape(Bs, Hs // group, n * group, m)

    if isinstance(schedule, Lists):
        return grouped(schedule.number), grouped(schedule.index)
    return grouped(schedule.bounds), None


def _columns(table: Any, index: Any, row: Any, n: Any, xp: Any) -> Any:
    """The n-th block that each row visits, unmasked ones first."""
    if index is not None:
        m = index.shape[-1]
        return xp.take_along_axis(index.reshape(*index.shape[:2], -1), row * m + xp.minimum(n, m - 1), axis=-1)
    lo, full_lo, full_hi, _ = (xp.take_along_axis(table[..., c], row, axis=-1) for c in range(4))
    full = full_hi - full_lo
    masked = lo + n - full
    after = xp.where(masked < full_lo, masked, masked + full)
    return xp.where(n < full, full_lo + n, after)


def _most_steps(call: Call, block_q: int, block_k: int, side: Side, rows_each: int, most: int) -> int:
    """The most steps of a schedule that is known on the device only: those of its static part, or all tiles."""
    if "q_positions" in call:
        return most
    kept = {name: call[name] for name in ("query", "key", "value")}
    spec = replace(call.spec, rules=Rules(_static_part(call.spec.rules.mask)))
    return rows_each * flatten(Call(spec, kept), block_q, block_k, side).length


def _static_part(rule: Expression | None) -> Expression | None:
    """What of a mask rule does not depend on arrays, and shows what the rule shows."""
    if rule is None or not has_operands(rule):
        return rule
    parts = [_static_part(arg) for arg in rule.args] if rule.name == "and" else []
    return reduce(and_, [part for part in parts if part is not None], TRUE) if any(parts) else None


def _namespace(call: Call) -> Any:
    """numpy where a schedule is known while tracing."""
    arrays = any(name in call for name in ("q_segments", "q_positions", "mask", "pattern"))
    rule = call.spec.rules.mask
    return jnp if arrays or (rule is not None and has_operands(rule)) else np


class Statuses(NamedTuple):
    """The flags VISIT and MASKED of every tile, int32 (batches * heads * nq * nk), for a grid over all tiles."""

    table: Any
    batches: int
    heads: int
    nq: int
    nk: int
    masked: bool = True
    unmasked: bool = True

    @property
    def scalars(self) -> Scalars:
        return {"table": self.table}

    def flags(self, scalars: Scalars, b: Any, h: Any, i: Any, j: Any) -> Any:
        first = (b if self.batches > 1 else 0) * self.heads + (h if self.heads > 1 else 0)
        return scalars["table"][(first * self.nq + i) * self.nk + j]


def statuses(call: Call, block_q: int, block_k: int) -> Statuses:
    """The flags of every tile of a call; one with queries past the end needs the mask."""
    T, S = call["query"].shape[1], call["key"].shape[1]
    schedule = plan(call, block_q, block_k, "q")
    j = jnp.arange(-(-S // block_k))
    if isinstance(schedule, Lists):
        slot = jnp.argsort(schedule.index, axis=-1)  # of each block in its row's list
        full, some = (slot < schedule.number[..., c : c + 1] for c in (0, 1))
    else:
        lo, full_lo, full_hi, hi = (jnp.asarray(schedule.bounds)[..., c : c + 1] for c in range(4))
        full, some = (full_lo <= j) & (j < full_hi), (lo <= j) & (j < hi)
    batches, heads, nq, nk = some.shape
    inside = (jnp.arange(1, nq + 1) * block_q <= T)[:, None]
    table = jnp.where(some, VISIT + MASKED * ~(full & inside), 0)
    return Statuses(table.reshape(-1).astype(jnp.int32), batches, heads, nq, nk)
