"""The framework: operations, the choice of platform and config, tuning, and how both are explained."""

from ejkernel.ops.cache import TunedConfigs
from ejkernel.ops.config import use_config
from ejkernel.ops.dispatch import Explanation, explain, interpret, interpreting, run
from ejkernel.ops.operation import Call, Dims, Implementation, Operation, get_operation, list_operations
from ejkernel.ops.sharding import Shards
from ejkernel.ops.support import support_table
from ejkernel.ops.target import Target, device_kind
from ejkernel.ops.tuning import autotune

__all__ = [
    "Call",
    "Dims",
    "Explanation",
    "Implementation",
    "Operation",
    "Shards",
    "Target",
    "TunedConfigs",
    "autotune",
    "device_kind",
    "explain",
    "get_operation",
    "interpret",
    "interpreting",
    "list_operations",
    "run",
    "support_table",
    "use_config",
]
