"""Triton <-> JAX: launch on a GPU, interpret on a CPU, or compile for a GPU that is not there."""

from ejkernel.bridge.compile import TARGETS, CompileReport, collect_launches, compile_for, compile_launches
from ejkernel.bridge.launch import Launch
from ejkernel.bridge.triton import triton_call, triton_call_by_name

__all__ = [
    "TARGETS",
    "CompileReport",
    "Launch",
    "collect_launches",
    "compile_for",
    "compile_launches",
    "triton_call",
    "triton_call_by_name",
]
