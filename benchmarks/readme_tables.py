"""Keep generated tables in Markdown files current: `python -m benchmarks.readme_tables --write` or `--check`.

The support table of an operation stands between `<!-- support:OPERATION -->` and `<!-- /support -->`. What was measured
stands between `<!-- benchmark:NAME -->` and `<!-- /benchmark -->`, from `benchmarks/results/NAME.json` where that is,
and what that comes to in a few lines between `<!-- summary:NAME -->` and `<!-- /summary -->`.
Rooflines stand between `<!-- roofline:FAMILY -->` and `<!-- /roofline -->`.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import ejkernel
from benchmarks.reporting import report
from ejkernel.cli.families import families
from ejkernel.ops import support_table

FAMILIES = Path(ejkernel.__file__).parent / "kernels"
RESULTS = Path(__file__).parent / "results"
NOTES = Path(__file__).parents[1] / "docs" / "notes"


def replace_sections(text: str, kind: str, make: Callable[[str], str | None]) -> str:
    r"""Put make(name) between every `<!-- kind:name -->` and `<!-- /kind -->`; None leaves what is there.

    >>> replace_sections("<!-- sum:1+1 -->\nold\n<!-- /sum -->", "sum", lambda name: str(eval(name)))
    '<!-- sum:1+1 -->\n2\n<!-- /sum -->'
    """
    pattern = re.compile(rf"(<!-- {kind}:([^ ]+) -->\n).*?(<!-- /{kind} -->)", re.DOTALL)

    def replaced(match: re.Match[str]) -> str:
        made = make(match[2])
        return match[0] if made is None else f"{match[1]}{made}\n{match[3]}"

    return pattern.sub(replaced, text)


def _measured(name: str) -> str | None:
    path = RESULTS / f"{name}.json"
    return report.markdown(report.load(path)) if path.exists() else None


def _summary(name: str) -> str | None:
    path = RESULTS / f"{name}.json"
    return report.summary(report.load(path)) if path.exists() else None


def pages() -> list[Path]:
    """The files that have such tables."""
    return sorted([*FAMILIES.glob("*/README.md"), *NOTES.glob("*.md")])


def _bounds(family: str) -> str | None:
    roofline = families()[family].roofline
    return None if roofline is None else roofline().table


def outdated(paths: list[Path], *, write: bool) -> list[Path]:
    """The files whose tables differ from what the code and the benchmarks say; with `write`, corrected."""
    outdated_paths = []
    for path in paths:
        old = path.read_text()
        new = replace_sections(replace_sections(old, "support", support_table), "benchmark", _measured)
        new = replace_sections(replace_sections(new, "summary", _summary), "roofline", _bounds)
        if new != old:
            outdated_paths.append(path)
            if write:
                path.write_text(new)
    return outdated_paths


def main(
    files: Annotated[
        list[Path] | None, typer.Argument(exists=True, dir_okay=False, help="Default: the families' READMEs and notes.")
    ] = None,
    write: Annotated[bool, typer.Option("--write/--check", help="Correct the files, or only report.")] = False,
) -> None:
    """Regenerate the tables, or exit with 1 where one is not current."""
    paths = files or pages()
    changed = outdated(paths, write=write)
    for path in changed:
        print(f"{'wrote' if write else 'not current:'} {path}")
    if changed and not write:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
