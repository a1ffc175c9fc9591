"""The CPU benchmark runs, checks its answers and draws its tables, at toy sizes."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "softmax_cpu.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("softmax_cpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["softmax_cpu"] = module
    spec.loader.exec_module(module)
    return module


def test_benchmark_at_toy_size(benchmark, tmp_path):
    families, picture = tmp_path / "kernels", tmp_path / "picture.svg"
    readme = families / "softmax" / "README.md"
    readme.parent.mkdir(parents=True)
    readme.write_text("<!-- benchmark:softmax_cpu -->\n<!-- /benchmark -->\n")
    benchmark.FAMILIES, benchmark.PICTURE = families, picture
    command = benchmark.typer.Typer()
    command.command()(benchmark.main)
    output = tmp_path / "result.json"
    arguments = [
        "--length",
        "64",
        "--heads",
        "2",
        "--dim",
        "16",
        "--repeats",
        "1",
        "--output",
        str(output),
        "--write-readme",
    ]
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "all answers are right" in result.output
    assert {"machine", "peers", "savings", "date"} <= set(json.loads(output.read_text()))
    assert "the speed of `jax.nn`" in readme.read_text()
    assert picture.read_text().startswith("<?xml")


def test_a_wrong_answer_stops_the_benchmark(benchmark):
    with pytest.raises(SystemExit, match="wrong answer"):
        benchmark.check("forward", benchmark.np.ones(3), benchmark.np.full(3, 1.1))
