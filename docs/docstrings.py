"""Docstrings as the reference shows them: examples as blocks of code, and what is returned as it is written."""

import re
from textwrap import dedent
from typing import Any

import griffe

# Markdown would take these for quotations
EXAMPLE = re.compile(r"(?m)^(?:>>> .*\n(?:(?!>>> ).+\n?)*)+")
# and the parser of docstrings a sentence with a colon for a type and its description
RETURNS = re.compile(r"(?m)^Returns:\n((?:[ ]+.*\n|\n)+)")


def shown(docstring: str) -> str:
    """The same with a fence around every example, and the section on what is returned as plain text."""
    text = EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", docstring + "\n")
    return RETURNS.sub(lambda found: f"**Returns:**\n\n{dedent(found[1])}\n", text).rstrip()


class Docstrings(griffe.Extension):
    """Called by mkdocstrings for everything that it reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = shown(obj.docstring.value)
