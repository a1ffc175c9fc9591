"""Block-sparse attention on tensors, and from JAX, against dkernel itself, whose outputs are compared with the former.

    python -m benchmarks.studies.sparse_torch          # on a GPU
    python -m benchmarks.studies.sparse_torch tiles decode  # some of the studies
    python -m benchmarks.studies.sparse_torch --small  # sizes that a CPU can do, to see that it runs

dkernel itself must come before this package's `dkernel` on the path: PYTHONPATH=where/it/is:src. Medians; milliseconds.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ejkernel.torch import LocalStrideSparseAttention, flash_attention

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Shape:
    T: int = 8192
    H: int = 32
    Hkv: int = 32
    D: int = 128
    B: int = 1

    def tensors(self, device: torch.device, T: int | None = None) -> list[torch.Tensor]:
        sizes = (self.B, T or self.T, self.H, self.D), *[(self.B, self.T, self.Hkv, self.D)] * 2
        return [torch.randn(size, device=device, dtype=torch.bfloat16).requires_grad_() for size in sizes]


@dataclass(frozen=True)
class Pattern:
    block: int = 64
    local: int = 16
    stride: int = 8

    def __str__(self) -> str:
        return f"block {self.block}, local {self.local}, stride {self.stride}"


def module(shape: Shape, pattern: Pattern, kind: Any = LocalStrideSparseAttention, **options: Any) -> Any:
    return kind(shape.H, shape.T, pattern.block, pattern.local, pattern.stride, seq_dim=1, **options)


def dkernel_itself() -> Any:
    """The class of dkernel, or None where it is not installed or `dkernel` is this package's own."""
    import dkernel

    theirs = dkernel.LocalStrideSparseAttention
    return None if theirs is LocalStrideSparseAttention else theirs


# Measuring --------------------------------------------------------------------------------------------------


def milliseconds(step: Callable[[], Any], device: torch.device, samples: int = 7) -> float:
    """The median, on the device's own clock where it has one; there ten calls at a time, which hides the host."""
    for _ in range(3):
        step()
    times, calls = [], 10 if device.type == "cuda" else 1
    for _ in range(samples):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            first.record()
            for _ in range(calls):
                step()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / calls)
        else:
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def passes(attend: Attend, tensors: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    weights = torch.randn_like(attend(*tensors))

    def both() -> None:
        torch.autograd.grad(attend(*tensors), tensors, weights)

    def forward() -> None:
        with torch.no_grad():
            attend(*tensors)

    return {"forward": forward, "forward + backward": both}


def show(name: str, times: dict[str, dict[str, float]], against: str) -> None:
    """One line per pass: every contender's time, and how many times faster than `against` it is."""
    for what in next(iter(times.values())):
        texts = []
        for who, times_of in times.items():
            ratio = f" ({times[against][what] / times_of[what]:.2f}x)" if against in times and who != against else ""
            texts.append(f"{who} {times_of[what]:.3f}{ratio}")
        print(f"{name}, {what}: {', '.join(texts)}", flush=True)


def compare(
    name: str, contenders: dict[str, Attend], tensors: list[torch.Tensor], against: str, more: Any = None
) -> None:
    """The contenders, and those whose times are there already."""
    device, times = tensors[0].device, dict(more or {})
    for who, attend in contenders.items():
        times[who] = {what: milliseconds(step, device) for what, step in passes(attend, tensors).items()}
    show(name, times, against)


# What is compared -------------------------------------------------------------------------------------------


def with_dkernel(shape: Shape, device: torch.device) -> None:
    theirs = dkernel_itself()
    if theirs is None:
        print("dkernel itself is not on the path: its columns are missing")
    for stride in (4, 8, 16):
        pattern, tensors = Pattern(stride=stride), shape.tensors(device)
        ours = module(shape, pattern)
        contenders: dict[str, Attend] = {"ejkernel.torch": ours}
        if theirs is not None:
            contenders["dkernel"] = module(shape, pattern, theirs).to(device)
            torch.testing.assert_close(ours(*tensors), contenders["dkernel"](*tensors), atol=2e-2, rtol=2e-2)
        name = f"B1 T{shape.T} H{shape.H} D{shape.D}, {pattern}"
        compare(name, contenders, tensors, "dkernel", in_jax(shape, pattern, device))


def in_jax(shape: Shape, pattern: Pattern, device: torch.device) -> dict[str, dict[str, float]]:
    """The same pattern through `ejkernel.modules`, on JAX's device: milliseconds by pass; ten calls at a time."""
    import jax
    import jax.numpy as jnp

    from ejkernel.modules import blocksparse_attention
    from ejkernel.types import BlockPattern

    if (jax.default_backend() == "gpu") != (device.type == "cuda"):
        print(f"JAX runs on {jax.default_backend()}, PyTorch on {device.type}: no column of JAX")
        return {}
    cells = BlockPattern.local_stride(
        shape.H, -(-shape.T // pattern.block), pattern.local, pattern.stride, block_size=pattern.block
    )
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, shape.T, shape.H, shape.D), jnp.bfloat16) for key in keys)
    attend = partial(blocksparse_attention, block_mask=cells)
    steps = {
        "forward": jax.jit(attend),
        "forward + backward": jax.jit(jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))),
    }
    times: dict[str, float] = {}
    for what, step in steps.items():
        jax.block_until_ready(step(q, k, v))
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            jax.block_until_ready([step(q, k, v) for _ in range(10)])
            samples.append(1e2 * (time.perf_counter() - start))
        times[what] = statistics.median(samples)
    return {"from JAX": times}


