"""Train a small Equinox transformer on packed documents, on any device: `train_flax.py` in
Equinox's words.

    pip install equinox optax
    python examples/train_equinox.py

Equinox's modules see one row at a time, and `jax.vmap` the batch. Attention is called inside: a
row is `(T, heads, D)`, and the kernel takes the whole batch all the same.
"""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from documents import VOCAB, Batch, floor, packed

from ejkernel.modules import flash_attention
from ejkernel.types import MaskInfo

WIDTH, LAYERS, H, HKV, D, LENGTH = 64, 2, 4, 2, 16, 96


class Attention(eqx.Module):
    """Grouped-query attention within documents, of one row (T, WIDTH)."""

    q: eqx.nn.Linear
    kv: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.q = eqx.nn.Linear(WIDTH, H * D, use_bias=False, key=keys[0])
        self.kv = eqx.nn.Linear(WIDTH, 2 * HKV * D, use_bias=False, key=keys[1])
        self.out = eqx.nn.Linear(H * D, WIDTH, use_bias=False, key=keys[2])

    def __call__(self, x: jax.Array, packing: MaskInfo) -> jax.Array:
        query = jax.vmap(self.q)(x).reshape(-1, H, D)
        key, value = jnp.moveaxis(jax.vmap(self.kv)(x).reshape(-1, 2, HKV, D), 1, 0)
        out = flash_attention(query, key, value, mask_info=packing, causal=True)
        return jax.vmap(self.out)(out.reshape(-1, H * D))


class Block(eqx.Module):
    attention: Attention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.RMSNorm, eqx.nn.RMSNorm]

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key)
        self.attention = Attention(keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[1])
        self.norms = eqx.nn.RMSNorm(WIDTH), eqx.nn.RMSNorm(WIDTH)

    def __call__(self, x: jax.Array, packing: MaskInfo) -> jax.Array:
        x = x + self.attention(jax.vmap(self.norms[0])(x), packing)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, LAYERS + 2)
        small = WIDTH**-0.5  # the same weights turn outputs into logits
        self.tokens = eqx.nn.Embedding(
            weight=small * jax.random.normal(keys[0], (VOCAB, WIDTH))
        )
        self.positions = eqx.nn.Embedding(
            weight=small * jax.random.normal(keys[1], (LENGTH, WIDTH))
        )
        self.blocks = [Block(key) for key in keys[2:]]
        self.norm = eqx.nn.RMSNorm(WIDTH)

    def __call__(self, tokens: jax.Array, documents: jax.Array) -> jax.Array:
        packing = MaskInfo.from_segments(documents)
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(packing.q_positions[0])
        for block in self.blocks:
            x = block(x, packing)
        return jax.vmap(self.norm)(x) @ self.tokens.weight.T


def loss_of(
    model: Transformer, tokens: jax.Array, documents: jax.Array, targets: jax.Array
) -> jax.Array:
    logits = jax.vmap(model)(tokens, documents)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.sum(losses, where=targets >= 0) / jnp.sum(targets >= 0)


def arrays(batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.asarray(batch.tokens), jnp.asarray(batch.documents), jnp.asarray(batch.targets)


def keeps_to_its_document(model: Transformer, batch: Batch) -> bool:
    """Whether other tokens in the other documents leave what a document predicts as it is, to
    the bit.
    """
    ours = batch.documents == 1
    tokens = np.where(ours, batch.tokens, (batch.tokens + 7) % VOCAB)
    run = eqx.filter_jit(eqx.filter_vmap(model))
    one, other = (
        np.asarray(run(jnp.asarray(x), jnp.asarray(batch.documents)))[ours]
        for x in (batch.tokens, tokens)
    )
    return bool((one == other).all())


def main(steps: int = 100) -> tuple[float, float]:
    model, adam = Transformer(jax.random.key(0)), optax.adam(3e-3)
    state = adam.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(
        model: Transformer, state: optax.OptState, *batch: jax.Array
    ) -> tuple[Transformer, optax.OptState, jax.Array]:
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, *batch)
        updates, state = adam.update(gradients, state)
        return eqx.apply_updates(model, updates), state, loss

    start = time.perf_counter()
    for number in range(steps):
        model, state, loss = step(model, state, *arrays(packed(number, rows=8, length=LENGTH)))
        if number % 20 == 0:
            print(f"step {number:3}: loss {loss:.3f}")
    rate = steps * 8 * LENGTH / (time.perf_counter() - start)
    unseen = packed(10**6, rows=32, length=LENGTH)
    final, best = float(eqx.filter_jit(loss_of)(model, *arrays(unseen))), floor(unseen)
    print(f"on unseen documents {final:.3f}, the best there is {best:.3f}; {rate:.0f} tokens/s")
    if not keeps_to_its_document(model, unseen):
        raise SystemExit("a document saw another")
    print("no document sees another")
    return final, best


if __name__ == "__main__":
    main()
