"""The index of every public name: `python docs/names.py` writes docs/reference.md, which a test compares.

A name is public where a page of the reference has it; what it is is the first line of its docstring.
"""

import importlib
import inspect
import re
from pathlib import Path

DOCS = Path(__file__).parent
FILE = DOCS / "reference.md"
SHOWN = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
WHOLE = ("ejgpu", "ejgpu.utils", "ejgpu.xla_utils")  # modules that a page shows whole


def named() -> dict[str, tuple[str, str]]:
    """By short name and package: the page with its anchor, and what it is."""
    found = {}
    for page in sorted((DOCS / "families").glob("*.md")):
        for path in SHOWN.findall(page.read_text()):
            module, _, name = path.rpartition(".")
            if path in WHOLE:
                whole = importlib.import_module(path)
                public = getattr(whole, "__all__", None) or [
                    n for n in vars(whole) if not n.startswith("_")
                ]
                names = [
                    n
                    for n in public
                    if getattr(getattr(whole, n), "__module__", "").startswith(path)
                ]
                entries = [(path, n) for n in names if inspect.getdoc(getattr(whole, n))]
            else:
                entries = [(module, name)]
            for package, short in entries:
                thing = getattr(importlib.import_module(package), short)
                found[f"{short} {package}"] = (
                    f"families/{page.name}#{package}.{short}",
                    summary(thing),
                )
    return found


def summary(thing: object) -> str:
    """The first line of a docstring, and those that end its sentence."""
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0]
    whole = re.match(r".*?[.:]$", paragraph, re.DOTALL | re.MULTILINE)
    return " ".join((whole[0] if whole else paragraph).split()).replace("|", "\\|")


def written() -> str:
    rows = []
    for key, (link, told) in sorted(named().items(), key=lambda one: one[0].lower()):
        name, package = key.split()
        rows.append(f"| [`{name}`]({link}) | `{package}` | {told} |")
    head = (
        "# Every name\n\nAll that is public, with the package it is imported from.\n"
        "What `ejkernel.modules`, `ejkernel.types` and `ejkernel.cache` have is in `ejkernel` too.\n"
        "The commands are in `ejkernel --help`.\n\n"
    )
    return head + "| name | from | what |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    FILE.write_text(written())
