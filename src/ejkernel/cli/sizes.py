"""The command-line options that describe a call: those of all families, merged."""

import inspect
from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from ejkernel.cli.families import families, family_of
from ejkernel.family import Family, Option


def _options(family: Family) -> dict[str, tuple[type, Option, Any]]:
    """(type, description, default) of every option of a family."""
    options = {}
    hints = get_type_hints(family.arguments, include_extras=True)
    for name, parameter in inspect.signature(family.arguments).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind, option = hints[name], Option()
            if get_origin(kind) is Annotated:
                kind, option = get_args(kind)
            kinds = [one for one in get_args(kind) if one is not NoneType] or [kind]
            options[name] = kinds[0], option, parameter.default
    return options


def _merged() -> dict[str, inspect.Parameter]:
    """Every option of every family, for Typer; None where it is not given."""
    merged: dict[str, dict[str, tuple[type, Option, Any]]] = {}
    for family in families().values():
        for name, option in _options(family).items():
            merged.setdefault(name, {})[family.name] = option
    return {name: _parameter(name, by_family) for name, by_family in merged.items()}


def _parameter(name: str, by_family: dict[str, tuple[type, Option, Any]]) -> inspect.Parameter:
    """One that several families have, with what each of them says of it."""
    kinds, options, defaults = zip(*by_family.values(), strict=True)
    if len(set(kinds)) > 1:
        raise TypeError(f"the families disagree on {name}: {', '.join(kind.__name__ for kind in kinds)}")
    texts = _help_by_family({family: option.help for family, (_, option, _) in by_family.items() if option.help})
    shown = {family: str(x) for family, (_, _, x) in by_family.items() if x is not None and x is not False}
    texts += [f"(default: {_defaults_by_family(shown, len(by_family))})"] if shown else []
    flag = f"--{name.replace('_', '-')}"
    if kinds[0] is bool and None in defaults:
        flag += f"/--no-{name.replace('_', '-')}"
    option = typer.Option(flag, help=" ".join(texts), min=options[0].least)
    annotation = Annotated[kinds[0] | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help_by_family(helps: dict[str, str]) -> list[str]:
    """The sentences of an option: where families say different ones, each after their names.

    >>> _help_by_family({"dense": "Queries.", "local": "Queries.", "cached": "New tokens."})
    ['dense, local: Queries.', 'cached: New tokens.']
    """
    names = _inverted(helps)
    return [text if len(names) == 1 else f"{', '.join(names[text])}: {text}" for text in names]


def _defaults_by_family(defaults: dict[str, str], families: int) -> str:
    """The default of most families, then what others have; each after its names where some have none.

    >>> _defaults_by_family({"dense": "8", "cached": "16", "local": "8"}, 3)
    '8; cached: 16'
    >>> _defaults_by_family({"cached": "16", "local": "64"}, 3)
    'cached: 16; local: 64'
    """
    commonest_first = sorted(_inverted(defaults).items(), key=lambda entry: -len(entry[1]))
    texts = [f"{', '.join(names)}: {default}" for default, names in commonest_first]
    if len(defaults) == families:
        texts[0] = commonest_first[0][0]
    return "; ".join(texts)


def _inverted(texts: dict[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return names


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
