"""What the commands print on: a console, and tables that all look the same."""

import os
from typing import Any

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """As wide as the terminal, or as COLUMNS says; in a file or a pipe wide enough for every table there is."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=240)


def table(*columns: str, right: tuple[str, ...] = (), unbroken: tuple[str, ...] = (), **options: Any) -> Table:
    """A table with some columns to the right, and some that are never broken into lines."""
    made = Table(title_justify="left", title_style="bold", **options)
    for column in columns:
        justify = "right" if column in right else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=column in unbroken)
    return made
