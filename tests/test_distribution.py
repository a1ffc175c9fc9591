"""What is published: the wheel and the source distribution, and that both say the same as the repository."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import ejkernel

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DISTRIBUTION = PROJECT["project"]["name"]
PACKAGES = sorted(Path(path).name for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def shipped(folder: Path) -> set[str]:
    """The files of a folder that are meant, by their paths from the root."""
    made = {"__pycache__", ".ruff_cache"}
    found = (path for path in folder.rglob("*") if path.is_file() and not made & {*path.parts})
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with both distributions."""
    folder = tmp_path_factory.mktemp("dist")
    code = f"from hatchling import build; build.build_wheel({str(folder)!r}); build.build_sdist({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_packages_are_those_of_the_repository():
    assert sorted(path.name for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists()) == PACKAGES
    assert {"ejkernel", "ejgpu"} <= set(PACKAGES)


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {path.removeprefix("src/") for name in PACKAGES for path in shipped(ROOT / "src" / name)}
    assert names == expected
    assert {Path(name).suffix for name in names} <= {".py", ".md", ".json", ".typed", ".pyi"}
    assert {f"{name}/py.typed" for name in PACKAGES} <= names
    assert any(re.fullmatch(r"ejkernel/data/tuned/nvidia_h200.*\.json", name) for name in names)


def test_the_wheel_describes_itself(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    told = Parser().parsestr(wheel.read(name).decode())
    assert (told["Name"], told["Version"]) == (DISTRIBUTION, ejkernel.__version__)
    assert told["License-Expression"] == "Apache-2.0" and told["Requires-Python"] == ">=3.11"
    assert told["Description-Content-Type"] == "text/markdown" and told.get_payload().startswith("# ejkernel")
    extras = told.get_all("Provides-Extra")
    assert {"cuda", "tpu", "torch", "docs", "test"} <= set(extras)
    (entries,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    assert "ejkernel = ejkernel.cli.main:main" in wheel.read(entries).decode()
    assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())


def test_the_wheel_runs_where_nothing_else_is(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "import ejgpu, ejkernel; print(ejkernel.__file__); ejkernel.flash_attention"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))


def test_the_source_distribution_has_what_tests_and_docs_need(built):
    (path,) = built.glob("*.tar.gz")
    prefix = f"{DISTRIBUTION.replace('-', '_')}-{ejkernel.__version__}/"
    with tarfile.open(path) as archive:
        names = {name.removeprefix(prefix) for name in archive.getnames()}
    for folder in ("src", "tests", "benchmarks", "docs", "examples"):
        assert {name for name in names if name.startswith(f"{folder}/")} == shipped(ROOT / folder)
    single = {
        "PKG-INFO",
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "Makefile",
        "constraints.txt",
        "constraints-newest.txt",
        "mkdocs.yml",
    }
    single |= {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", ".gitignore"}
    assert {name for name in names if "/" not in name} == single


def test_versions_agree_everywhere():
    version = ejkernel.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_pythons_agree_everywhere():
    classifiers = " ".join(PROJECT["project"]["classifiers"])
    declared = re.findall(r"Python :: (3\.\d+)", classifiers)
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    (matrix,) = re.findall(r"python-version: \[(.*)\]", workflow)
    assert re.findall(r'"(3\.\d+)"', matrix) == declared
    assert PROJECT["project"]["requires-python"] == f">={declared[0]}"
    assert "make test" in workflow
    # `make` makes its environment with the Python of the job
    assert "VENV_PYTHON: python\n" in workflow and "$(VENV_PYTHON)" in (ROOT / "Makefile").read_text()


def test_hints_install_what_is_published():
    # another package on PyPI is called ejkernel
    assert DISTRIBUTION == "ejkernel-attention"
    extras = {*PROJECT["project"]["optional-dependencies"]}
    files = [path for name in ("src", "docs", "examples", "benchmarks") for path in sorted((ROOT / name).rglob("*"))]
    files = [path for path in files if path.suffix in (".py", ".md")] + [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    hints = [
        (path, *hint)
        for path in files
        for hint in re.findall(r"(ej\w+(?:-\w+)*)\[(\w+|\{[\w.]+\})\]['\"]", path.read_text())
    ]
    assert len(hints) >= 5
    for path, name, extra in hints:
        assert name == DISTRIBUTION, f"{path.relative_to(ROOT)} installs {name}"
        assert extra.startswith("{") or extra in extras, f"{path.relative_to(ROOT)} names an extra {extra}"


def test_every_workflow_runs_a_target_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        assert "secrets" not in text and "password" not in text, path.name
        used |= set(re.findall(r"\bmake ([a-z-]+)$", text, re.MULTILINE))
    assert used == {"test", "macos", "docs", "package", "newest", "nightly"} and used <= targets
