"""What is private or undocumented of JAX and is imported here is still there: `make nightly` asks its pre-release.

A failure names the line. Imports in a `try`, or behind a condition, are of versions that may not be this one.
"""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def is_private(module: str, name: str) -> bool:
    first, *rest = [*module.split("."), name]
    return first == "jaxlib" or (first == "jax" and any(part.startswith("_") for part in rest))


def private_imports() -> dict[str, tuple[str, str]]:
    """By file and line: the module and the name."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        guards = [node for node in ast.walk(tree) if isinstance(node, (ast.Try, ast.If))]
        guarded = {id(inner) for guard in guards for inner in ast.walk(guard)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level and id(node) not in guarded:
                for alias in node.names:
                    if is_private(node.module, alias.name):
                        found[f"{path.relative_to(ROOT)}:{node.lineno} {alias.name}"] = (node.module, alias.name)
    return found


IMPORTS = private_imports()


@pytest.mark.parametrize("where", IMPORTS)
def test_a_private_name_is_still_there(where):
    module, name = IMPORTS[where]
    package = importlib.import_module(module)
    assert hasattr(package, name) or importlib.util.find_spec(f"{module}.{name}"), f"{where} of {module}"
