"""Which operations there are: those of the families that were named."""

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ejkernel.checks.names import unknown
from ejkernel.families import registered_families
from ejkernel.ops.operation import Operation


@lru_cache(maxsize=4)
def _operations(modules: tuple[str, ...]) -> dict[str, Operation]:
    by_family = (importlib.import_module(f"{module}.operations").OPERATIONS for module in modules)
    return {operation.name: operation for operations in by_family for operation in operations}


def list_operations() -> list[str]:
    """Names of all public operations.

    >>> from ejkernel.ops import list_operations
    >>> "flash_attention" in list_operations()
    True
    """
    return sorted(_operations(registered_families()))


def get_operation(operation: "Operation | str | Callable[..., Any]") -> Operation:
    """The operation behind an `Operation`, its name, or its public function."""
    if isinstance(operation, Operation):
        return operation
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", repr(operation))
    operations = _operations(registered_families())
    if name not in operations:
        raise ValueError(unknown("operation", name, sorted(operations)))
    return operations[name]
