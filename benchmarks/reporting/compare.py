"""Two runs of one benchmark beside each other: what got slower, what broke, what is on one side only."""

from typing import Any, NamedTuple

from benchmarks.reporting.report import Cell, Document, Grid

# case, pass, contender
Place = tuple[str, str, str]


class Change(NamedTuple):
    """A cell that both runs measured, in milliseconds."""

    place: Place
    old: float
    new: float

    @property
    def ratio(self) -> float:
        return self.new / self.old


class Comparison(NamedTuple):
    """What became of every cell.

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
        return [one for one in self.changes if one.place[2] in self.ours and one.ratio > 1 + within]


def check_comparable(old: Document, new: Document) -> None:
    """`ValueError` where two runs are of different things."""
    for what, a, b in (
        ("benchmarks", old["benchmark"], new["benchmark"]),
        ("devices", old["machine"].get("device"), new["machine"].get("device")),
    ):
        if a != b:
            raise ValueError(f"the runs are of different {what}: {a} and {b}")


def compare(old: Document, new: Document) -> Comparison:
    """Both runs, cell by cell."""
    before, after = _cells(old), _cells(new)
    ours = frozenset(name for found in (old, new) for name, platform in found["contenders"].items() if platform)
    timed = [place for place in before if _timed(before[place]) and _timed(after.get(place))]
    changes = [Change(place, before[place]["milliseconds"], after[place]["milliseconds"]) for place in timed]
    broken = [
        f"{_named(place)}: {after[place]['status']} {after[place].get('reason', '')}".rstrip()
        for place in before
        if place[2] in ours and _timed(before[place]) and after.get(place, {}).get("status") in ("wrong", "failed")
    ]
    missing = [
        f"{_named(place)}: only in the {side} run{_why(there.get(place))}"
        for side, here, there in (("old", before, after), ("new", after, before))
        for place in here
        if _timed(here[place]) and not _timed(there.get(place))
    ]
    return Comparison(sorted(changes, key=lambda one: -one.ratio), broken, missing, ours)


def differences(old: Document, new: Document) -> list[str]:
    """Versions that are not the same, and a machine that was busy: either may be why a time is another."""
    both = {**old["machine"], **new["machine"]}
    told = []
    for name in both:
        a, b = (found["machine"].get(name, "none") for found in (old, new))
        if name != "load" and a != b:
            told.append(f"{name}: {a}, then {b}")
    busy = [side for side, found in (("old", old), ("new", new)) if found["machine"].get("load", 0.0) > 0.5]
    return told + [f"the machine had other work in the {side} run" for side in busy]


def grid(found: Comparison, within: float) -> Grid:
    """Every cell that both have: above 1 it takes longer now. Bold is quicker by more than the limit, red slower."""
    slower = {one.place for one in found.slower(within)}
    rows = [
        [
            *(Cell(word) for word in one.place),
            Cell(f"{one.old:.4g}"),
            Cell(f"{one.new:.4g}"),
            Cell(f"{one.ratio:.3f}", best=one.ratio < 1 / (1 + within), bad=one.place in slower),
        ]
        for one in found.changes
    ]
    numbers = ("old, ms", "new, ms", "new / old")
    return Grid(("case", "pass", "contender", *numbers), rows, numbers)


def line(change: Change) -> str:
    return f"{_named(change.place)}: {change.old:.4g} ms, now {change.new:.4g} ms ({change.ratio:.2f} times as long)"


def _cells(found: Document) -> dict[Place, dict[str, Any]]:
    return {(r["case"], r["what"], r["contender"]): r for r in found["results"]}


def _timed(result: dict[str, Any] | None) -> bool:
    return result is not None and result["status"] == "ok" and bool(result["milliseconds"])


def _named(place: Place) -> str:
    return ", ".join(place)


def _why(result: dict[str, Any] | None) -> str:
    return "" if result is None else f" ({' '.join(filter(None, (result['status'], result.get('reason'))))})"
