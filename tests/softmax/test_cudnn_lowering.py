"""The calls of cuDNN are those that JAX makes itself, lowered on a machine without a GPU."""

import re
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.softmax import cudnn
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target, deterministic
from ejkernel.ops.dispatch import choose, run_locally
from ejkernel.types import MaskInfo

HOPPER = Target("gpu", "nvidia_h200", "sm_90")
B, T, H, D = 4, 128, 4, 64

# our options, and those of JAX that mean the same
CASES = {
    "full": ({}, {}),
    "causal": ({"causal": True}, {"mask_type": fused.MaskType.CAUSAL}),
    "window": (
        {"causal": True, "sliding_window": (31, 0)},
        {"mask_type": fused.MaskType.CAUSAL, "sliding_window_length": 32},
    ),
    "scale": ({"softmax_scale": 0.5}, {"scale": 0.5}),
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """What JAX asks the GPU when a call is traced."""
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)


def structs(Hkv=H, dtype="bfloat16", sharding=None):
    q = jax.ShapeDtypeStruct((B, T, H, D), dtype, sharding=sharding)
    k = jax.ShapeDtypeStruct((B, T, Hkv, D), dtype, sharding=sharding)
    return q, k, k, q


def lower(function, arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def calls(text):
    """Every custom call: operands (those that are no arguments without their number), config, layouts and types."""
    return [re.sub(r"%\d+", "%", line) for line in re.findall(r"stablehlo.custom_call @(.*)", text)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("Hkv", [H, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("name", CASES)
def test_the_calls_are_those_of_jax(name, Hkv, dtype):
    """A JAX that calls cuDNN in another way shows here."""
    options, theirs = CASES[name]

    def ours(q, k, v, dout):
        call = canonicalise(q, k, v, **options).on(HOPPER)
        assert cudnn.unsupported(call) == []
        outputs, residuals = cudnn.forward(call, cudnn.Config())
        return outputs, cudnn.backward(call, residuals, {"out": dout}, cudnn.Config())

    def expected(q, k, v, dout):
        out, pull = jax.vjp(lambda *x: fused.dot_product_attention(*x, **{"scale": D**-0.5, **theirs}), q, k, v)
        return out, pull(dout)

    arrays = structs(Hkv, dtype)
    lines = calls(lower(ours, arrays))
    assert len(lines) == 2 and lines == calls(lower(expected, arrays))


# Packed sequences -------------------------------------------------------------------------------------------

OFFSETS = [[0, 40, 40, 100], [0, 1, 90, 128]]  # an empty sequence, tokens of none


def packed_call(Hkv=H, offsets=(0, 40, 40, 100), target=HOPPER, **options):
    q, k, v, _ = (jnp.ones((1, *x.shape[1:]), x.dtype) for x in structs(Hkv))
    return canonicalise(q, k, v, cum_seqlens_q=jnp.asarray(offsets), **options).on(target)


@pytest.mark.parametrize("offsets", [OFFSETS[0], [0, 100]], ids=["three", "one"])
@pytest.mark.parametrize("name", ["full", "causal"])
def test_packed_calls_are_those_of_jax(name, offsets):
    options, theirs = CASES[name]
    starts = [*offsets[:-1], 100] if len(offsets) == 2 else offsets[:-1]
    sizes = jnp.diff(jnp.asarray([*starts, offsets[-1]]))[None]
    places = jnp.asarray([[*starts, -1]])

    def ours(q, k, v, dout, cum):
        call = canonicalise(q, k, v, cum_seqlens_q=cum, **options).on(HOPPER)
        assert cudnn.unsupported(call) == []
        outputs, residuals = cudnn.forward(call, cudnn.Config())
        return outputs, cudnn.backward(call, residuals, {"out": dout}, cudnn.Config())

    def expected(q, k, v, dout, cum):
        def attend(*x):
            packing = {"q_seqlen": sizes, "kv_seqlen": sizes, "q_offsets": places, "kv_offsets": places}
            return fused.dot_product_attention(*x, **packing, **{"scale": D**-0.5, **theirs})

        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    arrays = [jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) for x in structs()]
    arrays.append(jax.ShapeDtypeStruct((len(offsets),), jnp.int32))

    def unnamed(text):
        """Operands without their names: what JAX is given whole, ours computes."""
        return [re.sub(r"%[\w#]*", "%", line) for line in calls(text)]

    lines = unnamed(lower(ours, arrays))
    assert len(lines) == 2 and lines == unnamed(lower(expected, arrays))
    assert all(re.search(rf"max_seg_per_batch\W+\d*: {max(2, len(offsets) - 1)}\b", line) for line in lines)


def packing_of_rows():
    """Two rows of three sequences each, as vmap makes them."""
    offsets = jnp.asarray(OFFSETS)
    ids = np.full((len(OFFSETS), T), -1, np.int32)
    for row, ends in zip(ids, OFFSETS, strict=True):
        for m, (start, end) in enumerate(pairwise(ends)):
            row[start:end] = m
    return cudnn.Packing(jnp.asarray(ids), offsets[:, :-1], jnp.diff(offsets))


def test_cudnn_finds_packed_sequences():
    """In elements from the first row's first token on; what follows the last sequence is the end of all rows."""
    q = jax.ShapeDtypeStruct((len(OFFSETS), T, H, D), jnp.bfloat16)
    operands = packing_of_rows().operands().values()
    q_sizes, k_sizes, q_places, k_places = (x.reshape(-1) for x in fused._fix_seqlen_offsets(*operands, q, q))
    starts = [b * T + start for b, ends in enumerate(OFFSETS) for start in ends[:-1]]
    expected = np.asarray([*starts, len(OFFSETS) * T]) * H * D
    for sizes, places in ((q_sizes, q_places), (k_sizes, k_places)):
        np.testing.assert_array_equal(sizes, np.diff(OFFSETS).reshape(-1))
        np.testing.assert_array_equal(places[: len(expected)], expected)


def test_the_log_sum_exps_of_packed_sequences():
    """cuDNN keeps T for each sequence, from its first token on."""
    rows, M = len(OFFSETS), len(OFFSETS[0]) - 1
    stats = np.random.default_rng(0).normal(size=(rows * M, H, T)).astype(np.float32)
    lse, back = np.full((rows, H, T), -np.inf, np.float32), np.zeros_like(stats)
    for b, ends in enumerate(OFFSETS):
        for m, (start, end) in enumerate(pairwise(ends)):
            lse[b, :, start:end] = back[b * M + m, :, : end - start] = stats[b * M + m, :, : end - start]
    packing = packing_of_rows()
    np.testing.assert_array_equal(packing.by_token(jnp.asarray(stats)), lse)
    np.testing.assert_array_equal(packing.by_sequence(jnp.asarray(lse)), back)


PACKED_REFUSALS = {
    "compute capability 8.0: only 9.0 and later": lambda: packed_call(target=Target("gpu", "nvidia_a100", "sm_80")),
    "windows of packed sequences": lambda: packed_call(causal=True, sliding_window=(31, 0)),
    "scale -0.5: only positive ones": lambda: packed_call(softmax_scale=-0.5),
    "packed keys of other lengths": lambda: packed_call(cum_seqlens_k=jnp.asarray([0, 10, 40, 100])),
    "129 packed sequences: only up to 128": lambda: packed_call(offsets=[0] * 129 + [128]),
    "segments and lengths, unless": lambda: packed_call(mask_info=MaskInfo.from_segments(jnp.zeros((1, T), int))),
}


@pytest.mark.parametrize("reason", PACKED_REFUSALS)
def test_packed_sequences_it_cannot_do(reason):
    reasons = cudnn.unsupported(PACKED_REFUSALS[reason]())
    assert len(reasons) == 1 and reason in reasons[0]


def test_packed_keys_of_fewer_heads_need_a_jax_that_finds_them():
    q, k = (jax.ShapeDtypeStruct((len(OFFSETS), T, heads, D), jnp.bfloat16) for heads in (H, 2))
    *_, places = fused._fix_seqlen_offsets(*packing_of_rows().operands().values(), q, k)
    finds = int(places[0, 2]) == OFFSETS[0][2] * 2 * D
    reasons = cudnn.unsupported(packed_call(Hkv=2))
    assert reasons == [] if finds else "looks for their keys in the wrong place" in reasons[0]


def gradients(q, k, v, dout):
    """As a user gets them: through the gradient and the vmap rule of the library."""

    def attend(q, k, v):
        return run_locally(FLASH_ATTENTION, canonicalise(q, k, v, causal=True).on(HOPPER), "cudnn", None)["out"]

    return jax.vjp(attend, q, k, v)[1](dout)


def test_auto_does_not_train_on_cudnn_where_the_same_bits_are_asked_for():
    call = canonicalise(*(jnp.ones((B, T, H, D), jnp.bfloat16),) * 3).on(Target("gpu", "nvidia_a100", "sm_80"))
    plan, told = choose(FLASH_ATTENTION, call, None, None)  # nothing is measured: the first that can
    assert told.platform == "cudnn" and told.gradient is None
    assert plan is not None and plan.implementation is cudnn.IMPLEMENTATION and plan.gradient is None
    with deterministic():
        _, told = choose(FLASH_ATTENTION, call, None, None)
        plan, given = choose(FLASH_ATTENTION, call, None, {})
    assert told.platform == "cudnn" and told.gradient is not None and told.gradient.platform not in (None, "cudnn")
    assert "not cudnn for the gradient: its gradients differ between runs" in str(told)
    assert given.platform == "cudnn" and plan is not None and plan.gradient is not None


def test_vmap_folds_into_the_batch():
    folded = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in structs(2)]
    _, backward = calls(lower(jax.vmap(gradients), folded))
    assert backward.startswith("__cudnn$fmhaSoftmaxBackward(") and f"tensor<{3 * B}x{T}x{H}x{D}xbf16>" in backward


def test_jit_may_split_batch_and_heads():
    """The partitioner is given a rule for each call, not a call that it must gather for."""
    mesh = Mesh(np.asarray(jax.devices("cpu")[:4]).reshape(2, 2), ("dp", "tp"))
    lines = calls(lower(gradients, structs(sharding=NamedSharding(mesh, P("dp", None, "tp")))))
    assert [line.split("(")[0] for line in lines] == ["CustomSPMDPartitioning"] * 2
    assert all("sdy.sharding_rule" in line for line in lines)
