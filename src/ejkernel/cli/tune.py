"""`ejkernel tune`: measure configs for the sizes that matter, and keep the fastest."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from ejkernel.checks.names import unknown
from ejkernel.cli import screen
from ejkernel.cli.arguments import OperationOrFamily, TunedPlatforms
from ejkernel.cli.families import families, family_of
from ejkernel.cli.sizes import described
from ejkernel.family import Family
from ejkernel.ops.platforms import PLATFORMS

if TYPE_CHECKING:
    from ejkernel.ops import Explanation
    from ejkernel.ops.tuning import Tuned


class Work(NamedTuple):
    """A call to tune.

    Attributes:
        operation: whose public function is called.
        same_kernels: further operations that run the same kernels, for which the result is kept too.
        run: the call, on a platform.
        explain: what it would run, on a platform.
    """

    name: str
    operation: str
    same_kernels: tuple[str, ...]
    run: Callable[[str], Any]
    explain: "Callable[[str | None], Explanation]"


def tune(
    what: OperationOrFamily,
    sizes: dict[str, Any],
    platform: TunedPlatforms = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what your tuned file has.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller calls.")] = False,
) -> None:
    """Measure configs here and keep the fastest in your tuned file.

    For one call of the sizes given, or for calls that models make often.
    What the file has is not measured again, so that a run may be stopped and gone on with.
    """
    from ejkernel.ops.target import target_of
    from ejkernel.ops.tuned_files import unsaved, user_file

    if strays := sorted({*(platform or ())} - {*PLATFORMS}):
        raise typer.BadParameter(unknown("platform", strays[0], PLATFORMS))
    try:
        work = _work(what, sizes, quick)
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    console, path = screen.console(), user_file(target_of(()).kind)
    run = _Run(console, path, again)
    try:
        for one in work:
            run.tune(one, platform or list(PLATFORMS))
    finally:  # after Ctrl-C too
        lost = bool(unsaved(path).entries)
        outcome = f"could not be kept in {path}" if lost else f"kept in {path}"
        console.print(
            f"{run.tuned} tuned{f', {outcome}' if run.tuned else ''}", style="red" if lost else None, markup=False
        )
    if lost or run.failed or not (run.tuned or run.known):
        raise typer.Exit(1)


def _work(what: str, sizes: dict[str, Any], quick: bool) -> list[Work]:
    """The calls asked for: of those sizes, or typical ones, or else of the sizes that are the default."""
    import jax

    family = families().get(what) or family_of(what)
    operations = list(family.functions) if what == family.name else [what]
    if sizes and what == family.name:
        raise ValueError(f"sizes are those of one operation; {what} has {', '.join(operations)}")
    if not sizes:
        typical = family.typical_calls(jax.default_backend(), quick)
        if calls := [call for call in typical if {*operations} & {*call.operations}]:
            return [_of_sizes(family, [n for n in call.operations if n in operations], call.sizes) for call in calls]
    return [_of_sizes(family, [operation], sizes) for operation in operations]


def _of_sizes(family: Family, operations: list[str], sizes: dict[str, Any]) -> Work:
    """A call on shapes alone, whose inputs the operation draws itself, and the operations it is kept for."""
    import jax

    from ejkernel.ops import explain

    operation, *same_kernels = operations
    arguments, function = described(operation, sizes), family.function(operation)

    def run(platform: str) -> None:
        arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.ShapeDtypeStruct)}
        options = {name: x for name, x in arguments.items() if name not in arrays}
        jax.eval_shape(lambda given: function(**given, **options, platform=platform), arrays)

    name = " ".join(f"{name} {size}" for name, size in sizes.items()) or "default sizes"
    return Work(
        name, operation, tuple(same_kernels), run, lambda platform: explain(function, **arguments, platform=platform)
    )


class _Run:
    """A line for every call and platform, as they are measured and kept."""

    def __init__(self, console: Console, path: Path, again: bool):
        self.console, self.path, self.again = console, path, again
        self.tuned = self.known = self.failed = 0
        self.refused: set[str] = set()

    def tune(self, work: Work, platforms: list[str]) -> None:
        refusals = work.explain(None).refusals
        for platform in platforms:
            title = f"{work.operation}, {work.name}, {platform}"
            if platform not in refusals:
                self.console.print(f"{escape(title)}: {self._measured(work, platform)}")
                continue
            reason = f"not on {platform}: {'; '.join(refusals[platform])}"
            if reason not in self.refused:  # once, however many calls it is for
                self.refused.add(reason)
                self.console.print(f"{title}: {reason}", markup=False)

    def _measured(self, work: Work, platform: str) -> str:
        from ejkernel.ops import autotune
        from ejkernel.ops.tuned_files import keep

        try:
            with autotune(again=self.again) as results:
                work.run(platform)
        except RuntimeError as error:
            self.failed += 1
            return f"[red]{escape(str(error))}[/]"
        if not results:
            self.known += 1
            return "already tuned, --again measures it again"
        (result,) = results
        for operation in work.same_kernels:
            keep(result.entry(operation), self.path)
        self.tuned += 1
        return _outcome(result)


def _outcome(result: "Tuned") -> str:
    """What won against the default."""
    best, configs = result.best, len(result.seconds) + len(result.failed)
    took = sum(result.seconds[best])
    text = f"{_microseconds(took)} with {best}, of {configs} configs"
    if result.failed:
        text += f", {len(result.failed)} of which failed"
    if result.default not in result.seconds:
        return f"[green]{escape(text)}[/]; the default failed: {escape(result.failed[result.default])}"
    usual = sum(result.seconds[result.default])
    if best == result.default:
        return escape(f"{text}: the default is the fastest")
    return f"[green]{escape(text)}[/], {usual / took:.2f} times as fast as the default ({_microseconds(usual)})"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
