"""The framework: operations, the choice of platform and config, tuning, and how both are explained."""

from ejkernel.families import register_families
from ejkernel.ops.config import use_config
from ejkernel.ops.dispatch import Composite, run, run_plain
from ejkernel.ops.explanation import Explanation
from ejkernel.ops.fusion_barrier import fusion_barrier
from ejkernel.ops.operation import Call, Dims, Implementation, Operation, Splits
from ejkernel.ops.platforms import PLATFORMS
from ejkernel.ops.recording import explain
from ejkernel.ops.registry import get_operation, list_operations
from ejkernel.ops.settings import deterministic, implicit_sharding, interpret, interpreting
from ejkernel.ops.sharding import Shards
from ejkernel.ops.support import support_table
from ejkernel.ops.target import Target, device_kind
from ejkernel.ops.tuned_files import TunedConfigs
from ejkernel.ops.tuning import autotune

__all__ = [
    "PLATFORMS",
    "Call",
    "Composite",
    "Dims",
    "Explanation",
    "Implementation",
    "Operation",
    "Shards",
    "Splits",
    "Target",
    "TunedConfigs",
    "autotune",
    "deterministic",
    "device_kind",
    "explain",
    "fusion_barrier",
    "get_operation",
    "implicit_sharding",
    "interpret",
    "interpreting",
    "list_operations",
    "register_families",
    "run",
    "run_plain",
    "support_table",
    "use_config",
]
