"""Tensors given to the functions of JAX arrays: the error says which argument, and where the others are."""

import jax.numpy as jnp
import pytest
import torch

from ejkernel import modules

X, CACHE = jnp.ones((1, 8, 2, 16)), jnp.ones((4, 4, 2, 16))
ONE, PAGES = torch.ones(1, 8, 2, 16), torch.ones(4, 4, 2, 16)


class Own(torch.Tensor):
    """A subclass, as a user may have one."""


CASES = {
    "query": lambda: modules.flash_attention(ONE, ONE, ONE),
    "key": lambda: modules.scaled_dot_product_attention(X, ONE, X),
    "value": lambda: modules.gla_attention(X, X, ONE.as_subclass(Own)),
    "bias": lambda: modules.flash_attention(X, X, X, bias=torch.ones(8, 8, dtype=torch.bfloat16)),
    "g_cmp": lambda: modules.native_sparse_attention(X, X, X, g_cmp=torch.nn.Parameter(torch.ones(1, 8, 2))),
    "x": lambda: modules.mean_pooling(ONE),
    "key_cache": lambda: modules.page_attention(X[:, 0], PAGES, CACHE, [3], [[1]]),
    "queries": lambda: modules.ragged_page_attention(ONE[0], (CACHE, CACHE), [8], [[1, 2]], [0, 8], 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_tensor_is_named(name):
    with pytest.raises(TypeError, match=f"^{name} is a PyTorch tensor, and must be a JAX array; ejkernel.torch has"):
        CASES[name]()


def test_lengths_may_be_tensors():
    out = modules.page_attention(X[:, 0], CACHE, CACHE, torch.tensor([3]), torch.tensor([[1]]))
    assert out.shape == (1, 2, 16)
    with pytest.raises(TypeError, match="context_lens must be an array of integers, got Tensor: can't convert meta"):
        modules.page_attention(X[:, 0], CACHE, CACHE, torch.ones(1, dtype=torch.int32, device="meta"), [[1]])
