"""The shapes in the public signatures are true: real calls under a runtime type checker."""

import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from ejkernel import modules
from harness.softmax import BIASES, LENGTHS, PACKED, SINKS, SIZES, Case


@pytest.mark.parametrize("case", [*LENGTHS, *SIZES, *BIASES, *SINKS, *PACKED], ids=lambda case: case.id)
def test_flash_attention(case: Case):
    checked = jaxtyped(typechecker=beartype)(modules.flash_attention)
    outputs = jax.eval_shape(lambda arrays: checked(**arrays, **case.keywords()), case.arrays())
    out, lse = outputs if case.lse else (outputs, None)
    query, value = case.arrays()["query"], case.arrays()["value"]
    assert out.shape == (*query.shape[:-1], value.shape[-1]) and out.dtype == query.dtype
    if lse is not None:
        *lead, T, H, _ = query.shape
        assert lse.shape == (*lead, H, T) and lse.dtype == jnp.float32


@pytest.mark.parametrize("name", ["attention", "scaled_dot_product_attention", "blocksparse_attention"])
def test_the_others(name):
    checked = jaxtyped(typechecker=beartype)(getattr(modules, name))
    q, k = jnp.ones((2, 8, 4, 16)), jnp.ones((2, 12, 2, 16))
    extra = {"block_mask": jnp.ones((2, 3), bool), "block_size": 4} if name == "blocksparse_attention" else {}
    out = jax.eval_shape(lambda q, k: checked(q, k, k, **extra), q, k)
    assert jax.tree.leaves(out)[0].shape == (2, 8, 4, 16)


@pytest.mark.parametrize("name", modules.__all__)
def test_every_public_function_is_documented(name):
    function = getattr(modules, name)
    assert ">>>" in function.__doc__ and function.__name__ == name
