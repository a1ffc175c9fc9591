"""The command line and the benchmarks know families only by what these say of themselves."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import ejkernel
from ejkernel.cli.families import families, family_of
from ejkernel.cli.sizes import described, with_sizes
from ejkernel.kernels import FAMILIES
from ejkernel.kernels.pooling import about
from ejkernel.ops import list_operations

PACKAGE = Path(ejkernel.__file__).parent


@pytest.mark.parametrize("room", ["cli", "bench", "about"])
def test_no_family_is_known_by_name(room):
    names = [*families(), *(package.split(".")[-1] for package in FAMILIES), *list_operations()]
    pattern = re.compile("|".join(names))
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_every_operation_is_in_a_family_and_can_be_described():
    for operation in list_operations():
        family = family_of(operation)
        assert family.function(operation).__name__ == operation
        assert described(operation, {"batch": 3, "length": 48})


def test_families_that_disagree_on_an_option(monkeypatch):
    def arguments(operation, *, length: str = "long"):
        return {}

    monkeypatch.setattr(about, "FAMILY", replace(about.FAMILY, arguments=arguments))
    with pytest.raises(TypeError, match="the families disagree on length: int, int, str"):
        with_sizes(lambda sizes: None)
