"""`python -m benchmarks`: what it measures, checks, keeps and shows, at toy sizes."""

import dataclasses
import errno
import json
import os
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import command_line, outputs, softmax
from benchmarks.command_line import make_app
from benchmarks.measuring import benchmark, measure, timing
from benchmarks.measuring.benchmark import BOTH, FORWARD, Contender, jax_program
from benchmarks.measuring.contenders import all_contenders, bucket_of
from benchmarks.measuring.device_lock import DeviceLock
from benchmarks.measuring.measure import Job, Measured, measure_in_processes
from benchmarks.measuring.timing import interleaved_samples
from benchmarks.paged import BENCHMARK as PAGED
from benchmarks.paged.cases import Case as PagedCase
from benchmarks.reporting import report
from benchmarks.reporting.report import tuned
from benchmarks.softmax import cases as softmax_cases
from benchmarks.softmax.cases import Case
from ejkernel.cli.workers import TOO_LATE, Lost, spread
from ejkernel.modules import flash_attention, page_attention
from ejkernel.ops import TunedConfigs, explain, interpret
from ejkernel.ops.settings import changed
from ejkernel.ops.target import named_target
from ejkernel.ops.tuned_files import user_file
from process_tasks import die, halves, sleep

CAUSAL = Case("dense", 1, 32, 2, 2, 8, "causal", "float32")
DOCUMENTS = Case("masked", 1, 32, 4, 2, 8, "documents", "bfloat16", documents=4)
OURS, PEER, TORCH = "ejkernel xla", "jax.nn (XLA)", "PyTorch SDPA"
BENCHMARK = softmax.BENCHMARK
SOFTMAX = BENCHMARK.family

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")


def run(*arguments: str):
    return CliRunner().invoke(make_app(), [*arguments], catch_exceptions=False)


@pytest.fixture
def toy(monkeypatch):
    """The benchmark with toy cases, and with contenders that a test adds."""
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(softmax_cases, "_BLOCK", 32 * 2 * 8)  # eight queries at a time

    def use(*cases, more=()):
        changed = dataclasses.replace(
            BENCHMARK,
            cases=lambda backend, quick: list(cases),
            peers=lambda: [*BENCHMARK.peers(), *more],
        )
        monkeypatch.setattr(softmax, "BENCHMARK", changed)

    return use


def contender(name, change=None, *, error=None, refusal=None, platform=None):
    """jax.nn's results, changed on the way; or one that raises or refuses."""
    nn = next(c for c in all_contenders(BENCHMARK, "cpu", None) if c.name == PEER)

    def build(case, what, arrays, device_lock):
        if error is not None:
            raise error
        program = nn.build(case, what, arrays, device_lock)
        return dataclasses.replace(program, results=lambda: (change or dict)(dict(program.results())))

    return Contender(name, name, build, refusal=lambda case: refusal, platform=platform)


def test_paged(tmp_path, monkeypatch):
    """Decoding and a mixed batch, and what a decode must read."""
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)
    kept = tmp_path / "run.json"
    result = run("paged", "--quick", "--repeats", "1", "--json", str(kept))
    assert result.exit_code == 0, result.output
    assert "every answer right" in result.output and "refused: one call is for one number of tokens" in result.output
    saved = {(r["case"], r["contender"]): r for r in json.loads(kept.read_text())["results"]}
    decode, mixed = "decode B4 S64 page16 H8 Hkv2 D64", "mixed 1 x 32 tokens + B3 S64 page16 H8 Hkv2 D64"
    assert all(saved[case, OURS]["status"] == "ok" for case in (decode, mixed))
    ours = saved[decode, OURS]
    assert ours["rate"] == pytest.approx(2 * 4 * 64 * 2 * 64 * 4 / ours["milliseconds"] / 1e9, rel=1e-3)
    assert ours["tuning"]["operations"] == ["page_attention"]
    assert saved[mixed, OURS]["tuning"]["operations"] == ["ragged_page_attention"]


def test_linear(tmp_path, monkeypatch):
    """Decays per channel, whose gradients are judged too, and a decode step; what each must move."""
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)
    kept = tmp_path / "run.json"
    result = run("linear", "--quick", "--repeats", "1", "--case", "^(gla|decode)", "--json", str(kept))
    assert result.exit_code == 0, result.output
    assert "6 measurements, every answer right" in result.output
    saved = {(r["case"], r["what"], r["contender"]): r for r in json.loads(kept.read_text())["results"]}
    trained, step = saved["gla B1 T128 H2 D16", BOTH, OURS], saved["decode B4 T1 H2 D16", FORWARD, OURS]
    assert {*trained["errors"]} == {"out", "dquery", "dkey", "dvalue", "dg"}
    assert trained["rate"] == pytest.approx(14 * 128 * 2 * 16 * 4 / trained["milliseconds"] / 1e9, rel=1e-3)
    assert step["rate"] == pytest.approx(2 * 4 * 2 * 16 * 16 * 4 / step["milliseconds"] / 1e9, rel=1e-3)


