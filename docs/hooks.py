"""What the site does to pages that are also read in the repository: links to files there become links to pages here."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INCLUDED = re.compile(r'^--8<-- "(src/\S+\.md)"$', re.MULTILINE)
SIBLING = re.compile(r"\]\(\.\./(\w+)/README\.md(#[\w-]+)?\)")
FAMILY = re.compile(r"\]\((?:\.\./)+src/ejkernel/kernels/(\w+)/README\.md(#[\w-]+)?\)")
PAGE = re.compile(r"\]\((?:\.\./)+docs/((?:notes/)?\w+\.md)(#[\w-]+)?\)")
PLOT = re.compile(r"\]\((?:\.\./)+(benchmarks/results/\w+\.svg)\)")
EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(\w+)\.py\)")


def plots() -> list[str]:
    """Pictures of measurements, which lie beside their numbers, outside the site's own folder."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "benchmarks" / "results").glob("*.svg")
    )


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Called by mkdocs once: what lies outside joins the site."""
    from mkdocs.structure.files import File

    for path in plots():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page before it is rendered."""
    up = "../" * page.file.src_uri.count("/")
    markdown = INCLUDED.sub(lambda m: _readme(m[1]), markdown)
    markdown = FAMILY.sub(lambda m: f"]({up}families/{m[1]}.md{m[2] or ''})", markdown)
    markdown = PAGE.sub(lambda m: f"]({up}{m[1]}{m[2] or ''})", markdown)
    markdown = PLOT.sub(lambda m: f"]({up}{m[1]})", markdown)
    return EXAMPLE.sub(lambda m: f"]({up}examples.md#{m[1].replace('_', '-')})", markdown)


def _readme(path: str) -> str:
    """What a README says, behind the reference: its links to others are links to their pages, beside this one."""
    text = re.sub(r"\A# .*$", "## How it works", (ROOT / path).read_text(), flags=re.MULTILINE)
    return SIBLING.sub(lambda m: f"]({m[1]}.md{m[2] or ''})", text)
