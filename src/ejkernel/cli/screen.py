"""What the commands print on: a console wide enough for a log, and tables that look alike."""

from typing import Any

from rich.console import Console
from rich.table import Table


def console() -> Console:
    found = Console(highlight=False)
    # into a file or a log, tables need room: that of a benchmark with nine columns of names
    return found if found.is_terminal else Console(highlight=False, width=240)


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = (), **options: Any) -> Table:
    """A table with some columns to the right, and some that are never broken into lines."""
    made = Table(title_justify="left", title_style="bold", **options)
    for column in columns:
        justify = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=column in whole)
    return made
