"""Code that pages show in full, on the site and on GitHub: `python docs/quotes.py` writes it anew; a test compares.

A block of code with the path of a file as its title has the contents of that file.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent
BLOCK = re.compile(r'(^```py title="([\w/.]+)"\n).*?(^```$)', re.MULTILINE | re.DOTALL)


def quoted(text: str) -> str:
    """The page with every such block as its file is now."""
    return BLOCK.sub(
        lambda match: f"{match[1]}{(DOCS.parent / match[2]).read_text()}{match[3]}", text
    )


if __name__ == "__main__":
    for page in DOCS.rglob("*.md"):
        page.write_text(quoted(page.read_text()))
