"""The support table: every feature of an operation against every platform, asked of the implementations themselves."""

from collections.abc import Callable
from typing import Any

from ejkernel.ops.operation import Operation, get_operation
from ejkernel.ops.target import Target

# what a column of the table stands for: platform, backend, and a typical device
COLUMNS = {
    "xla": ("xla", Target("cpu", "cpu", "cpu")),
    "triton": ("triton", Target("gpu", "nvidia_h200", "sm_90")),
    "pallas (Hopper)": ("pallas", Target("gpu", "nvidia_h200", "sm_90")),
    "pallas (TPU)": ("pallas", Target("tpu", "tpu_v5_lite", "tpu")),
    "cudnn": ("cudnn", Target("gpu", "nvidia_h200", "sm_90")),
}


def support_table(operation: Operation | str | Callable[..., Any]) -> str:
    """A Markdown table of features against platforms, generated from each platform's `unsupported`.

    >>> from ejkernel.ops import support_table
    >>> support_table("flash_attention").splitlines()[0].startswith("| feature |")
    True
    """
    operation = get_operation(operation)
    columns = {c: p for c, p in COLUMNS.items() if operation.path(p[0], p[1].backend) is not None}
    rows = ["| feature | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for feature, call in operation.probes().items():
        cells = []
        for platform, target in columns.values():
            reasons = operation.load(platform, target.backend).unsupported(call.on(target))
            cells.append("yes" if not reasons else "no: " + "; ".join(reasons))
        rows.append(f"| {feature} | " + " | ".join(cells) + " |")
    return "\n".join(rows)
