"""Two runs of one benchmark beside each other: what got slower, what broke, what is on one side only."""

from typing import Any, NamedTuple

from benchmarks.reporting.report import Cell, Grid, Run

# of a cell: case, pass, contender
CellKey = tuple[str, str, str]


class Change(NamedTuple):
    """A cell that both runs measured, in milliseconds."""

    key: CellKey
    old: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.old


class Comparison(NamedTuple):
    """How every cell changed.

    Attributes:
        changes: cells with a time on both sides, the worst first.
        broken: ours that had a right answer and a time, and now are wrong or fail; with what they say now.
        missing: cells with a time on one side only, and which side that is.
        ours: the contenders that are judged; peers are there to show what the machine did.
    """

    changes: list[Change]
    broken: list[str]
    missing: list[str]
    ours: frozenset[str]

    def slower(self, within: float) -> list[Change]:
        """Those of ours that take more than `1 + within` times as long."""
        return [one for one in self.changes if one.key[2] in self.ours and one.ratio > 1 + within]


def check_comparable(old: Run, new: Run) -> None:
    """`ValueError` where two runs are of different things."""
    for what, a, b in (
        ("benchmarks", old["benchmark"], new["benchmark"]),
        ("devices", old["machine"].get("device"), new["machine"].get("device")),
    ):
        if a != b:
            raise ValueError(f"the runs are of different {what}: {a} and {b}")


def compare(old: Run, new: Run) -> Comparison:
    """Both runs, cell by cell."""
    before, after = _cells(old), _cells(new)
    ours = frozenset(name for run in (old, new) for name, platform in run["contenders"].items() if platform)
    timed = [key for key in before if _timed(before[key]) and _timed(after.get(key))]
    changes = [Change(key, before[key]["milliseconds"], after[key]["milliseconds"]) for key in timed]
    broken = [
        f"{_named(key)}: {after[key]['status']} {after[key].get('reason', '')}".rstrip()
        for key in before
        if key[2] in ours and _timed(before[key]) and after.get(key, {}).get("status") in ("wrong", "failed")
    ]
    missing = [
        f"{_named(key)}: only in the {side} run{_why(other.get(key))}"
        for side, cells, other in (("old", before, after), ("new", after, before))
        for key in cells
        if _timed(cells[key]) and not _timed(other.get(key))
    ]
    return Comparison(sorted(changes, key=lambda one: -one.ratio), broken, missing, ours)


def differences(old: Run, new: Run) -> list[str]:
    """What may be why times differ, other than our code: versions, and a machine that was busy."""
    both = {**old["machine"], **new["machine"]}
    lines = []
    for name in both:
        a, b = (run["machine"].get(name, "none") for run in (old, new))
        if name != "load" and a != b:
            lines.append(f"{name}: {a}, then {b}")
    busy = [side for side, run in (("old", old), ("new", new)) if run["machine"].get("load", 0.0) > 0.5]
    return lines + [f"the machine had other work in the {side} run" for side in busy]


def grid(comparison: Comparison, within: float) -> Grid:
    """Every cell that both have; above 1 it takes longer now. Bold is faster by more than the limit, red slower."""
    slower = {one.key for one in comparison.slower(within)}
    rows = [
        [
            *(Cell(word) for word in one.key),
            Cell(f"{one.old:.4g}"),
            Cell(f"{one.new:.4g}"),
            Cell(f"{one.ratio:.3f}", best=one.ratio < 1 / (1 + within), bad=one.key in slower),
        ]
        for one in comparison.changes
    ]
    numbers = ("old, ms", "new, ms", "new / old")
    return Grid(("case", "pass", "contender", *numbers), rows, numbers)


def line(change: Change) -> str:
    return f"{_named(change.key)}: {change.old:.4g} ms, now {change.new:.4g} ms ({change.ratio:.2f} times as long)"


def _cells(run: Run) -> dict[CellKey, dict[str, Any]]:
    return {(r["case"], r["what"], r["contender"]): r for r in run["results"]}


def _timed(result: dict[str, Any] | None) -> bool:
    return result is not None and result["status"] == "ok" and bool(result["milliseconds"])


def _named(key: CellKey) -> str:
    return ", ".join(key)


def _why(result: dict[str, Any] | None) -> str:
    return "" if result is None else f" ({' '.join(filter(None, (result['status'], result.get('reason'))))})"
