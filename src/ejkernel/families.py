"""Which families there are: names alone, so that the front door needs nothing to say them."""

_FAMILIES: list[str] = []


def register_families(*modules: str) -> None:
    """Name families, packages with a module `operations`, whose `OPERATIONS` load when somebody asks for one."""
    _FAMILIES.extend(module for module in modules if module not in _FAMILIES)


def registered_families() -> tuple[str, ...]:
    """The packages that were named, in order."""
    return tuple(_FAMILIES)
