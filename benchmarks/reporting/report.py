"""The results of a run: kept as JSON while it grows, shown as tables, and handed on to `auto`."""

import dataclasses
import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measuring.benchmark import BOTH, FORWARD, UNITS, Benchmark, Contender
from benchmarks.measuring.contenders import choice
from benchmarks.measuring.measure import Result
from benchmarks.reporting.run_file import check_run
from ejkernel.ops import TunedConfigs
from ejkernel.ops.files import write_whole

SCHEMA = 2
AUTO = "†"  # beside the time of the platform that auto takes, or of both where it takes two

# What `--json` keeps: `benchmark`, `date`, `machine`, `contenders` (name to platform, None for a peer), `missing`
# (name to reason), `cases` (name to facts, with `auto`: what our auto takes, by pass), `complete`, and `results`
Run = dict[str, Any]


def new_run(
    benchmark: Benchmark,
    machine: dict[str, Any],
    cases: list[Any],
    taking_part: list[Contender],
    missing: dict[str, str],
) -> Run:
    """A run without results yet."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark.family.name,
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "contenders": {contender.name: contender.platform for contender in taking_part},
        "missing": missing,
        "cases": {case.name: {**case.facts(), "auto": choice(benchmark.family, case)} for case in cases},
        "complete": False,
        "results": [],
    }


def _rounded(x: Any) -> Any:
    """To five digits: no measurement is more exact."""
    if isinstance(x, float):
        return float(f"{x:.5g}")
    if isinstance(x, dict):
        return {name: _rounded(value) for name, value in x.items()}
    return [_rounded(value) for value in x] if isinstance(x, list) else x


def save(run: Run, path: Path) -> None:
    """Write the file in one step, with a line per case and result."""
    lines = []
    for name, value in run.items():
        if name == "cases":
            inner = [f"  {json.dumps(case)}: {json.dumps(facts)}" for case, facts in value.items()]
            text = "{\n" + ",\n".join(inner) + "\n }"
        elif name == "results":
            text = "[\n" + ",\n".join(f"  {json.dumps(_rounded(result))}" for result in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(name)}: {text}")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def load(path: Path) -> Run:
    """Read a run; `ValueError` where the file is none."""
    try:
        run = json.loads(path.read_text())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise ValueError(f"it is not a benchmark of schema {SCHEMA}")
    check_run(run)
    return run


def add(run: Run, results: list[Result]) -> None:
    """Keep results; one that was there of the same cell goes."""
    new = {(r.case, r.what, r.contender): dataclasses.asdict(r) for r in results}
    kept = [r for r in run["results"] if (r["case"], r["what"], r["contender"]) not in new]
    run["results"] = [*kept, *new.values()]


def resumed(run: Run, before: Run, cases: list[Any]) -> Run:
    """A run of these cases that goes on with an earlier one, which was cut short.

    Results of these cases are kept where the earlier run has them all, without a failure; those of other cases stay.
    `ValueError` where it was of another benchmark, machine or version: its times would not be comparable.
    """
    new: Run = json.loads(json.dumps(_rounded(run)))  # as it is in a file
    _check_same(before, new, ["benchmark", "contenders"])
    _check_same(before["machine"], new["machine"], sorted({*before["machine"], *new["machine"]} - {"load"}))
    measured = [r for r in before["results"] if r["status"] != "skipped" and not r.get("alone")]
    cells = {(r["case"], r["what"], r["contender"]) for r in measured if not _is_failure(before, r)}
    again = {
        case.name
        for case in cases
        if before["cases"].get(case.name) != new["cases"][case.name]
        or not cells.issuperset((case.name, what, contender) for what in case.passes for contender in new["contenders"])
    }
    loads = [x["machine"]["load"] for x in (before, run) if "load" in x["machine"]]
    return run | {
        "machine": run["machine"] | ({"load": max(loads)} if loads else {}),
        "cases": before["cases"] | run["cases"],
        "results": [r for r in before["results"] if r["case"] not in again],
    }


def _check_same(before: dict[str, Any], now: dict[str, Any], names: list[str]) -> None:
    for name in names:
        if before.get(name) != now.get(name):
            raise ValueError(f"{name} was {before.get(name)}, and is {now.get(name)}")


def only(run: Run, wanted: Callable[[str], bool], wanted_contender: Callable[[str], bool] = lambda name: True) -> Run:
    """What it says of some cases, and of the contenders among whom they are shown."""
    cases = {name: facts for name, facts in run["cases"].items() if wanted(name)}
    contenders = {name: platform for name, platform in run["contenders"].items() if wanted_contender(name)}
    results = [r for r in run["results"] if r["case"] in cases and r["contender"] in contenders]
    return run | {"cases": cases, "contenders": contenders, "results": results}


def joined(runs: list[Run]) -> Run:
    """Several runs of one device as one; `ValueError` where devices differ, or two of them have a case in common."""
    first, *others = runs
    if not others:
        return first
    devices = list(dict.fromkeys(run["machine"]["device"] for run in runs))
    if len(devices) > 1:
        raise ValueError(f"their devices differ: {', '.join(devices)}")
    cases = [(name, facts | {"run": n}) for n, run in enumerate(runs) for name, facts in run["cases"].items()]
    if len(dict(cases)) < len(cases):
        raise ValueError("a case is in several of them")
    contenders = {name: platform for run in runs for name, platform in run["contenders"].items()}
    missing = {name: why for run in runs for name, why in run["missing"].items()}
    names = dict.fromkeys(name for run in runs for name in run["machine"])
    return first | {
        "benchmark": ", ".join(run["benchmark"] for run in runs),
        "date": " and ".join(sorted({run["date"] for run in runs})),
        "machine": {name: _of_all([run["machine"][name] for run in runs if name in run["machine"]]) for name in names},
        "contenders": contenders,
        # who is missing in one of them may be in another
        "missing": {name: why for name, why in missing.items() if name not in contenders},
        "cases": dict(cases),
        "complete": all(run["complete"] for run in runs),
        "results": [result for run in runs for result in run["results"]],
    }


def _of_all(values: list[Any]) -> Any:
    """The largest load; every version."""
    return " and ".join(dict.fromkeys(values)) if isinstance(values[0], str) else max(values)


# Verdicts ---------------------------------------------------------------------------------------------------


def line(result: Result) -> str:
    """One result in a line."""
    if result.milliseconds is None:
        text = f"{result.status}: {result.reason}"
    else:
        text = f"{result.milliseconds:.3f} ms, first call {result.first_call_seconds:.1f} s"
        text += f", WRONG: {_errors(dataclasses.asdict(result))}" if result.status == "wrong" else ""
        text += ", alone" if result.alone else ""
    return f"{result.case}, {result.what}, {result.contender}: {text}"


def _errors(result: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {e['error']:.2g} > {e['limit']:.2g}" for name, e in result["errors"].items() if not _ok(e)
    )


def _ok(error: dict[str, float]) -> bool:
    return error["error"] <= error["limit"]


def failures(run: Run) -> list[str]:
    """What a run must not have: wrong answers of anybody, and failures of ours."""
    failed = [r for r in run["results"] if _is_failure(run, r)]
    return [f"{r['case']}, {r['what']}, {r['contender']}: {r['reason'] or f'wrong, {_errors(r)}'}" for r in failed]


def _is_failure(run: Run, result: dict[str, Any]) -> bool:
    ours = run["contenders"].get(result["contender"]) is not None
    return result["status"] == "wrong" or (result["status"] == "failed" and ours)


def notes(run: Run) -> list[str]:
    """Who is not there, and why cells are empty or not comparable; each reason once."""
    lines = [f"{name}: {reason}" for name, reason in run["missing"].items()]
    empty: dict[tuple[str, str], list[str]] = {}
    for r in run["results"]:
        if r["status"] in ("refused", "failed", "skipped"):
            empty.setdefault((r["contender"], f"{r['status']}: {r['reason']}"), []).append(r["case"])
        elif r.get("alone"):
            why = "timed alone, no time was left to interleave it with others"
            empty.setdefault((r["contender"], why), []).append(r["case"])
    for (contender, reason), cases in empty.items():
        distinct = list(dict.fromkeys(cases))
        where = distinct[0] if len(distinct) == 1 else f"{len(distinct)} cases"
        lines.append(f"{contender}, {where}: {reason}")
    return lines + [f"{case}: not measured, the run was cut short" for case in unmeasured(run)]


def unmeasured(run: Run) -> list[str]:
    """Cases that a run never came to."""
    reached = {result["case"] for result in run["results"]}
    return [case for case in run["cases"] if case not in reached]


# Tables -----------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    text: str
    best: bool = False
    bad: bool = False


class Grid(NamedTuple):
    """A table: columns, of which the first says what it is about, rows of cells, and the columns of numbers."""

    columns: tuple[str, ...]
    rows: list[list[Cell]]
    numbers: tuple[str, ...] = ()


def _by_contender(run: Run, case: str, what: str) -> dict[str, dict[str, Any]]:
    return {r["contender"]: r for r in run["results"] if (r["case"], r["what"]) == (case, what)}


def _fastest(row: dict[str, dict[str, Any]], names: list[str]) -> float | None:
    return min((row[n]["milliseconds"] for n in names if n in row and row[n]["status"] == "ok"), default=None)


def _cell(result: dict[str, Any] | None, unit: str, fastest: float | None, by_auto: bool) -> Cell:
    if result is None:
        return Cell("")
    if result["status"] != "ok":
        status: str = result["status"]
        return Cell({"wrong": "WRONG", "refused": "-"}.get(status, status), bad=status in ("wrong", "failed"))
    value = _milliseconds(result["milliseconds"]) if unit == "ms" else f"{result['rate']:{UNITS[unit].digits}}"
    return Cell(value + (AUTO if by_auto else ""), best=result["milliseconds"] == fastest)


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _speed_rows(run: Run, group: str, what: str) -> list[list[Cell]]:
    names, rows = run["contenders"], []
    ours, peers = [n for n in names if names[n]], [n for n in names if not names[n]]
    for case, facts in sorted(run["cases"].items(), key=lambda one: _order(one[1])):
        row = _by_contender(run, case, what)
        if facts["group"] != group or not row:
            continue
        best, best_peer = _fastest(row, ours), _fastest(row, peers)
        fastest = min((x for x in (best, best_peer) if x is not None), default=None)
        taken = str(facts["auto"][what]).split(", ")
        cells = [_cell(row.get(n), facts["unit"], fastest, names[n] in taken) for n in names]
        ratio = f"{best_peer / best:.2f}" if best and best_peer else ""
        rows.append([Cell(case.removeprefix(group).strip()), *cells, Cell(ratio)])
    return rows


def _order(facts: dict[str, Any]) -> list[Any]:
    return [facts.get(name, 0) for name in ("D", "T")]


def speeds(run: Run) -> list[Grid]:
    """A table per group and pass."""
    grids = []
    for group in dict.fromkeys(facts["group"] for facts in run["cases"].values()):
        unit = next(facts["unit"] for facts in run["cases"].values() if facts["group"] == group)
        for what in dict.fromkeys(r["what"] for r in run["results"]):
            rows = _speed_rows(run, group, what)
            if rows:
                numbers = (*run["contenders"], "speed over best peer")
                grids.append(Grid((f"{group}, {what}, {unit}", *numbers), rows, numbers))
    return grids


def memories(run: Run) -> list[Grid]:
    """Temporary memory by case and contender, where cases ask for it."""
    names, rows = run["contenders"], []
    for case, facts in run["cases"].items():
        for what in dict.fromkeys(r["what"] for r in run["results"] if r["case"] == case and facts.get("memory")):
            known = {n: r.get("temporary_megabytes") for n, r in _by_contender(run, case, what).items()}
            least = min((x for x in known.values() if x is not None), default=None)
            cells = [Cell("" if x is None else f"{x:.0f}", best=x == least) for x in map(known.get, names)]
            rows.append([Cell(f"{case}, {what}"), *cells])
    return [Grid(("temporary memory, MB", *names), rows, tuple(names))] if rows else []


def costs(run: Run) -> Grid:
    """The longest first call and the most temporary memory of each contender, and where."""
    rows = []
    for name in run["contenders"]:
        timed = [r for r in run["results"] if r["contender"] == name and r["milliseconds"] is not None]
        cells = [Cell(name)]
        for field, unit in (("first_call_seconds", "s"), ("temporary_megabytes", "MB")):
            known = [r for r in timed if r[field] is not None]
            most = max(known, key=lambda r: r[field], default=None)
            cells.append(Cell("" if most is None else f"{most[field]:.1f} {unit} ({most['case']}, {most['what']})"))
        rows.append(cells)
    return Grid(("at most", "first call", "temporary memory"), rows)


def where(run: Run) -> str:
    """The machine and what it ran, in a line."""
    machine = dict(run["machine"])
    device, load = machine.pop("device"), machine.pop("load", 0.0)
    text = f"{device}; {', '.join(f'{name} {version}' for name, version in machine.items())}; {run['date']}"
    busy = f"; provisional: other work was on the machine (load {load:.1f})" if load > 0.5 else ""
    return text + busy + ("" if run["complete"] else "; the run was cut short")


def grids(run: Run) -> list[Grid]:
    """All tables, in the order shown."""
    return [*speeds(run), *memories(run), costs(run)]


def summary(run: Run) -> str:
    """Our speed over the best peer's, least to most and in how many cases: a line for each group."""
    passes = list(dict.fromkeys(result["what"] for result in run["results"]))
    lines = [f"| {' | '.join(['cases', *passes])} |", "|" + " --- |" * (len(passes) + 1)]
    for group in dict.fromkeys(facts["group"] for facts in run["cases"].values()):
        cells = []
        for what in passes:
            rows = _speed_rows(run, group, what)
            ratios = sorted(float(row[-1].text) for row in rows if row[-1].text)
            least_to_most = " - ".join(f"{ratio:.2f}" for ratio in dict.fromkeys([*ratios[:1], *ratios[-1:]]))
            cells.append(f"{least_to_most}x ({len(ratios)})" if ratios else "no peer" if rows else "")
        lines.append(f"| {' | '.join([group, *cells])} |")
    return "\n".join([f"{where(run)}.", "", *lines])


