"""The Mosaic GPU kernels lower for Hopper on a machine that has none."""

import math
import operator
import re
from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from ejkernel.kernels.softmax import mosaic_gpu, triton
from ejkernel.kernels.softmax.mosaic_gpu import backward as backward_kernels
from ejkernel.kernels.softmax.mosaic_gpu import backward_fused
from ejkernel.kernels.softmax.mosaic_gpu import forward as forward_kernel
from ejkernel.kernels.softmax.mosaic_gpu.scheduler import BlockRuns, TileScheduler
from ejkernel.kernels.softmax.mosaic_gpu.tiles import copied_bias
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target, deterministic
from ejkernel.ops.autodiff import execute
from ejkernel.ops.dispatch import plan
from ejkernel.types import BlockPattern, MaskInfo

HOPPER = Target("gpu", "nvidia_h200", "sm_90", cores=132)
DROPOUT = {"dropout_prob": 0.1, "dropout_seed": 3}


def bias(rows, columns, dtype="bfloat16"):
    return jax.ShapeDtypeStruct((rows, columns), dtype)


CASES = {
    "D64": {"D": 64},
    "D128-causal": {"D": 128, "causal": True},
    "D256-causal": {"D": 256, "causal": True},
    "D256-segments-soft-cap": {"D": 256, "segments": True, "logits_soft_cap": 20.0},
    "D192": {"D": 192},
    "D96-window-ragged": {"D": 96, "T": 200, "causal": True, "sliding_window": 64},
    "D64-many-tiles": {"D": 64, "T": 8192, "H": 8},
    "D128-many-tiles-causal": {"D": 128, "T": 8192, "H": 8, "causal": True},
    "D128-segments-sinks-soft-cap": {
        "D": 128,
        "segments": True,
        "causal": True,
        "sinks": True,
        "logits_soft_cap": 20.0,
    },
    "D64-pattern-128-shared-ragged": {"D": 64, "T": 500, "pattern": 128, "shared": True},
    "D128-pattern-64-segments": {"D": 128, "pattern": 64, "segments": True, "causal": True, "sinks": True},
    "D256-pattern-64-causal": {"D": 256, "pattern": 64, "causal": True},
    "D96-pattern-128-window": {"D": 96, "pattern": 128, "causal": True, "sliding_window": 200},
    "D80-causal": {"D": 80, "causal": True},
    "D40-ragged": {"D": 40, "T": 201},
    "D192-Dv128-causal": {"D": 192, "Dv": 128, "causal": True},
    "D64-bias": {"D": 64, "bias": bias(256, 256)},
    "D64-mask": {"D": 64, "T": 200, "dense": (2, 1, 200, 200)},
    "D128-mask-of-keys-causal": {"D": 128, "dense": (2, 1, 1, 256), "causal": True},
    "D256-mask-of-heads": {"D": 256, "dense": (1, 4, 256, 256)},
    "D64-mask-bias-dropout": {
        "D": 64,
        "dense": (1, 1, 256, 256),
        "bias": bias(256, 256),
        "dropout_prob": 0.1,
        "dropout_seed": 3,
    },
    "D64-dropout": {"D": 64, **DROPOUT},
    "D128-dropout-segments": {"D": 128, **DROPOUT, "segments": True, "causal": True},
    "D128-bias-causal-soft-cap": {"D": 128, "T": 500, "bias": bias(500, 500), "causal": True, "logits_soft_cap": 20.0},
    "D64-bias-of-keys-float32": {"D": 64, "bias": bias(1, 256, "float32")},
    "D256-bias-dropout": {"D": 256, "bias": bias(256, 256), **DROPOUT},
    "D128-many-tiles-segments-longest-first": {"D": 128, "T": 4096, "H": 8, "segments": True, "causal": True},
    "D64-many-tiles-pattern-longest-first": {"D": 64, "T": 4096, "H": 8, "pattern": 64, "causal": True},
}


