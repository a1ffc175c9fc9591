"""Softmax attention on this CPU: ratios, in one run, to jax.nn's attention, PyTorch's, and our own causal run.

    python benchmarks/softmax_cpu.py                  a table, and the numbers as JSON
    python benchmarks/softmax_cpu.py --write-readme   also the table in the family's README and the picture

Every answer is checked. Times are medians of interleaved runs, so that a busy machine slows all sides alike.
"""

import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ejkernel.cli.tables import FAMILIES, replace_sections
from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "softmax_cpu.svg"
DOCUMENTS = 16

Function = Callable[..., Any]


def with_gradients(function: Function) -> Function:
    """(q, k, v) -> the gradients of a sum of squares."""
    return jax.grad(lambda q, k, v: jnp.square(function(q, k, v)).sum(), argnums=(0, 1, 2))


# the idle threads of the one before spin for a while and would slow the next
REST_SECONDS = 0.3


def medians(runs: dict[str, Callable[[], Any]], repeats: int, tick: Callable[[], None]) -> dict[str, float]:
    """Median milliseconds of each, run in turns after one call to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeats):
        for name, run in runs.items():
            time.sleep(REST_SECONDS)
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
        tick()
    return {name: float(np.median(values)) for name, values in times.items()}


def compiled(function: Function, *arrays: jax.Array) -> tuple[Callable[[], Any], float]:
    """A call of the compiled function, and the megabytes of temporary memory it needs."""
    program = jax.jit(function).lower(*arrays).compile()
    memory = program.memory_analysis()
    megabytes = float("nan") if memory is None else memory.temp_size_in_bytes / 1e6
    return (lambda: jax.block_until_ready(program(*arrays))), megabytes


def check(name: str, got: Any, wanted: Any) -> None:
    """Both are float32 sums in different orders: they agree to a few parts in a hundred thousand."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        if not error < 5e-5:
            raise SystemExit(f"{name}: wrong answer, relative error {error:.1e}")


def random_inputs(T: int, H: int, D: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((1, T, H, D), np.float32)) for _ in range(3)]


# Against jax.nn and PyTorch ---------------------------------------------------------------------------------


def torch_runs(arrays: list[jax.Array]) -> dict[str, Callable[[], Any]]:
    """PyTorch's attention, forward and with gradients; nothing where it is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    # (B, H, T, D)
    q, k, v = (torch.from_numpy(np.asarray(x).swapaxes(1, 2).copy()).requires_grad_() for x in arrays)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)

    def forward() -> Any:
        with torch.no_grad():
            return attend().numpy().swapaxes(1, 2)

    def both() -> Any:
        gradients = torch.autograd.grad(attend().square().sum(), (q, k, v))
        return [x.numpy().swapaxes(1, 2) for x in gradients]

    return {"forward": forward, "forward + backward": both}


def against_peers(T: int, H: int, D: int, repeats: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Causal attention: ours, jax.nn's and PyTorch's."""
    arrays = random_inputs(T, H, D)
    sides = {
        "ejkernel": partial(flash_attention, causal=True),
        "jax.nn": partial(jax.nn.dot_product_attention, is_causal=True),
    }
    torch_side = torch_runs(arrays)
    rows = []
    for what, wrap in (("forward", lambda f: f), ("forward + backward", with_gradients)):
        programs = {name: compiled(wrap(function), *arrays) for name, function in sides.items()}
        runs = {name: run for name, (run, _) in programs.items()}
        if what in torch_side:
            runs["PyTorch"] = torch_side[what]
        for name, run in runs.items():
            check(f"{what}, {name}", run(), runs["jax.nn"]())
        row: dict[str, Any] = {"what": f"causal, {what}", "T": T, "milliseconds": medians(runs, repeats, tick)}
        rows.append(row | {"megabytes": {name: memory for name, (_, memory) in programs.items()}})
    return rows


# Against our own causal run ---------------------------------------------------------------------------------


