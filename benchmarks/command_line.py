"""`python -m benchmarks`: measure against peers, and show what was measured."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.outputs import drawable, writable
from ejkernel.cli import screen

if TYPE_CHECKING:
    from benchmarks.measuring.benchmark import Benchmark, Contender
    from benchmarks.measuring.measure import Result
    from benchmarks.reporting.report import Grid, Run

CaseFilter = Annotated[str | None, typer.Option(help="Only cases whose name matches this regular expression.")]
Platforms = Annotated[
    list[str] | None, typer.Option(help="Of ours: auto, xla, triton, pallas, cudnn or cute; again for more.")
]
Peers = Annotated[list[str] | None, typer.Option(help="Only this peer (see --list), or none; again for more.")]
Json = Annotated[Path | None, typer.Option(callback=writable, help="Keep the numbers there, written after every case.")]
Plot = Annotated[Path | None, typer.Option(callback=drawable, help="Draw it there (.png, .svg); needs matplotlib.")]
Tuned = Annotated[
    Path | None,
    typer.Option(
        callback=writable,
        help="Merge our times into this tuned file, of the same device: they order the platforms of auto.",
    ),
]
Repeats = Annotated[int, typer.Option(min=1, help="Samples of each, interleaved.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and smaller cases.")]
List = Annotated[bool, typer.Option("--list", help="Say what would be measured.")]
Budget = Annotated[float | None, typer.Option(min=0, help="Seconds; what does not fit is skipped.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what --json has: its complete cases are kept.")]
Kept = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What --json kept.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that compile side by side; by default 1, on a GPU mostly up to 14."),
]


# each has a `BENCHMARK`
MODULES = (
    "benchmarks.softmax",
    "benchmarks.paged",
    "benchmarks.linear",
    "benchmarks.native_sparse",
    "benchmarks.model",
)


def all_benchmarks() -> "dict[str, Benchmark]":
    """All there are, by name, in the order shown."""
    loaded = [import_module(module).BENCHMARK for module in MODULES]
    return {benchmark.family.name: benchmark for benchmark in loaded}


@dataclass(frozen=True)
class Options:
    """What was asked of a benchmark."""

    case: str | None = None
    platform: list[str] | None = None
    peer: list[str] | None = None
    json: Path | None = None
    plot: Path | None = None
    tuned: Path | None = None
    repeats: int = 7
    quick: bool = False
    only_list: bool = False
    budget: float | None = None
    jobs: int | None = None
    resume: bool = False


def measure(
    context: typer.Context,
    case: CaseFilter = None,
    platform: Platforms = None,
    peer: Peers = None,
    json: Json = None,
    plot: Plot = None,
    tuned: Tuned = None,
    repeats: Repeats = 7,
    quick: Quick = False,
    only_list: List = False,
    budget: Budget = None,
    jobs: Jobs = None,
    resume: Resume = False,
) -> None:
    given = {**locals()}
    _run(str(given.pop("context").info_name), Options(**given))


def _run(name: str, options: Options) -> None:
    deadline = time.monotonic() + (float("inf") if options.budget is None else options.budget)
    # by default JAX takes most of the memory when it starts, and peers in PyTorch need some
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    from benchmarks.measuring.machine import machine
    from benchmarks.reporting import report

    benchmark = all_benchmarks()[name]
    console, backend = screen.console(), jax.default_backend()
    contenders, missing = _contenders(benchmark, backend, options)
    wanted = _matching(options.case)
    known = benchmark.cases(backend, options.quick)
    cases = [case for case in known if wanted(case.name)]
    if not cases:
        raise typer.BadParameter(f"no case matches {options.case!r}; there are {', '.join(c.name for c in known)}")
    if options.only_list:
        _print_lines(console, [case.name for case in cases])
        _print_lines(console, [f"{c.key}: {c.name}" for c in contenders])
        _print_lines(console, [f"{name}: {reason}" for name, reason in missing.items()])
        return
    run = report.new_run(benchmark, machine(), cases, contenders, missing)
    _check_device(run, options.tuned)
    if options.resume:
        run = _resumed(run, options.json, cases)
        done = {result["case"] for result in run["results"]}
        cases = [case for case in cases if case.name not in done]
    kept = True
    for results in filter(None, _measured(benchmark, backend, cases, contenders, options, deadline)):
        report.add(run, results)
        for result in results:
            print(report.line(result), flush=True)
        kept = _keep(console, run, options.json)
    skipped = any(result["status"] == "skipped" for result in run["results"])
    run["complete"] = not (skipped or report.unmeasured(run))
    kept = _keep(console, run, options.json) and kept
    kept = _show(console, run, options.plot, options.tuned) and kept
    _print_verdict(console, run)
    if not kept:
        raise typer.Exit(1)


Folder = Annotated[Path, typer.Option(help="Keep NAME_DEVICE.json and .svg of each there.")]
WhetherQuick = Annotated[bool | None, typer.Option(help="Fewer and smaller cases; by default on a CPU.")]
EachBudget = Annotated[float | None, typer.Option(min=0, help="Seconds for each; what does not fit is skipped.")]


def every(
    folder: Folder = Path("build/benchmarks"),
    quick: WhetherQuick = None,
    repeats: Repeats = 7,
    budget: EachBudget = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what is there: its complete cases are kept.")
    ] = False,
) -> None:
    """Measure everything there is, one benchmark after another; exit with 1 where one would."""
    import jax

    from ejkernel.ops.target import target_of

    quick = jax.default_backend() == "cpu" if quick is None else quick
    console, failed = screen.console(), []
    can_draw = drawable(folder / "benchmark.svg") is not None
    for name in all_benchmarks():
        console.print(f"[bold]{name}[/]")
        path = writable(folder / f"{name}_{target_of(()).kind}.json")
        assert path is not None
        settings = {
            "json": path,
            "plot": path.with_suffix(".svg") if can_draw else None,
            "quick": quick,
            "repeats": repeats,
            "budget": budget,
            "resume": resume,
        }
        try:
            _run(name, Options(**settings))
        except typer.Exit as ended:
            failed += [name] if ended.exit_code else []
        except typer.BadParameter as refusal:  # the file of another run: the others are still to be measured
            console.print(f"[red]{escape(refusal.message)}[/]")
            failed.append(name)
    console.print(f"the numbers are in {folder}", markup=False)
    if failed:
        console.print(f"[red]{', '.join(failed)} failed[/]")
        raise typer.Exit(1)


def _resumed(run: "Run", path: Path | None, cases: list[Any]) -> "Run":
    """The run with the complete cases of the one in the file, if there is one."""
    from benchmarks.reporting import report

    if path is None:
        raise typer.BadParameter("--resume goes on with the file of --json, and none is given")
    if not path.exists():
        return run
    try:
        return report.resumed(run, _loaded(path), cases)
    except ValueError as error:
        raise typer.BadParameter(
            f"{path} is of another run: {error}; name another file, or leave --resume out"
        ) from None


def _keep(console: Console, run: "Run", path: Path | None) -> bool:
    """Save the results so far, if that was asked for; whether it worked: if not, the run goes on without a file."""
    from benchmarks.reporting import report

    return path is None or _written(console, path, lambda: report.save(run, path))


def _written(console: Console, path: Path, write: Callable[[], None]) -> bool:
    """Write a file; whether it worked, and if not the reason is printed."""
    try:
        write()
    except (OSError, RuntimeError) as error:
        console.print(f"[red]{escape(f'{path} could not be written: {error}')}[/]")
        return False
    return True


def _check_device(run: "Run", tuned: Path | None) -> None:
    """Refuse to mix the times of a device into the tuned file of another."""
    from benchmarks.reporting import report
    from ejkernel.ops.tuned_files import device_of

    device = None if tuned is None else device_of(tuned)
    if device is not None and device not in report.kinds(run):
        measured = " or ".join(sorted(report.kinds(run)))
        raise typer.BadParameter(f"{tuned} is for {device}, and these times are of {measured}")


def _matching(pattern: str | None, option: str = "--case") -> Callable[[str], bool]:
    try:
        compiled = re.compile(pattern or "")
    except re.error as error:
        raise typer.BadParameter(f"{option} {pattern!r} is no regular expression: {error}") from None
    return lambda name: compiled.search(name) is not None


def _contenders(benchmark: "Benchmark", backend: str, options: Options) -> "tuple[list[Contender], dict[str, str]]":
    """The contenders asked for that are installed and run here, and why others do not."""
    from benchmarks.measuring.contenders import all_contenders
    from ejkernel.ops import PLATFORMS

    everybody = all_contenders(benchmark, backend, options.platform)
    peers = [c.key for c in everybody if c.platform is None]
    unknown = {*(options.platform or ())} - {"auto", *PLATFORMS} | {*(options.peer or ())} - {"none", *peers}
    if unknown:
        known = f"platforms: auto, {', '.join(PLATFORMS)}; peers: none, {', '.join(peers)}"
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is unknown; {known}")
    asked = [c for c in everybody if c.platform is not None or not options.peer or c.key in options.peer]
    missing = {c.name: reason for c in asked if (reason := c.missing(backend)) is not None}
    return [c for c in asked if c.name not in missing], missing


def _measured(
    benchmark: "Benchmark",
    backend: str,
    cases: list[Any],
    contenders: "list[Contender]",
    options: Options,
    deadline: float,
) -> "Iterator[list[Result]]":
    from benchmarks.measuring.measure import Job, measure_in_processes, measure_in_this_process

    # only one process can use a TPU, and on a CPU compilation would slow what is measured
    several = backend == "gpu" and benchmark.side_by_side
    jobs = options.jobs or (max(1, min(14, (os.cpu_count() or 1) - 2)) if several else 1)
    if jobs == 1:
        yield from measure_in_this_process(benchmark, cases, contenders, options.repeats, deadline)
        return
    # or each process has a pool of compilers of PyTorch's, which together are too many
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    given = {"platforms": options.platform, "repeats": options.repeats, "deadline": deadline}
    job = partial(Job, benchmark=benchmark.module, backend=backend, **given)
    names = [contender.name for contender in contenders]
    with TemporaryDirectory() as folder:
        lock = str(Path(folder) / "device.lock")
        yield from measure_in_processes([job(case=c, contenders=names, lock=lock) for c in cases], jobs, deadline)


def show(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="What --json kept; several join.")],
    case: CaseFilter = None,
    contender: Annotated[str | None, typer.Option(help="Only contenders whose name matches it.")] = None,
    plot: Plot = None,
    tuned: Tuned = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
) -> None:
    """Show a run that was kept, or several of one device as one."""
    from benchmarks.reporting import report

    try:
        loaded = report.joined([_loaded(file) for file in files])
    except ValueError as error:
        raise typer.BadParameter(f"{', '.join(map(str, files))} cannot be shown as one: {error}") from None
    run = report.only(loaded, _matching(case), _matching(contender, "--contender"))
    for what, pattern in (("case", case), ("contender", contender)):
        if not run[f"{what}s"]:
            raise typer.BadParameter(f"no {what} matches {pattern!r}; there are {', '.join(loaded[f'{what}s'])}")
    _check_device(run, tuned)
    if markdown:
        print(report.markdown(run))
    if not _show(screen.console(), run, plot, tuned, tables=not markdown):
        raise typer.Exit(1)


def _loaded(file: Path) -> "Run":
    from benchmarks.reporting import report

    try:
        return report.load(file)
    except ValueError as error:
        raise typer.BadParameter(f"{file} does not hold what --json keeps: {error}") from None
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror}") from None


def _share(text: str) -> float:
    """A share: 0.05 for `5%` and for `0.05`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise typer.BadParameter(f"--within {text!r} is no share such as 5%")
    return share


