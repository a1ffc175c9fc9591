"""The commands. What one of them alone needs is loaded when it runs."""

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ejkernel
from ejkernel.checks.names import unknown
from ejkernel.cli import screen
from ejkernel.cli.arguments import CheckedPlatform, FamilyWithRoofline, OperationName, Operations
from ejkernel.cli.explain import explain
from ejkernel.cli.families import families, known_functions
from ejkernel.cli.sizes import with_sizes
from ejkernel.cli.tune import tune

SUMMARY = "Attention for JAX: what runs here, and how well."

if TYPE_CHECKING:
    from ejkernel.cli.verify import Outcome
    from ejkernel.family import Error


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
    table = screen.table("platform", "works here", "operations, or why not", title="Platforms")
    for platform, works in facts.platforms().items():
        answer = "[green]yes[/]" if works.operations else "[yellow]no[/]"
        table.add_row(platform, answer, escape("\n".join(works.operations or works.reasons)))
    console.print(table)


def verify(
    operations: Operations = None,
    platform: CheckedPlatform = None,
) -> None:
    """Check every operation on every platform that works here against its definition, and time it against jax.nn."""
    # by default a process takes most of a GPU's memory when JAX starts, and several share it here
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from rich.progress import Progress

    from ejkernel.cli.verify import platforms_for
    from ejkernel.cli.verify import verify as outcomes_of
    from ejkernel.ops import PLATFORMS

    console = screen.console()
    for name in operations or ():
        if name not in known_functions():
            raise typer.BadParameter(unknown("operation", name, known_functions()))
    if platform not in (None, *PLATFORMS):
        raise typer.BadParameter(unknown("platform", platform, PLATFORMS))
    work, refused = [], {}
    for check in (check for family in families().values() for check in family.checks()):
        if operations and check.operation not in operations:
            continue
        able, refusals = platforms_for(check)
        work.append((check, [p for p in able if platform in (None, p)]))
        for p, reasons in refusals.items():
            if platform in (None, p):
                refused.setdefault(p, reasons)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("compiling", total=sum(len(platforms) for _, platforms in work))

        def checked(outcome: "Outcome") -> None:
            name = f"{outcome.check.operation}, {outcome.check.name}"
            progress.update(bar, description=name, advance=1)
            if not console.is_terminal:  # no bar in a log
                console.print(f"{name}, {outcome.platform}: {'ok' if outcome.ok else 'FAILED'}", markup=False)
            if progress.finished:
                progress.update(bar, description="timing")

        done = outcomes_of(work, checked)
    if done:
        console.print(_outcome_table(done))
    _summarise(console, done, refused)


def _outcome_table(outcomes: "list[Outcome]") -> Table:
    import jax

    right, names = ("output error", "gradient error", "time", "speed"), ("case", "platform", "dtype")
    compact = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0)}
    table = screen.table(*names, *right, "", right=right, unbroken=names, title="Against the definition", **compact)
    operation = None
    for o in outcomes:
        if o.check.operation != operation:  # a row of its own: beside the case it would need the width of the numbers
            operation = o.check.operation
            table.add_section()
            table.add_row(f"[bold]{operation}[/]")
        named = (o.check.name, o.platform, o.check.dtype)
        time = "" if o.seconds is None else f"{o.seconds * 1e3:.1f} ms"
        ratio = f"{o.peer_seconds / o.seconds:.1f}x" if o.seconds and o.peer_seconds else ""
        verdict = "[green]ok[/]" if o.ok else "[red]FAILED[/]"
        table.add_row(*named, _error(o.output), _error(o.gradient), time, ratio, verdict)
    table.caption = (
        "Errors are the largest against float32; beside them, as a multiple of those of the naive computation in the "
        "same dtype. Times are of a forward and, where there is one, a backward; speed is against jax.nn's."
    )
    if jax.default_backend() == "gpu":
        table.caption += " XLA has not tried out its matmuls, jax.nn's aside: xla may be faster in use."
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
        console.print(
            f"{o.check.operation}, {o.check.name}, {o.platform}: {o.crash or ', '.join(limits)}", markup=False
        )
    if failed:
        console.print(f"[red]{len(failed)} of {len(outcomes)} checks failed[/]")
    elif not outcomes:
        console.print("[red]nothing could be checked[/]")
    else:
        console.print(f"[green]all {len(outcomes)} checks passed[/]")
    if failed or not outcomes:
        raise typer.Exit(1)


def support(operation: OperationName) -> None:
    """Print the support table of an operation: every feature against every platform, as Markdown."""
    from ejkernel.ops import support_table

    try:
        print(support_table(operation))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def roofline(
    family: FamilyWithRoofline = None,
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    length: Annotated[int | None, typer.Option(min=1)] = None,
    width: Annotated[int | None, typer.Option(min=1, help="heads * head_dim.")] = None,
) -> None:
    """Print the milliseconds that kernels cannot beat on each TPU, by what they visit and copy."""
    known = {name: one.roofline for name, one in families().items() if one.roofline is not None}
    if family not in (None, *known):
        raise typer.BadParameter(f"{family} has no roofline; there are {', '.join(known)}")
    given = {"batch": batch, "length": length, "width": width}
    given = {name: size for name, size in given.items() if size is not None}
    try:
        rooflines = [bound(**given) for name, bound in known.items() if family in (None, name)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    print("\n\n".join(f"{one.title}:\n{one.table}" for one in rooflines))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ejkernel {ejkernel.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", "-V", help="Print the version and exit.", callback=_print_version, is_eager=True)
]


def options(version: Version = False) -> None:
    """What comes before a command."""


def make_app() -> typer.Typer:
    """The commands, with the options of the families that there are now."""
    made = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help=SUMMARY,
    )
    made.callback(help=SUMMARY)(options)
    for command in (info, verify, with_sizes(explain), with_sizes(tune), support, roofline):
        made.command()(command)
    return made


app = make_app()
