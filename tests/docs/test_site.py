"""The site as far as it can be checked without building it: its pictures, its pages and its reference."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import ejgpu
import ejkernel
import ejkernel.modules
import ejkernel.operators
import ejkernel.types

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
PICTURES = runpy.run_path(str(DOCS / "pictures.py"))
NAMES = runpy.run_path(str(DOCS / "names.py"))
CHART = runpy.run_path(str(DOCS / "chart.py"))
QUOTES = runpy.run_path(str(DOCS / "quotes.py"))
HOOKS = runpy.run_path(str(DOCS / "hooks.py"))


@pytest.mark.parametrize("name", PICTURES["PICTURES"])
def test_pictures_are_current(name):
    assert (DOCS / "images" / "masks" / f"{name}.svg").read_text() == PICTURES["drawn"](name), "python docs/pictures.py"


def test_the_index_of_names_is_current_and_has_all():
    assert NAMES["FILE"].read_text() == NAMES["written"](), "python docs/names.py"
    names = {key.split()[0] for key in NAMES["named"]()}
    for package in (ejkernel, ejkernel.operators, ejgpu):
        assert set(package.__all__) - {"DIMS"} <= names, set(package.__all__) - names


def test_the_chart_is_current_and_fits_a_phone():
    chart = NAMES["DOCS"] / "images" / "h200.svg"
    assert chart.read_text() == CHART["drawn"](), "python docs/chart.py"
    width = int(re.search(r'viewBox="0 0 (\d+) ', chart.read_text())[1])
    smallest = min(map(int, re.findall(r'font-size="(\d+)"', chart.read_text())))
    assert smallest * 360 / width >= 10  # on a screen of 360 points


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in PAGES)])
def test_code_on_pages_fits(page):
    for block in re.findall(r"^```.*?^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            assert len(line) <= 96, line


@pytest.mark.parametrize("page", PAGES)
def test_quoted_files_are_current(page):
    text = (DOCS / page).read_text()
    assert QUOTES["quoted"](text) == text, "python docs/quotes.py"


def test_the_worked_example_is_shown_whole():
    shown = re.findall(r'^```py title="([\w/.]+)"$', (DOCS / "new_kernel.md").read_text(), re.MULTILINE)
    family = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "toy_family").glob("[a-z]*.py")}
    assert family <= set(shown)


def test_every_page_has_its_place():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_links_out_of_the_folder_become_links_to_pages(page):
    file = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    markdown = HOOKS["on_page_markdown"]((DOCS / page).read_text(), file)
    for target in re.findall(r"\]\((?!http)([^)#]+)", markdown):
        found = (DOCS / page).parent / target
        if found.resolve() in [DOCS / path for path in HOOKS["plots"]()]:
            continue
        assert found.exists() and DOCS in found.resolve().parents, target


def test_what_is_included_is_there():
    for page in PAGES:
        for path in re.findall(r'^--8<-- "(.*)"$', (DOCS / page).read_text(), re.MULTILINE):
            assert (ROOT / path).is_file(), path


def test_everything_public_is_in_the_reference():
    told = set(re.findall(r"^::: ([\w.]+)$", "\n".join((DOCS / page).read_text() for page in PAGES), re.MULTILINE))
    short = {name.rpartition(".")[2] for name in told}
    functions = {f"ejkernel.modules.{name}" for name in ejkernel.modules.__all__}
    assert functions <= told, functions - told
    plain = {"DIMS"}  # a table, in the glossary
    for room in (ejkernel.types, ejkernel.operators):
        assert set(room.__all__) - plain <= short, set(room.__all__) - plain - short
    assert {ejgpu.__name__, "ejgpu.utils", "ejgpu.xla_utils"} <= told
    names = re.findall(r'^    "(\w+)",$', (ROOT / "src/ejkernel/torch/__init__.py").read_text(), re.MULTILINE)
    assert names and {f"ejkernel.torch.{name}" for name in names} <= told


def test_the_glossary_names_what_is_there():
    page = (DOCS / "glossary.md").read_text()
    nouns = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    nouns = [noun for noun in nouns if noun not in ("noun", "---")]
    assert len(set(nouns)) == len(nouns)
    assert {"`Dims`", "`Spec`", "`Call`", "`Plan`", "`Config`", "`Target`", "`Shards`", "chunk", "sub-block"} <= set(
        nouns
    )
    for path in re.findall(r"`((?:src|benchmarks)[\w/]*(?:\.\w+)?)`", page):
        assert (ROOT / path).exists(), path
    answers = re.findall(r"`(\w+)` in `(src/[\w/]+\.py)`", page)
    assert len(answers) >= 10
    for name, path in answers:
        assert re.search(rf"^( *(class|def) |\s+){name}\b", (ROOT / path).read_text(), re.MULTILINE), (name, path)


def test_every_example_is_shown():
    for path in (ROOT / "examples").glob("*.py"):  # whose lines a page shows
        assert max(map(len, path.read_text().splitlines())) <= 96, path.name
    page = (DOCS / "examples.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f'--8<-- "examples/{path.name}"' in page
        assert f"{{ #{path.stem.replace('_', '-')} }}" in page
