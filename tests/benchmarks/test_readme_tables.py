"""The generated tables in the READMEs."""

import json
import re

from typer.testing import CliRunner

from benchmarks import readme_tables as tables
from benchmarks.reporting import report
from benchmarks.reporting.report import SCHEMA
from ejkernel.ops import list_operations, support_table


def test_tables_are_current():
    outdated = tables.outdated(tables.pages(), write=False)
    assert not outdated, f"run `make tables`: {outdated}"


def test_every_family_has_a_readme_with_its_tables():
    families = [folder.parent for folder in tables.FAMILIES.glob("*/spec.py")]
    assert families
    named = set()
    for family in families:
        named |= set(re.findall(r"<!-- support:([^ ]+) -->", (family / "README.md").read_text()))
    assert named <= set(list_operations())
    assert len(named) >= len(families)


def test_write_then_check(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- support:flash_attention -->\nstale\n<!-- /support -->\nb\n")
    command = tables.typer.Typer()
    command.command()(tables.main)
    run = CliRunner().invoke
    assert run(command, [str(readme), "--check"]).exit_code == 1
    assert run(command, [str(readme), "--write"]).exit_code == 0
    assert run(command, [str(readme), "--check"]).exit_code == 0
    table = support_table("flash_attention")
    assert readme.read_text() == f"a\n<!-- support:flash_attention -->\n{table}\n<!-- /support -->\nb\n"


def test_what_was_measured_comes_from_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmark:softmax_abacus -->\nstale\n<!-- /benchmark -->\n")
    assert not tables.outdated([readme], write=True) and "stale" in readme.read_text()
    run = {
        "benchmark": "softmax",
        "date": "2026-11-15",
        "machine": {"device": "abacus"},
        "contenders": {"beads": "xla"},
    }
    run |= {"schema": SCHEMA, "missing": {"fingers": "not installed"}, "cases": {}, "results": [], "complete": True}
    (tmp_path / "softmax_abacus.json").write_text(json.dumps(run))
    assert tables.outdated([readme], write=True) == [readme]
    assert "abacus" in readme.read_text() and "- fingers: not installed\n<!-- /benchmark -->" in readme.read_text()


def test_a_summary_has_the_range_of_each_group():
    lines = report.summary(report.load(tables.RESULTS / "paged_nvidia_h200.json")).splitlines()
    assert lines[0].startswith("1 x nvidia_h200") and lines[2:4] == ["| cases | forward |", "| --- | --- |"]
    assert lines[4:] == ["| decode | 0.99 - 1.51x (5) |", "| mixed | no peer |"]


def test_sections_of_other_kinds_are_left_alone():
    text = "<!-- benchmark:x -->\nnumbers\n<!-- /benchmark -->"
    assert tables.replace_sections(text, "support", support_table) == text
