"""`ejkernel tune`: what it measures, keeps, skips and says. Times are made up."""

import dataclasses

import jax
import pytest
from typer.testing import CliRunner

from ejkernel.cli.commands import app
from ejkernel.cli.families import families
from ejkernel.cli.sizes import described
from ejkernel.family import TypicalCall
from ejkernel.kernels.softmax import family, xla
from ejkernel.ops import TunedConfigs, explain, tuning
from ejkernel.ops.tuned_files import user_file

FAST, SLOW = xla.Config(16, 16), xla.Config(8, 8)
SIZES = ["--length", "32", "--heads", "2", "--dim", "8", "--dtype", "float32", "--causal"]
CALLS = [
    TypicalCall(
        ("flash_attention", "scaled_dot_product_attention"),
        {"length": T, "heads": 2, "dim": 8, "dtype": "float32", "causal": True},
    )
    for T in (8, 32)
]

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")


def tune(*arguments):
    result = CliRunner().invoke(app, ["tune", *arguments])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The configs measured, in order: all but the fast one take 2 ms for both passes."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(xla.IMPLEMENTATION, "search_space", lambda call: [SLOW, FAST])
    changed = dataclasses.replace(family.FAMILY, typical_calls=lambda backend, quick: CALLS[:1] if quick else CALLS)
    monkeypatch.setattr(family, "FAMILY", changed)
    seen = []

    def measure(operation, implementation, call, config, arrays):
        seen.append((call["query"].shape[1], config))
        return (0.0002, 0.0006) if config == FAST else (0.0005, 0.0015)

    monkeypatch.setattr(tuning, "_measure", measure)
    return seen


def kept():
    return TunedConfigs.load(user_file("cpu")).entries


def test_a_call_of_some_sizes(measured):
    code, output = tune("flash_attention", *SIZES)
    assert code == 0 and len(measured) == 3
    assert f"800 us with {FAST}, of 3 configs, 2.50 times as fast as the default (2000 us)" in output
    assert "cudnn: not on cudnn: needs an NVIDIA GPU" in output and output.endswith("tuned/cpu.json")
    assert [*kept()] == ["flash_attention"]
    (entry,) = kept()["flash_attention"].values()
    assert entry["xla"]["config"] == dataclasses.asdict(FAST) and entry["xla"]["training"] == pytest.approx(600)


def test_what_is_known_is_measured_on_request_only(measured):
    tune("flash_attention", *SIZES)
    code, output = tune("flash_attention", *SIZES)
    assert code == 0 and "already tuned, --again measures it again" in output and len(measured) == 3
    assert tune("flash_attention", *SIZES, "--again")[0] == 0 and len(measured) == 6


def test_the_typical_calls_of_a_family(measured):
    """Kept for every operation that has these kernels."""
    code, output = tune("softmax")
    assert code == 0 and "2 tuned, kept in" in output and {T for T, _ in measured} == {8, 32}
    assert output.count("not on cudnn") == 1
    assert kept()["flash_attention"] == kept()["scaled_dot_product_attention"] and len(kept()["flash_attention"]) == 2


def test_the_typical_calls_of_an_operation(measured):
    assert tune("scaled_dot_product_attention", "--quick")[0] == 0
    assert [*kept()] == ["scaled_dot_product_attention"] and {T for T, _ in measured} == {8}


def test_an_operation_made_of_anothers_calls(measured):
    """The call of one device is measured, and kept under the name that it is looked up by."""
    code, output = tune("ring_attention", *SIZES)
    assert code == 0 and len(measured) == 3 and "1 tuned, kept in" in output
    assert [*kept()] == ["flash_attention"]
    code, output = tune("ring_attention", *SIZES)
    assert code == 0 and "already tuned, --again measures it again" in output and len(measured) == 3
    output = CliRunner().invoke(app, ["explain", "ring_attention", *SIZES]).output
    assert f"config: {FAST} (from the user's tuned file)" in " ".join(output.split())


def test_an_interrupt_keeps_what_was_done(measured, monkeypatch):
    made_up = tuning._measure

    def measure(operation, implementation, call, config, arrays):
        if call["query"].shape[1] == 32:
            raise KeyboardInterrupt
        return made_up(operation, implementation, call, config, arrays)

    monkeypatch.setattr(tuning, "_measure", measure)
    code, output = tune("flash_attention")
    assert code == 130 and "1 tuned, kept in" in output
    assert len(kept()["flash_attention"]) == 1
    monkeypatch.setattr(tuning, "_measure", made_up)
    code, output = tune("flash_attention")
    assert code == 0 and output.count("already tuned") == 1 and len(kept()["flash_attention"]) == 2


def test_the_default_may_be_the_fastest_or_fail(measured, monkeypatch):
    monkeypatch.setattr(tuning, "_measure", lambda *a: (0.001,))
    assert "the default is the fastest" in tune("flash_attention", *SIZES)[1]

    def measure(operation, implementation, call, config, arrays):
        if config != SLOW:
            raise MemoryError("too large")
        return (0.001,)

    monkeypatch.setattr(tuning, "_measure", measure)
    code, output = tune("flash_attention", *SIZES, "--again")
    assert code == 0 and "3 configs, 2 of which failed; the default failed: MemoryError: too large" in output

    def broken(*arguments):
        raise MemoryError("too large")

    monkeypatch.setattr(tuning, "_measure", broken)
    code, output = tune("flash_attention", *SIZES, "--again")
    assert code == 1 and "no config of flash_attention on xla could be measured" in output


@pytest.mark.parametrize("device", ["h200", "v5e", None])
@pytest.mark.parametrize("name", families())
def test_typical_calls_can_be_described_and_run_somewhere(name, device):
    backend = {"h200": "gpu", "v5e": "tpu", None: "cpu"}[device]
    family = families()[name]
    few, all_calls = (family.typical_calls(backend, quick) for quick in (True, False))
    assert len(few) <= len(all_calls)
    for call in [*few, *all_calls]:
        for operation in call.operations:
            arguments = described(operation, call.sizes)
            assert explain(family.function(operation), **arguments, device=device).platform is not None, call


@pytest.mark.filterwarnings("ignore:tuned configs could not be saved")
def test_what_cannot_be_kept_is_said(measured, tmp_path):
    user_file("cpu").parent.write_text("in the way")
    code, output = tune("flash_attention", *SIZES)
    assert code == 1 and "1 tuned, could not be kept in" in output


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("flash_attention --platform cudnn", 1, "not on cudnn: needs an NVIDIA GPU"),
        ("flash_attention --platform abacus", 2, "unknown platform 'abacus'; known: xla"),
        ("abacus", 2, "unknown operation 'abacus'; known: "),
        ("softmax --length 32", 2, "sizes are those of one operation; softmax has flash_attention"),
        ("flash_attention --chunk-size 4", 2, "flash_attention has no chunk_size"),
    ],
)
def test_what_cannot_be_tuned(measured, command, code, message):
    exit_code, output = tune(*command.split())
    assert exit_code == code and message in output and not measured
