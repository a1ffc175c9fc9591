"""Keep generated tables in Markdown files current: `python -m ejkernel.cli.tables --write` or `--check`.

A table stands between `<!-- support:flash_attention -->` and `<!-- /support -->`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import ejkernel
from ejkernel.ops import support_table

FAMILIES = Path(ejkernel.__file__).parent / "kernels"


def replace_sections(text: str, kind: str, make: Callable[[str], str]) -> str:
    r"""Put make(name) between every `<!-- kind:name -->` and `<!-- /kind -->`.

    >>> replace_sections("<!-- sum:1+1 -->\nold\n<!-- /sum -->", "sum", lambda name: str(eval(name)))
    '<!-- sum:1+1 -->\n2\n<!-- /sum -->'
    """
    pattern = re.compile(rf"(<!-- {kind}:([^ ]+) -->\n).*?(<!-- /{kind} -->)", re.DOTALL)
    return pattern.sub(lambda match: f"{match[1]}{make(match[2])}\n{match[3]}", text)


def outdated(paths: list[Path], *, write: bool) -> list[Path]:
    """The files whose support tables differ from what the code says; with `write`, corrected."""
    found = []
    for path in paths:
        old = path.read_text()
        new = replace_sections(old, "support", support_table)
        if new != old:
            found.append(path)
            if write:
                path.write_text(new)
    return found


def main(
    files: Annotated[list[Path] | None, typer.Argument(help="Markdown files; default: the families' READMEs.")] = None,
    write: Annotated[bool, typer.Option("--write/--check", help="Correct the files, or only report.")] = False,
) -> None:
    """Regenerate the support tables, or exit with 1 where one is not current."""
    paths = files or sorted(FAMILIES.glob("*/README.md"))
    changed = outdated(paths, write=write)
    for path in changed:
        print(f"{'wrote' if write else 'not current:'} {path}")
    if changed and not write:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
