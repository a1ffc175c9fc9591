"""The house: rooms, the packages of `src/ejkernel`, import one another one way.

Imports inside functions count, as do modules loaded by a name that is written down. What only type checkers read does
not.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(ejkernel.__file__).parent


def module_of(path: Path) -> str:
    parts = ("ejkernel", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def room_of(module: str) -> str:
    """The package on top, where `kernels/common` is one of its own, and so is the front door."""
    parts = module.split(".")
    return "kernels/common" if parts[1:3] == ["kernels", "common"] else "".join(parts[1:2]) or "ejkernel"


def imports_of(source: str, package: str) -> Iterator[str]:
    """The modules of the library that a file names."""
    for node in read_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." * bool(node.module) if node.level else ""
            base += node.module or ""
            yield from (known(f"{base}.{alias.name}") or base for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (x.value for x in node.args if isinstance(x, ast.Constant))


def read_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from read_nodes(child)


def known(module: str) -> str | None:
    return module if module in FILES else None


def graph() -> dict[str, set[str]]:
    """Which files each file imports."""
    found = {}
    for module, path in FILES.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = imports_of(path.read_text(), package)
        found[module] = {name for name in names if name in FILES and name != module}
    return found


def order(edges: dict[str, set[str]]) -> list[str]:
    """From the ground up; CycleError names a circle."""
    return list(graphlib.TopologicalSorter(edges).static_order())


def rooms() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for module, targets in graph().items():
        edges.setdefault(room_of(module), set()).update(room_of(target) for target in targets)
    return {room: targets - {room} for room, targets in edges.items()}


def test_rooms_import_one_another_one_way():
    floors = order(rooms())
    for ground_up in (["checks", "types", "kernels", "modules", "cache"], ["ops", "kernels/common", "kernels"]):
        assert sorted(ground_up, key=floors.index) == ground_up
    assert rooms()["checks"] == rooms()["families"] == set() and rooms()["ops"] <= {"checks", "families"}


def test_files_import_one_another_one_way():
    order(graph())


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import ejkernel.ops.target", "ejkernel.ops.target"),
        ("from ejkernel.ops import target", "ejkernel.ops.target"),
        ("from ejkernel.ops import run", "ejkernel.ops"),
        ("from ..ops import target", "ejkernel.ops.target"),
        ("from .mask import MaskInfo", "ejkernel.types.mask"),
        ("def f():\n    from ejkernel.ops import run", "ejkernel.ops"),
        ("importlib.import_module('ejkernel.modules')", "ejkernel.modules"),
        ("if TYPE_CHECKING:\n    import ejkernel.ops", None),
    ],
)
def test_what_counts_as_an_import(source, found):
    assert [name for name in imports_of(source, "ejkernel.types") if name in FILES] == [
        name for name in [found] if name
    ]


def test_a_circle_is_seen():
    with pytest.raises(graphlib.CycleError):
        order({"a": {"b"}, "b": {"c"}, "c": {"a"}})
