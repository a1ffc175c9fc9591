"""Arguments that several commands have, with what a shell offers where one is completed."""

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from ejkernel.cli.families import families, known_functions
from ejkernel.ops.platforms import PLATFORMS
from ejkernel.ops.target import NAMED


def _offers(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell offers: the names that begin as what was typed."""

    def completed(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return completed


def _operations_and_families() -> list[str]:
    return [*known_functions(), *families()]


def _with_roofline() -> list[str]:
    return [name for name, family in families().items() if family.roofline is not None]


_operation_names, _platform_names = _offers(known_functions), _offers(lambda: PLATFORMS)

OperationName = Annotated[str, typer.Argument(help="`ejkernel info` lists them.", autocompletion=_operation_names)]
Operations = Annotated[
    list[str] | None, typer.Argument(help="Operations to check; default: all.", autocompletion=_operation_names)
]
OperationOrFamily = Annotated[
    str,
    typer.Argument(
        help="An operation or a family; `ejkernel info` lists operations.",
        autocompletion=_offers(_operations_and_families),
    ),
]
FamilyWithRoofline = Annotated[
    str | None, typer.Argument(help="Default: all that have one.", autocompletion=_offers(_with_roofline))
]
ForcedPlatform = Annotated[
    str | None, typer.Option(help=f"Force one of {', '.join(PLATFORMS)}.", autocompletion=_platform_names)
]
CheckedPlatform = Annotated[
    str | None,
    typer.Option(help="Check only this platform; exit with 1 if it cannot.", autocompletion=_platform_names),
]
TunedPlatforms = Annotated[
    list[str] | None,
    typer.Option(help=f"Only {', '.join(PLATFORMS)}: one, or again for more.", autocompletion=_platform_names),
]
Device = Annotated[
    str | None,
    typer.Option(help=f"Instead of the one here: {', '.join(NAMED)}.", autocompletion=_offers(lambda: NAMED)),
]
