"""Leading dimensions: none, several and empty ones, in terms of one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import (
    attention,
    blocksparse_attention,
    flash_attention,
    mean_pooling,
    scaled_dot_product_attention,
)
from ejkernel.types import MaskInfo
from harness import normal
from tolerances import assert_close

B, T, S, H, HKV, D = 6, 5, 7, 4, 2, 8
ARRAYS = {"query": normal("q", (B, T, H, D)), "key": normal("k", (B, S, HKV, D)), "value": normal("v", (B, S, HKV, D))}
BLOCKS = np.tri(2, 2, dtype=bool)
LSE = {"return_lse": True}
FUNCTIONS = {
    "flash": lambda a: flash_attention(**a, causal=True, **LSE),
    "flash-undivided": lambda a: flash_attention(**a, normalize_output=False, **LSE),
    "flash-dropout": lambda a: flash_attention(**a, dropout_prob=0.3, dropout_seed=1, **LSE),
    "attention": lambda a: attention(**a, causal=True),
    "sdpa": lambda a: (scaled_dot_product_attention(**a, causal=True),),
    "blocksparse": lambda a: blocksparse_attention(**a, block_mask=BLOCKS, block_size=4, **LSE),
}


def results(function, arrays):
    """Outputs, and gradients of a sum that weighs every output, by name."""

    def total(a):
        outputs = function(a)
        return sum((x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)).sum() for x in outputs), outputs

    gradients, outputs = jax.jit(jax.grad(total, has_aux=True))(arrays)
    return dict(enumerate(outputs)), gradients


@functools.cache
def flat_results(name):
    return results(FUNCTIONS[name], ARRAYS)


def shaped(arrays, *batch):
    return {name: x.reshape(*batch, *x.shape[1:]) for name, x in arrays.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_several_batch_dimensions_are_one(name):
    flat, gradients = flat_results(name)
    several, several_gradients = results(FUNCTIONS[name], shaped(ARRAYS, 2, 1, 3))
    assert_close(several, shaped(flat, 2, 1, 3), kind="output")
    assert_close(several_gradients, shaped(gradients, 2, 1, 3), kind="gradient of")


@pytest.mark.parametrize("name", ["flash", "attention", "blocksparse"])
def test_no_batch_dimension_is_one_sequence(name):
    (flat, _), (single, gradients) = flat_results(name), results(FUNCTIONS[name], {n: x[0] for n, x in ARRAYS.items()})
    assert_close(single, {n: x[0] for n, x in flat.items()}, kind="output")
    assert {n: x.shape for n, x in gradients.items()} == {n: x.shape[1:] for n, x in ARRAYS.items()}


BIASES = {
    "whole": (2, 3, H, T, S),
    "first": (2, 1, H, T, S),
    "second": (3, H, 1, S),
    "none": (1, 1, 1, T, S),
    "matrix": (T, S),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_broadcasts_along_several_batch_dimensions(name):
    """Its gradient is summed along those where it does."""

    def function(a):
        return flash_attention(**a, **LSE)

    bias = normal("bias", BIASES[name])
    several = results(function, shaped(ARRAYS, 2, 3) | {"bias": bias})
    full = jnp.broadcast_to(bias, (2, 3, H, T, S)).reshape(B, H, T, S)
    flat = results(function, ARRAYS | {"bias": full})
    axes = tuple(range(5 - bias.ndim)), tuple(a for a in range(bias.ndim) if bias.shape[a] == 1)
    total = flat[1]["bias"].reshape(2, 3, H, T, S).sum(axes[0]).sum(axes[1], keepdims=True)
    assert_close(several[0], shaped(flat[0], 2, 3), kind="output")
    assert_close(several[1], {**shaped({n: flat[1][n] for n in ARRAYS}, 2, 3), "bias": total}, kind="gradient of")


def test_a_bias_of_one_sequence():
    one, bias = {name: x[0] for name, x in ARRAYS.items()}, normal("bias", (H, T, S))
    expected = flash_attention(**{name: x[None] for name, x in one.items()}, bias=bias)[0]
    for given in (bias, bias[None]):
        assert_close({"out": flash_attention(**one, bias=given)}, {"out": expected})


def test_a_mask_of_the_whole_batch():
    lengths = jnp.arange(1, B + 1)
    mask = MaskInfo(T, S).apply_kv_lengths(lengths)
    result = flash_attention(**shaped(ARRAYS, 2, 3), mask_info=mask)
    assert_close({"out": result}, {"out": flash_attention(**ARRAYS, mask_info=mask).reshape(result.shape)})


@pytest.mark.parametrize("batch", [(0,), (2, 0)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_empty_batch_gives_empty_arrays(name, batch):
    arrays = {n: jnp.zeros((*batch, *x.shape[1:]), x.dtype) for n, x in ARRAYS.items()}
    full, _ = flat_results(name)
    outputs, gradients = results(FUNCTIONS[name], arrays)
    assert {n: x.shape for n, x in outputs.items()} == {n: (*batch, *x.shape[1:]) for n, x in full.items()}
    assert [x.dtype for x in outputs.values()] == [x.dtype for x in full.values()]
    assert {n: x.shape for n, x in gradients.items()} == {n: x.shape for n, x in arrays.items()}


def test_a_function_of_blocks_for_an_empty_batch():
    x = jnp.zeros((0, 8, 2, 4))
    assert blocksparse_attention(x, x, x, block_mask=lambda b, h, i, j: i >= j, block_size=4).shape == x.shape


def test_what_an_empty_batch_shares_has_a_gradient_of_zero():
    shared = {"bias": normal("bias", (H, T, S)), "softmax_aux": normal("sinks", (H,))}
    arrays = {n: x[:0] for n, x in ARRAYS.items()} | shared
    mask = MaskInfo.from_segments(jnp.zeros((0, T), jnp.int32), jnp.zeros((0, S), jnp.int32))
    _, gradients = results(lambda a: flash_attention(**a, mask_info=mask, **LSE), arrays)
    assert {n: gradients[n].shape for n in shared} == {n: x.shape for n, x in shared.items()}
    assert not any(gradients[n].any() for n in shared)


def test_vmap_over_nothing():
    arrays = {n: jnp.zeros((0, *x.shape), x.dtype) for n, x in ARRAYS.items()}
    outputs, gradients = results(jax.vmap(FUNCTIONS["flash"]), arrays)
    assert [x.shape for x in outputs.values()] == [(0, B, T, H, D), (0, B, H, T)]
    assert gradients["key"].shape == (0, B, S, HKV, D)


def test_an_empty_batch_on_every_platform(platform):
    shapes = {n: (0, *x.shape[1:-1], 64) for n, x in ARRAYS.items()}  # a head dim that all take
    arrays = {n: jnp.zeros(shape, "bfloat16") for n, shape in shapes.items()}
    with platform.context():
        outputs, gradients = results(lambda a: (flash_attention(**a, platform=platform.name),), arrays)
    assert [x.shape for x in outputs.values()] == [(0, T, H, 64)]
    assert {n: x.shape for n, x in gradients.items()} == shapes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_first_of_several_may_be_split(kind):
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (kind, kind))
    specs = (P("dp", None, None, "tp", None),) * 3
    arrays = shaped(ARRAYS, 2, 3)
    result = jax.jit(lambda a: flash_attention(**a, mesh=mesh, in_specs=specs))(arrays)
    assert_close({"out": result}, {"out": flash_attention(**arrays)})
    with pytest.raises(ValueError, match="splits batch dimensions behind the first, of 2"):
        flash_attention(**arrays, mesh=mesh, in_specs=(P(None, "dp"),) * 3)


# mean_pooling -------------------------------------------------------------------------------------------------------


def pooled(a, **options):
    return (mean_pooling(a["x"], chunk_size=2, **options),)


def test_mean_pooling_takes_any_batch():
    x = {"x": normal("x", (B, T, H, D))}
    flat, gradients = results(pooled, x)
    for batch, part in (((2, 3), slice(None)), ((), slice(1))):
        several = results(pooled, shaped({"x": x["x"][part]}, *batch))
        assert_close(several[0], shaped({0: flat[0][part]}, *batch))
        if batch:
            assert_close(several[1], shaped(gradients, *batch))


def test_mean_pooling_of_packed_tokens_without_a_batch():
    x, cu = normal("x", (T, H, D)), jnp.array([0, 3, 5])
    result = mean_pooling(x, cu, chunk_size=2)
    assert result.shape == (3, H, D)
    assert_close({"out": result}, {"out": mean_pooling(x[None], cu, chunk_size=2)[0]})


@pytest.mark.parametrize("batch", [(0,), (0, 2)])
def test_mean_pooling_of_nothing(batch):
    outputs, gradients = results(pooled, {"x": jnp.zeros((*batch, T, H, D))})
    assert outputs[0].shape == (*batch, 3, H, D) and gradients["x"].shape == (*batch, T, H, D)
