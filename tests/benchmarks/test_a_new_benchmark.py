"""What is measured of a family outside of the library, once its module is listed: the toy of `tests/toy_family`."""

import jax
import pytest
from typer.testing import CliRunner

from benchmarks import command_line
from benchmarks.measuring import measure, timing
from ejkernel.families import registered_families
from ejkernel.ops import register_families

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")


def test_a_new_benchmark_needs_no_other_line(monkeypatch, tmp_path):
    monkeypatch.setattr("ejkernel.families._FAMILIES", [*registered_families()])
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(command_line, "MODULES", (*command_line.MODULES, "toy_family.benchmark"))
    register_families("toy_family")
    result = CliRunner().invoke(command_line.make_app(), ["toy", "--repeats", "1"])
    assert result.exit_code == 0, result.output
    assert "2 measurements, every answer right" in result.output