@pytest.mark.parametrize("results_of", [{"x": "y"}, {"x": "y", "state": "z"}])
def test_a_chain_of_calls_is_timed_as_one_program(monkeypatch, results_of):
    """Each call's results are the next one's arrays, and the calls' share of the time is what counts."""
    clock, ran = [0.0], []

    def tick(x, state):
        clock[0] += 1.0
        ran.append((float(x[0]), float(state)))
        return 2 * x, state + 1

    def double(arrays):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays["x"], arrays["state"]))
        return dict(zip("yz", jax.pure_callback(tick, like, arrays["x"], arrays["state"]), strict=True))

    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    arrays = {"x": np.ones(4, np.float32), "state": np.float32(0)}
    program = jax_program(double, arrays, DeviceLock(), chain=(results_of, 10))
    assert np.asarray(program.results()["y"]).tolist() == [2.0] * 4
    ran.clear()
    carried = "state" in results_of
    assert program.seconds(1) == 1.0 and ran == [(2.0**n, n if carried else 0.0) for n in range(10)]
    assert program.seconds(25) == 25.0 and len(ran) == 10 + 30


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "int8"])
def test_a_scale_ignored_is_a_wrong_answer(cache):
    case = PagedCase("decode", 2, 40, 8, 4, 2, 16, "float32", cache, "ms")
    problem = PAGED.problem(case)
    (truth,) = problem.truths(DeviceLock())
    right = page_attention(**problem.arrays, k_scale=case.scales[0], v_scale=case.scales[1])
    assert truth.error("out", right).ok
    assert not truth.error("out", page_attention(**problem.arrays, k_scale=1.0, v_scale=case.scales[1])).ok


def test_a_whole_run(toy, tmp_path):
    toy(CAUSAL, DOCUMENTS)
    kept, picture, tuned = tmp_path / "deep" / "run.json", tmp_path / "run.png", tmp_path / "tuned.json"
    options = ["--json", str(kept), "--plot", str(picture), "--tuned", str(tuned), "--repeats", "2"]
    result = run("softmax", *options)
    assert result.exit_code == 0, result.output
    assert "every answer right" in result.output and "cuDNN (jax.nn): needs gpu, this is cpu" in result.output
    assert "dense B1 T32 H2 D8 causal, forward + backward, ejkernel xla: " in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")

    saved = json.loads(kept.read_text())
    assert saved["complete"] and saved["machine"]["jax"] == jax.__version__
    assert saved["cases"][CAUSAL.name]["auto"] == {FORWARD: "xla", BOTH: "xla"} and saved["contenders"][OURS] == "xla"
    assert TORCH in {*saved["contenders"], *saved["missing"]}
    rows = {(r["case"], r["what"], r["contender"]): r for r in saved["results"]}
    assert len(rows) == len(saved["results"]) == 2 * 2 * len(saved["contenders"])
    for (case, what, _), row in rows.items():
        assert row["status"] == "ok", row
        assert len(row["samples"]) == 2 and row["first_call_seconds"] > 0 and row["calls"] >= 1
        one = next(c for c in (CAUSAL, DOCUMENTS) if c.name == case)
        assert row["rate"] == pytest.approx(one.amount(what) / row["milliseconds"] / 1e9, rel=1e-3)
        assert set(row["errors"]) == ({"out"} if what == FORWARD else {"out", "dquery", "dkey", "dvalue"})
    assert rows[CAUSAL.name, FORWARD, OURS]["temporary_megabytes"] > 0

    times = TunedConfigs.load(tuned)
    tuning = rows[CAUSAL.name, FORWARD, OURS]["tuning"]
    for operation in ("flash_attention", "scaled_dot_product_attention"):
        forward, both = (rows[CAUSAL.name, what, OURS]["milliseconds"] * 1e3 for what in (FORWARD, BOTH))
        backward = max(both - forward, forward) if both > forward else 0.0
        for gradient, wanted in ((False, forward), (True, backward)):
            expected_times = {"xla": pytest.approx(wanted, abs=0.2)} if wanted > 0 else {}
            assert times.times(operation, tuning["bucket"], gradient) == expected_times

    shown = run("show", str(kept), "--markdown", "--case", "masked", "--plot", str(tmp_path / "one.svg"))
    assert shown.exit_code == 0 and "| B1 T32 H4 Hkv2 D8 documents 4 at random |" in shown.output
    assert CAUSAL.name.removeprefix("dense ") not in shown.output
    assert (tmp_path / "one.svg").read_text().startswith("<?xml")