def packed_answer(T: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Each document on its own, by jax.nn."""
    split = [x.reshape(DOCUMENTS, T // DOCUMENTS, *x.shape[2:]) for x in (q, k, v)]
    return jax.nn.dot_product_attention(*split, is_causal=True).reshape(q.shape)


def window_answer(T: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The first and the last T/16 rows, by jax.nn on the keys they see."""
    W = T // DOCUMENTS
    ends = []
    for first in (0, T - W):
        seen = max(0, first - W)
        distance = (first + jnp.arange(W))[:, None] - (seen + jnp.arange(first + W - seen))[None, :]
        mask = ((distance >= 0) & (distance <= W))[None, None]
        keys = (x[:, seen : first + W] for x in (k, v))
        ends.append(jax.nn.dot_product_attention(q[:, first : first + W], *keys, mask=mask))
    return jnp.concatenate(ends, axis=1)


def against_causal(T: int, H: int, D: int, repeats: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """What packed documents and windows save of a causal run."""
    q, k, v = random_inputs(T, H, D)
    W = T // DOCUMENTS
    documents = MaskInfo.from_segments(jnp.repeat(jnp.arange(DOCUMENTS, dtype=jnp.int32), W)[None])
    causal = partial(flash_attention, causal=True)
    packed = partial(flash_attention, causal=True, mask_info=documents)
    window = partial(flash_attention, causal=True, sliding_window=(W, 0))
    check("packed documents", packed(q, k, v), packed_answer(T, q, k, v))
    out = window(q, k, v)
    check("window", jnp.concatenate([out[:, :W], out[:, -W:]], axis=1), window_answer(T, q, k, v))
    rows = []
    for what, wrap in (("forward", lambda f: f), ("forward + backward", with_gradients)):
        sides = {"causal": causal, f"{DOCUMENTS} packed documents": packed, f"window of T/{DOCUMENTS}": window}
        runs = {name: compiled(wrap(function), q, k, v)[0] for name, function in sides.items()}
        rows.append({"what": what, "T": T, "milliseconds": medians(runs, repeats, tick)})
    return rows


# Showing ----------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    from importlib import metadata

    found = {"cores": os.cpu_count(), "architecture": platform.machine(), "python": platform.python_version()}
    found["load"] = os.getloadavg()[0]
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    found["processor"] = names[0] if names else platform.processor()
    for package in ("ejkernel", "jax", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def ratio_rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(measurement, ratio, of what to what, aim) for the tables."""
    rows = []
    for row, aim in zip(result["peers"], (4, 3), strict=True):
        times, memory, T = row["milliseconds"], row["megabytes"], row["T"]
        rows.append(
            (f"{row['what']}, T={T}", times["jax.nn"] / times["ejkernel"], "the speed of `jax.nn`", f">= {aim}")
        )
        if "PyTorch" in times:
            ratio = times["PyTorch"] / times["ejkernel"]
            rows.append((f"{row['what']}, T={T}", ratio, "the speed of PyTorch", ""))
        ratio = memory["jax.nn"] / memory["ejkernel"]
        rows.append((f"{row['what']}, T={T}", ratio, "less temporary memory than `jax.nn`", ">= 15"))
    for row in result["savings"]:
        times = row["milliseconds"]
        for name in times:
            if name != "causal":
                ratio = times["causal"] / times[name]
                rows.append((f"{name}, {row['what']}, T={row['T']}", ratio, "the speed of our causal run", ">= 5"))
    return [(what, f"{ratio:.1f}x", against, aim) for what, ratio, against, aim in rows]


def markdown(result: dict[str, Any]) -> str:
    m = result["machine"]
    versions = ", ".join(f"{name} {m[name]}" for name in ("jax", "torch", "python") if name in m)
    where = f"{m['processor']}, {m['cores']} cores; {versions}; {result['date']}."
    lines = [f"float32, {result['shape']}. {where}", "", "| measurement | ratio | | aim |", "| --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(row) + " |" for row in ratio_rows(result)]
    return "\n".join([*lines, "", f"{busy(result)}Reproduce with `make bench`."])


def busy(result: dict[str, Any]) -> str:
    """A warning where other work was on the machine when the run began."""
    load = result["machine"]["load"]
    return f"Provisional: the machine was busy (load {load:.1f}). " if load > 0.5 else ""


def draw(result: dict[str, Any], path: Path) -> bool:
    """The picture of the README; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # words, not outlines
    matplotlib.rcParams["svg.hashsalt"] = "ejkernel"
    from matplotlib import pyplot

    rows = ratio_rows(result)
    bars = [(f"{what}\n{against.replace('`', '')}", float(ratio[:-1])) for what, ratio, against, _ in rows]
    figure, axes = pyplot.subplots(figsize=(8, 0.55 * len(bars) + 0.8), layout="constrained")
    names, values = zip(*reversed(bars), strict=True)
    colors = ["#55a868" if "our causal run" in name else "#4c72b0" for name in names]
    drawn = axes.barh(names, values, color=colors)
    axes.bar_label(drawn, fmt="%.1fx", padding=3, fontsize=9)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 2 * max(values))
    axes.set_xticks([1, 2, 5, 10, 20, 50], ["1x", "2x", "5x", "10x", "20x", "50x"])
    axes.minorticks_off()
    axes.tick_params(axis="y", labelsize=8)
    title = f"ejkernel on {result['machine']['cores']} CPU cores, {result['shape']}, float32"
    axes.set_title("\n".join(filter(None, [title, busy(result).strip()])), fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return True


def main(
    length: Annotated[int, typer.Option(help="T against peers; twice that for packed and window.")] = 4096,
    heads: int = 8,
    dim: int = 64,
    repeats: int = 5,
    output: Annotated[Path, typer.Option(help="Where the numbers go.")] = Path("softmax_cpu.json"),
    write_readme: Annotated[bool, typer.Option("--write-readme", help="Update the README and its picture.")] = False,
) -> None:
    """Measure softmax attention on this CPU."""
    console = Console()
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("softmax attention on the CPU", total=4 * repeats)
        tick = partial(progress.advance, bar)
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "shape": f"B1 H{heads} D{dim}",
            "peers": against_peers(length, heads, dim, repeats, tick),
            "savings": against_causal(2 * length, heads, dim, repeats, tick),
        }
    output.write_text(json.dumps(result, indent=1) + "\n")
    table = Table("measurement", "ratio", "", "aim")
    for row in ratio_rows(result):
        table.add_row(*row)
    console.print(table)
    console.print(f"all answers are right; the numbers are in {output}")
    if write_readme:
        readme = FAMILIES / "softmax" / "README.md"
        readme.write_text(replace_sections(readme.read_text(), "benchmark", lambda _: markdown(result)))
        drawn = draw(result, PICTURE)
        console.print(f"wrote {readme.name}" + (f" and {PICTURE.name}" if drawn else "; no picture without matplotlib"))


if __name__ == "__main__":
    typer.run(main)
