"""What is private in JAX stands in one file, which says what it is."""

import ast
from pathlib import Path

import ejkernel
from ejkernel.ops import private_jax
from ejkernel.ops.platforms import PLATFORMS

ROOT = Path(ejkernel.__file__).parent
ALLOWED = {"ops/private_jax.py"}


def private_imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("jax._src")]


def test_nothing_else_imports_it():
    mosaic = ROOT / "kernels" / "softmax" / "mosaic_gpu"  # its own file says what it uses of Mosaic
    others = [path for path in ROOT.rglob("*.py") if mosaic not in path.parents]
    importing = {path.relative_to(ROOT).as_posix() for path in others if private_imports(path)}
    assert importing == ALLOWED


def test_what_it_names_is_there():
    assert list(private_jax.entered_meshes()) and private_jax.cudnn_takes_offsets()


def test_versions_agree_with_what_is_installed_by_the_project():
    """The first version that nobody has tried is the bound in pyproject.toml."""
    text = (ROOT.parents[1] / "pyproject.toml").read_text()
    for row in PLATFORMS.values():
        for package, before in row.known:
            assert f"{package}>=" in text or f"{package}[" in text
            assert f"<{before}" in text, (package, before)