def test_the_shape_of_a_model(toy, tmp_path):
    """More queries than keys, and a bias that is trained; PyTorch does not take part."""
    case = Case("models", 2, 6, 4, 2, 8, "full", "bfloat16", S=5, bias=True, model="T5")
    assert case.name == "models T5 B2 T6 S5 H4 Hkv2 D8 full bias"
    toy(case)
    kept = tmp_path / "run.json"
    result = run("softmax", "--json", str(kept), "--repeats", "2")
    assert result.exit_code == 0 and "every answer right" in result.output, result.output
    rows = {(r["what"], r["contender"]): r for r in json.loads(kept.read_text())["results"]}
    for contender in (OURS, PEER):
        assert set(rows[BOTH, contender]["errors"]) == {"out", "dquery", "dkey", "dvalue", "dbias"}
    assert {contender for (_, contender), row in rows.items() if row["status"] == "ok"} == {OURS, PEER}


def test_everything_there_is(toy, tmp_path, monkeypatch):
    """One that fails does not end the others, and is named."""
    toy(CAUSAL)
    broken = dataclasses.replace(
        BENCHMARK, peers=lambda: [contender("liar", lambda got: {n: 2 * x for n, x in got.items()})]
    )
    right = dataclasses.replace(BENCHMARK, cases=lambda backend, quick: [CAUSAL] if quick else [], peers=list)
    wrong = dataclasses.replace(broken, cases=right.cases)
    named = {"liars": wrong, "softmax": right}
    saved = {n: dataclasses.replace(b, family=dataclasses.replace(SOFTMAX, name=n)) for n, b in named.items()}
    monkeypatch.setattr("benchmarks.command_line.all_benchmarks", lambda: saved)
    result = run("all", "--folder", str(tmp_path / "numbers"), "--repeats", "1")
    assert result.exit_code == 1 and "liars failed" in result.output
    kept = {path.name for path in (tmp_path / "numbers").iterdir()}
    assert kept == {"liars_cpu.json", "liars_cpu.svg", "softmax_cpu.json", "softmax_cpu.svg"}
    assert json.loads((tmp_path / "numbers" / "softmax_cpu.json").read_text())["complete"]
    other = tmp_path / "numbers" / "liars_cpu.json"
    other.write_text(other.read_text().replace('"jax": "', '"jax": "9.'))
    result = run("all", "--folder", str(tmp_path / "numbers"), "--repeats", "1", "--resume")
    assert result.exit_code == 1 and "is of another run: jax was 9." in " ".join(result.output.split())
    assert "liars failed" in result.output and "every answer right" in result.output
    del saved["liars"]
    assert run("all", "--folder", str(tmp_path / "numbers"), "--repeats", "1").exit_code == 0


def test_a_wrong_answer_is_said_and_exits_with_1(toy, tmp_path):
    liars = {
        "small": lambda got: got | {"out": 1.001 * got["out"]},
        "nan": lambda got: got | {"out": got["out"] + np.nan},
        "gradient": lambda got: got | ({"dkey": got["dvalue"]} if "dkey" in got else {}),
    }
    toy(CAUSAL, more=[contender(name, change) for name, change in liars.items()])
    peers = [word for name in ("jax-nn", *liars) for word in ("--peer", name)]
    result = run("softmax", *peers, "--repeats", "1", "--json", str(tmp_path / "x.json"))
    assert result.exit_code == 1
    assert "WRONG" in result.output and all(f"{name}: wrong" in result.output for name in liars)
    saved = json.loads((tmp_path / "x.json").read_text())["results"]
    assert {r["contender"] for r in saved if r["status"] == "wrong"} == liars.keys()


def test_refusals_and_failures_are_shown(toy):
    shy = contender("shy", refusal="too shy for this")
    broken = contender("broken", error=KeyError("on fire"))
    misshapen = contender("misshapen", lambda got: got | {"out": got["out"][0]})
    toy(CAUSAL, more=[shy, broken, misshapen])
    result = run("softmax", "--peer", "shy", "--peer", "broken", "--peer", "misshapen", "--repeats", "1")
    assert result.exit_code == 0, result.output  # a peer's failure is not ours
    assert "refused: too shy for this" in result.output and "failed: KeyError: 'on fire'" in result.output
    assert "out has shape (32, 2, 8), not (1, 32, 2, 8)" in result.output


def test_a_failure_of_ours_exits_with_1(toy):
    toy(CAUSAL, more=[contender("ours too", error=NotImplementedError("on fire"), platform="triton")])
    assert run("softmax", "--peer", "none", "--repeats", "1").exit_code == 1


def test_what_does_not_fit_the_budget_is_skipped(toy, tmp_path):
    toy(CAUSAL, DOCUMENTS)
    result = run("softmax", "--peer", "none", "--budget", "0", "--json", str(tmp_path / "x.json"))
    assert result.exit_code == 1 and "4 measurements were skipped" in result.output
    saved = json.loads((tmp_path / "x.json").read_text())
    assert not saved["complete"] and {r["reason"] for r in saved["results"]} == {TOO_LATE.reason}


