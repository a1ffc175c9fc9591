"""`ejkernel.torch.flash_attention` against its definition, and against that of JAX."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import ejkernel.modules
from ejkernel.torch import flash_attention
from harness.tensors import IMPLEMENTATIONS, check, dense, placed, running

SHAPE = {"B": 2, "T": 70, "S": 70, "H": 2, "Hkv": 2, "D": 16}


def tensors_of(B, T, S, H, Hkv, D, Dv=None, dtype=torch.float32) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = {"query": (B, T, H, D), "key": (B, S, Hkv, D), "value": (B, S, Hkv, Dv or D)}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def seen_of(T, S, causal=False, sliding_window=None, **_: Any) -> np.ndarray:
    distance = np.arange(S) - (np.arange(T)[:, None] + S - T)
    left, right = sliding_window if isinstance(sliding_window, tuple) else (sliding_window,) * 2
    seen = (distance <= 0) | (not causal)
    return seen & (distance >= (-S if left is None else -left)) & (distance <= (S if right is None else right))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({}, {"causal": True}),
    "causal-T<S-gqa": ({"T": 20, "H": 4}, {"causal": True}),
    "causal-T>S": ({"S": 33}, {"causal": True}),
    "window": ({"T": 100, "S": 100, "B": 1}, {"sliding_window": (20, 3)}),
    "soft-cap": ({"Dv": 24}, {"logits_soft_cap": 2.0, "causal": True}),
    "bfloat16": ({"dtype": torch.bfloat16}, {"causal": True, "softmax_scale": 0.3}),
    "decode-gqa": ({"T": 1, "H": 8}, {"causal": True}),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case, implementation):
    sizes, options = CASES[case]
    tensors = tensors_of(**{**SHAPE, **sizes})
    (B, T, H, _), (_, S, _, Dv) = tensors["query"].shape, tensors["value"].shape
    seen = seen_of(T, S, **options)[None, None]
    random = torch.Generator().manual_seed(2)
    cotangents = torch.randn((B, T, H, Dv), generator=random), torch.randn((B, H, T), generator=random)

    def ours(query, key, value):
        return flash_attention(query, key, value, return_lse=True, **options)

    def theirs(query, key, value):
        return dense(query, key, value, seen, options.get("softmax_scale"), options.get("logits_soft_cap"))

    with running(implementation):
        check(placed(implementation, ours), theirs, tensors, cotangents)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sinks(implementation):
    tensors = tensors_of(**{**SHAPE, "S": 33}) | {"sinks": torch.tensor([0.5, -1.0])}
    seen = seen_of(70, 33, causal=True)[None, None]
    random = torch.Generator().manual_seed(2)
    cotangents = torch.randn((2, 70, 2, 16), generator=random), torch.randn((2, 2, 70), generator=random)

    def ours(query, key, value, sinks):
        return flash_attention(query, key, value, softmax_aux=sinks, causal=True, return_lse=True)

    def theirs(query, key, value, sinks):
        return dense(query, key, value, seen, sinks=sinks)

    with running(implementation):
        check(placed(implementation, ours), theirs, tensors, cotangents)


@pytest.mark.parametrize("shape", [(2,), (2, 3), (1, 3)])
def test_sinks_of_every_shape_as_in_jax(shape):
    tensors = tensors_of(**SHAPE)
    sinks = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    expected = ejkernel.modules.flash_attention(
        *(jnp.asarray(x.numpy()) for x in tensors.values()), softmax_aux=jnp.asarray(sinks.numpy()), causal=True
    )
    actual = flash_attention(**tensors, softmax_aux=sinks, causal=True)
    np.testing.assert_allclose(actual.numpy(), expected, atol=2e-6)


@pytest.mark.parametrize("implementation", ["cpu", "interpreted"])
@pytest.mark.parametrize(
    ("T", "S", "cu_q", "cu_k"),
    [(100, 100, [0, 30, 31, 80], None), (60, 100, [0, 20, 50], [0, 40, 90]), (60, 60, [0, 20, 60], [0, 30, 55])],
)
def test_packed_as_in_jax(T, S, cu_q, cu_k, implementation):
    tensors = tensors_of(1, T, S, 2, 1, 16)
    cu = {"cum_seqlens_q": cu_q, "cum_seqlens_k": cu_k}
    given = {name: x for name, x in cu.items() if x is not None}
    expected = ejkernel.modules.flash_attention(
        *(jnp.asarray(x[0].numpy()) for x in tensors.values()),
        **{name: jnp.array(x) for name, x in given.items()},
        causal=True,
        sliding_window=9,
        return_lse=True,
    )
    with running(implementation):
        actual = flash_attention(
            *(x[0] for x in tensors.values()),
            **{name: torch.tensor(x) for name, x in given.items()},
            causal=True,
            sliding_window=9,
            return_lse=True,
        )
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=3e-6)


def test_one_sequence_and_an_empty_batch():
    query, key, value = tensors_of(**SHAPE).values()
    out, lse = flash_attention(query[0], key[0], value[0], return_lse=True)
    assert out.shape == (70, 2, 16) and lse.shape == (2, 70)
    torch.testing.assert_close(out, flash_attention(query, key, value)[0])
    empty = query[:0].requires_grad_()
    out, lse = flash_attention(empty, key[:0], value[:0], return_lse=True)
    assert out.shape == (0, 70, 2, 16) and lse.shape == (0, 2, 70)
    (out.sum() + lse.sum()).backward()
    assert empty.grad.shape == empty.shape


@pytest.mark.parametrize("implementation", ["cpu", "interpreted"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 20), (20, 0)])
def test_no_queries_or_no_keys(queries, keys, implementation):
    """Nothing to see gives zeros; what weight there is, sinks have."""
    shapes = ((2, queries, 2, 16), (2, keys, 2, 16), (2, keys, 2, 24))
    leaves = [torch.full(shape, torch.nan, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    sinks = torch.tensor([0.5, -torch.inf], requires_grad=True)
    with running(implementation):
        out, lse = flash_attention(*leaves, softmax_aux=sinks, causal=True, return_lse=True)
        out.sum().backward(retain_graph=True)
        lse[:, 0].sum().backward()
    assert out.shape == (2, queries, 2, 24) and out.dtype == torch.bfloat16 and not out.any()
    assert (lse == sinks[None, :, None]).all() and lse.shape == (2, 2, queries)
    assert all(not x.grad.any() for x in leaves)
    assert sinks.grad.tolist() == [2.0 * queries, 0.0]


@pytest.mark.parametrize("cu", [[2, 16], [0, 9, 5], [0, 99], [0, -1, 16], [0, 2**32 + 3, 16]])
@pytest.mark.parametrize("given", [list, torch.tensor])
def test_bad_cumulative_lengths_raise(cu, given):
    q, k, v = (torch.zeros(16, 2, 16) for _ in range(3))
    need = "must start at 0, never decrease, and end within the 16 tokens"
    with pytest.raises(ValueError, match=f"cum_seqlens_q {need}"):
        flash_attention(q, k, v, cum_seqlens_q=given(cu))
    with pytest.raises(ValueError, match=f"cum_seqlens_k {need}"):
        flash_attention(q, k, v, cum_seqlens_q=[0, *[16] * (len(cu) - 1)], cum_seqlens_k=given(cu))


@pytest.mark.gpu
def test_bad_cumulative_lengths_on_the_host_raise_for_tensors_of_a_gpu():
    q, k, v = (torch.zeros(16, 2, 16, device="cuda") for _ in range(3))
    with pytest.raises(ValueError, match="cum_seqlens_q must start at 0"):
        flash_attention(q, k, v, cum_seqlens_q=[2, 16])
    with pytest.raises(ValueError, match="cum_seqlens_q must start at 0"):
        flash_attention(q, k, v, cum_seqlens_q=torch.tensor([0, 9, 5]))


def test_values_of_the_host_are_checked_before_they_move():
    """On a device whose values nobody looks at, here PyTorch's one of shapes alone."""
    q, k, v = (torch.zeros(16, 2, 16, device="meta") for _ in range(3))
    for cu in ([2, 16], torch.tensor([0, 9, 5]), [0, 99]):
        with pytest.raises(ValueError, match="cum_seqlens_q must start at 0"):
            flash_attention(q, k, v, cum_seqlens_q=cu)
    assert flash_attention(q, k, v, cum_seqlens_q=[0, 9, 16]).shape == q.shape


BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "keys alone": (ValueError, "cum_seqlens_k needs cum_seqlens_q", {"cum_seqlens_k": torch.tensor([0, 70])}),
    "a batch of packed ones": (ValueError, "query has batch 2, needed 1", {"cum_seqlens_q": torch.tensor([0, 70])}),
    "window": (ValueError, "must not be negative", {"sliding_window": -1}),
    "scale": (ValueError, "softmax_scale=inf must be finite", {"softmax_scale": float("inf")}),
    "cap": (ValueError, "logits_soft_cap=0.0 must be positive", {"logits_soft_cap": 0.0}),
    "causal": (TypeError, "causal must be True or False", {"causal": 1}),
    "sinks": (ValueError, r"softmax_aux \(3, 2\) must be", {"softmax_aux": torch.zeros(3, 2)}),
    "sinks of ints": (TypeError, "softmax_aux must be a tensor of floats", {"softmax_aux": torch.zeros(2).int()}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case):
    error, message, options = BAD[case]
    with pytest.raises(error, match=message):
        flash_attention(*tensors_of(**SHAPE).values(), **options)