def compare(
    old: Kept,
    new: Kept,
    within: Annotated[str, typer.Option(help="How much slower ours may be.")] = "5%",
    case: CaseFilter = None,
) -> None:
    """Compare two runs of a benchmark on one device; exit with 1 where ours got slower or broke.

    Peers are shown, since what slows them is the machine, and not judged.
    """
    from benchmarks.reporting import compare as runs
    from benchmarks.reporting import report

    limit, wanted = _share(within), _matching(case)
    before, after = (report.only(_loaded(file), wanted) for file in (old, new))
    try:
        runs.check_comparable(before, after)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    console, comparison = screen.console(), runs.compare(before, after)
    _print_grid(console, runs.grid(comparison, limit))
    _print_lines(console, [*runs.differences(before, after), *comparison.missing])
    bad = [*map(runs.line, comparison.slower(limit)), *comparison.broken]
    for line in bad:
        console.print(f"[red]{escape(line)}[/]")
    ours = [one for one in comparison.changes if one.key[2] in comparison.ours]
    if bad or not ours:
        verdict = f"{len(bad)} of ours are slower by more than {limit:.0%}, or broke"
        console.print(f"[red]{verdict if bad else 'the runs have no time of ours in common'}[/]")
        raise typer.Exit(1)
    console.print(f"[green]{len(ours)} times of ours, none slower by more than {limit:.0%}[/]")