def test_a_run_that_was_cut_short_goes_on(toy, tmp_path):
    toy(CAUSAL, DOCUMENTS)
    kept = tmp_path / "x.json"
    options = ["softmax", "--peer", "none", "--repeats", "1", "--json", str(kept), "--resume"]
    assert run(*options, "--case", CAUSAL.name).exit_code == 0  # nothing is there yet
    first = json.loads(kept.read_text())
    first["results"] += [{**r, "case": DOCUMENTS.name, "status": "skipped"} for r in first["results"]]
    first["cases"][DOCUMENTS.name] = first["cases"][CAUSAL.name]
    kept.write_text(json.dumps(first))
    result = run(*options)
    assert result.exit_code == 0 and f"\n{CAUSAL.name}, " not in f"\n{result.output}", result.output
    saved = json.loads(kept.read_text())
    assert saved["complete"] and saved["cases"].keys() == {CAUSAL.name, DOCUMENTS.name}
    cells = {(r["case"], r["what"]): r for r in saved["results"]}
    assert len(cells) == len(saved["results"]) == 4 and all(r["status"] == "ok" for r in saved["results"])
    assert all(cells[r["case"], r["what"]] == r for r in first["results"] if r["case"] == CAUSAL.name)


def test_what_goes_on_loses_nothing(toy, tmp_path):
    """Cases that were not asked for again stay, with what they lack; a busy machine is not forgotten."""
    toy(CAUSAL, DOCUMENTS)
    kept = tmp_path / "x.json"
    options = ["softmax", "--peer", "none", "--repeats", "1", "--json", str(kept)]
    assert run(*options).exit_code == 0
    first = json.loads(kept.read_text())
    first["machine"]["load"], first["cases"]["not reached"] = 77.0, first["cases"][CAUSAL.name]
    kept.write_text(json.dumps(first))
    result = run(*options, "--resume", "--case", CAUSAL.name)
    assert result.exit_code == 0 and "not reached: not measured, the run was cut short" in result.output, result.output
    saved = json.loads(kept.read_text())
    assert saved["cases"] == first["cases"] and saved["results"] == first["results"] and not saved["complete"]
    assert saved["machine"]["load"] == 77.0


def test_a_case_that_failed_is_measured_again(toy, tmp_path):
    """Where ours failed, not where a peer did, which is a finding."""
    kept = tmp_path / "x.json"
    options = ["softmax", "--peer", "broken", "--repeats", "1", "--json", str(kept), "--resume"]
    broken = contender("broken", error=KeyError("on fire"))
    for error, code in ((NotImplementedError("on fire"), 1), (None, 0)):
        toy(CAUSAL, more=[broken, contender("ours too", error=error, platform="triton")])
        assert run(*options).exit_code == code
        status = {r["contender"]: r["status"] for r in json.loads(kept.read_text())["results"]}
        assert status == {OURS: "ok", "broken": "failed", "ours too": "failed" if error else "ok"}
    result = run(*options)
    assert result.exit_code == 0 and f"\n{CAUSAL.name}, " not in f"\n{result.output}", result.output


def test_another_run_is_not_gone_on_with(toy, tmp_path):
    toy(CAUSAL)
    kept = tmp_path / "x.json"
    options = ["softmax", "--peer", "none", "--repeats", "1", "--json", str(kept)]
    assert run(*options).exit_code == 0
    kept.write_text(kept.read_text().replace('"jax": "', '"jax": "9.'))
    result = run(*options, "--resume")
    assert result.exit_code == 2 and "of another run: jax was 9." in " ".join(result.output.replace("│", "").split())
    result = run("softmax", "--resume")
    assert result.exit_code == 2 and "none is given" in " ".join(result.output.replace("│", "").split())


def test_list_and_unknown_names(toy):
    toy(CAUSAL, DOCUMENTS)
    result = run("softmax", "--list", "--case", "^dense", "--platform", "auto", "--platform", "xla")
    assert result.exit_code == 0 and CAUSAL.name in result.output and DOCUMENTS.name not in result.output
    assert "ejkernel-auto" in result.output and "jax-nn" in result.output
    for wrong, message in (
        ("--peer flesh", "flesh is unknown"),
        ("--platform abacus", "abacus is unknown"),
        ("--case nothing", f"no case matches 'nothing'; there are {CAUSAL.name}"),
        ("--case (", "no regular expression"),
    ):
        result = run("softmax", *wrong.split())
        assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("text", ['{"schema": 0}', "# not JSON"])
