"""What ptxas makes of the Mosaic GPU kernels: `python tests/hopper.py --head-dim 128 --causal`, without a GPU.

Lowers a call for Hopper and has the CUDA plugin of JAX compile it, with nothing behind it but a library that says it
is a driver. Printed are the registers and spills of each kernel, what ptxas remarks (products that it runs one by one,
waits that it adds), and the instructions of each loop that multiplies. `--order` prints these in order: whether the
exponentials come before the wait for a product is to be seen nowhere else.

Needs a C compiler, JAX from 0.11 on with its CUDA plugin (`pip install jax-cuda13-plugin jax-cuda13-pjrt`, no CUDA),
and ptxas and nvdisasm, which Triton's package brings.
"""

import argparse
import ast
import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

# enough of a driver to compile for an H200: attributes 75 and 76 are its capability, 97 its shared memory, 16 its cores
DRIVER = """
int cuInit(unsigned f) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGet(int *d, int n) { *d = 0; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
    *v = a == 75 ? 9 : a == 76 ? 0 : a == 97 ? 232448 : a == 16 ? 132 : 0; return 0;
}
int cuModuleLoadData(void **m, const void *i) { *m = (void *)2; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *n) { *f = (void *)3; return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { return 0; }
int cuGetErrorName(int e, const char **s) { *s = "?"; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "?"; return 0; }
int cuLaunchKernelEx() { return 1; }
int cuTensorMapEncodeTiled() { return 1; }
"""
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?(.*?);")
LABEL = re.compile(r"^(\.L_x_\d+):")
BRANCH = re.compile(r"BRA[.A-Z]*\s.*`\((\.L_x_\d+)\)")
# what the order of a loop is about
TELLING = re.compile(r"HGMMA|MUFU|SHFL|LDL|STL|WARPGROUP\.DEPBAR|SYNCS\.\w+|BAR\.\w+|BRA|UTMA\w+|PMTRIG|MEMBAR")


def tool(name: str) -> str:
    """Where a tool of CUDA's is: on the path, or in Triton's package."""
    if found := shutil.which(name):
        return found
    triton = importlib.util.find_spec("triton")
    path = Path(triton.origin).parent / "backends/nvidia/bin" / name if triton and triton.origin else None
    if path is None or not path.exists():
        raise SystemExit(f"{name} is neither on the path nor in a package triton")
    return str(path)


def lower(sizes: argparse.Namespace) -> None:
    """Lower a forward and its backward for an H200."""
    import jax
    import jax.numpy as jnp

    from ejkernel.kernels.softmax import mosaic_gpu
    from ejkernel.kernels.softmax.spec import canonicalise
    from ejkernel.ops import Target

    def both(query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        target = Target("gpu", "nvidia_h200", "sm_90", cores=132)
        options = {"sliding_window": sizes.window} if sizes.window else {}
        if sizes.documents:
            options["cum_seqlens_q"] = jnp.linspace(0, sizes.length, sizes.documents + 1).astype(jnp.int32)
        call = canonicalise(query, key, value, causal=sizes.causal, **options).on(target)
        config = replace(mosaic_gpu.default_config(call), **ast.literal_eval(sizes.cfg))
        if reasons := mosaic_gpu.unsupported(call) + mosaic_gpu.unsupported_config(call, config):
            raise SystemExit("; ".join(reasons))
        print(config)
        outputs, residuals = mosaic_gpu.IMPLEMENTATION.forward(call, config)
        return outputs, mosaic_gpu.IMPLEMENTATION.backward(call, residuals, outputs, config)

    x = jax.ShapeDtypeStruct((1 if sizes.documents else 2, sizes.length, 16, sizes.head_dim), jnp.bfloat16)
    jax.jit(both).trace(x, x, x).lower(lowering_platforms=("cuda",))


def compile_all(folder: Path) -> None:
    """Leave the PTX of all kernels that were lowered in a folder."""
    import jax_plugins.xla_cuda13 as plugin  # pyright: ignore[reportMissingImports]
    from jax.experimental.mosaic.gpu import core

    source, driver = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", driver, source], check=True)
    ctypes.CDLL(str(driver), ctypes.RTLD_GLOBAL)
    compiled = ctypes.CDLL(plugin._get_library_path()).MosaicGpuCompile
    compiled.argtypes, compiled.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    said = os.dup(2)
    with (folder / "said").open("wb") as file:  # of every kernel that it finds no disassembler
        os.dup2(file.fileno(), 2)
        done = [compiled(module, len(module)) for module in core.KNOWN_KERNELS.values()]
        os.dup2(said, 2)
    if not all(done):
        raise SystemExit(f"the plugin could not compile a kernel: {(folder / 'said').read_text()}")


def loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop that multiplies: what a branch back on a condition encloses."""
    found: list[str] = []
    labels: dict[str, int] = {}
    spans = []
    for line in sass.splitlines():
        if label := LABEL.match(line.strip()):
            labels[label[1]] = len(found)
        elif instruction := INSTRUCTION.match(line):
            condition, text = instruction.groups()
            found.append(text)
            branch = BRANCH.match(text)
            if condition and branch and labels.get(branch[1], len(found)) < len(found):
                spans.append((labels[branch[1]], len(found)))
    multiply = [(a, b) for a, b in spans if any(x.startswith("HGMMA") for x in found[a:b])]
    inner = [(a, b) for a, b in multiply if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in multiply)]
    return [found[a:b] for a, b in inner]


def report(ptx: Path, *, order: bool) -> None:
    cubin = ptx.with_suffix(".cubin")
    said = subprocess.run([tool("ptxas"), "-v", "-arch=sm_90a", ptx, "-o", cubin], capture_output=True, text=True)
    if said.returncode:
        raise SystemExit(said.stderr)
    print(f"\n{ptx.stem}")
    for line in said.stderr.splitlines():
        if re.search(r"\(C\d+\)|registers|spill stores", line):
            print("   ", re.sub(r"^ptxas info\s*: ", "", line.strip())[:200])
    sass = subprocess.run([tool("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    for loop in loops(sass):
        counts = Counter(instruction.split()[0].split(".")[0] for instruction in loop)
        print(f"    a loop of {len(loop)}:", ", ".join(f"{name} {n}" for name, n in counts.most_common(24)))
        if order:
            print("       ", in_order(loop))


def in_order(loop: list[str]) -> str:
    """The telling instructions, runs of one kind once with their number."""
    runs: list[tuple[str, int]] = []
    for instruction in loop:
        if told := TELLING.match(instruction):
            name, number = runs[-1] if runs else ("", 0)
            runs[-1:] = [(name, number + 1)] if name == told[0] else [*runs[-1:], (told[0], 1)]
    return " ".join(name if number == 1 else f"{name}*{number}" for name, number in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int)
    parser.add_argument("--documents", type=int, help="so many, packed one after another")
    parser.add_argument("--cfg", default="{}", help="what differs from the default config, as a Python dict")
    parser.add_argument("--order", action="store_true", help="what a loop issues and waits for, in order")
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": name, "JAX_PLATFORMS": "cpu"}
        lower(sizes)
        compile_all(folder)
        for ptx in sorted(folder.glob("*.ptx")):
            report(ptx, order=sizes.order)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
    main()
