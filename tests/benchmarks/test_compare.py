"""`python -m benchmarks compare`: the gate between two runs."""

import copy
import json

import pytest
from typer.testing import CliRunner

from benchmarks.command_line import make_app
from benchmarks.measuring.benchmark import BOTH, FORWARD

OURS, PEER = "ejkernel auto", "cuDNN"


def result(case, what, contender, milliseconds, status="ok", reason=""):
    given = {"case": case, "what": what, "contender": contender, "status": status, "reason": reason}
    unknown = dict.fromkeys(("rate", "first_call_seconds", "temporary_megabytes", "tuning"))
    return given | {"milliseconds": milliseconds, "errors": {}} | unknown


FACTS = {"group": "dense", "unit": "ms", "auto": {FORWARD: "xla", BOTH: "xla"}}
OLD = {
    "schema": 2,
    "benchmark": "softmax",
    "date": "2026-11-15",
    "machine": {"device": "1 x nvidia_h200 (sm_90)", "jax": "0.11.2"},
    "contenders": {OURS: "auto", PEER: None},
    "missing": {},
    "cases": dict.fromkeys(("dense one", "dense two"), FACTS),
    "complete": True,
    "results": [
        result("dense one", FORWARD, OURS, 1.0),
        result("dense one", BOTH, OURS, 4.0),
        result("dense two", FORWARD, OURS, 2.0),
        result("dense one", FORWARD, PEER, 1.0),
    ],
}


@pytest.fixture
def gate(tmp_path):
    """The gate between OLD and what a change makes of it."""

    def run(change, *options):
        new = copy.deepcopy(OLD)
        change(new)
        paths = [tmp_path / name for name in ("old.json", "new.json")]
        for path, run in zip(paths, (OLD, new), strict=True):
            path.write_text(json.dumps(run))
        made = CliRunner().invoke(make_app(), ["compare", *map(str, paths), *options], catch_exceptions=False)
        return made.exit_code, " ".join(made.output.replace("│", " ").split())

    return run


def slow(run, by, number=0):
    run["results"][number]["milliseconds"] *= by


def test_the_same_run_passes(gate):
    code, output = gate(lambda new: None)
    assert code == 0 and "3 times of ours, none slower by more than 5%" in output


def test_a_slower_cell_of_ours_fails_by_name(gate):
    code, output = gate(lambda new: slow(new, 1.08))
    assert code == 1 and f"dense one, forward, {OURS}: 1 ms, now 1.08 ms (1.08 times as long)" in output
    assert "1 of ours are slower by more than 5%" in output and "1.080" in output
    assert gate(lambda new: slow(new, 1.08), "--within", "10%")[0] == 0
    assert gate(lambda new: slow(new, 1.08), "--within", "0.1")[0] == 0
    assert gate(lambda new: slow(new, 1.08), "--case", "two")[0] == 0


def test_a_slower_peer_is_the_machine(gate):
    code, output = gate(lambda new: slow(new, 2.0, number=3))
    assert code == 0 and "2.000" in output


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_an_answer_that_broke_fails(gate, status):
    code, output = gate(lambda new: new["results"][1].update(status=status, reason="on fire"))
    assert code == 1 and f"dense one, forward + backward, {OURS}: {status} on fire" in output


def test_cells_on_one_side_are_said(gate):
    def change(new):
        new["results"][0] = result("dense three", FORWARD, OURS, 1.0)
        new["results"][2].update(status="skipped", milliseconds=None, reason="no time was left")
        new["cases"]["dense three"] = FACTS

    code, output = gate(change)
    assert code == 0
    assert f"dense one, forward, {OURS}: only in the old run" in output
    assert f"dense two, forward, {OURS}: only in the old run (skipped no time was left)" in output
    assert f"dense three, forward, {OURS}: only in the new run" in output


def test_nothing_in_common_fails(gate):
    code, output = gate(lambda new: new.update(results=[]))
    assert code == 1 and "no time of ours in common" in output


def test_runs_of_different_things_are_refused(gate):
    code, output = gate(lambda new: new["machine"].update(device="1 x nvidia_h100 (sm_90)"))
    assert code == 2 and "different devices: 1 x nvidia_h200 (sm_90) and 1 x nvidia_h100 (sm_90)" in output
    code, output = gate(lambda new: new.update(benchmark="paged"))
    assert code == 2 and "different benchmarks: softmax and paged" in output
    assert gate(lambda new: new["machine"].update(jax="0.12.0"))[1].count("jax: 0.11.2, then 0.12.0") == 1


@pytest.mark.parametrize("within", ["fast", "-1%", "nan", "inf"])
def test_a_share_that_is_none(gate, within):
    code, output = gate(lambda new: None, f"--within={within}")
    assert code == 2 and "is no share such as 5%" in output
