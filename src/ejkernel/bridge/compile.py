"""Compile Triton kernels for GPUs that are not there, and read registers, spills and memory off the result."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.extend as jex

from ejkernel.bridge.launch import TRITON_TYPES, Launch
from ejkernel.bridge.triton import launch_p

# shared memory a program may use, in bytes
TARGETS = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
}


@dataclass(frozen=True)
class CompileReport:
    """What a compiled kernel uses.

    Attributes:
        kernel: the function's name.
        target: such as `sm_90`.
        registers: per thread.
        spill_bytes: stores and loads of registers that did not fit.
        stack_bytes: local memory per thread, spills included.
        shared_bytes: per program.
        tensor_memory_columns: of Blackwell's tensor memory.
        scratch_bytes: global scratch memory, which jax-triton does not provide.
        cubin_bytes: size of the binary.
        ptx: the assembly.
    """

    kernel: str
    target: str
    num_warps: int
    num_stages: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    tensor_memory_columns: int
    scratch_bytes: int
    cubin_bytes: int
    ptx: str

    def __repr__(self) -> str:
        return (
            f"CompileReport({self.kernel} for {self.target}, {self.num_warps} warps, {self.num_stages} stages: "
            f"{self.registers} registers, {self.spill_bytes} bytes spilled, {self.shared_bytes} bytes shared)"
        )

    @property
    def problems(self) -> list[str]:
        """Why this kernel would not launch, or not run fast; empty when it is fine."""
        limit = TARGETS[self.target]
        # ptxas gives at most this many when a program is this wide; the driver refuses a launch beyond
        threads = 32 * self.num_warps
        limits = {
            f"spills {self.spill_bytes} bytes": self.spill_bytes,
            f"needs {self.shared_bytes} bytes of shared memory, {self.target} has {limit}": self.shared_bytes > limit,
            f"needs {self.registers} registers for {threads} threads, an SM has 65536": self.registers * threads
            > 65536,
            f"needs {self.scratch_bytes} bytes of global scratch, jax-triton gives none": self.scratch_bytes,
            f"needs {self.tensor_memory_columns} columns of tensor memory of 512": self.tensor_memory_columns > 512,
        }
        return [f"{self.kernel}: {reason}" for reason, holds in limits.items() if holds]


def compile_for(
    target: str,
    kernel: Any,
    arguments: Mapping[str, str] | Sequence[Any],
    constexprs: Mapping[str, Any] | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
) -> CompileReport:
    """Compile a `@triton.jit` kernel for a GPU, with or without one.

    Args:
        target: one of `TARGETS`.
        arguments: the non-constexpr parameters: Triton types by name (`"*bf16"`, `"i32"`), or in order, the outputs
            included, arrays (or `ShapeDtypeStruct`s) and scalars as `triton_call` takes them.
        constexprs: the other parameters by name.
    """
    from ejkernel.bridge.private_triton import compile_ahead

    if target not in TARGETS:
        raise ValueError(f"{target=} is unknown; use one of {list(TARGETS)}")
    signature, constants = _signature(kernel, arguments, dict(constexprs or {}))
    # as jax-triton: arrays are aligned, scalars are not specialised
    aligned = [i for i, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    options = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": 1, "enable_fp_fusion": True}
    compiled = compile_ahead(kernel, signature, constants, aligned, int(target.removeprefix("sm_")), options)
    usage = _resource_usage(compiled.cubin)
    return CompileReport(
        kernel=kernel.__name__,
        target=target,
        num_warps=num_warps,
        num_stages=num_stages,
        registers=usage["REG"],
        # spills live on the stack: without one there is nothing to ask ptxas again
        spill_bytes=_spill_bytes(compiled.ptx, target) if usage["STACK"] else 0,
        stack_bytes=usage["STACK"],
        shared_bytes=compiled.shared_bytes,
        tensor_memory_columns=compiled.tensor_memory_columns,
        scratch_bytes=compiled.scratch_bytes,
        cubin_bytes=len(compiled.cubin),
        ptx=compiled.ptx,
    )


def collect_launches(
    function: Callable[..., Any], *arrays: Any
) -> list[tuple[Launch, tuple[jax.ShapeDtypeStruct, ...]]]:
    """Every Triton launch a function would make, with the types of its arrays. Nothing runs.

    `arrays` are arrays or `ShapeDtypeStruct`s. The function is traced as under `ejkernel.ops.interpret()`, so that
    `platform="triton"` is accepted on a machine without a GPU. Differentiate inside it to see the backward's.
    """
    from ejkernel.ops import interpret

    with interpret():
        traced = jax.make_jaxpr(function)(*arrays)
    return list(_launches(traced.jaxpr))


def compile_launches(function: Callable[..., Any], *arrays: Any, target: str) -> list[CompileReport]:
    """Compile every distinct Triton launch of a function for a GPU."""
    reports: dict[Any, CompileReport] = {}
    for launch, operands in collect_launches(function, *arrays):
        absent = next(iter(operands), jax.ShapeDtypeStruct((), "int8"))
        arguments = [*launch.fill(operands, absent), *launch.outputs]
        key = (id(launch.kernel), *map(_type, arguments), launch.constexprs, launch.num_warps, launch.num_stages)
        if key not in reports:
            constexprs = dict(launch.constexprs)
            reports[key] = compile_for(
                target, launch.kernel, arguments, constexprs, launch.num_warps, launch.num_stages
            )
    return list(reports.values())


def _launches(jaxpr: Any) -> Iterator[tuple[Launch, tuple[jax.ShapeDtypeStruct, ...]]]:
    for equation in jaxpr.eqns:
        if equation.primitive is launch_p:
            operands = (v.aval for v in equation.invars)
            yield equation.params["launch"], tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands)
        for inner in jex.core.jaxprs_in_params(equation.params):
            yield from _launches(inner)


def _type(argument: Any) -> str:
    if isinstance(argument, str):
        return argument
    if hasattr(argument, "shape"):
        return "*" + TRITON_TYPES[argument.dtype.name]
    if argument == 1:
        return "constexpr"  # jax-triton compiles the scalars 1 and 1.0 as the constant 1
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def _signature(kernel: Any, arguments: Any, constexprs: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Triton's type of every parameter, and the value of every constant."""
    named = dict(arguments) if isinstance(arguments, Mapping) else dict(zip(kernel.arg_names, arguments, strict=False))
    types = {name: _type(a) for name, a in named.items()}
    constants = {p.name: p.default for p in kernel.params if p.has_default} | constexprs
    constants |= {name: 1 for name, type_ in types.items() if type_ == "constexpr"}
    missing = [name for name in kernel.arg_names if name not in types and name not in constants]
    unknown = sorted({*types, *constants} - set(kernel.arg_names))
    if missing or unknown:
        raise TypeError(f"{kernel.__name__} takes {kernel.arg_names}; {missing=}, {unknown=}")
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    return signature, {name: value for name, value in constants.items() if signature[name] == "constexpr"}


def _resource_usage(cubin: bytes) -> dict[str, int]:
    from ejkernel.bridge.private_triton import cuobjdump

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        listing = subprocess.run(
            [cuobjdump(), "-res-usage", str(path)], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", listing)}


def _spill_bytes(ptx: str, target: str) -> int:
    from ejkernel.bridge.private_triton import ptxas

    assembler, gpu = ptxas(int(target.removeprefix("sm_")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [assembler, "-v", gpu, str(path), "-o", str(path) + ".o"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
