"""The commands. Each loads what it needs when it runs, so that `--help` is quick."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ejkernel.cli import bench, screen
from ejkernel.cli.interrupt import end_on_interrupt

if TYPE_CHECKING:
    from ejkernel.bench.answers import Error
    from ejkernel.cli.verify import Outcome
    from ejkernel.ops import Explanation

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention for JAX: what runs here, and how well.",
)
app.add_typer(bench.app, name="bench")


@app.command()
def info() -> None:
    """Devices, versions, and which platforms work here and why others do not."""
    from ejkernel.cli import info as facts

    console = screen.console()
    table = screen.table("", "", show_header=False, title="This machine")
    for name, version in facts.versions().items():
        table.add_row(name, version)
    table.add_row("devices", "\n".join(facts.devices()))
    for name, path in facts.tuned_files().items():
        table.add_row(f"tuned configs, {name}", path)
    console.print(table)
    table = screen.table("platform", "here", "operations, or why not", title="Platforms")
    for platform, works in facts.platforms().items():
        here = "[green]yes[/]" if works.operations else "[yellow]no[/]"
        table.add_row(platform, here, "\n".join(works.operations or works.reasons))
    console.print(table)


@app.command()
def verify(
    operations: Annotated[list[str] | None, typer.Argument(help="Operations to check; default: all.")] = None,
    platform: Annotated[str | None, typer.Option(help="Check only this platform; exit with 1 if it cannot.")] = None,
) -> None:
    """Check every operation on every platform that works here against its definition, and time it against jax.nn."""
    from rich.progress import Progress

    from ejkernel.cli.cases import all_cases
    from ejkernel.cli.verify import platforms_for
    from ejkernel.cli.verify import verify as outcomes_of
    from ejkernel.ops import list_operations
    from ejkernel.ops.operation import PLATFORMS

    console = screen.console()
    unknown = sorted(set(operations or ()) - set(list_operations()))
    if unknown:
        raise typer.BadParameter(f"unknown operation {', '.join(unknown)}; known: {', '.join(list_operations())}")
    if platform not in (None, *PLATFORMS):
        raise typer.BadParameter(f"unknown platform {platform}; known: {', '.join(PLATFORMS)}")
    work, refused = [], {}
    for case in all_cases():
        if operations and case.operation not in operations:
            continue
        able, refusals = platforms_for(case)
        work.append((case, [p for p in able if platform in (None, p)]))
        for p, reasons in refusals.items():
            if platform in (None, p):
                refused.setdefault(p, reasons)
    done = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=sum(len(platforms) for _, platforms in work))
        for case, platforms in work:
            progress.update(bar, description=f"{case.operation}, {case.name}")
            for outcome in outcomes_of([(case, platforms)]):
                done.append(outcome)
                progress.advance(bar)
                if not console.is_terminal:  # no bar in a log
                    verdict = "ok" if outcome.ok else "FAILED"
                    console.print(f"{case.operation}, {case.name}, {outcome.platform}: {verdict}", markup=False)
    if done:
        console.print(_outcome_table(done))
    _summarise(console, done, refused)


def _outcome_table(outcomes: "list[Outcome]") -> Table:
    right, names = ("output error", "gradient error", "time", "speed"), ("case", "platform", "dtype")
    compact = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = screen.table(*names, *right, "", right=right, whole=names, title="Against the definition", **compact)
    operation = None
    for o in outcomes:
        if o.case.operation != operation:  # a row of its own: beside the case it would need the width of the numbers
            operation = o.case.operation
            table.add_section()
            table.add_row(f"[bold]{operation}[/]")
        named = (o.case.name, o.platform, o.case.dtype)
        time = "" if o.seconds is None else f"{o.seconds * 1e3:.1f} ms"
        ratio = f"{o.peer_seconds / o.seconds:.1f}x" if o.seconds and o.peer_seconds else ""
        verdict = "[green]ok[/]" if o.ok else "[red]FAILED[/]"
        table.add_row(*named, _error(o.output), _error(o.gradient), time, ratio, verdict)
    table.caption = (
        "Errors are the largest against float32; beside them, as a multiple of those of the naive computation in the "
        "same dtype. Times are of a forward and, where there is one, a backward; speed is against jax.nn's."
    )
    return table


def _error(error: "Error | None") -> str:
    if error is None:
        return ""
    shown = f"{error.error:.1e}"
    shown += f" {error.error / error.naive:.1f}x" if error.naive > 0 else ""
    return shown if error.ok else f"[red]{shown}[/]"


def _summarise(console: Console, outcomes: "list[Outcome]", refused: dict[str, list[str]]) -> None:
    """Say how it went; exit with 1 unless something was checked and all of it is well."""
    tried = {o.platform for o in outcomes}
    for platform, reasons in refused.items():
        if platform not in tried:
            console.print(f"{platform} is not checked: {'; '.join(reasons)}", markup=False)
    failed = [o for o in outcomes if not o.ok]
    for o in failed:
        limits = [f"{e.error:.2e} > {e.limit:.2e}" for e in (o.output, o.gradient) if e is not None and not e.ok]
        console.print(f"{o.case.operation}, {o.case.name}, {o.platform}: {o.crash or ', '.join(limits)}", markup=False)
    if failed:
        console.print(f"[red]{len(failed)} of {len(outcomes)} checks failed[/]")
    elif not outcomes:
        console.print("[red]nothing could be checked[/]")
    else:
        console.print(f"[green]all {len(outcomes)} checks passed[/]")
    if failed or not outcomes:
        raise typer.Exit(1)


@app.command()
def explain(
    operation: Annotated[str, typer.Argument(help="Such as flash_attention.")],
    batch: Annotated[int, typer.Option(min=1)] = 1,
    length: Annotated[int, typer.Option(min=1, help="Queries; of a decode, keys.")] = 1024,
    kv_length: Annotated[int | None, typer.Option(min=1, help="Keys; default: the length.")] = None,
    heads: Annotated[int, typer.Option(min=1)] = 8,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Default: as many as query heads.")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Head dimension of queries and keys.")] = 64,
    value_dim: Annotated[int | None, typer.Option(min=1, help="Head dimension of values; default: of keys.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal")] = None,
    window: Annotated[str | None, typer.Option(help="A number, or left,right.")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Packed documents in a row.")] = None,
    bias: Annotated[bool, typer.Option("--bias")] = False,
    sinks: Annotated[bool, typer.Option("--sinks")] = False,
    soft_cap: Annotated[float | None, typer.Option()] = None,
    dropout: Annotated[float | None, typer.Option(help="Probability.")] = None,
    lse: Annotated[bool, typer.Option("--lse", help="Also return the log-sum-exp.")] = False,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Of blocksparse_attention; of a cache, tokens per page.")
    ] = None,
    chunk_size: Annotated[int | None, typer.Option(min=1, help="Of mean_pooling.")] = None,
    platform: Annotated[str | None, typer.Option(help="Force xla, triton, pallas or cudnn.")] = None,
) -> None:
    """Say what a call would run here: platform, config, and why the other platforms would not."""
    given = dict(locals())  # the options above, under the names of Request's fields
    from ejkernel.cli.describe import Request, explained

    try:
        answer = explained(Request(**given))
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    _print_explanation(screen.console(), answer, platform)
    if answer.platform is None:
        raise typer.Exit(1)


def _print_explanation(console: Console, answer: "Explanation", forced: str | None) -> None:
    from ejkernel.ops.operation import PLATFORMS

    if answer.platform is None:
        asked = f"platform {forced!r} cannot do this call" if forced not in (None, "auto") else "no platform can do it"
        console.print(f"[bold]{answer.operation}[/] on {answer.target.kind}: [red]{asked}[/]")
        could = [p for p in PLATFORMS if p not in answer.refusals]
        console.print(f"platforms that could: {', '.join(could) or 'none'}")
    else:
        chosen = f"[green]{answer.platform}[/] ({answer.reason})"
        console.print(f"[bold]{answer.operation}[/] on {answer.target.kind}: {chosen}")
        console.print(f"config: {answer.config} (from {answer.config_source})", markup=False)
        if (other := answer.gradient) is not None:
            console.print(f"its gradient: [green]{other.platform}[/] ({other.reason})")
            console.print(f"config: {other.config} (from {other.config_source})", markup=False)
    table = screen.table("platform", "why not")
    for platform, reasons in answer.refusals.items():
        table.add_row(platform, "\n".join(f"- {reason}" for reason in reasons))
    for platform, reasons in answer.avoided.items():
        table.add_row(f"{platform}, gradient", "\n".join(f"- {reason}" for reason in reasons))
    console.print(table)


@app.command()
def support(operation: Annotated[str, typer.Argument(help="Such as flash_attention.")]) -> None:
    """Print the support table of an operation: every feature against every platform, as Markdown."""
    from ejkernel.ops import support_table

    try:
        print(support_table(operation))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except ModuleNotFoundError as missing:
        print(f"the table asks every platform, and {missing.name} is not installed (pip install 'ejkernel[cuda]')")
        raise typer.Exit(1) from None


@app.command()
def roofline(
    batch: Annotated[int, typer.Option(min=1)] = 2,
    length: Annotated[int, typer.Option(min=1)] = 8192,
    width: Annotated[int, typer.Option(min=256, help="heads * head_dim.")] = 2048,
) -> None:
    """Print the milliseconds that attention cannot beat on each TPU: softmax by the tiles visited, then decoding."""
    from ejkernel.cli.roofline import paged_table, softmax_table

    print(softmax_table(batch, length, width))
    print(f"\nA decode step over pages, 32 sequences of 4096 keys:\n{paged_table()}")


def main() -> None:
    """What the script `ejkernel` runs."""
    end_on_interrupt(app)


if __name__ == "__main__":
    main()
