"""compute-sanitizer over the GPU kernels: `python tests/sanitizer.py` on a machine with an NVIDIA GPU and its tools.

A process runs one case, forward and every gradient; what comes out is for pytest to check. Every argument and result
has an allocation of its own, so that memcheck sees what is read beside it (not between a program's own temporaries).
Printed are what each tool reported, and the kernels that it did not see to the end of their process.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
TOOLS = ("memcheck", "racecheck")
SETTINGS = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    # graphs launch what the tools cannot follow; autotuning runs kernels that are not ours
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]),
}
RAN = "launched:"
# of the family and the kernel: Triton's by their modules, Mosaic GPU's by the names that `launch` is given
NAMES = re.compile(r"kernels\.(\w+)\.triton\w*:(\w+_kernel)|\b(softmax)_(forward|dq|dkv|bwd)\b")


class Job(NamedTuple):
    family: str
    platform: str
    case: str


# one process each; together they launch every kernel
JOBS = (
    Job("softmax", "pallas", "D64-bfloat16"),
    Job("softmax", "pallas", "D128-bfloat16"),
    Job("softmax", "pallas", "D256-bfloat16"),
    Job("softmax", "pallas", "wide-D64-gqa-causal"),
    Job("softmax", "pallas", "wide-D128-segments-gqa-causal"),
    Job("softmax", "pallas", "wide-D64-pattern-per-batch"),
    Job("softmax", "triton", "63x129"),
    Job("softmax", "triton", "bfloat16-gqa-causal"),
    Job("softmax", "triton", "bias-bfloat16"),
    Job("softmax", "triton", "pattern-local-stride"),
    Job("softmax", "triton", "dropout-bfloat16-segments"),
    Job("softmax", "torch", "pattern"),
    Job("softmax", "torch", "packed"),
    Job("linear", "triton", "T1"),
    Job("linear", "triton", "token-mixed"),
    Job("linear", "triton", "packed-all-reverse"),
    Job("linear", "triton", "D128-bfloat16"),
    Job("paged", "triton", "splits-3"),
    Job("paged", "triton", "mixed-everything"),
    Job("paged", "triton", "e4m3"),
    Job("native_sparse", "triton", "plain"),
    Job("native_sparse", "triton", "plain-by-keys"),
    Job("native_sparse", "triton", "bfloat16"),
    Job("native_sparse", "triton", "bfloat16-by-keys"),
    Job("native_sparse", "triton", "choosing"),
    Job("pooling", "triton", "packed"),
)


def known() -> set[str]:
    """Every kernel there is, by the family and its name."""
    found = set()
    for path in (HERE.parent / "src" / "ejkernel" / "kernels").glob("*/*.py"):
        family, text = path.parent.name, path.read_text()
        if path.name.startswith("triton"):
            found |= {f"{family} {name}" for name in re.findall(r"@triton\.jit[^\n]*\ndef (\w+_kernel)\(", text)}
        if path.name.startswith("mosaic_gpu"):
            found |= {f"{family} {name}" for name in re.findall(r'\bname="softmax_(\w+)"', text)}
    return found


def functions(family: str, platform_name: str, case_id: str) -> Iterator[tuple[Callable[..., Any], Any]]:
    """What a case runs on its arrays, all of which have gradients unless the family has none."""
    import jax
    import jax.numpy as jnp

    from ejkernel.modules import mean_pooling, select_blocks
    from harness import linear, native_sparse, paged, softmax
    from harness.checks import normal
    from harness.platforms import PLATFORMS

    def trained(function: Callable[..., Any], arrays: Any) -> Any:
        out, pull = jax.vjp(function, arrays)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    platform = next(p for p in PLATFORMS if (p.name, p.device) == (platform_name, "gpu"))
    if family == "pooling":
        pooled = partial(mean_pooling, chunk_size=16, cu_seqlens=jnp.array([0, 33, 34, 100]), platform="triton")
        yield partial(trained, pooled), normal("x", (1, 100, 2, 16))
        return
    if case_id == "choosing":
        chosen = partial(select_blocks, block_counts=8, block_size=4, platform="triton")
        yield lambda a: chosen(*a), (normal("query", (2, 160, 4, 16)), normal("key", (2, 40, 2, 16)))
        return
    room = {"softmax": softmax, "linear": linear, "paged": paged, "native_sparse": native_sparse}[family]
    case = next(c for c in room.CASES if c.id == case_id)
    if family == "paged":
        yield lambda a: case.run(a, platform), case.arrays()
        return
    yield partial(trained, partial(room.call_case, case, platform)), case.arrays()
    if case_id in ("token-mixed", "packed-all-reverse"):  # in pieces, as long sequences are
        cut = partial(room.call_case, case, platform, cfg={"chunk": 16, "segment": 16, "block_c": 16})
        yield partial(trained, cut), case.arrays()
    if case.id in ("D128-bfloat16", "wide-D128-segments-gqa-causal") and platform_name == "pallas":
        fused = partial(softmax.call_case, replace(case, options=case.options | {"cfg": {"fused": True}}), platform)
        yield partial(trained, fused), case.arrays()


def in_torch(case_id: str) -> None:
    import torch

    from ejkernel.torch import LocalStrideSparseAttention, flash_attention

    made = partial(torch.randn, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    if case_id == "pattern":
        attend = LocalStrideSparseAttention(4, 512, 16, 8, 4, seq_dim=1, num_kv_heads=2)
        inputs = made(1, 300, 4, 64), made(1, 300, 2, 64), made(1, 300, 2, 64)
    else:
        cu = torch.tensor([0, 33, 150, 300], dtype=torch.int32, device="cuda")
        attend = partial(flash_attention, causal=True, cum_seqlens_q=cu, cum_seqlens_k=cu)
        inputs = made(300, 4, 64), made(300, 2, 64), made(300, 2, 64)
    attend(*inputs).float().sum().backward()
    torch.cuda.synchronize()


def compiled_kernels() -> list[str]:
    """Triton's kernels that PyTorch has launched."""
    rooms = [m for name, m in sys.modules.items() if name.startswith("ejkernel.kernels.softmax.triton")]
    found = {name for m in rooms for name, x in vars(m).items() if getattr(x, "device_caches", None)}
    return sorted(f"softmax {name}" for name in found if name.endswith("_kernel"))


