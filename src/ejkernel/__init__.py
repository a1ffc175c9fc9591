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
    from ejkernel.ops import autotune, explain, interpret, use_config
    from ejkernel.types import *  # noqa: F403

register_families(*FAMILIES)

__version__ = "0.1.0"

__all__ = ["__version__", "autotune", "explain", "interpret", "use_config"]


def __getattr__(name: str) -> Any:
    """What the rooms above have, loaded when it is asked for: with JAX, which takes seconds."""
    if name in ("modules", "ops", "types"):
        return importlib.import_module(f"ejkernel.{name}")
    if name in __all__:
        return getattr(importlib.import_module("ejkernel.ops"), name)
    if not name.startswith("_"):
        for room in (importlib.import_module("ejkernel.modules"), importlib.import_module("ejkernel.types")):
            if name in room.__all__:
                return getattr(room, name)
    # with the module, Python says what else might be meant
    raise AttributeError(f"module 'ejkernel' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    modules, types = importlib.import_module("ejkernel.modules"), importlib.import_module("ejkernel.types")
    return sorted({*globals(), *__all__, *modules.__all__, *types.__all__})
