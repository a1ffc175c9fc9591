"""What is particular to the TPU kernels: their memory arithmetic, their grid, their interpreter and their cost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # no public word on races yet

from ejkernel.kernels.common.pallas_tpu import CHIPS, MIB, chip_of
from ejkernel.kernels.common.pallas_tpu_cost import costs
from ejkernel.kernels.softmax import pallas_tpu
from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.pallas_tpu import tiles as tpu_tiles
from ejkernel.kernels.softmax.pallas_tpu.schedule import FIRST, LAST, MASKED, VISIT, flatten
from ejkernel.kernels.softmax.pallas_tpu.tiles import rounded
from ejkernel.kernels.softmax.schedule import plan
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import flash_attention
from ejkernel.ops import Target, explain, interpret
from ejkernel.ops.dispatch import choose
from ejkernel.types import BlockPattern, MaskInfo
from harness import normal

TARGETS = {chip.name: Target("tpu", kind, "tpu") for kind, chip in CHIPS.items()}


def call_of(target="v5e", B=2, T=2048, S=None, H=4, Hkv=2, D=128, dtype="bfloat16", **options):
    """A call on shapes alone."""
    structs = [jax.ShapeDtypeStruct(s, dtype) for s in ((B, T, H, D), (B, S or T, Hkv, D), (B, S or T, Hkv, D))]
    calls = []
    jax.eval_shape(lambda *qkv: calls.append(canonicalise(*qkv, **options)), *structs)
    return calls[0].on(TARGETS[target])


# Memory ---------------------------------------------------------------------------------------------------------


def test_vmem_of_a_plain_forward_by_hand():
    need = pallas_tpu.vmem_bytes(call_of(), pallas_tpu.Config(512, 1024))["forward"]
    copied = 2 * (2 * (512 + 1024) * 256 + 32 * 512)  # twice: q and out, k and v, lse
    kept = 4 * 512 * 128 + 2 * 32 * 512  # the output's sum, a row of maxima and one of sums
    assert need == copied + kept + 3 * 4 * 512 * 1024


def test_vmem_counts_what_options_add():
    config = pallas_tpu.Config(512, 512)
    plain = pallas_tpu.vmem_bytes(call_of(), config)
    for options in ({"bias": jnp.ones((1, 1, 2048, 2048))}, {"dropout_prob": 0.1, "dropout_seed": 0}):
        more = pallas_tpu.vmem_bytes(call_of(**options), config)
        assert all(more[kernel] > plain[kernel] for kernel in plain)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("D", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("chip", TARGETS)
def test_defaults_fit_and_are_large(chip, D, dtype):
    call = call_of(chip, T=8192, D=D, dtype=dtype, causal=True)
    config = pallas_tpu.default_config(call)
    assert pallas_tpu.unsupported(call) == [] and pallas_tpu.unsupported_config(call, config) == []
    assert max(pallas_tpu.vmem_bytes(call, config).values()) <= chip_of(call.target).vmem_budget
    assert min(config.forward) >= (512 if chip != "v4" else 256)


def test_a_window_gets_tiles_of_its_size():
    config = pallas_tpu.default_config(call_of(T=8192, causal=True, sliding_window=200))
    assert max(config.forward) == 256


def test_a_config_that_does_not_fit_is_refused_with_its_size():
    call = call_of("v4", T=8192)
    plan_, told = choose(FLASH_ATTENTION, call, "pallas", {"block_q": 4096, "block_k": 4096})
    assert plan_ is None
    assert any("forward needs" in reason and "v4 has 14.0" in reason for reason in told.refusals["pallas"])
    assert choose(FLASH_ATTENTION, call, "pallas", {"block_q": 512, "block_k": 512})[0] is not None


def test_blocks_must_fill_lanes_on_hardware():
    _, told = choose(FLASH_ATTENTION, call_of(), "pallas", {"block_q": 200, "block_k": 512})
    assert "multiples of 128" in told.refusals["pallas"][0]


def test_explain_shows_the_refusal_of_a_config():
    q = jax.ShapeDtypeStruct((1, 16384, 2, 64), "bfloat16")
    with interpret():
        told = explain(flash_attention, q, q, q, platform="pallas", cfg={"block_q": 8192, "block_k": 8192})
    assert told.platform is None and "MiB of VMEM, v5e has 112.0" in str(told)


def test_a_schedule_that_does_not_fit_scalar_memory_is_refused():
    pattern = BlockPattern.from_dense(np.ones((2, 32, 64, 64), bool), block_size=128)
    call = call_of(T=8192, H=32, mask_info=MaskInfo.from_block_pattern(pattern, q_len=8192))
    assert "scalar memory" in " ".join(pallas_tpu.unsupported_config(call, pallas_tpu.Config(128, 128)))


@pytest.mark.parametrize("size", [0, -8, 12, 64.0])
def test_a_block_must_be_whole_sublanes(size):
    with pytest.raises(ValueError, match=r"block_q=.* must be a multiple of 8 from 8 on"):
        pallas_tpu.Config(block_q=size)


# The grid -------------------------------------------------------------------------------------------------------

MASKS = {
    "causal": {"causal": True},
    "rows-that-see-nothing": {"T": 96, "S": 32, "causal": True},
    "window": {"sliding_window": (20, 3)},
    "segments": {"mask_info": MaskInfo.from_segments(jnp.asarray(np.sort(np.arange(128).reshape(2, 64) % 5)))},
    "pattern": {
        "mask_info": MaskInfo.from_block_pattern(BlockPattern.local_stride(4, 4, 1, 2, block_size=16), q_len=64)
    },
    "pattern-for-all-heads": {
        "mask_info": MaskInfo.from_block_pattern(BlockPattern.sliding_blocks(4, 1, block_size=16), q_len=64)
    },
}


def listed(schedule, b, h, row):
    """(block, masked) in the order in which a row visits them."""
    parts = [np.asarray(x) for x in schedule]
    parts = [x[b if x.shape[0] > 1 else 0, h if x.shape[1] > 1 else 0, row].tolist() for x in parts]
    if len(parts) == 2:
        (unmasked, total), blocks = parts
        return [(blocks[n], n >= unmasked) for n in range(total)]
    lo, full_lo, full_hi, hi = parts[0]
    masked = [*range(lo, full_lo), *range(full_hi, hi)]
    return [(n, False) for n in range(full_lo, full_hi)] + [(n, True) for n in masked]


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("mask", MASKS)
def test_the_grid_visits_what_the_schedule_says(mask, side):
    options = {"T": 64, **MASKS[mask]}
    T, S = options.pop("T"), options.pop("S", None)
    q, k = jnp.ones((2, T, 4, 8)), jnp.ones((2, S or T, 2, 8))
    call = canonicalise(q, k, k, **options)
    G = 2 if side == "k" else 1
    steps, schedule = flatten(call, 32, 16, side, G), plan(call, 32, 16, side)
    blocks = (T // 32) if side == "q" else ((S or T) // 16)
    for b in range(2):
        for h in range(4 // G):
            done = np.arange(int(steps.number))
            of_steps = (*steps.row(steps.scalars, b, h, done), *steps.column(steps.scalars, b, h, done))
            mine = list(zip(*(np.broadcast_to(x, done.shape).tolist() for x in of_steps), strict=True))
            for row, member in np.ndindex(blocks, G):
                visits = [(j, word) for r, g, j, word in mine if (r, g) == (row, member) and word & VISIT]
                assert [(j, bool(word & MASKED)) for j, word in visits] == listed(schedule, b, h * G + member, row)
            starts = [r for r, _, _, word in mine if word & FIRST]
            assert starts == [r for r, _, _, word in mine if word & LAST] == list(range(blocks))


@pytest.mark.parametrize("chip", TARGETS)
def test_long_contexts_with_grouped_heads_fit(chip):
    assert pallas_tpu.unsupported(call_of(chip, B=1, T=2**17, H=8, Hkv=1, causal=True)) == []


def test_a_static_grid_has_no_idle_step():
    q = jnp.ones((1, 128, 1, 8))
    steps = flatten(canonicalise(q, q, q, causal=True), 32, 32, "q")
    assert steps.number == 1 + 2 + 3 + 4
    assert (np.asarray(steps.columns) & VISIT).all()


# The interpreter ------------------------------------------------------------------------------------------------


def test_no_races_and_the_same_bits_every_time(monkeypatch):
    monkeypatch.setattr(tpu_tiles, "launch", partial(tpu_tiles.launch, copies=True))
    arrays = [normal(name, (1, 70, heads, 16)) for name, heads in (("q", 4), ("k", 2), ("v", 2))]

    @jax.jit
    def step(q, k, v):
        attend = lambda *x: flash_attention(*x, causal=True, platform="pallas", cfg={"block_q": 32, "block_k": 64})  # noqa: E731
        with interpret():
            out, pull = jax.vjp(attend, q, k, v)
            return out, pull(out)

    first = step(*arrays)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(step(*arrays)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert interpreter.races is not None and not interpreter.races.races_found


def test_rounding_to_float16_is_numpys():
    rng = np.random.default_rng(0)
    x = np.concatenate([
        rng.standard_normal(4096) * 2.0 ** rng.integers(-26, 17, 4096),
        [0.0, 2.0**-14, 2.0**-24, 2.0**-25, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65504, 65519, 65520, np.inf, np.nan],
    ]).astype(np.float32)  # fmt: skip
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(rounded(jnp.asarray(x), "float16"), expected)


# Cost -----------------------------------------------------------------------------------------------------------


def test_cost_counts_visited_tiles_only():
    config = pallas_tpu.Config(512, 512)
    by_mask = {
        name: {cost.kernel: cost for cost in costs(pallas_tpu.IMPLEMENTATION, call_of(**options), config)}
        for name, options in {"full": {}, "causal": {"causal": True}}.items()
    }
    full, causal = by_mask["full"]["softmax_forward"], by_mask["causal"]["softmax_forward"]
    assert full.flops == 2 * 2 * 4 * 2048 * 2048 * 256
    assert causal.flops * 16 == full.flops * 10  # 4 x 4 tiles, 10 of them on or below the diagonal
    assert set(by_mask["full"]) == {"softmax_forward", "softmax_dq", "softmax_dkv"}
    chip = CHIPS["tpu_v5_lite"]
    assert full.seconds(chip) == max(full.flops / chip.flops, full.bytes / chip.bandwidth)
    assert full.seconds(CHIPS["tpu_v6_lite"]) == 2 * full.flops / CHIPS["tpu_v6_lite"].flops  # half of a matrix unit
    assert MIB < full.bytes < 64 * MIB
