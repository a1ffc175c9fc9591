"""The families that are registered, and which of them has an operation."""

from ejkernel.checks.names import unknown
from ejkernel.families import registered_families
from ejkernel.family import Family, load_family


def families() -> dict[str, Family]:
    """By name, in the order they were registered."""
    loaded = [load_family(package) for package in registered_families()]
    return {family.name: family for family in loaded}


def family_of(operation: str) -> Family:
    """The family that has an operation; `ValueError` where none has."""
    for family in families().values():
        if operation in family.functions:
            return family
    raise ValueError(f"{unknown('operation', operation, known_functions())}; families: {', '.join(families())}")


def known_functions() -> list[str]:
    """The public functions of all families: operations, and functions that call several of them."""
    return sorted(name for family in families().values() for name in family.functions)
