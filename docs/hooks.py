"""What the site does to pages that are also read in the repository: links to files there become links to pages here."""

import re
from typing import Any

FAMILY = re.compile(r"\]\((?:\.\./)+src/ejkernel/kernels/(\w+)/README\.md(#[\w-]+)?\)")
EXAMPLE = re.compile(r"\]\((?:\.\./)+examples/(\w+)\.py\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page before it is rendered."""
    up = "../" * page.file.src_uri.count("/")
    markdown = FAMILY.sub(lambda m: f"]({up}families/{m[1]}.md{m[2] or ''})", markdown)
    return EXAMPLE.sub(lambda m: f"]({up}examples.md#{m[1].replace('_', '-')})", markdown)