def test_a_foreign_file_is_not_shown(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    result = run("show", str(tmp_path / "x.json"))
    assert result.exit_code == 2 and "does not hold what --json keeps" in " ".join(
        result.output.replace("│", " ").split()
    )


def output_of(result) -> str:
    return " ".join(result.output.replace("│", " ").split())


def test_a_file_that_lacks_something_is_not_shown(tmp_path):
    (tmp_path / "x.json").write_text('{"schema": 2, "results": []}')
    result = run("show", str(tmp_path / "x.json"))
    assert result.exit_code == 2 and "it has no benchmark, date" in output_of(result)
    (tmp_path / "x.json").write_text(json.dumps(KEPT | {"results": [{"case": "dense one", "what": FORWARD}]}))
    result = run("show", str(tmp_path / "x.json"))
    assert result.exit_code == 2 and "result 1 has no contender, status" in output_of(result)


KEPT = {
    "schema": 2,
    "benchmark": "softmax",
    "date": "2026-11-15",
    "machine": {"device": "AMD EPYC 9654, 2 cores"},
    "contenders": {"ejkernel xla": "xla"},
    "missing": {},
    "cases": {name: {"group": "dense", "unit": "ms", "auto": {FORWARD: "xla"}} for name in ("dense one", "dense two")},
    "complete": False,
    "results": [
        {"case": "dense one", "what": FORWARD, "contender": "ejkernel xla", "status": "ok", "milliseconds": 2.0}
        | {"reason": "", "rate": 1.0, "first_call_seconds": 1.0, "temporary_megabytes": None, "errors": {}}
        | {"tuning": {"operations": ["flash_attention"], "bucket": "b", "platform": "xla", "config": None}}
    ],
}


@pytest.fixture
def kept(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(KEPT))
    return path


def test_times_of_another_device_are_refused(kept, tmp_path):
    """Those of a CPU do not belong in a GPU's file, the user's or the shipped one; in one of no device they may be."""
    for file in ("tuned/nvidia_h200/tuned.json", "tuned/nvidia_h200.json"):
        result = run("show", str(kept), "--tuned", str(tmp_path / file))
        assert result.exit_code == 2 and "is for nvidia_h200, and these times are of cpu" in output_of(result)
        result = run("softmax", "--quick", "--tuned", str(tmp_path / file))  # before anything is measured
        assert result.exit_code == 2 and "these times are of cpu" in output_of(result)
    assert not list(tmp_path.rglob("*tuned.json"))
    for file in ("tuned/cpu.json", "mine.json"):
        assert run("show", str(kept), "--tuned", str(tmp_path / file)).exit_code == 0
        assert TunedConfigs.load(tmp_path / file).times("flash_attention", "b") == {"xla": 2000.0}


def test_a_run_that_was_cut_short_is_marked(kept, tmp_path):
    result = run("show", str(kept), "--tuned", str(tmp_path / "mine.json"))
    assert "dense two: not measured, the run was cut short" in result.output
    assert "our times, those there are, are in" in result.output
    assert "- dense two: not measured" in run("show", str(kept), "--markdown").output


def test_files_that_cannot_be_written_are_refused_before_the_work(kept, tmp_path):
    (tmp_path / "file").write_text("")
    for option, path, message in (
        ("--plot", "x.nosuch", "the suffix '.nosuch' is none of"),
        ("--plot", "x", "the suffix '' is none of"),
        ("--plot", "file/x.png", "cannot be written: "),
        ("--tuned", "file/x.json", "cannot be written: "),
        ("--tuned", ".", "is a folder"),
        ("--tuned", "x" * 300, "cannot be written: File name too long"),
    ):
        result = run("show", str(kept), option, str(tmp_path / path))
        assert result.exit_code == 2 and message in output_of(result), result.output
    result = run("softmax", "--json", str(tmp_path / "file" / "x.json"))
    assert result.exit_code == 2 and "cannot be written: " in output_of(result)
    assert {p.name for p in tmp_path.iterdir()} == {"file", "run.json"}


def test_that_nothing_can_draw_is_said_before_the_work(toy, tmp_path, monkeypatch):
    toy(CAUSAL)
    monkeypatch.setattr(outputs, "find_spec", lambda name: None)
    picture, numbers = tmp_path / "x.svg", tmp_path / "numbers"
    for command in (["softmax", "--plot", str(picture)], ["all", "--folder", str(numbers)]):
        monkeypatch.setattr(command_line, "MODULES", ("benchmarks.softmax",))
        result = run(*command, "--peer", "none", "--repeats", "1") if command[0] != "all" else run(*command)
        assert result.exit_code == 0, result.output
        said_first, measured = (result.output.index(text) for text in ("no picture: matplotlib is not", CAUSAL.name))
        assert said_first < measured and result.output.count("no picture") == 1
    assert not picture.exists() and [path.suffix for path in numbers.iterdir()] == [".json"]


def test_a_full_disk_ends_no_run(toy, tmp_path, monkeypatch):
    toy(CAUSAL)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=full))
    files = {name: str(tmp_path / f"x{suffix}") for name, suffix in (("--json", ".json"), ("--plot", ".svg"))}
    options = [word for option in (*files.items(), ("--tuned", str(tmp_path / "t.json"))) for word in option]
    result = run("softmax", "--peer", "none", "--repeats", "1", *options)
    assert result.exit_code == 1 and "every answer right" in result.output
    for name in ("x.json", "x.svg", "t.json"):
        assert f"{name} could not be written: [Errno 28] No space left on device" in result.output
    assert {p.name for p in tmp_path.iterdir()} <= {"t.json.lock"}


# Cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("quick", [True, False])
def test_cases(backend, quick):
    saved = BENCHMARK.cases(backend, quick)
    assert len({case.name for case in saved}) == len(saved)
    if backend == "gpu":
        assert all(case.B * case.T == 16384 for case in saved if case.group == "dense")
        assert all(case.H * case.D == 2048 for case in saved if case.group == "dense")


def test_times_of_one_head_dim_are_not_those_of_another():
    """A kernel for another is another kernel."""
    cases = {case.D: case for case in BENCHMARK.cases("gpu", False) if (case.T, case.mask) == (2048, "causal")}
    buckets = {D: bucket_of(SOFTMAX, "flash_attention", case) for D, case in cases.items()}
    assert {64, 80, 128, 256} <= set(buckets) and all(f"-D{D}-V{D}-" in name for D, name in buckets.items())


def test_times_are_kept_where_a_call_on_the_device_looks_for_them():
    """A GPU keeps lengths that are no multiple of eight in buckets of their own."""
    case = next(case for case in BENCHMARK.cases("gpu", False) if case.T == 197)
    with changed(device=named_target("h200")):
        bucket = bucket_of(SOFTMAX, "flash_attention", case)
    explanation = explain(lambda arrays: flash_attention(**case.arguments(arrays)), case.structs(), device="h200")
    assert f"measured for {bucket}:" in explanation.reason
    assert bucket != bucket_of(SOFTMAX, "flash_attention", case)


def test_flops_count_the_pairs_that_are_seen():
    at = np.arange(64)
    seen = {
        "full": np.ones((64, 64)),
        "window": (at[:, None] >= at) & (at[:, None] - at < 16),
        "causal": (at[:, None] > at) + 0.5 * (at[:, None] == at),  # the convention: half of T * T
    }
    ids = Case("x", 2, 64, 4, 2, 8, "documents", "float32", documents=4).segments()
    assert ids.shape == (64,) and set(ids) == {0, 1, 2, 3}
    seen["documents"] = seen["causal"] * (ids[:, None] == ids)
    seen["prefix-LM"] = np.maximum(seen["causal"], at < 16)
    seen["prefix-LM"][at, at] = np.where(at < 16, 1, 0.5)
    for mask, pairs in seen.items():
        case = Case("x", 2, 64, 4, 2, 8, mask, "float32", window=16 if mask == "window" else None, documents=4)
        assert case.amount(FORWARD) == 4 * 2 * 4 * 8 * pairs.sum(), mask
        assert case.amount(BOTH) == 3.5 * case.amount(FORWARD)
    tree = Case("x", 1, 96, 4, 2, 8, "tree", "float32")
    at = np.arange(96)
    pairs = tree.visible(at[:, None], at, tree.numbers())
    assert tree.amount(FORWARD) == 4 * 4 * 8 * (pairs.sum() - 96 / 2)


def test_functions_run_as_functions():
    """Documents by a function that is taken for no segments, and the others under names that tables can tell apart."""
    cases = {case.mask: case for case in BENCHMARK.cases("cpu", True) if case.group == "functions"}
    buckets = {mask: bucket_of(SOFTMAX, "flash_attention", case) for mask, case in cases.items()}
    assert all(buckets[mask].endswith("-mask_fn") for mask in ("prefix-LM", "tree", "documents"))
    assert buckets["causal"].endswith("causal-score_fn") and "window" in buckets["window"]
    gpu = {case.mask: case.name for case in BENCHMARK.cases("gpu", False) if case.group == "functions"}
    assert gpu["tree"] == "functions B1 T12288 H32 Hkv8 D128 tree 8 x 1024 on 4096"
    assert gpu["window"] == "functions B1 T8192 H16 Hkv8 D256 window 4096 soft cap 50"


# Timing and processes ---------------------------------------------------------------------------------------


def test_samples_are_interleaved():
    seen = []

    def runner(name, seconds):
        def run(calls):
            seen.append((name, calls))
            return seconds * calls

        return run

    saved = interleaved_samples({"quick": runner("quick", 0.001), "slow": runner("slow", 2.0)}, repeats=5)
    assert seen[:4] == [("quick", 1), ("quick", 25), ("quick", 25), ("slow", 1)]  # how many calls make a sample
    rounds = [seen[4 + 2 * n : 6 + 2 * n] for n in range(3)]
    assert all(sorted(one_round) == [("quick", 25), ("slow", 1)] for one_round in rounds)
    assert rounds[0] != rounds[1] or rounds[1] != rounds[2], "nobody always follows the same one"
    assert saved["quick"].median == pytest.approx(0.001) and len(saved["quick"].seconds) == 5
    assert len(saved["slow"].seconds) == 3  # not a close race
    assert timing.Samples([3.0, 1.0, 8.0, 2.0], 1).median == 2.5


def test_a_process_that_dies_takes_nothing_with_it():
    items = deque([3, 4])
    saved = dict(spread(die, items, 2, time.monotonic() + 60))
    assert saved == {code: Lost(f"its process ended with exit code {code}") for code in (3, 4)}


