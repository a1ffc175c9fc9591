r"""Train a small transformer on sequences that are split over devices: data parallel times
sequence parallel.

    python examples/train_long_context.py  # on the accelerators that there are
    python examples/train_long_context.py --devices 8  # on 8 devices that the CPU stands for
    python examples/train_long_context.py --devices 1  # on one device: the same losses
    python examples/train_long_context.py --processes 2 --process 0 \
        --coordinator localhost:1234 --devices 4
    python examples/train_long_context.py --processes 2 --process 1 \
        --coordinator localhost:1234 --devices 4

The last two are two processes of one run. On a cluster every process runs this same script with
`--cluster`, and `jax.distributed.initialize()` finds the others as JAX does it: on TPU VMs (one
process per host, as from `gcloud compute tpus tpu-vm ssh --worker=all --command=...`), under
Slurm (`srun`, one task per GPU or per node) and in Kubernetes (an indexed job with a headless
service); elsewhere give `--coordinator`, `--processes` and `--process`.

Tokens, targets and positions are put into the zigzag order once, on the host. The model never
needs to know: every layer but attention works on each token by itself, rotary embeddings read
positions, and `ring_attention` is told the layout.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.modules import ring_attention, to_zigzag

Weights = dict[str, jax.Array]

# Arguments ------------------------------------------------------------------------------------

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--devices", type=int, help="take the CPU, as so many devices; default: what there is"
)
parser.add_argument(
    "--data", type=int, help="devices along the batch; default: 2 where they divide"
)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument(
    "--method", default="ring", choices=["auto", "ring", "all_to_all", "all_gather"]
)
parser.add_argument(
    "--cluster", action="store_true", help="one of several processes, which JAX finds by itself"
)
parser.add_argument("--coordinator", help="host:port of the first process")
parser.add_argument("--processes", type=int, help="how many there are")
parser.add_argument("--process", type=int, help="which this is")


def start(given: argparse.Namespace) -> None:
    """What must be said before JAX looks for devices."""
    if given.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", given.devices)
    if given.cluster:
        jax.distributed.initialize()
    elif given.coordinator is not None:
        jax.distributed.initialize(given.coordinator, given.processes, given.process)


# The model ------------------------------------------------------------------------------------

VOCABULARY, LAYERS, WIDTH, HEADS, KEY_HEADS, DIM = 64, 2, 64, 4, 2, 16


def init(key: jax.Array) -> Weights:
    """Weights: those of layers are stacked, so that a scan goes through them."""
    shapes = {
        "q": (LAYERS, WIDTH, HEADS, DIM),
        "k": (LAYERS, WIDTH, KEY_HEADS, DIM),
        "v": (LAYERS, WIDTH, KEY_HEADS, DIM),
        "o": (LAYERS, HEADS, DIM, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "embed": (VOCABULARY, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / math.sqrt(WIDTH)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def normalised(x: jax.Array) -> jax.Array:
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embeddings (B, T, H, D) by the positions (T,) of the tokens, in whatever order
    they lie.
    """
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 10000.0 ** -(jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def logits_of(
    weights: Weights, tokens: jax.Array, positions: jax.Array, attend: Callable[..., Any]
) -> jax.Array:
    layers = {name: w for name, w in weights.items() if name != "embed"}

    def layer(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
        inside = normalised(x)
        q, k, v = (jnp.einsum("btc,chd->bthd", inside, w[name]) for name in "qkv")
        out = attend(rotated(q, positions), rotated(k, positions), v)
        x = x + jnp.einsum("bthd,hdc->btc", out, w["o"])
        return x + jax.nn.gelu(normalised(x) @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), weights["embed"][tokens], layers)
    return normalised(x) @ weights["embed"].T


def loss_of(
    weights: Weights, batch: dict[str, jax.Array], attend: Callable[..., Any]
) -> jax.Array:
    scores = jax.nn.log_softmax(logits_of(weights, batch["tokens"], batch["positions"], attend))
    return -jnp.take_along_axis(scores, batch["targets"][..., None], -1).mean()


# Training -------------------------------------------------------------------------------------


def batches(batch: int, length: int, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Sequences that repeat themselves from far away: only attention over the whole length
    predicts the second half.
    """
    rng = np.random.default_rng(0)
    for _ in range(steps):
        half = rng.integers(0, VOCABULARY, (batch, length // 2 + 1))
        whole = np.concatenate([half, half], 1)[:, : length + 1].astype(np.int32)
        yield {
            "tokens": whole[:, :-1],
            "targets": whole[:, 1:],
            "positions": np.arange(length, dtype=np.int32),
        }


def train(
    mesh: Mesh, *, batch: int = 4, length: int = 512, steps: int = 10, method: str = "ring"
) -> list[float]:
    """The losses of some steps on a mesh with axes "data" and "sequence"."""
    split, n = P("data", "sequence"), mesh.shape["sequence"]
    where = {"axis_name": "sequence", "mesh": mesh, "in_specs": (split, split, split)}
    attend = partial(ring_attention, causal=True, layout="zigzag", method=method, **where)
    specs = {"tokens": split, "targets": split, "positions": P("sequence")}

    def placed(x: np.ndarray, spec: P) -> jax.Array:
        """An array of all processes, of which each makes its own part."""
        return jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, spec), lambda index: x[index]
        )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, momentum: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch, attend)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
        return jax.tree.map(lambda w, m: w - 0.05 * m, weights, momentum), momentum, loss

    whole = NamedSharding(mesh, P())
    weights = jax.jit(init, out_shardings=whole)(jax.random.key(0))
    momentum = jax.tree.map(jnp.zeros_like, weights)
    losses = []
    for given in batches(batch, length, steps):
        order = {name: to_zigzag(x, n, axis=x.ndim - 1) for name, x in given.items()}
        arrays = {name: placed(jax.device_get(x), specs[name]) for name, x in order.items()}
        weights, momentum, loss = step(weights, momentum, arrays)
        losses.append(float(loss))
    return losses


def mesh_of(data: int | None) -> Mesh:
    count = jax.device_count()
    data = data or (2 if count % 2 == 0 else 1)
    if count % data:
        raise SystemExit(f"--data {data} does not divide {count} devices")
    return Mesh(np.asarray(jax.devices()).reshape(data, -1), ("data", "sequence"))


def main() -> None:
    given = parser.parse_args()
    start(given)
    mesh = mesh_of(given.data)
    losses = train(
        mesh, batch=given.batch, length=given.length, steps=given.steps, method=given.method
    )
    if jax.process_index() == 0:
        print(f"{dict(mesh.shape)}, {jax.process_count()} processes, {given.length} tokens")
        for number, loss in enumerate(losses):
            print(f"step {number}  loss {loss:.5f}")


if __name__ == "__main__":
    main()
