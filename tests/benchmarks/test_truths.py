"""What benchmarks take for right, where it is computed in another way than the definition is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.linear import cases as linear
from benchmarks.measuring.device_lock import DeviceLock
from benchmarks.native_sparse import cases as native_sparse
from benchmarks.softmax import cases as softmax
from ejkernel.family import Truth
from ejkernel.kernels.native_sparse.reference import reference
from ejkernel.kernels.native_sparse.spec import canonicalise
from tolerances import assert_close


@pytest.mark.parametrize("group", ["shared blocks", "random blocks"])
def test_blocks_are_different_and_neighbours_share_them(group):
    case = native_sparse.Case(group, 4096, 2, 2, 16, 8, "float32")
    blocks = native_sparse.drawn_blocks(case)[0]  # (T, Hkv, K)
    own_block = np.arange(case.T) // native_sparse.BLOCK
    assert blocks.shape == (4096, 2, 8) and blocks.min() == -1 and (blocks <= own_block[:, None, None]).all()
    ordered = np.sort(blocks, -1)
    assert ((np.diff(ordered) > 0) | (ordered[..., 1:] < 0)).all()
    assert ((blocks >= 0).sum(-1) == np.minimum(own_block + 1, 8)[:, None]).all()
    later = blocks[2048:]
    kept = np.mean([len({*a} & {*b}) / 8 for a, b in zip(later[:-1, 0], later[1:, 0], strict=True)])
    assert 0.89 < kept < 0.93 if group == "shared blocks" else kept < 0.25


def test_attention_over_the_blocks_of_each_query_is_the_definition():
    case = native_sparse.Case("random blocks", 256, 4, 2, 8, 3, "float32")
    problem = native_sparse.Selected(case)
    out, gradients = native_sparse._defined(case, jnp.dtype("float32"), problem.arrays)

    def attend(trained):
        call = canonicalise(**trained, block_indices=problem.arrays["block_indices"], block_size=native_sparse.BLOCK)
        return reference(call)["out"]

    exact, pull = jax.vjp(attend, {name: problem.arrays[name] for name in native_sparse.TRAINED})
    np.testing.assert_allclose(out["out"], exact, atol=1e-5)
    (wanted,) = pull(problem.arrays["dout"])
    for name, x in wanted.items():
        np.testing.assert_allclose(gradients[f"d{name}"], x, atol=3e-5)


@pytest.mark.parametrize("group", ["lightning", "gla"])
def test_sums_over_pairs_are_the_recurrence(group):
    case = linear.Case(group, 2, 128, 2, 8, "float32")
    problem = linear.Recurrence(case)
    ways = (linear._in_pairs, linear._by_token)
    pairs, tokens = (problem._run(way, "float32", problem.arrays, DeviceLock()) for way in ways)
    for one, other in zip(pairs, tokens, strict=True):
        for name, x in one.items():
            np.testing.assert_allclose(x, other[name], atol=2e-4)


def test_errors_on_the_host_are_those_on_the_device():
    draw = np.random.default_rng(0).standard_normal
    exact = {"out": draw((3, 5), np.float32)}
    naive = {"out": exact["out"].astype(jnp.bfloat16)}
    got = (exact["out"] + 0.01).astype(jnp.bfloat16)
    on_device = Truth.of(jax.tree.map(jnp.asarray, exact), jax.tree.map(jnp.asarray, naive))
    on_host = Truth.of(exact, naive)
    assert (on_host.naive, on_host.floor) == (on_device.naive, on_device.floor)
    assert on_host.error("out", got) == on_device.error("out", jnp.asarray(got))
    assert not on_host.error("out", np.full((3, 5), np.nan)).ok


@pytest.mark.parametrize("case", [
    softmax.Case("models", 2, 6, 4, 2, 8, "full", "float32", S=5, bias=True, model="T5"),
    softmax.Case("models", 1, 12, 2, 2, 8, "documents", "float32", documents=3, model="packed"),
    softmax.Case("models", 1, 12, 2, 2, 8, "documents", "float32", documents=3, by="mask_fn", model="unrecognised"),
    softmax.Case("models", 1, 24, 2, 1, 8, "tree", "float32", alibi=True, model="rollouts"),
    softmax.Case("models", 1, 12, 2, 2, 8, "prefix-LM", "float32", soft_cap=0.5, model="prefix"),
], ids=lambda case: case.model)  # fmt: skip
def test_attention_a_few_queries_at_a_time_is_the_definition(case, monkeypatch):
    """A bias has a gradient too."""
    monkeypatch.setattr(softmax, "_BLOCK", case.B * case.H * case.keys * 3)  # two queries
    problem = softmax.Attention(case)
    output, gradients = problem.truths(DeviceLock())
    trained = {name: problem.arrays[name] for name in softmax.TRAINED if name in problem.arrays}

    def attend(trained):
        return softmax.reference(softmax.canonicalise(**case.arguments(problem.arrays | trained)), jnp.float32)["out"]

    out, pull = jax.vjp(attend, trained)
    assert_close(output.exact, {"out": out})
    assert_close(gradients.exact, {f"d{name}": dx for name, dx in pull(problem.arrays["dout"])[0].items()})