def test_answers_of_processes_and_items_added_meanwhile():
    items, saved = deque([4]), []
    for item, answer in spread(halves, items, 1, float("inf")):
        saved.append((item, answer))
        items.extend([8] if answer == 2 and item == 4 else [])
    assert saved == [(4, 2), (4, 1), (8, 4), (8, 2)]


def test_no_process_outlives_the_deadline():
    start = time.monotonic()
    saved = list(spread(sleep, deque([50, 60]), 1, start + 3))
    assert saved[-2:] == [(50, TOO_LATE), (60, TOO_LATE)]
    assert time.monotonic() - start < 20


def test_a_case_in_a_process_of_its_own(tmp_path):
    job = Job(BENCHMARK.module, "cpu", CAUSAL, None, [OURS], 1, str(tmp_path / "lock"), float("inf"))
    results = [r for some in measure_in_processes([job], 2, time.monotonic() + 120) for r in some]
    assert [(r.what, r.status) for r in results] == [(FORWARD, "ok"), (BOTH, "ok")]


def test_what_was_measured_before_the_time_was_up_is_kept(monkeypatch):
    def fake(task, queue, processes, deadline):
        job = queue.popleft()
        yield job, Measured([measure.Result(CAUSAL.name, FORWARD, "ours", "ok", milliseconds=1.0, alone=True)])
        yield job, TOO_LATE

    monkeypatch.setattr(measure, "spread", fake)
    job = Job(BENCHMARK.module, "gpu", CAUSAL, None, ["ours", "slow"], 1, "", 0.0)
    measured, skipped = measure_in_processes([job], 2, 0.0)
    assert [r.contender for r in measured] == ["ours"]
    assert [(r.contender, r.what, r.status) for r in skipped] == [
        ("ours", BOTH, "skipped"),
        ("slow", FORWARD, "skipped"),
        ("slow", BOTH, "skipped"),
    ]
    saved = {"results": [], "missing": {}, "cases": {CAUSAL.name: {}}}
    for results in (measured, skipped):
        report.add(saved, results)
    assert f"ours, {CAUSAL.name}: timed alone, no time was left to interleave it with others" in report.notes(saved)


def test_ours_do_not_wait_for_peers(toy, monkeypatch):
    """Each is timed alone once built; one that would miss the deadline is not built, and the others are interleaved."""
    toy(CAUSAL)
    clock = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def slow(got):
        clock[0] += 30.0
        return got

    everybody = [contender("ours"), contender("slow", slow), contender("too late")]
    yielded = list(measure.measure(BENCHMARK, CAUSAL, everybody, 2, DeviceLock(), deadline=100.0, alone_first=True))
    cells = [[(r.contender, r.status, r.alone) for r in some.results] for some in yielded]
    assert cells == [
        [],
        [("ours", "ok", True)] * 2,
        [("slow", "ok", True)] * 2,
        [("too late", "skipped", False)] * 2,
        *[[("ours", "ok", False), ("slow", "ok", False)]] * 2,
    ]
    saved = {"results": []}
    for some in yielded:
        report.add(saved, some.results)
    assert len(saved["results"]) == 6 and not any(r["alone"] for r in saved["results"])


def test_a_case_starts_again_without_what_took_the_device_down(monkeypatch):
    tried = []

    def fake(task, queue, processes, deadline):
        while queue:
            job = queue.popleft()
            tried.append(job.contenders)
            yield job, Measured([], "bad" if "bad" in job.contenders else None)

    monkeypatch.setattr(measure, "spread", fake)
    list(measure_in_processes([Job(BENCHMARK.module, "gpu", CAUSAL, None, ["good", "bad"], 1, "", 0.0)], 2, 0.0))
    assert tried == [["good", "bad"], ["good"]]


def test_a_device_that_went_down_ends_the_case(toy, monkeypatch):
    toy(CAUSAL, DOCUMENTS, more=[contender("killer", error=RuntimeError("illegal address"))])
    monkeypatch.setattr(measure, "device_works", lambda: False)
    result = run("softmax", "--peer", "killer", "--repeats", "1")
    assert result.exit_code == 1 and "the device went down under killer" in result.output


# For auto ---------------------------------------------------------------------------------------------------


