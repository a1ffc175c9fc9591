"""The support table: every feature of an operation against every platform, asked of the implementations themselves."""

from collections.abc import Callable
from typing import Any

from ejkernel.ops.operation import Operation
from ejkernel.ops.platforms import PLATFORMS, TYPICAL
from ejkernel.ops.registry import get_operation
from ejkernel.ops.settings import changed
from ejkernel.ops.target import NAMED, Target

_SHORT = {"cpu": "CPU", "sm_90": "Hopper", "sm_100": "Blackwell", "tpu": "TPU"}


def _columns(operation: Operation) -> dict[str, tuple[str, Target]]:
    """Platform and device by title; one program of several backends, as XLA's, is one column."""
    platforms = {}
    for name, row in PLATFORMS.items():
        entry = operation.implementations.get(name, {})
        if isinstance(entry, str):
            platforms[name] = (name, TYPICAL[row.backends[0]])
        else:
            platforms |= {f"{name} ({_SHORT.get(runs_on, runs_on)})": (name, _typical(runs_on)) for runs_on in entry}
    return platforms


def _typical(runs_on: str) -> Target:
    """A device for what a row of implementations names."""
    return next(target for target in (*TYPICAL.values(), *NAMED.values()) if runs_on in target.names)


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
        for platform, target in columns.values():
            with changed(device=target):  # which has all packages
                reasons = operation.load(platform, *target.names).unsupported(call.on(target))
            cells.append("yes" if not reasons else "no: " + "; ".join(reasons))
        rows.append(f"| {feature} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)
