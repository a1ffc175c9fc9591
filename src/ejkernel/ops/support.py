"""The support table: every feature of an operation against every platform, asked of the implementations themselves."""

from collections.abc import Callable
from typing import Any

from ejkernel.ops.operation import Operation
from ejkernel.ops.platforms import PLATFORMS, TYPICAL
from ejkernel.ops.registry import get_operation
from ejkernel.ops.settings import changed

_SHORT = {"cpu": "CPU", "gpu": "Hopper", "tpu": "TPU"}


def _columns(operation: Operation) -> dict[str, tuple[str, str]]:
    """Platform and backend by title; one program of several backends, as XLA's, is one column."""
    found = {}
    for name, row in PLATFORMS.items():
        entry = operation.implementations.get(name, {})
        if isinstance(entry, str):
            found[name] = (name, row.backends[0])
        else:
            found |= {f"{name} ({_SHORT[b]})": (name, b) for b in row.backends if b in entry}
    return found


def support_table(operation: Operation | str | Callable[..., Any]) -> str:
    """A Markdown table of features against platforms, generated from each platform's `unsupported`.

    >>> from ejkernel.ops import support_table
    >>> support_table("flash_attention").splitlines()[0].startswith("| feature |")
    True
    """
    operation = get_operation(operation)
    if operation.made_of:  # of its own it has none: those of the calls it makes
        parts = [f"{name}:\n\n{support_table(name)}" for name in operation.made_of]
        return "\n\n".join(parts)
    columns = _columns(operation)
    rows = ["| feature | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for feature, call in operation.probes().items():
        cells = []
        for platform, backend in columns.values():
            with changed(device=TYPICAL[backend]):  # which has all packages
                reasons = operation.load(platform, backend).unsupported(call.on(TYPICAL[backend]))
            cells.append("yes" if not reasons else "no: " + "; ".join(reasons))
        rows.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(rows)
