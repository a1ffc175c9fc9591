"""ejkernel: attention for JAX, fast on every accelerator, from one definition per operation."""

from ejkernel.kernels import FAMILIES
from ejkernel.ops import autotune, explain, interpret, register_families, use_config

register_families(*FAMILIES)

__version__ = "0.1.0"

__all__ = ["__version__", "autotune", "explain", "interpret", "use_config"]