def arguments(D, T=256, H=4, Hkv=2, Dv=0, segments=False, sinks=False, pattern=0, shared=False, **options):
    q = jax.ShapeDtypeStruct((2, T, H, D), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, T, Hkv, D), jnp.bfloat16)
    v = jax.ShapeDtypeStruct((2, T, Hkv, Dv or D), jnp.bfloat16)
    masks = [MaskInfo.from_segments(jnp.zeros((2, T), jnp.int32))] if segments else []
    if pattern:
        blocks = BlockPattern.local_stride(H, -(-T // pattern), 1, 3, homo_head=shared, block_size=pattern)
        masks.append(MaskInfo.from_block_pattern(blocks, q_len=T))
    if dense := options.pop("dense", None):
        masks.append(MaskInfo.from_attention_mask(jnp.ones(dense, jnp.bool_)))
    if masks:
        options["mask_info"] = reduce(operator.and_, masks)
    if sinks:
        options["softmax_aux"] = jnp.zeros(H)
    if bias := options.pop("bias", None):
        options["bias"] = jnp.zeros((1, H, *bias.shape), bias.dtype)
    return (q, k, v), options


# what each of these lowers is in other cases too
COVERED_BY_OTHERS = (
    "D64", "D192", "D64-bias", "D64-dropout", "D256-causal", "D96-pattern-128-window", "D128-mask-of-keys-causal",
    "D128-pattern-64-segments", "D64-bias-of-keys-float32", "D80-causal", "D64-mask", "D256-mask-of-heads",
    "D128-bias-causal-soft-cap", "D256-pattern-64-causal",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.cuda_aot_more] * (name in COVERED_BY_OTHERS)) for name in CASES]
)
def test_lowers_forward_and_backward(name, monkeypatch):
    arrays, options = arguments(**CASES[name])
    # a kernel of Triton's, which jax-triton lowers with a GPU alone
    monkeypatch.setattr(triton, "bias_gradient", lambda call, *_: jnp.zeros(call["bias"].shape))

    def both(query, key, value):
        call = canonicalise(query, key, value, **options).on(HOPPER)
        assert mosaic_gpu.unsupported(call) == []
        config = replace(mosaic_gpu.default_config(call), **kind)
        outputs, residuals = mosaic_gpu.IMPLEMENTATION.forward(call, config)
        return outputs, mosaic_gpu.IMPLEMENTATION.backward(call, residuals, outputs, config)

    refused = CASES[name]["D"] != 128 or {"bias", "dropout_prob"} & set(CASES[name])
    may_fuse = mosaic_gpu.CAN_ADD_TO_INPUT and not refused
    for same_bits in (False, True) if may_fuse else (True,):
        kind = {"fused": True} if not same_bits else {}
        kind |= {"longest_first": "longest-first" in name}
        with deterministic(same_bits):
            text = jax.jit(lambda *x: both(*x)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        kernels = {"forward", "dq", "dkv"} if same_bits else {"forward", "bwd"}
        assert set(re.findall(r"softmax_(\w+?)_mosaic_gpu", text)) == kernels
        assert text.count("stablehlo.optimization_barrier") >= 2 * len(kernels)  # around each, see `fusion_barrier`


THREE = {"warpgroups": 3}
OTHER_CONFIGS = {"D64-two": ("D64", {"warpgroups": 2}), "D64-three-bias": ("D64-bias", THREE)}
FUSED_D64 = {"fused": True, "dkv_block_q": 128, "dkv_stages": 2}
if mosaic_gpu.CAN_ADD_TO_INPUT:
    OTHER_CONFIGS["D64-fused"] = "D64-many-tiles", FUSED_D64
    OTHER_CONFIGS["D128-fused"] = "D128-many-tiles-causal", {"fused": True}


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_lowers_what_is_no_default(name, monkeypatch):
    case, way = OTHER_CONFIGS[name]
    arrays, options = arguments(**CASES[case])
    monkeypatch.setattr(triton, "bias_gradient", lambda call, *_: jnp.zeros(call["bias"].shape))

    def run(query, key, value):
        call = canonicalise(query, key, value, **options).on(HOPPER)
        config = replace(mosaic_gpu.default_config(call), **{"fused": False, **way})
        assert mosaic_gpu.unsupported_config(call, config) == []
        outputs, residuals = mosaic_gpu.IMPLEMENTATION.forward(call, config)
        return outputs, mosaic_gpu.IMPLEMENTATION.backward(call, residuals, outputs, config)

    with deterministic(False):
        text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    kernels = {"forward", "bwd"} if "fused" in way else {"forward", "dq", "dkv"}
    assert set(re.findall(r"softmax_(\w+?)_mosaic_gpu", text)) == kernels


@pytest.mark.parametrize(
    ("case", "way", "reason"),
    [
        ("D64", {"block_k": 256}, "block_k=256 leaves no registers"),
        ("D128-causal", THREE, "no registers for head dim 128"),
        ("D64-mask", THREE, "two times 64 queries"),
        ("D64", {"fused": True, "dkv_stages": 2}, "needs dkv_block_q=128"),
        ("D64-mask", {"fused": True, "dkv_block_q": 128, "dkv_stages": 2}, "no dense mask"),
        ("D256-causal", {"fused": True}, "for head dims 64 and 128, not 256"),
    ],
)
def test_refuses_what_it_has_no_room_for(case, way, reason):
    arrays, options = arguments(**CASES[case])
    arrays = [jnp.zeros(x.shape, x.dtype) for x in arrays]
    call = canonicalise(*arrays, **options).on(HOPPER)
    with deterministic(False):
        reasons = mosaic_gpu.unsupported_config(call, replace(mosaic_gpu.default_config(call), **way))
    assert any(reason in given for given in reasons), reasons


def test_two_or_three_consumers():
    with pytest.raises(ValueError, match="warpgroups=4 must be 2 or 3"):
        mosaic_gpu.Config(warpgroups=4)


def test_many_tiles_of_documents_go_longest_first():
    def longest_first(**kind):
        arrays, options = arguments(causal=True, **kind)
        configs = []

        def trace(*arrays):
            configs.append(mosaic_gpu.default_config(canonicalise(*arrays, **options).on(HOPPER)))
            return arrays

        jax.eval_shape(trace, *arrays)
        return configs[0].longest_first

    for D in (64, 128):
        assert longest_first(D=D, T=8192, H=32, segments=True)
        assert not longest_first(D=D, T=8192, H=32)
        assert not longest_first(D=D, T=512, H=32, segments=True)


def coordinates(scheduler):
    """Those of each program's tiles, (programs, most, 3), and -1 where there are no more."""

    def of_program(_):
        def put(n, tiles):
            return tiles.at[n].set(jnp.stack(scheduler.tile_coordinates(n)))

        none = jnp.full((2 * (scheduler.tiles // scheduler.programs + 1), 3), -1)
        return jax.lax.fori_loop(0, scheduler.count(), put, none)

    return np.asarray(jax.vmap(of_program, axis_name="program")(jnp.arange(scheduler.programs)))


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "H", "cores"),
    [(2, 8192, 16, 132), (8, 2000, 16, 132), (1, 5120, 8, 132), (1, 16384, 5, 132), (1, 1100, 4, 3), (1, 640, 2, 1)],
)
def test_programs_share_the_tiles(B, T, H, cores, causal, side):
    """Every tile is somebody's, once, and where programs take several they have the same work."""
    q = jax.ShapeDtypeStruct((B, T, H, 128), jnp.bfloat16)
    tiles = -(-T // 128)

    def trace(query):
        call = canonicalise(query, query, query, causal=causal).on(HOPPER)
        runs = BlockRuns.of(call, 128, 128, side)
        schedulers.extend(TileScheduler.of(B, H, tiles, runs, side, n) for n in (cores, 0))
        return query

    schedulers: list[TileScheduler] = []
    jax.eval_shape(trace, q)
    scheduler, without_cores = schedulers
    assert scheduler.one_tile_each == ((B, T) == (1, 5120) and not causal)
    assert without_cores.one_tile_each and without_cores.programs == B * H * tiles
    tiles_of = coordinates(replace(scheduler, table_ref=scheduler.table().get("program_tiles")))
    taken = tiles_of[tiles_of[..., 0] >= 0]
    assert len(taken) == len(np.unique(taken, axis=0)) == B * H * tiles
    assert (taken.max(0) == (B - 1, H - 1, tiles - 1)).all()
    if not scheduler.one_tile_each:
        blocks = np.arange(1, tiles + 1) if causal else np.ones(tiles)
        blocks = blocks[::-1] if side == "k" else blocks
        work = np.where(tiles_of[..., 0] >= 0, blocks[tiles_of[..., 2]], 0).sum(1)
        assert work.max() <= (1.04 if B * H * tiles > 8 * cores else 1.12) * work.mean()


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_programs_share_tiles_of_unknown_length(shape, side):
    """In their order, the longest first, every tile is somebody's, once, and programs have about the same work."""
    B, H, Hkv, tiles, cores = 2, 4, 2, 23, 7
    rng = np.random.default_rng(0)
    first = rng.integers(0, 5, (*shape, tiles))
    bounds = np.stack([first, first, first, first + rng.integers(0, 40, first.shape)], -1).astype(np.int32)
    heads = H if side == "q" else Hkv
    scheduler = TileScheduler.of(B, heads, tiles, BlockRuns(None, True, True, True), side, cores, sort=True)
    assert scheduler.longest_first and scheduler.programs == cores
    tiles_of = coordinates(replace(scheduler, table_ref=scheduler.table(jnp.asarray(bounds))["program_tiles"]))
    taken = tiles_of[tiles_of[..., 0] >= 0]
    assert len(taken) == len(np.unique(taken, axis=0)) == B * heads * tiles
    blocks = np.broadcast_to(bounds[..., 3] - bounds[..., 0], (B, H, tiles))
    blocks = blocks if side == "q" else blocks.reshape(B, Hkv, H // Hkv, tiles).sum(2)
    work = np.where(tiles_of[..., 0] >= 0, blocks[tuple(np.moveaxis(tiles_of, -1, 0))], 0).sum(1)
    assert work.max() - work.min() <= blocks.max()


ONE_KERNEL = [(128, {"fused": True}), (64, {"fused": True, "dkv_block_q": 128, "dkv_stages": 2})]
ONE_KERNEL = ONE_KERNEL if mosaic_gpu.CAN_ADD_TO_INPUT else []
BIASED = [(D, {"bias": bias(rows, 256)}) for D in (64, 96, 128) for rows in (1, 256)]
BIASED += [(256, {"bias": bias(1, 256)})]


@pytest.mark.parametrize(
    ("D", "kind"),
    [(D, {"dkv_split": split, "fused": False}) for D in mosaic_gpu.HEAD_DIMS for split in (False, True)]
    + ONE_KERNEL
    + BIASED
    + [(64, {**THREE, "fused": False}), (64, {**THREE, "bias": bias(256, 256)})],
)
def test_shared_memory_is_what_the_kernels_allocate(D, kind, monkeypatch):
    """Arrays in whole kilobytes, Mosaic's scratch in one more, and barriers of 8 bytes for which 256 are set aside."""
    kind = dict(kind)
    bias = kind.pop("bias", None)
    arrays, options = arguments(D, causal=True, bias=bias)
    allocated = {}

    def record(kernel, *, out_type, name, **_):
        scratch = kernel.scratch()
        barriers = [x.num_barriers for x in scratch.values() if isinstance(x, plgpu.Barrier)]
        tiles = [math.prod(x.shape) * x.dtype.itemsize for x in scratch.values() if not isinstance(x, plgpu.Barrier)]
        kilobytes = 1 + sum(-(-size // 1024) for size in tiles)
        allocated[name.removeprefix("softmax_")] = 1024 * kilobytes + 256
        assert 8 * sum(map(np.prod, barriers)) <= 256
        return lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_type)

    def both(query, key, value):
        call = canonicalise(query, key, value, **options).on(HOPPER)
        config = replace(mosaic_gpu.default_config(call), **kind)
        outputs, residuals = mosaic_gpu.IMPLEMENTATION.forward(call, config)
        assert mosaic_gpu.IMPLEMENTATION.backward(call, residuals, outputs, config)
        return config.shared_bytes(D, *(copied_bias(call, side) for side in ("q", "k")))

    monkeypatch.setattr(triton, "bias_gradient", lambda call, *_: jnp.zeros(call["bias"].shape))
    for module in (forward_kernel, backward_kernels, backward_fused):
        monkeypatch.setattr(module, "launch", record)
    expected = {}
    jax.eval_shape(lambda *x: expected.update(both(*x)) or x, *arrays)
    assert expected == allocated


@pytest.mark.parametrize("D", mosaic_gpu.HEAD_DIMS)
def test_a_config_that_does_not_fit_is_refused(D):
    """Defaults fit; four stages of 256 keys do not, and the reason has the size."""
    (q, k, v), options = arguments(D, causal=True)
    call = canonicalise(
        jnp.zeros(q.shape, q.dtype), jnp.zeros(k.shape, k.dtype), jnp.zeros(v.shape, v.dtype), **options
    )
    config = mosaic_gpu.default_config(call)
    assert mosaic_gpu.unsupported_config(call, config) == []
    (reason,) = mosaic_gpu.unsupported_config(call, replace(config, block_k=256, stages=4))[:1]
    assert "forward kernel needs" in reason and "232448" in reason
    configs = mosaic_gpu.search_space(call)
    assert configs[0] == config and len(set(configs)) == len(configs)
    assert all(mosaic_gpu.unsupported_config(call, other) == [] for other in configs)
    assert {other.persistent for other in configs} == {True, False}


def test_a_batch_may_pass_the_limit_of_a_second_grid_dimension():
    q = jax.ShapeDtypeStruct((70000, 16, 1, 64), jnp.bfloat16)

    def attend(query):
        call = canonicalise(query, query, query).on(HOPPER)
        assert mosaic_gpu.unsupported(call) == []
        return mosaic_gpu.IMPLEMENTATION.forward(call, mosaic_gpu.default_config(call))

    assert "mosaic_gpu" in jax.jit(attend).trace(q).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("shape", [(70000, 1, 1, 16), (1, 1, 16, 1), (70000, 1, 16, 16)], ids=str)
def test_so_may_a_batch_of_biases(shape):
    q, bias = jax.ShapeDtypeStruct((70000, 16, 1, 64), jnp.bfloat16), jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def gradient(query, bias):
        call = canonicalise(query, query, query, bias=bias).on(HOPPER)
        return triton.bias_gradient(call, {"out": query, "lse": jnp.zeros((70000, 1, 16))}, {"out": query})

    assert jax.eval_shape(gradient, q, bias).shape == shape


@pytest.mark.parametrize("D", mosaic_gpu.HEAD_DIMS)
def test_the_backward_that_adds_in_any_order_is_taken_unless_the_same_bits_are_asked_for(D):
    x = jnp.zeros((1, 2048, 2, D), jnp.bfloat16)
    call = canonicalise(x, x, x).on(HOPPER)
    with deterministic(False):
        config = mosaic_gpu.default_config(call)
        assert not mosaic_gpu.default_config(canonicalise(x, x, x, causal=True).on(HOPPER)).fused
        assert config.fused == (D in (64, 128) and mosaic_gpu.CAN_ADD_TO_INPUT)
        reasons = mosaic_gpu.unsupported_config(call, replace(config, dkv_stages=2, fused=True))
        assert any("for head dims 64 and 128" in reason for reason in reasons) == (D not in (64, 128))
        assert ("any order" in mosaic_gpu.remark(call, config)) == config.fused
    with deterministic():
        two_kernels = mosaic_gpu.default_config(call)
        assert not two_kernels.fused
        assert ("two kernels" in mosaic_gpu.remark(call, two_kernels)) == config.fused
        reasons = mosaic_gpu.unsupported_config(call, replace(config, fused=True))
        assert any("the same bits" in reason for reason in reasons)


@pytest.mark.parametrize("fused", [True, False] if mosaic_gpu.CAN_ADD_TO_INPUT else [False])
def test_lowers_the_backward_inside_a_shard_map(fused):
    """What a kernel adds to must not leave it as a reference: a shard_map could not hold it."""
    arrays, _ = arguments(128)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])

    def gradients(query, key, value):
        call = canonicalise(query, key, value).on(HOPPER)
        chosen = plan(FLASH_ATTENTION, call, "pallas", {"dq_stages": 6, "fused": fused})
        return jax.grad(lambda arrays: execute(chosen, arrays)["out"].astype(jnp.float32).sum())(call.arrays)

    split = jax.shard_map(gradients, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with deterministic(False):
        text = jax.jit(split).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert ("softmax_bwd_mosaic_gpu" in text) == fused
