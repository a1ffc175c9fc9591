"""`python -m benchmarks model`: a training step and a decode loop, at toy sizes."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.command_line import Options, _measured, make_app
from benchmarks.measuring import measure
from benchmarks.measuring.benchmark import FORWARD, LEARNING_RATE, TRAINING, passes_of
from benchmarks.measuring.contenders import choice
from benchmarks.measuring.device_lock import DeviceLock
from benchmarks.model import BENCHMARK
from benchmarks.model.cases import TRAINED, Case, Model, all_cases
from benchmarks.model.ours import decoding, training
from benchmarks.model.peers import peers
from benchmarks.softmax import BENCHMARK as SOFTMAX
from ejkernel.ops import explain

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")

PACKED = Case("training", 2, 32, 2, 1, 8, "float32", 16, documents=4)


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)
    kept = tmp_path / "run.json"
    options = ["--quick", "--repeats", "1", "--json", str(kept), "--plot", str(tmp_path / "run.svg")]
    result = CliRunner().invoke(make_app(), ["model", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "4 measurements, every answer right" in result.output
    assert "temporary memory, MB" in result.output and "training, training step, ktoken/s" in result.output
    saved = json.loads(kept.read_text())
    cells = {(r["case"], r["contender"]): r for r in saved["results"]}
    packed, decode = (case.name for case in all_cases("cpu", True))
    for contender in ("ejkernel auto", "jax.nn (XLA)"):
        step, loop = cells[packed, contender], cells[decode, contender]
        assert {*step["errors"]} == {"out", *(f"d{name}" for name in TRAINED)} and step["temporary_megabytes"] > 0
        assert step["rate"] == pytest.approx(128 / step["milliseconds"], rel=1e-3)
        assert loop["rate"] == pytest.approx(4 * 8 / loop["milliseconds"], rel=1e-3)
    assert saved["cases"][packed]["auto"] == {TRAINING: "xla"}
    # it is of no single call: nothing for auto to learn
    assert (
        "our times" in CliRunner().invoke(make_app(), ["show", str(kept), "--tuned", str(tmp_path / "t.json")]).output
    )
    assert not json.loads((tmp_path / "t.json").read_text())["entries"]


def test_a_step_moves_the_weights():
    problem = Model(PACKED)
    step = passes_of(lambda arrays: training(PACKED, arrays, None), TRAINING, TRAINED)
    saved = jax.jit(step)(problem.arrays)
    moved = problem.arrays["w_up"] - LEARNING_RATE * saved["dw_up"]
    np.testing.assert_allclose(saved["new w_up"], moved, rtol=1e-6)
    losses, gradients = problem.truths(DeviceLock())
    assert losses.error("out", saved["out"]).ok
    assert all(gradients.error(f"d{name}", saved[f"d{name}"]).ok for name in TRAINED)
    # documents that see one another
    wrong = jax.jit(partial(training, PACKED, platform=None))(
        {n: x for n, x in problem.arrays.items() if n != "offsets"}
    )
    assert not losses.error("out", wrong).ok


def test_a_loop_that_forgets_a_token_is_wrong():
    case = Case("decode", 2, 12, 2, 1, 8, "float32", 16, B=2, steps=3, page=4, passes=(FORWARD,))
    problem = Model(case)
    (truth,) = problem.truths(DeviceLock())
    decode = jax.jit(decoding, static_argnums=(0, 2))
    assert truth.error("out", decode(case, problem.arrays, None)).ok
    other = problem.arrays | {"tokens": problem.arrays["tokens"].at[0].add(1) % case.vocabulary}
    steps = jnp.abs(decode(case, other, None) - truth.exact["out"]).max((1, 2))
    assert (steps > 1e-3).all()  # the first token is in the cache of all that follow


@pytest.mark.parametrize("quick", [True, False])
def test_cases_of_a_gpu(quick):
    saved = all_cases("gpu", quick)
    assert [case.group for case in saved] == ["training", "decode", "training"]
    for case in saved:
        function = BENCHMARK.family.function(case.operations[0])
        explanation = explain(lambda given, f=function, c=case: f(c, given, None), case.structs(), device="h200")
        assert explanation.platform in ("triton", "cudnn", "pallas", "cute"), explanation
        assert case.amount(case.passes[0]) == (32 * 32 if case.decodes else 16384)
    assert {*choice(BENCHMARK.family, saved[0])} == {TRAINING}


def test_who_takes_part():
    packed, decode, _ = all_cases("gpu", False)
    named = {peer.key: peer for peer in peers()}
    assert {key for key, peer in named.items() if peer.missing("gpu") is None} >= {"jax-cudnn"}
    assert named["jax-nn"].refusal(packed) == "its logits would take 32 GiB"
    assert named["jax-cudnn"].refusal(packed) is None and named["jax-cudnn"].refusal(decode) is None
    assert named["fa4"].refusal(decode) == "it has no call for a token against a cache"


@pytest.mark.parametrize("benchmark, several", [(BENCHMARK, False), (SOFTMAX, True)])
def test_on_a_gpu_a_model_is_compiled_beside_nobody_who_measures(benchmark, several, monkeypatch):
    used = []
    monkeypatch.setattr(measure, "measure_in_this_process", lambda *_: used.append(False) or [])
    monkeypatch.setattr(measure, "measure_in_processes", lambda *_: used.append(True) or [])
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert list(_measured(benchmark, "gpu", [], [], Options(), float("inf"))) == [] and used == [several]
