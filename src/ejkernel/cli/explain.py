"""`ejkernel explain`: what a call would run here, from its sizes alone."""

from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from ejkernel.cli import screen
from ejkernel.cli.arguments import Device, ForcedPlatform, OperationName
from ejkernel.cli.families import family_of
from ejkernel.cli.sizes import described
from ejkernel.ops.explanation import table_rows
from ejkernel.ops.platforms import PLATFORMS

if TYPE_CHECKING:
    from ejkernel.ops import Explanation


def explain(
    operation: OperationName,
    sizes: dict[str, Any],
    platform: ForcedPlatform = None,
    device: Device = None,
) -> None:
    """Say what a call would run here, or on another device: platform, config, and why not the other platforms."""
    from ejkernel.ops import explain as ask

    try:
        arguments = described(operation, sizes)
        forced = {} if platform is None else {"platform": platform}
        answer = ask(family_of(operation).function(operation), **arguments, **forced, device=device)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    _print(screen.console(), answer, platform)
    if answer.platform is None:
        raise typer.Exit(1)


def _print(console: Console, answer: "Explanation", forced: str | None) -> None:
    if answer.platform is None:
        asked = f"platform {forced!r} cannot do this call" if forced not in (None, "auto") else "no platform can do it"
        console.print(f"[bold]{answer.operation}[/] on {answer.target.kind}: [red]{asked}[/]")
        could = [p for p in PLATFORMS if p not in answer.refusals]
        console.print(f"platforms that could: {', '.join(could) or 'none'}")
    else:
        chosen = f"[green]{answer.platform}[/] ({answer.reason})"
        console.print(f"[bold]{answer.operation}[/] on {answer.target.kind}: {chosen}")
        if answer.calls:
            calls = screen.table("call", "arrays", "forward", "backward")
            for row in table_rows(answer.calls):
                calls.add_row(*map(escape, row))
            console.print(calls)
        elif answer.config is not None:
            console.print(f"config: {answer.config} (from {answer.config_source})", markup=False)
        if answer.remark:
            console.print(answer.remark, markup=False)
        if (other := answer.gradient) is not None:
            console.print(f"its gradient: [green]{other.platform or 'none'}[/] ({other.reason})")
            if other.platform is not None:
                console.print(f"config: {other.config} (from {other.config_source})", markup=False)
    if not (answer.refusals or answer.avoided):
        return
    table = screen.table("platform", "why not")
    for platform, reasons in answer.refusals.items():
        table.add_row(platform, _listed(reasons))
    for platform, reasons in answer.avoided.items():
        table.add_row(f"{platform}, gradient", _listed(reasons))
    console.print(table)


def _listed(reasons: list[str]) -> str:
    """One per line; the brackets of an extra are no markup."""
    return escape("\n".join(f"- {reason}" for reason in reasons))
