"""What the site does to pages that are also read in the repository: links to files there become links to pages here."""

import re
from pathlib import Path
from typing import Any

INCLUDED = re.compile(r'^--8<-- "(src/\S+\.md)"$', re.MULTILINE)
SIBLING = re.compile(r"\]\(\.\./(\w+)/README\.md(#[\w-]+)?\)")
FAMILY = re.compile(r"\]\((?:\.\./)+src/ejkernel/kernels/(\w+)/README\.md(#[\w-]+)?\)")
EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(\w+)\.py\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page before it is rendered."""
    up = "../" * page.file.src_uri.count("/")
    markdown = INCLUDED.sub(lambda m: _readme(m[1]), markdown)
    markdown = FAMILY.sub(lambda m: f"]({up}families/{m[1]}.md{m[2] or ''})", markdown)
    return EXAMPLE.sub(lambda m: f"]({up}examples.md#{m[1].replace('_', '-')})", markdown)


def _readme(path: str) -> str:
    """A family's own page: its links to others are links to their pages, beside this one."""
    text = (Path(__file__).parents[1] / path).read_text()
    return SIBLING.sub(lambda m: f"]({m[1]}.md{m[2] or ''})", text)
