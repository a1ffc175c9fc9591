"""Numbers that only shift lengths, tables and slots compile nothing, wherever they are; scales may be traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.paged.ragged import ragged_mqa
from ejkernel.modules import (
    cascade_attention,
    decode_attention,
    page_attention,
    prefill_page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    write_interleaved_kv_pages,
    write_kv_pages,
)
from harness import normal
from harness.compilations import compiled_programs

N, T, H, HKV, D, P, L, W = 3, 7, 4, 2, 16, 12, 4, 4
QUERY, PACKED = normal("query", (N, H, D)), normal("packed", (T, H, D))
PAGES, PAIRS = normal("pages", (P, L, HKV, D)), normal("pairs", (P, L, 2 * HKV, D))
FLAT, WHOLE = PAGES.reshape(P * L, HKV, D), normal("whole", (N, W * L, HKV, D))
ROWS = normal("rows", (N, HKV, D))

# of (lengths (N,), table (N, W), starts of queries (N + 1,))
CALLS = {
    "page": lambda lens, table, _: page_attention(QUERY, PAGES, PAGES, lens, table, return_lse=True),
    "ragged": lambda lens, table, start: ragged_page_attention(PACKED, PAIRS, lens, table, start, lens[0] % 2 + 2),
    "prefill": lambda lens, table, _: prefill_page_attention(PACKED, PAGES, PAGES, lens[0], table[0]),
    "cascade": lambda lens, table, _: cascade_attention(QUERY, PAGES, PAGES, lens, table, lens[0] // 8),
    "decode": lambda lens, table, _: decode_attention(QUERY, FLAT, FLAT, table, lens, page_size=L),
    "contiguous": lambda lens, _, start: ragged_decode_attention(QUERY, WHOLE, WHOLE, start[:-1], lens),
    "softmax in parts": lambda lens, _, start: ragged_mqa(QUERY, WHOLE[:, :, 0], WHOLE[:, :, 0], lens, start[:-1]),
    "write": lambda lens, *_: write_kv_pages(PAGES, PAGES, ROWS, ROWS, lens),
    "write pairs": lambda lens, *_: write_interleaved_kv_pages(PAIRS, ROWS, ROWS, lens),
}


def numbers(seed: int) -> list[np.ndarray]:
    """Lengths, all different since `write` takes them for slots; a table; where queries begin."""
    draw = np.random.default_rng(seed)
    table = draw.integers(0, P, (N, W))
    table[:] = table[:1]  # all begin alike
    return [
        draw.permutation(5)[:N] + 8 * draw.integers(0, 2),
        table,
        np.sort(draw.integers(0, 2, N + 1)) * [0, 1, 1, 1],
    ]


@pytest.mark.parametrize("where", [np.asarray, jnp.asarray], ids=["host", "device"])
@pytest.mark.parametrize("name", CALLS)
def test_other_numbers_compile_nothing(name, where):
    first, *others = ([where(x.astype(np.int32)) for x in numbers(seed)] for seed in range(4))
    jax.block_until_ready(CALLS[name](*first))
    with compiled_programs() as names:
        for given in others:
            jax.block_until_ready(CALLS[name](*given))
    assert not names


SCALED = {
    "page": lambda scale, **options: page_attention(
        QUERY, PAGES, PAGES, LENS, TABLE, softmax_scale=scale, logits_soft_cap=2.0, **options
    ),
    "cascade": lambda scale, **options: cascade_attention(
        QUERY, PAGES, PAGES, LENS, TABLE, 3, softmax_scale=scale, **options
    ),
    "ragged": lambda scale, **options: ragged_page_attention(
        PACKED, PAIRS, LENS, TABLE, np.arange(N + 1), None, softmax_scale=scale, **options
    ),
}
LENS, TABLE = numbers(1)[0] + 3, numbers(1)[1]


@pytest.mark.parametrize("options", [{}, {"k_scale": np.array([0.5, 2.0], np.float32)}], ids=["plain", "k_scale"])
@pytest.mark.parametrize("name", SCALED)
def test_a_scale_may_be_traced(name, options):
    traced = jax.jit(lambda scale: SCALED[name](scale, **options))
    for scale in (0.3, -1.2):
        np.testing.assert_allclose(traced(jnp.float32(scale)), SCALED[name](scale, **options), atol=1e-5)
    with pytest.raises(TypeError, match="softmax_scale must be a number, got float32 of shape"):
        traced(jnp.ones(4))