def _show(console: Console, run: "Run", plot: Path | None, tuned: Path | None, *, tables: bool = True) -> bool:
    """Print tables, merge times and draw; whether all files that were asked for could be written."""
    from benchmarks.reporting import report
    from benchmarks.reporting.plot import draw

    if tables:
        for grid in report.grids(run):
            _print_grid(console, grid)
        legend = f"Medians; {report.AUTO} is what auto took (two: forward, backward)."
        console.print(f"{report.where(run)}. {legend}", markup=False)
        _print_lines(console, report.notes(run))
    if not run["complete"]:
        console.print("[yellow]the run was cut short[/]")
    written = True
    if tuned is not None:
        written = _written(console, tuned, lambda: report.tuned(run).save(tuned))
        if written:
            console.print(f"our times{'' if run['complete'] else ', those there are,'} are in {tuned}", markup=False)
    if plot is not None:
        drawn = _written(console, plot, lambda: draw(run, plot))
        written = drawn and written
        if drawn:
            console.print(f"the picture is in {plot}", markup=False)
    return written


def _print_grid(console: Console, grid: "Grid") -> None:
    columns, numbers = ([escape(name) for name in names] for names in (grid.columns, grid.numbers))
    shown = screen.table(*columns, right=tuple(numbers), unbroken=tuple(columns[:1]))
    for row in grid.rows:
        styles = ["red" if cell.bad else "bold green" if cell.best else "none" for cell in row]
        shown.add_row(*(f"[{style}]{escape(cell.text)}[/]" for cell, style in zip(row, styles, strict=True)))
    console.print(shown)


def _print_lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False)


def _print_verdict(console: Console, run: "Run") -> None:
    """Print failures and counts; exit with 1 where an answer is wrong, ours failed, or nothing was measured."""
    from benchmarks.reporting import report

    failed = report.failures(run)
    measured = sum(result["milliseconds"] is not None for result in run["results"])
    for failure in failed:
        console.print(f"[red]{escape(failure)}[/]")
    skipped = sum(result["status"] == "skipped" for result in run["results"])
    if skipped:
        console.print(f"[yellow]{skipped} measurements were skipped[/]")
    if failed or not measured:
        console.print(f"[red]{len(failed)} failures, {measured} measurements[/]")
        raise typer.Exit(1)
    console.print(f"[green]{measured} measurements, every answer right[/]")


def make_app() -> typer.Typer:
    """A command for each benchmark and for all of them, and those that read the files of earlier runs."""
    made = typer.Typer(
        no_args_is_help=True,
        add_completion=False,  # a shell completes commands, and `python -m benchmarks` is none
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Measure against peers: times, memory, first calls, every answer checked.",
    )
    for name, benchmark in all_benchmarks().items():
        made.command(name, help=benchmark.help)(measure)
    made.command("all")(every)
    for command in (show, compare):
        made.command()(command)
    return made
