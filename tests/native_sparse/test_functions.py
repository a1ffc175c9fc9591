"""Mask and score functions of selected attention, and a traced window, against the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import explain
from ejkernel.kernels.native_sparse.reference import reference
from ejkernel.kernels.native_sparse.spec import canonicalise
from ejkernel.modules import flash_attention, native_sparse_attention, selected_attention
from harness import check, normal

B, T, S, H, HKV, D = 2, 24, 40, 4, 2, 8
CHOSEN = np.random.default_rng(0).integers(-1, 6, (B, S, HKV, 3)).astype(np.int32)


def functions(gates, table, slopes):
    total = jnp.cumsum(-jax.nn.softplus(gates), axis=-1)

    def score(s, b, h, i, j):
        return s * slopes[h] + total[b, h, i] - total[b, h, j] + table[jnp.clip(j - i, -8, 8) + 8, h]

    return score


def masks(kind):
    limits = jnp.array([5, 17])
    return {
        "alike": lambda b, h, i, j: (j % 3 != 0) | (j < limits[b]),
        "by-head": lambda b, h, i, j: (j - i) % (h + 2) != 0,
    }[kind]


def arrays(B, T, S):
    shapes = {"query": (B, T, H, D), "key": (B, S, HKV, D), "value": (B, S, HKV, D), "softmax_aux": (H,)}
    return {n: normal(n, shape) for n, shape in shapes.items()}


def options(given, mask, **more):
    trained = [given.pop(name) for name in ("gates", "table", "slopes")]
    return given | {"block_size": 8, "score_fn": functions(*trained), "mask_fn": masks(mask), "return_lse": True} | more


@pytest.mark.parametrize(("mask", "packed"), [("alike", False), ("by-head", True)])
def test_functions(mask, packed):
    rows, queries = (1, S) if packed else (B, T)
    more = {"block_indices": CHOSEN[:rows, :queries]}
    more |= {"cu_seqlens": np.array([0, 17, 38], np.int32)} if packed else {}
    given = arrays(rows, queries, S)
    given |= {"gates": normal("gates", (rows, H, S)), "table": normal("table", (17, H)), "slopes": normal("s", (H,))}

    def attend(given):
        out, lse = selected_attention(**options(dict(given), mask, **more), platform="xla", cfg={"block_q": 16})
        return {"out": out, "lse": jnp.maximum(lse, -50.0)}

    def defined(given, dtype):
        found = reference(canonicalise(**options(dict(given), mask, **more)), dtype)
        return {"out": found["out"], "lse": jnp.maximum(found["lse"], -50.0)}

    check(attend, defined, given)


def test_all_blocks_are_causal_attention():
    q, k, v = (normal(name, (1, S, 2, D)) for name in "qkv")
    score, mask = lambda s, b, h, i, j: s - 0.1 * (i - j), lambda b, h, i, j: (i - j) % 2 == 0
    every = jnp.broadcast_to(jnp.arange(S // 8), (1, S, 2, S // 8))
    out = selected_attention(q, k, v, every, block_size=8, score_fn=score, mask_fn=mask)
    np.testing.assert_allclose(out, flash_attention(q, k, v, causal=True, score_fn=score, mask_fn=mask), atol=1e-5)
    told = explain(selected_attention, q, k, v, every, block_size=8, score_fn=score, platform="triton")
    assert "a score function: score - " in " ".join(told.refusals["triton"])


def test_a_traced_window():
    q, k, v = (normal(name, (1, S, 2, D)) for name in "qkv")
    gate = normal("gate", (1, S, 2))

    def attend(window):
        return native_sparse_attention(q, k, v, g_swa=gate, window_size=window)

    np.testing.assert_allclose(jax.jit(attend)(jnp.int32(7)), attend(7), atol=1e-6)
    with pytest.raises(ValueError, match="is of the window branch: give its gate"):
        jax.jit(lambda window: native_sparse_attention(q, k, v, gate, window_size=window))(jnp.int32(7))
