"""Flax's own attention modules on these kernels: one argument, nothing else changes.

    pip install flax
    python examples/flax_attention_fn.py

`ejkernel.modules.dot_product_attention` is called as Flax calls its own, so that it is an
`attention_fn` as it stands. The same module with the same weights gives the same outputs and
gradients; the matrix of weights is never formed.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from ejkernel.modules import dot_product_attention

B, T, WIDTH = 2, 200, 64


def made(**options: object) -> nnx.MultiHeadAttention:
    fixed = {"num_heads": 4, "in_features": WIDTH, "decode": False, "rngs": nnx.Rngs(0)}
    return nnx.MultiHeadAttention(**fixed, **options)  # pyright: ignore


@nnx.jit
def loss_and_gradients(module: nnx.MultiHeadAttention, x: jax.Array, mask: jax.Array | None):
    def loss(module: nnx.MultiHeadAttention) -> jax.Array:
        out = module(x, mask=mask)
        # the last tokens of the first row are padding
        return jnp.mean(jnp.square(out[:, : T // 2]))

    return nnx.value_and_grad(loss)(module)


def main() -> float:
    x = jax.random.normal(jax.random.key(1), (B, T, WIDTH))
    real = jnp.arange(T)[None] < jnp.array([T // 2, T])[:, None]
    mask = nnx.combine_masks(nnx.make_causal_mask(real), nnx.make_attention_mask(real, real))
    ours, theirs = (
        loss_and_gradients(module, x, mask)
        for module in (made(attention_fn=dot_product_attention), made())
    )
    worst = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    )
    print(
        f"loss {ours[0]:.6f}, with Flax's own attention {theirs[0]:.6f}; "
        f"gradients differ by {worst:.1e} at most"
    )
    if worst > 1e-5:
        raise SystemExit("they should agree")
    return worst


if __name__ == "__main__":
    main()
