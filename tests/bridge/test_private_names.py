"""What is undocumented of Triton and jax-triton is used in one file each: a new version is looked at there."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BRIDGE = ROOT / "src/ejkernel/bridge"
SOURCES = [path for folder in ("src", "benchmarks", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]

# of `triton`, and of `triton.language`, whichever name a file gives it
UNDOCUMENTED = ("_C", "backends", "compiler", "compile", "runtime", "knobs", "tools")
UNDOCUMENTED_LANGUAGE = ("core", "standard", "semantic", "str_to_ty", "tensor", "block_type")


def private_uses(source: str) -> list[str]:
    """Imports and attributes of Triton beyond the language and `jit`, and any import of jax-triton."""
    uses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            uses += [alias.name for alias in node.names if is_private(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            uses += [name for name in names if is_private(name)]
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            uses += [name] if is_private(re.sub(r"^tl\.", "triton.language.", name)) else []
    return uses


def is_private(name: str) -> bool:
    package, first, second = (*name.split("."), "", "")[:3]
    if package == "jax_triton":
        return True
    if package != "triton" or not first:
        return False
    if first == "language":
        return second in UNDOCUMENTED_LANGUAGE or second.startswith("_")
    return first in UNDOCUMENTED or first.startswith("_")


@pytest.mark.parametrize(
    "line",
    [
        "import jax_triton as jt",
        "from jax_triton import triton_call",
        "import triton.runtime.jit",
        "from triton import knobs",
        "from triton.compiler import ASTSource",
        "triton.runtime.driver.active",
        "tl.core.constexpr",
        "tl._experimental",
    ],
)
def test_a_private_use_is_seen(line):
    assert private_uses(line)


def test_the_language_and_jit_are_not_private():
    assert not private_uses(
        "import triton\nimport triton.language as tl\n@triton.jit\ndef f(x: tl.constexpr): tl.load(x)"
    )


@pytest.mark.parametrize("dependency", ["triton", "jax_triton"])
def test_nobody_else_uses_private_names(dependency):
    """A kernel of Triton's own language may be anywhere; its runtime, compiler and interpreter in one file."""
    home = BRIDGE / f"private_{dependency}.py"
    users = {path for path, names in uses_by_file().items() if names_of(dependency, names)}
    assert users == {home}


@cache
def uses_by_file() -> dict[Path, list[str]]:
    texts = {path: path.read_text() for path in SOURCES}
    return {path: private_uses(text) for path, text in texts.items() if "triton" in text}


def names_of(dependency: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("jax_triton") == (dependency == "jax_triton")]


@pytest.mark.parametrize("dependency", ["triton", "jax-triton"])
def test_the_versions_it_was_seen_in_are_those_that_may_be_installed(dependency):
    """The oldest and the newest that pyproject.toml allows are named where the private names are."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (allowed,) = {line for line in extras["cuda"] if re.match(rf"{dependency}[<>=]", line)}
    oldest, beyond = re.findall(r"\d+\.\d+", allowed)
    text = (BRIDGE / f"private_{dependency.replace('-', '_')}.py").read_text()
    first, last = (version.rsplit(".", 1)[0] for version in re.findall(r"\d+\.\d+\.\d+", text.split("Seen in")[1])[:2])
    major, minor = beyond.split(".")
    assert (first, last) == (oldest, f"{major}.{int(minor) - 1}")
