"""Layers: the packages of `src/ejkernel` import one another in one direction, and no files import in a circle.

Every way to import counts: statements inside functions, and names in strings, of which tables for `import_module` are
made. What only type checkers read does not.
"""

import ast
import graphlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(ejkernel.__file__).parent

# Files that import by a name which a caller gives: what they load is written in the caller's file, and counts there.
NAMED_BY_CALLERS = {
    "ejkernel.family.description",
    "ejkernel.ops.operation",
    "ejkernel.ops.registry",
}


def module_of(path: Path) -> str:
    names = ("ejkernel", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def layer_of(module: str) -> str:
    """The package under `ejkernel`; also `kernels/common`, `kernels/family` (of each family), and `ejkernel` itself."""
    names = module.split(".")
    if names[1:2] == ["kernels"] and ("common" in names or names[-1] == "family"):
        return "kernels/common" if "common" in names else "kernels/family"
    return "".join(names[1:2]) or "ejkernel"


def imports_of(source: str, package: str) -> Iterator[str]:
    """The modules of the library that a file names, in import statements and in strings."""
    nodes = list(read_nodes(ast.parse(source)))
    strings = strings_of(nodes)
    yield from module_names(strings)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." * bool(node.module) if node.level else ""
            base += node.module or ""
            yield from (known(f"{base}.{alias.name}") or base for alias in node.names)
        elif imports_by_name(node):
            yield from named(node.args[0], strings)


def strings_of(nodes: list[ast.AST]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def module_names(strings: set[str]) -> list[str]:
    """The strings that are names of modules; "ejkernel" alone is rather that of the program."""
    return sorted(strings & FILES.keys() - {"ejkernel"})


def imports_by_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module")


def named(argument: ast.AST, strings: set[str]) -> list[str]:
    """The modules that an f-string makes of the strings in its file; other arguments name them in full."""
    if not isinstance(argument, ast.JoinedStr):
        return []
    parts = (re.escape(str(x.value)) if isinstance(x, ast.Constant) else "(.+)" for x in argument.values)
    pattern = re.compile("".join(parts))
    return [name for name in FILES if (match := pattern.fullmatch(name)) and strings.issuperset(match.groups())]


def read_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from read_nodes(child)


def known(module: str) -> str | None:
    return module if module in FILES else None


@cache
def graph() -> dict[str, set[str]]:
    """Which files each file imports."""
    edges = {}
    for module, path in FILES.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = imports_of(path.read_text(), package)
        edges[module] = {name for name in names if name in FILES and name != module}
    return edges


def order(edges: dict[str, set[str]]) -> list[str]:
    """From the ground up; CycleError names a circle."""
    return list(graphlib.TopologicalSorter(edges).static_order())


def layers() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for module, targets in graph().items():
        edges.setdefault(layer_of(module), set()).update(layer_of(target) for target in targets)
    return {layer: targets - {layer} for layer, targets in edges.items()}


def test_layers_import_one_another_in_one_direction():
    from_the_ground_up = order(layers())
    for some in (["checks", "expressions", "types", "kernels", "modules"], ["ops", "kernels/common", "kernels"]):
        assert sorted(some, key=from_the_ground_up.index) == some
    assert layers()["checks"] == layers()["families"] == layers()["expressions"] == set()
    assert layers()["ops"] <= {"checks", "families"}
    assert layers()["cache"] == {"checks"} and layers()["types"] == {"checks", "cache", "expressions"}


def test_what_is_installed_needs_no_benchmark():
    packages = {name.split(".")[0] for path in FILES.values() for name in imported_names(path.read_text())}
    assert "jax" in packages and "benchmarks" not in packages


def imported_names(source: str) -> Iterator[str]:
    """Every module in an import statement, those for type checkers too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_files_do_not_import_in_a_circle():
    order(graph())


def test_computed_names_are_known_or_given_by_callers():
    """An `import_module` whose name nobody can read from the file could hide a circle."""
    unknown = set()
    for module, path in FILES.items():
        nodes = list(read_nodes(ast.parse(path.read_text())))
        strings = strings_of(nodes)
        for argument in (node.args[0] for node in nodes if imports_by_name(node)):
            formatted = isinstance(argument, ast.JoinedStr)
            if not (
                isinstance(argument, ast.Constant) or (named(argument, strings) if formatted else module_names(strings))
            ):
                unknown.add(module)
    assert unknown <= NAMED_BY_CALLERS


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        ("import ejkernel.ops.target", "ejkernel.ops.target"),
        ("from ejkernel.ops import target", "ejkernel.ops.target"),
        ("from ejkernel.ops import run", "ejkernel.ops"),
        ("from ..ops import target", "ejkernel.ops.target"),
        ("from .mask import MaskInfo", "ejkernel.types.mask"),
        ("def f():\n    from ejkernel.ops import run", "ejkernel.ops"),
        ("importlib.import_module('ejkernel.modules')", "ejkernel.modules"),
        (
            "def __getattr__(name):\n    return import_module(TABLE[name])\nTABLE = {'run': 'ejkernel.ops'}",
            "ejkernel.ops",
        ),
        ("TABLE = {name: 'ejkernel.cache' for name in __all__ if name not in globals()}", "ejkernel.cache"),
        ("def load(name):\n    return import_module(f'ejkernel.{name}')\nload('modules')", "ejkernel.modules"),
        ("if TYPE_CHECKING:\n    import ejkernel.ops", None),
        ('"""Says `ejkernel.ops` in a sentence."""', None),
    ],
)
def test_what_counts_as_an_import(source, imported):
    assert [name for name in imports_of(source, "ejkernel.types") if name in FILES] == [
        name for name in [imported] if name
    ]


def test_a_circle_is_seen():
    with pytest.raises(graphlib.CycleError):
        order({"a": {"b"}, "b": {"c"}, "c": {"a"}})