def run(job: Job) -> None:
    """A job, here; it says which kernels it launched."""
    if job.platform == "torch":
        in_torch(job.case)
        print(RAN, ", ".join(compiled_kernels()), flush=True)
        return
    import jax

    for function, arrays in functions(*job):
        traced = jax.jit(function).trace(arrays)
        names = {" ".join(filter(None, found)) for found in NAMES.findall(str(traced.jaxpr))}
        jax.block_until_ready(traced.lower().compile()(arrays))
        print(RAN, ", ".join(sorted(names)), flush=True)


class Report(NamedTuple):
    tool: str
    job: Job
    text: str
    end: str

    @property
    def kernels(self) -> set[str]:
        lines = re.findall(rf"^{RAN} (.*)$", self.text, re.MULTILINE)
        return {name for line in lines for name in line.split(", ") if name}

    @property
    def summary(self) -> str:
        found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", self.text)
        return found[-1] if found else "no summary"

    @property
    def clean(self) -> bool:
        return self.summary.startswith(("0 errors", "0 hazards")) and self.end == "exit 0" and self.kernels != set()


def sanitized(tool: str, job: Job, seconds: float) -> Report:
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | SETTINGS
    command = ["compute-sanitizer", "--tool", tool, sys.executable, str(HERE / "sanitizer.py"), "--run", *job]
    # in a group of its own: what the tool has started ends with it
    started = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = started.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        text, _ = started.communicate()
        return Report(tool, job, text, f"stopped after {seconds:.0f} s")
    return Report(tool, job, text, f"exit {started.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", nargs="*", default=TOOLS)
    parser.add_argument("--only", default="", help="jobs to run, as a pattern")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300, help="that one process may take")
    parser.add_argument("--run", nargs=3, help="family, platform and case: run it here")
    given = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
    if given.run:
        run(Job(*given.run))
        return 0
    work = [(tool, job) for tool in given.tool for job in JOBS if re.search(given.only, " ".join(job))]
    unseen = {tool: known() for tool in given.tool}
    clean = True
    with ThreadPoolExecutor(given.processes) as pool:
        for report in pool.map(lambda one: sanitized(*one, given.seconds), work):
            unseen[report.tool] -= report.kernels if report.clean else set()
            clean &= report.clean
            print(f"{report.tool:10} {' '.join(report.job):50} {report.end}: {report.summary}", flush=True)
            if not report.clean:
                print("\n".join(report.text.splitlines()[-12:]), flush=True)
    for tool in given.tool:
        print(f"{tool} has not seen {', '.join(sorted(unseen[tool])) or 'nothing: every kernel ran'}")
    missed = not given.only and any(unseen.values())
    return 0 if work and clean and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
