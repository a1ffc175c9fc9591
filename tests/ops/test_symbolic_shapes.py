"""`jax.export` with dimensions left open: functions that need their sizes say which."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

from ejkernel import modules

b, t = export.symbolic_shape("b, t")
X, CACHE = jnp.ones((1, 8, 2, 16)), jnp.ones((4, 4, 2, 16))
LENS = jnp.array([3])


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


# id: (function, the one argument, what the error says of it)
CASES = {
    "batch": (lambda x: modules.flash_attention(x, x, x), struct(b, 8, 2, 16), r"0 of query \(b, 8, 2, 16\)"),
    "length": (lambda x: modules.attention(x, x, x)[0], struct(2, 3 * t, 2, 16), r"1 of query \(2, 3\*t, 2, 16\)"),
    "sdpa": (lambda x: modules.scaled_dot_product_attention(X, x, x), struct(1, t, 2, 16), "1 of key"),
    "jax.nn": (lambda x: modules.dot_product_attention(x, x, x), struct(b, 8, 2, 16), "0 of query"),
    "blocks": (
        lambda x: modules.blocksparse_attention(x, x, x, block_mask=jnp.ones((2, 2), bool), block_size=4),
        struct(1, t, 2, 16),
        "1 of query",
    ),
    "bias": (lambda x: modules.flash_attention(X, X, X, bias=x), struct(b, 2, 8, 8), "0 of bias"),
    "packed": (
        lambda x: modules.flash_attention(X, X, X, cum_seqlens_q=x), struct(b, dtype="int32"), "0 of cum_seqlens_q"
    ),
    "linear": (lambda x: modules.gla_attention(x, x, x), struct(b, 8, 2, 16), "0 of query"),
    "sparse": (lambda x: modules.native_sparse_attention(X, X, X, x), struct(b, 8, 2), "0 of g_cmp"),
    "pooling": (modules.mean_pooling, struct(2, t, 2, 16), "1 of x"),
    "decoding": (
        lambda x: modules.page_attention(x, CACHE, CACHE, LENS, [[1]]), struct(b, 2, 16), r"0 of query \(b, 2, 16\)"
    ),
    "tokens": (lambda x: modules.page_attention(x, CACHE, CACHE, LENS, [[1]]), struct(1, t, 2, 16), "1 of query"),
    "cache": (
        lambda x: modules.page_attention(X[:, 0], x, x, LENS, [[1]]), struct(b, 4, 2, 16), "0 of key_cache"
    ),
    "table": (
        lambda x: modules.page_attention(X[:, 0], CACHE, CACHE, LENS, x), struct(1, t, dtype="int32"),
        "1 of block_tables",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_dimension_is_named(name):
    function, argument, message = CASES[name]
    with pytest.raises(NotImplementedError, match=f"^dimension {message}.* is symbolic, and its size must be known"):
        export.export(jax.jit(function))(argument)


def test_writing_needs_no_number_of_rows():
    def write(rows, slots):
        return modules.write_kv_pages(CACHE, CACHE, rows, rows, slots)

    exported = export.export(jax.jit(write))(struct(b, 2, 16), struct(b, dtype="int32"))
    for n in (1, 3):
        keys, _ = exported.call(jnp.zeros((n, 2, 16)), jnp.arange(n, dtype=jnp.int32))
        assert int((keys == 0).sum()) == n * 32
