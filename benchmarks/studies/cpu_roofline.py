"""What XLA's own products and exponentials of whole tiles allow softmax attention on this CPU, beside what it takes and
PyTorch takes.

`python -m benchmarks.studies.cpu_roofline`, with PyTorch installed: float32, B1 T4096 H8 D64, causal, tiles of
512 x 512.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from ejkernel.modules import flash_attention

T, H, D, TILE = 4096, 8, 64, 512
# under a causal mask; a tile on the diagonal is computed in full
TILES = H * (T // TILE) * (T // TILE + 1) // 2
REPEATED_PRODUCTS = 32  # products in one program


class Product(NamedTuple):
    """A product of a tile: the contracted axis of each side, and how often a forward and a backward have it."""

    name: str
    left: tuple[int, int]
    right: tuple[int, int]
    axes: tuple[int, int]
    forward: int
    backward: int


PRODUCTS = (
    Product("q k', do v'", (TILE, D), (TILE, D), (1, 1), 1, 2),
    Product("p v, ds k", (TILE, TILE), (TILE, D), (1, 0), 1, 1),
    Product("do' p, q' ds", (TILE, D), (TILE, TILE), (0, 0), 0, 2),
)
FLOPS = 2 * TILE * TILE * D


def seconds(*runs: Callable[[], Any], repeats: int = 10) -> list[float]:
    """The median of each, interleaved in a random order, after one of each that compiles."""
    taken: dict[int, list[float]] = {n: [] for n in range(len(runs))}
    for run in runs:
        run()
    for _ in range(repeats):
        for n in random.sample(range(len(runs)), len(runs)):
            start = time.perf_counter()
            runs[n]()
            taken[n].append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken.values()]


def normal(*shape: int, key: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape)


def product_seconds(product: Product) -> tuple[float, float]:
    """Of one product: XLA's, PyTorch's."""
    left, right = normal(REPEATED_PRODUCTS, *product.left), normal(REPEATED_PRODUCTS, *product.right, key=1)
    numbers = (((product.axes[0],), (product.axes[1],)), ((), ()))

    @jax.jit
    def xla(left: jax.Array, right: jax.Array) -> jax.Array:
        def one(n: Any, _: Any) -> jax.Array:  # in place of the last one, so that it stays in the cache
            return lax.dot_general(left[n], right[n], numbers)

        return lax.fori_loop(1, REPEATED_PRODUCTS, one, one(0, None))

    a, b = (torch.randn(REPEATED_PRODUCTS, *shape) for shape in (product.left, product.right))
    a, b = a if product.axes[0] == 1 else a.mT, b if product.axes[1] == 0 else b.mT

    def by_torch() -> None:
        for x, y in zip(a, b, strict=True):
            torch.mm(x, y)

    ours, theirs = seconds(lambda: jax.block_until_ready(xla(left, right)), by_torch)
    return ours / REPEATED_PRODUCTS, theirs / REPEATED_PRODUCTS


def exp_seconds() -> tuple[float, float]:
    """Of the exponentials of a tile."""
    x, tiles = normal(TILE, TILE), torch.randn(REPEATED_PRODUCTS, TILE, TILE)
    xla = jax.jit(lambda x: lax.fori_loop(0, REPEATED_PRODUCTS, lambda _, x: jnp.exp(-x), x))

    def by_torch() -> None:
        for tile in tiles:
            torch.exp(tile)

    ours, theirs = seconds(lambda: jax.block_until_ready(xla(x)), by_torch)
    return ours / REPEATED_PRODUCTS, theirs / REPEATED_PRODUCTS


def attention_seconds() -> dict[str, list[float]]:
    """Ours and PyTorch's, forward and with gradients."""
    q, k, v, dout = (normal(1, T, H, D, key=key) for key in range(4))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *x: flash_attention(*x, causal=True, platform="xla"), q, k, v)
        return out, pull(dout)

    forward = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True, platform="xla"))
    trained = jax.jit(both)
    query, key, value = (torch.randn(1, H, T, D, requires_grad=True) for _ in range(3))
    weights = torch.randn(1, H, T, D)
    attend = torch.nn.functional.scaled_dot_product_attention

    def torch_forward() -> None:
        with torch.no_grad():
            attend(query, key, value, is_causal=True)

    def torch_both() -> None:
        torch.autograd.grad(attend(query, key, value, is_causal=True), (query, key, value), weights)

    return {
        "forward": seconds(lambda: jax.block_until_ready(forward(q, k, v)), torch_forward),
        "forward + backward": seconds(lambda: jax.block_until_ready(trained(q, k, v, dout)), torch_both),
    }


def main() -> None:
    print(f"jax {jax.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads; {TILES} tiles")
    least = {"forward": 0.0, "forward + backward": 0.0}
    for product in PRODUCTS:
        xla, theirs = product_seconds(product)
        print(f"{product.name:14} XLA {FLOPS / xla / 1e9:5.1f} GFLOP/s, PyTorch {FLOPS / theirs / 1e9:5.1f}")
        least["forward"] += TILES * product.forward * xla
        least["forward + backward"] += TILES * (product.forward + product.backward) * xla
    xla, theirs = exp_seconds()
    print(f"{'exp':14} XLA {TILE**2 / xla / 1e9:5.2f} G/s, PyTorch {TILE**2 / theirs / 1e9:5.2f}")
    least["forward"] += TILES * xla
    least["forward + backward"] += 2 * TILES * xla
    for name, (ours, theirs) in attention_seconds().items():
        floor = least[name]
        print(f"{name}: these alone {1e3 * floor:.0f} ms, ours {1e3 * ours:.0f}, PyTorch {1e3 * theirs:.0f};", end=" ")
        print(f"ours {theirs / ours:.2f}x PyTorch, at {floor / ours:.2f} of what these allow")


if __name__ == "__main__":
    main()
