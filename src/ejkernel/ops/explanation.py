"""What a call would run, and why the other platforms would not."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ejkernel.ops.target import Target


@dataclass(frozen=True)
class Explanation:
    """What would run, with which config, and why the other platforms would not.

    Attributes:
        gradient: the same of its gradient, where that is another platform's or one was passed over for it.
        remark: what the implementation says of its config.
        part_of: the public function that makes this call, where that makes several.
        arrays: dtype and shape of the arrays, by name.
        forward_calls: how often it runs, where it stands in loops.
        backward_calls: the same of its gradient.
        conditions: what decides about that besides: a while loop, a branch of a condition.
        calls: the calls of a function that makes several; their platforms and configs are joined in the fields above.
    """

    operation: str
    target: Target
    platform: str | None
    config: Any
    config_source: str | None
    reason: str
    refusals: dict[str, list[str]]
    gradient: "Explanation | None" = None
    remark: str = ""
    part_of: str = ""
    arrays: Mapping[str, str] = field(default_factory=dict)
    forward_calls: int = 0
    backward_calls: int = 0
    conditions: tuple[str, ...] = ()
    calls: "tuple[Explanation, ...]" = ()

    @property
    def avoided(self) -> dict[str, list[str]]:
        """Platforms that could do the call, and why they are not taken for its gradient."""
        refused = {} if self.gradient is None else self.gradient.refusals
        return {platform: reasons for platform, reasons in refused.items() if platform not in self.refusals}

    @property
    def backward_platform(self) -> str | None:
        """The platform of its gradient."""
        return self.platform if self.gradient is None else self.gradient.platform

    def __str__(self) -> str:
        lines = [f"{self.operation} on {self.target.kind}: {self.platform or 'nothing can run this'} ({self.reason})"]
        if self.calls:
            return "\n".join([*lines, *(f"  {line}" for line in _table(self.calls))])
        if self.config is not None:
            lines.append(f"  config: {self.config} (from {self.config_source})")
        if self.remark:
            lines.append(f"  {self.remark}")
        if (other := self.gradient) is not None:
            lines.append(f"  its gradient: {other.platform or 'none'} ({other.reason})")
            if other.platform is not None:
                lines.append(f"  config: {other.config} (from {other.config_source})")
        if self.forward_calls + self.backward_calls > 1 or self.conditions:
            lines.append(f"  runs: {' and '.join(runs(self))}")
        for platform, reasons in self.refusals.items():
            lines += [f"  not {platform}: {reason}" for reason in reasons]
        lines += [f"  not {p} for the gradient: {reason}" for p, reasons in self.avoided.items() for reason in reasons]
        return "\n".join(lines)

    __repr__ = __str__


def runs(call: Explanation) -> list[str]:
    """How often a call runs forward and backward, in words."""
    counts = {"forward": call.forward_calls, "backward": call.backward_calls}
    shown = [f"{name} {times}x" for name, times in counts.items() if times]
    return [*shown[:-1], ", ".join([*shown[-1:], *call.conditions])]


def table_rows(calls: tuple[Explanation, ...]) -> list[tuple[str, str, str, str]]:
    """Of each call: its name, its arrays, and what runs forward and backward."""

    def cell(platform: str | None, config: Any, times: int) -> str:
        return (
            f"{times}x {platform or 'nothing can run it'} {'' if config is None else config}".rstrip() if times else ""
        )

    def row(call: Explanation) -> tuple[str, str, str, str]:
        name = f"{call.part_of} > {call.operation}" if call.part_of else call.operation
        backward = call if call.gradient is None else call.gradient
        return (
            ", ".join([name, *call.conditions]),
            _listed(call.arrays),
            cell(call.platform, call.config, call.forward_calls),
            cell(backward.platform, backward.config, call.backward_calls),
        )

    return [row(call) for call in calls]


def _listed(arrays: Mapping[str, str], most: int = 3) -> str:
    """The first ones, which are tokens in every operation, and how many more there are."""
    shown = ", ".join(f"{name} {x}" for name, x in list(arrays.items())[:most])
    return shown if len(arrays) <= most else f"{shown}, +{len(arrays) - most}"


def _table(calls: tuple[Explanation, ...]) -> list[str]:
    rows = [("call", "arrays", "forward", "backward"), *table_rows(calls)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def combined(name: str, calls: tuple[Explanation, ...]) -> Explanation:
    """The explanation of a function that makes several calls."""
    platforms = [call.platform for call in calls]
    able = None not in platforms
    return Explanation(
        name,
        calls[0].target,
        " and ".join(dict.fromkeys(str(p) for p in platforms)) if able else None,
        tuple(call.config for call in calls),
        " and ".join(dict.fromkeys(str(call.config_source) for call in calls)),
        f"{len(calls)} calls",
        {platform: reasons for call in calls for platform, reasons in call.refusals.items()},
        calls=calls,
    )