def with_dense(shape: Shape, device: torch.device) -> None:
    tensors = shape.tensors(device)
    contenders = {"ejkernel.torch": module(shape, Pattern()), "dense causal": partial(flash_attention, causal=True)}
    compare(f"B1 T{shape.T} H{shape.H} D{shape.D}, {Pattern()}", contenders, tensors, "dense causal")


def small_blocks(shape: Shape, device: torch.device) -> None:
    """The same share of keys in blocks of 16 as in blocks of 64."""
    contenders = {f"blocks of {n}": module(shape, Pattern(n, 1024 // n, 8)) for n in (16, 32, 64, 128)}
    compare(f"B1 T{shape.T} H{shape.H} D{shape.D}, equal density", contenders, shape.tensors(device), "blocks of 64")


def uneven_heads(shape: Shape, device: torch.device) -> None:
    contenders = {f"{n} dense heads": module(shape, Pattern(), num_dense_heads=n) for n in (0, 2, 8)}
    compare(f"B1 T{shape.T} H{shape.H} D{shape.D}", contenders, shape.tensors(device), "0 dense heads")


def decoding(shape: Shape, device: torch.device) -> None:
    attend = module(shape, Pattern(), num_kv_heads=shape.Hkv)
    lengths = torch.randint(shape.T // 2, shape.T, (shape.B,), device=device)
    q, k, v = shape.tensors(device, T=1)
    with torch.no_grad():
        even = milliseconds(lambda: attend(q, k, v), device)
        uneven = milliseconds(lambda: attend(q, k, v, seqlens=lengths), device)
    name = f"decode B{shape.B} S{shape.T} H{shape.H} Hkv{shape.Hkv}"
    print(f"{name}: full caches {even:.3f}, a length for each sequence {uneven:.3f}", flush=True)


def tiles(shape: Shape, device: torch.device) -> None:
    """`block_m` and `block_n`, which are these kernels' tiles."""
    sizes = [(64, 64), (128, 64), (64, 128), (128, 128), (128, 32)]
    contenders = {f"{m} x {n}": module(shape, Pattern(), block_m=m, block_n=n) for m, n in sizes}
    compare(f"B1 T{shape.T} H{shape.H} D{shape.D}, tiles", contenders, shape.tensors(device), "64 x 64")


def host_time(device: torch.device) -> None:
    """Of a call whose kernels take next to no time, without waiting for them; and of its bare launches alone."""
    from ejkernel.torch.prepared_launch import PreparedLaunch

    shape = Shape(T=64, H=1, Hkv=1, D=64)
    attend, (q, k, v) = module(shape, Pattern()), shape.tensors(device)
    runs: list[Any] = []
    run_launch = PreparedLaunch.run

    def recorded(launch: Any, tensors: Any, *options: bool) -> None:
        runs.append(partial(run_launch, launch, dict(tensors), *options))
        run_launch(launch, tensors, *options)

    with torch.no_grad():
        attend(q, k, v)
        PreparedLaunch.run = recorded  # pyright: ignore[reportAttributeAccessIssue]
        attend(q, k, v)
        PreparedLaunch.run = run_launch
        forward, bare = microseconds(lambda: attend(q, k, v)), microseconds(lambda: [run() for run in runs])
    print(f"host time of a forward: {forward:.1f} us, of its {len(runs)} launches alone {bare:.1f} us")


def microseconds(step: Callable[[], Any], calls: int = 200) -> float:
    def batches() -> Iterator[float]:
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(calls):
                step()
            yield 1e6 * (time.perf_counter() - start) / calls
            if torch.cuda.is_available():
                torch.cuda.synchronize()

    return statistics.median(batches())


def decodes(small: bool, device: torch.device) -> None:
    for B in (1, 4) if small else (1, 32):
        decoding(Shape(B=B, T=512, H=4, Hkv=1, D=32) if small else Shape(B=B, Hkv=8), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("studies", nargs="*", help="of all there are")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU can do")
    given = parser.parse_args()
    small, device = given.small, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not small:
        parser.error("no GPU: use --small")
    usual = Shape(T=512, H=2, Hkv=2, D=32) if small else Shape()
    long = Shape(T=1024, H=2, Hkv=2, D=32) if small else Shape(T=32768)
    many = Shape(T=512, H=8, Hkv=8, D=32) if small else Shape()
    studies: dict[str, Callable[[], None]] = {
        "dkernel": partial(with_dkernel, usual, device),
        "host": partial(host_time, device),
        "dense": partial(with_dense, long, device),
        "blocks": partial(small_blocks, usual, device),
        "heads": partial(uneven_heads, many, device),
        "decode": partial(decodes, small, device),
        "tiles": partial(tiles, usual, device),
    }
    if device.type == "cpu":
        studies.pop("host")
    if unknown := [name for name in given.studies if name not in studies]:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(studies)}")
    for name in given.studies or studies:
        studies[name]()


if __name__ == "__main__":
    main()