def markdown(run: Run) -> str:
    """The tables for a README."""
    sections = [f"{where(run)}. Medians; every answer checked; {AUTO} is what `auto` took (two: forward, backward)."]
    for grid in grids(run):
        lines = ["| " + " | ".join(grid.columns) + " |", "|" + " --- |" * len(grid.columns)]
        lines += ["| " + " | ".join(f"**{c.text}**" if c.best else c.text for c in row) + " |" for row in grid.rows]
        sections.append("\n".join(lines))
    empty = notes(run)
    return "\n\n".join([*sections, *(["\n".join(f"- {note}" for note in empty)] if empty else [])])


# For auto ---------------------------------------------------------------------------------------------------


def kinds(run: Run) -> set[str]:
    """The kind and the architecture of the device a run was on, as they name tuned files.

    >>> kinds({"machine": {"device": "1 x nvidia_h200 (sm_90)"}}) == {"nvidia_h200", "sm_90"}
    True
    >>> kinds({"machine": {"device": "AMD EPYC 9654, 2 cores"}})
    {'cpu'}
    """
    named = re.fullmatch(r"\d+ x (\w+)(?: \((\w+)\))?", run["machine"]["device"])
    return {"cpu"} if named is None else {name for name in named.groups() if name is not None}


def tuned(run: Run) -> TunedConfigs:
    """Our times by bucket and platform: what orders the platforms of `auto`.

    Where auto took one platform, its run is another of the same program, and the faster of both counts: but only
    where the platform's own run was right.
    """
    configs = TunedConfigs()
    times = {(r["contender"], r["case"], r["what"]): r for r in run["results"] if r["status"] == "ok"}
    autos = [name for name, platform in run["contenders"].items() if platform == "auto"]
    for (name, case, what), result in times.items():
        platform, taken = run["contenders"][name], run["cases"][case].get("auto", {})
        if what != FORWARD or platform in (None, "auto"):
            continue
        microseconds = []
        for measured in (FORWARD, BOTH):
            if (name, case, measured) not in times:
                continue
            same_program = [name, *(autos if taken.get(measured) == platform else ())]
            cells = [(contender, case, measured) for contender in same_program]
            fastest = min(times[cell]["milliseconds"] for cell in cells if cell in times)
            microseconds.append(round(fastest * 1e3, 1))
        tuning = result["tuning"]
        if tuning is None:  # of several calls
            continue
        for operation in tuning["operations"]:
            configs = configs.add(operation, tuning["bucket"], tuning["platform"], tuning["config"], *microseconds)
    return configs
