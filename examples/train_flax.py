"""Train a small Flax NNX transformer on packed documents, on any device.

    pip install flax
    python examples/train_flax.py

Attention gets a `MaskInfo` made from the documents' ids: no document sees another, and blocks
between documents are not computed. In the end the loss is close to the best there is, and what
a document predicts does not depend on its neighbours in the row.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from documents import VOCAB, Batch, floor, packed
from flax import nnx

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

WIDTH, LAYERS, H, HKV, D, LENGTH = 64, 2, 4, 2, 16, 96


class Attention(nnx.Module):
    """Grouped-query attention within documents."""

    def __init__(self, rngs: nnx.Rngs):
        self.q = nnx.LinearGeneral(WIDTH, (H, D), use_bias=False, rngs=rngs)
        self.kv = nnx.LinearGeneral(WIDTH, (2, HKV, D), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((H, D), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, packing: MaskInfo) -> jax.Array:
        key, value = jnp.moveaxis(self.kv(x), 2, 0)
        return self.out(flash_attention(self.q(x), key, value, mask_info=packing, causal=True))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = Attention(rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, packing: MaskInfo) -> jax.Array:
        x = x + self.attention(self.norms[0](x), packing)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array, documents: jax.Array) -> jax.Array:
        packing = MaskInfo.from_segments(documents)
        # which begin anew in each document
        x = self.tokens(tokens) + self.positions(packing.q_positions)
        for block in self.blocks:
            x = block(x, packing)
        return self.tokens.attend(self.norm(x))


def loss_of(
    model: Transformer, tokens: jax.Array, documents: jax.Array, targets: jax.Array
) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(tokens, documents), jnp.maximum(targets, 0)
    )
    return jnp.sum(losses, where=targets >= 0) / jnp.sum(targets >= 0)


@nnx.jit
def step(model: Transformer, optimizer: nnx.Optimizer, *batch: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, *batch)
    optimizer.update(model, gradients)
    return loss


def arrays(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.asarray(batch.tokens), jnp.asarray(batch.documents), jnp.asarray(batch.targets)


def keeps_to_its_document(model: Transformer, batch: Batch) -> bool:
    """Whether other tokens in the other documents leave what a document predicts as it is, to
    the bit.
    """
    ours = batch.documents == 1
    tokens = np.where(ours, batch.tokens, (batch.tokens + 7) % VOCAB)
    one, other = (
        np.asarray(model(jnp.asarray(x), jnp.asarray(batch.documents)))[ours]
        for x in (batch.tokens, tokens)
    )
    return bool((one == other).all())


def main(steps: int = 100) -> tuple[float, float]:
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    start = time.perf_counter()
    for number in range(steps):
        loss = step(model, optimizer, *arrays(packed(number, rows=8, length=LENGTH)))
        if number % 20 == 0:
            print(f"step {number:3}: loss {loss:.3f}")
    rate = steps * 8 * LENGTH / (time.perf_counter() - start)
    unseen = packed(10**6, rows=32, length=LENGTH)
    final, best = float(loss_of(model, *arrays(unseen))), floor(unseen)
    print(f"on unseen documents {final:.3f}, the best there is {best:.3f}; {rate:.0f} tokens/s")
    if not keeps_to_its_document(model, unseen):
        raise SystemExit("a document saw another")
    print("no document sees another")
    return final, best


if __name__ == "__main__":
    main()