def test_times_order_the_platforms_of_auto(tmp_path, monkeypatch):
    """A run of two platforms, kept in the user's file, decides for shapes near the one measured."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    bucket = "B1-T32-S32-H2-K2-D8-V8-float32-causal"
    tuning = {"operations": ["flash_attention"], "bucket": bucket, "config": None}
    results = [
        {"case": "c", "what": what, "contender": platform, "status": "ok", "milliseconds": milliseconds}
        | {"tuning": tuning | {"platform": platform}}
        for platform, times in {"xla": (2.0, 5.0), "triton": (1.0, 7.0)}.items()
        for what, milliseconds in zip((FORWARD, BOTH), times, strict=True)
    ]
    saved = {"results": results, "cases": {"c": {}}, "contenders": {"xla": "xla", "triton": "triton"}}
    tuned(saved).save(user_file("cpu"))
    x = jax.ShapeDtypeStruct((4, 60, 2, 8), "float32")
    with interpret():
        explanation = explain(flash_attention, x, x, x, causal=True)
    assert (
        explanation.platform == "triton" and explanation.gradient is not None and explanation.gradient.platform == "xla"
    )
    assert explanation.reason.startswith(f"fastest measured at {bucket}, the nearest to B4-T64")
    assert explanation.reason.endswith("triton 1000 us, xla 2000 us")


def test_a_run_of_auto_is_another_of_the_platform_it_took():
    """Its faster time counts, for the passes that it gave to that platform alone."""

    def result(contender, platform, what, milliseconds):
        tuning = {"operations": ["flash_attention"], "bucket": "b", "config": None, "platform": platform}
        saved = {"case": "c", "what": what, "contender": contender, "status": "ok", "milliseconds": milliseconds}
        return saved | {"tuning": tuning}

    times = {"xla": (2.0, 5.0), "triton": (1.0, 7.0), "auto": (0.5, 3.0)}
    results = [
        result(name, "triton" if name == "auto" else name, what, milliseconds)
        for name, both in times.items()
        for what, milliseconds in zip((FORWARD, BOTH), both, strict=True)
    ]
    took = {FORWARD: "triton", BOTH: "triton, xla"}
    saved = {"results": results, "cases": {"c": {"auto": took}}, "contenders": {name: name for name in times}}
    entries = tuned(saved).entries["flash_attention"]["b"]
    assert {name: (e["microseconds"], e["training"]) for name, e in entries.items()} == {
        "xla": (2000.0, 5000.0),
        "triton": (500.0, 7000.0),
    }

    took[BOTH] = "triton"
    for one in results:
        one["status"] = "wrong" if (one["contender"], one["what"]) == ("triton", BOTH) else "ok"
    assert "training" not in tuned(saved).entries["flash_attention"]["b"]["triton"]


def test_a_few_of_those_measured_are_shown():
    kept = str(Path(__file__).parents[2] / "benchmarks" / "results" / "softmax_nvidia_h200.json")
    result = run("show", kept, "--case", "documents", "--contender", "pallas|fa4")
    assert result.exit_code == 0 and "ejkernel pallas" in result.output and "fa4-jax" in result.output
    assert "tokamax" not in result.output.split("sm_90")[0]  # what follows names the versions
    result = run("show", kept, "--contender", "abacus")
    assert result.exit_code == 2 and "no contender matches 'abacus'; there are ejkernel auto" in output_of(result)


def test_runs_of_one_device_are_shown_as_one(tmp_path):
    kept = Path(__file__).parents[2] / "benchmarks" / "results"
    both = [kept / f"{name}_nvidia_h200.json" for name in ("model", "softmax_tokamax")]
    result = run("show", *map(str, both), "--case", "16 documents|documents 16", "--plot", str(tmp_path / "both.svg"))
    assert result.exit_code == 0
    picture = (tmp_path / "both.svg").read_text()
    assert 0 < picture.index("training, ") < picture.index("masked, ")  # in the order of the runs
    assert "tokamax Mosaic: not installed" not in output_of(result)  # it was in one of them

    other = json.loads(both[1].read_text())
    other["machine"]["device"] = "1 x nvidia_a100 (sm_80)"
    (tmp_path / "other.json").write_text(json.dumps(other))
    result = run("show", str(both[0]), str(tmp_path / "other.json"))
    assert result.exit_code == 2 and "their devices differ: 1 x nvidia_h200 (sm_90), 1 x nvidia_a100" in output_of(
        result
    )
    result = run("show", str(both[0]), str(both[0]))
    assert result.exit_code == 2 and "a case is in several of them" in output_of(result)


def test_who_measures_is_alone_on_the_device(tmp_path):
    """Two may tune at a time; nobody measures meanwhile, and nobody tunes while one measures."""
    lock = str(tmp_path / "lock")
    first, second, measuring, happened = DeviceLock(lock), DeviceLock(lock), DeviceLock(lock), []

    def measured():
        with measuring:
            happened.append("measured")

    with first.shared():
        with second.shared():
            other = threading.Thread(target=measured)
            other.start()
            other.join(0.2)
            assert happened == []
        other.join(0.2)
        assert happened == []
    other.join()
    assert happened == ["measured"]
    with second.shared():
        pass


def test_nobody_tunes_before_those_who_measure_first(tmp_path):
    """The second waits for the first, which then tunes beside it: neither waits for ever."""
    lock, happened = str(tmp_path / "lock"), []
    first, second = DeviceLock(lock, measures_first=True), DeviceLock(lock, measures_first=True)

    def tuned():
        with second.shared():
            happened.append("tuned")

    other = threading.Thread(target=tuned)
    other.start()
    other.join(0.2)
    with first:
        happened.append("measured")
    with first.shared():
        other.join()
    assert happened == ["measured", "tuned"]
