"""The command line knows families only by what these say of themselves."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

import ejkernel
from ejkernel.cli.commands import make_app
from ejkernel.cli.families import families, family_of
from ejkernel.cli.sizes import described, with_sizes
from ejkernel.families import registered_families
from ejkernel.kernels import FAMILIES
from ejkernel.kernels.pooling import family as pooling
from ejkernel.ops import list_operations, register_families, tuning

PACKAGE = Path(ejkernel.__file__).parent


@pytest.mark.parametrize("package", ["cli", "family"])
def test_no_family_is_known_by_name(package):
    operations = {*list_operations()} - {"attention"}  # which is an English word too
    names = [*families(), *(package.split(".")[-1] for package in FAMILIES), *operations]
    pattern = re.compile(f"(?<![a-z])({'|'.join(names)})(?![a-z])")  # a ring is not in a string
    named = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((PACKAGE / package).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not named


def test_every_operation_is_in_a_family_and_can_be_described():
    for operation in list_operations():
        family = family_of(operation)
        assert family.function(operation).__name__ == operation
        assert described(operation, {"batch": 3, "length": 48})


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """The command line after the one line that a family needs beside its folder."""
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("ejkernel.families._FAMILIES", [*registered_families()])
    monkeypatch.setattr(tuning, "REPEATS", 1)
    register_families("toy_family")

    def run(*arguments):
        result = CliRunner().invoke(make_app(), arguments)
        return result.exit_code, result.output

    return run


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")
@pytest.mark.parametrize(
    ("command", "expected"),
    {
        "explain decayed_sum --length 16 --decay 0.9": "decayed_sum on cpu: xla",
        "verify decayed_sum": "all 1 checks passed",
        "tune decayed_sum --platform xla": "1 tuned, kept in",
        "tune toy --platform xla": "decayed_sum, length 8, xla: ",
        "support decayed_sum": "| plain | yes |",
    }.items(),
    ids=str,
)
def test_a_new_family_needs_no_other_line(toy, command, expected):
    code, output = toy(*command.split())
    assert code == 0, output
    assert expected in output


def test_families_that_disagree_on_an_option(monkeypatch):
    def arguments(operation, *, length: str = "long"):
        return {}

    monkeypatch.setattr(pooling, "FAMILY", replace(pooling.FAMILY, arguments=arguments))
    with pytest.raises(TypeError, match=r"the families disagree on length: (int, )+str"):
        with_sizes(lambda sizes: None)
