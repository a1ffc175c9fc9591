"""The options by which calls are described: those that the families have, together."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ejkernel.cli.families import families, family_of
from ejkernel.family import Family, Option


def _options(family: Family) -> dict[str, tuple[type, Option, Any]]:
    """(type, what is said of it, default) of every option of a family."""
    found = {}
    hints = get_type_hints(family.arguments, include_extras=True)
    for name, parameter in inspect.signature(family.arguments).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind, about = hints[name], Option()
            if get_origin(kind) is Annotated:
                kind, about = get_args(kind)
            kinds = [one for one in get_args(kind) if one is not NoneType] or [kind]
            found[name] = kinds[0], about, parameter.default
    return found


def _merged() -> dict[str, inspect.Parameter]:
    """Every option of every family, for Typer; None where it is not given."""
    found: dict[str, list[tuple[type, Option, Any]]] = {}
    for family in families().values():
        for name, option in _options(family).items():
            found.setdefault(name, []).append(option)
    return {name: _parameter(name, options) for name, options in found.items()}


def _parameter(name: str, options: list[tuple[type, Option, Any]]) -> inspect.Parameter:
    """One that several families have: each says what it is to them."""
    kinds, abouts, defaults = zip(*options, strict=True)
    if len(set(kinds)) > 1:
        raise TypeError(f"the families disagree on {name}: {', '.join(kind.__name__ for kind in kinds)}")
    said = list(dict.fromkeys(about.help for about in abouts if about.help))
    told = [str(default) for default in dict.fromkeys(defaults) if default is not None and default is not False]
    said += [f"(default: {' or '.join(told)})"] if told else []
    flag = f"--{name.replace('_', '-')}"
    if kinds[0] is bool and None in defaults:
        flag += f"/--no-{name.replace('_', '-')}"
    option = typer.Option(flag, help=" ".join(said), min=abouts[0].least)
    annotation = Annotated[kinds[0] | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_sizes(command: Callable[..., None]) -> Callable[..., None]:
    """A command with all these options; it gets those that were given as `sizes`, by name."""
    options = _merged()
    declared = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "sizes"]

    @wraps(command)
    def run(**given: Any) -> None:
        sizes = {name: given.pop(name) for name in options}
        command(**given, sizes={name: size for name, size in sizes.items() if size is not None})

    parameters = [*(p.replace(kind=p.KEYWORD_ONLY) for p in declared), *options.values()]
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def described(operation: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """The arguments of such a call, on shapes alone. An option that the operation does not have raises `ValueError`."""
    family = family_of(operation)
    has = [*_options(family)]
    unknown = [name for name in sizes if name not in has]
    arguments = {} if unknown else family.arguments(operation, **sizes)
    given = {name: value for name, value in arguments.items() if value is not None}
    taken = inspect.signature(family.function(operation)).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in taken.values()):  # else it checks them itself
        unknown += [name for name in given if name not in taken]
    if unknown:
        raise ValueError(f"{operation} has no {', '.join(unknown)}")
    return given
