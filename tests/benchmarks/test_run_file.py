"""Files of `--json` that something has damaged: a line that says what is wrong, never a traceback."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.command_line import make_app
from benchmarks.measuring.benchmark import BOTH, FORWARD
from benchmarks.measuring.measure import Result
from benchmarks.reporting import compare, report

ROOT = Path(__file__).resolve().parents[2]
TUNING = {"operations": ["flash_attention"], "bucket": "b", "platform": "xla", "config": {"block_q": 64}}
FACTS = {"group": "dense", "unit": "TFLOP/s", "T": 64, "D": 8, "memory": True, "auto": {FORWARD: "xla", BOTH: None}}
NAN = float("nan")
WRONG = {"out": {"error": NAN, "limit": 0.1}}
RESULTS = [
    Result("dense one", FORWARD, "xla", "ok", "", 1.0, 2.0, [1.0], 3, 4.0, 5.0, {}, TUNING),
    Result("dense one", BOTH, "xla", "wrong", "", 1.0, 2.0, [1.0], 3, 4.0, None, WRONG, TUNING),
    Result("dense one", FORWARD, "cuDNN", "refused", "on fire"),
    Result("dense two", FORWARD, "cuDNN", "ok", "", 1.0, 2.0, [1.0], 3, 4.0, 5.0, alone=True),
]
INTACT: dict[str, Any] = {
    "schema": 2,
    "benchmark": "softmax",
    "date": "2026-11-15",
    "machine": {"device": "1 x nvidia_h200 (sm_90)", "load": 0.1, "jax": "0.11.2"},
    "contenders": {"xla": "xla", "cuDNN": None},
    "missing": {"fingers": "not installed"},
    "cases": {"dense one": FACTS, "dense two": FACTS | {"unit": "ms"}},
    "complete": True,
    "results": [vars(result) for result in RESULTS],
}


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """The exit code and the words of each command that reads a file with this text."""
    monkeypatch.chdir(tmp_path)  # a short name is not broken over two lines

    def run(text: str) -> list[tuple[int, str]]:
        damaged, intact = Path("damaged.json"), Path("intact.json")
        damaged.write_bytes(text.encode("utf-8", "surrogateescape"))
        intact.write_text(json.dumps(INTACT))
        outcomes = []
        for command in (["show", damaged], ["compare", intact, damaged]):
            made = CliRunner().invoke(make_app(), [*map(str, command)], catch_exceptions=False)
            outcomes.append((made.exit_code, " ".join(made.output.replace("│", " ").split())))
        return outcomes

    return run


def changed(where: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The intact run but for one value; ... takes it out."""
    run = copy.deepcopy(INTACT)
    *path, last = where
    container: Any = run
    for name in path:
        container = container[name]
    if value is ...:
        del container[last]
    else:
        container[last] = value
    return run


DAMAGED = {
    "no-results": (("results",), ..., "it has no results"),
    "results-object": (("results",), {}, "it: results is {}, not a list"),
    "result-text": (("results", 0), "ok", "result 1 is 'ok', not an object"),
    "no-time": (("results", 0, "milliseconds"), ..., "result 1 has no milliseconds"),
    "null-time": (("results", 0, "milliseconds"), None, "milliseconds is None, not a finite number above 0"),
    "nan-time": (
        ("results", 0, "milliseconds"),
        float("nan"),
        "milliseconds is nan, not a finite number of at least 0 or null",
    ),
    "huge-time": (("results", 0, "milliseconds"), 10**400, "not a finite number of at least 0 or null"),
    "no-rate": (("results", 0, "rate"), None, "result 1: rate is None, not a finite number"),
    "status": (("results", 2, "status"), "fine", "result 3: status is 'fine', not one of ok, wrong, refused"),
    "status-list": (("results", 2, "status"), [], "result 3: status is [], not one of ok"),
    "no-such-case": (("results", 2, "case"), "x", "result 3: the case 'x' is none of its cases"),
    "no-such-contender": (("results", 2, "contender"), "x", "result 3: the contender 'x' is none of its contenders"),
    "no-such-pass": (("results", 2, "what"), "x", "result 3: of the pass 'x' case 'dense one' does not say its auto"),
    "error-text": (("results", 1, "errors", "out"), "big", "result 2: the error of 'out' is 'big', not an object"),
    "no-limit": (("results", 1, "errors", "out", "limit"), ..., "result 2: the error of 'out' has no limit"),
    "operations": (("results", 0, "tuning", "operations"), "x", "result 1: tuning: operations is 'x', not a list"),
    "no-device": (("machine", "device"), ..., "machine has no device"),
    "load": (("machine", "load"), "high", "machine: load is 'high', not a finite number"),
    "unit": (("cases", "dense one", "unit"), "mph", "case 'dense one': unit is 'mph', not one of ms, TFLOP/s"),
    "auto": (("cases", "dense one", "auto"), ["xla"], "case 'dense one': auto is ['xla'], not an object"),
    "size": (("cases", "dense one", "T"), None, "case 'dense one': T is None, not a whole number"),
    "contenders": (("contenders",), ["xla"], "it: contenders is ['xla'], not an object"),
}


@pytest.mark.parametrize(("where", "value", "message"), DAMAGED.values(), ids=DAMAGED)
def test_what_is_wrong_is_said(shown, where, value, message):
    for code, output in shown(json.dumps(changed(where, value))):
        assert code == 2 and "damaged.json does not hold what --json keeps: " in output and message in output


BROKEN = {
    "empty": "",
    "cut": json.dumps(INTACT)[:700],
    "deep": "[" * 100_000,
    "binary": "\udc80\udcff",
    "list": "[]",
    "number": "NaN",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_run_is_refused(shown, text):
    for code, output in shown(text):
        assert code == 2 and "damaged.json does not hold what --json keeps: " in output


def test_a_file_that_cannot_be_read(shown, monkeypatch):
    def fails(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", fails)
    for code, output in shown(""):
        assert code == 2 and ".json cannot be read: Permission denied" in output


def test_names_are_no_markup(shown):
    named = changed(("contenders",), {"xla": "xla", "cuDNN": None, "[/red]": "xla"})
    assert [code for code, _ in shown(json.dumps(named))] == [0, 0]


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield (name,)
        yield from ((name, *inner_path) for inner_path in paths(part))


@pytest.mark.parametrize("value", [..., None, -1, 10**400, NAN, "x", ["x"], {}])
def test_what_is_read_can_be_shown(tmp_path, value):
    """Whatever one value is: the file is refused, or everything can be made of it."""
    path = tmp_path / "x.json"
    for where in paths(INTACT):
        path.write_text(json.dumps(changed(where, value)))
        try:
            run = report.load(path)
        except ValueError:
            continue
        assert report.markdown(run) and report.kinds(run) and report.failures(run) is not None
        report.tuned(run).save(tmp_path / "tuned.json")
        other = changed(("cases",), {}) | {"results": [], "machine": INTACT["machine"] | run["machine"]}
        assert report.markdown(report.joined([run, other]))
        for old, new in ((run, INTACT), (INTACT, run)):
            made = compare.compare(old, new)
            assert compare.grid(made, 0.05) and compare.differences(old, new) is not None


def test_the_runs_of_this_repository_are_intact():
    for path in ROOT.glob("benchmarks/results/*.json"):
        assert report.load(path)["results"]
