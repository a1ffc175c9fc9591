"""ejkernel: attention for JAX on NVIDIA GPUs, TPUs and CPUs, from one definition per operation.

All that `ejkernel.modules` and `ejkernel.types` have is here too: `ejkernel.flash_attention`, `ejkernel.MaskInfo`.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ejkernel.families import register_families
from ejkernel.kernels import FAMILIES

if TYPE_CHECKING:
    from ejkernel.modules import *  # noqa: F403
    from ejkernel.ops import autotune as autotune
    from ejkernel.ops import explain as explain
    from ejkernel.ops import interpret as interpret
    from ejkernel.ops import use_config as use_config
    from ejkernel.types import *  # noqa: F403

register_families(*FAMILIES)

__version__ = "0.1.0"

_OPS = ("autotune", "explain", "interpret", "use_config")


def _public(name: str) -> Any:
    """What the packages above these have, loaded when it is asked for: with JAX, which takes seconds."""
    modules, types = importlib.import_module("ejkernel.modules"), importlib.import_module("ejkernel.types")
    if name == "__all__":
        return sorted({*_OPS, *modules.__all__, *types.__all__})
    return next((getattr(package, name) for package in (modules, types) if name in package.__all__), None)


def __getattr__(name: str) -> Any:
    if name in ("modules", "ops", "types"):
        return importlib.import_module(f"ejkernel.{name}")
    if name in _OPS:
        return getattr(importlib.import_module("ejkernel.ops"), name)
    if name == "__all__" or not name.startswith("_"):
        value = _public(name)
        if value is not None:
            return value
    # with the module, Python says what else might be meant
    raise AttributeError(f"module 'ejkernel' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return [*_public("__all__"), "__version__"]
