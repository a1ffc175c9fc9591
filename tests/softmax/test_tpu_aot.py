"""The TPU kernels, compiled by libtpu for chips that are not here: they fit, and nothing big is moved around them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.modules import flash_attention
from ejkernel.types import BlockPattern, MaskInfo

pytestmark = pytest.mark.tpu_aot

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
B, E = 2, 320

CASES = {
    "D64-causal-gqa": {"D": 64, "H": 8, "Hkv": 2, "causal": True},
    "D128-causal": {"D": 128, "causal": True},
    "D256-window": {"D": 256, "H": 4, "Hkv": 4, "causal": True, "sliding_window": 300},
    "D192-odd-lengths": {"D": 192, "T": 1001, "S": 777, "causal": True},
    "D128-float32-sinks-soft-cap": {"D": 128, "dtype": "float32", "T": 1024, "sinks": True, "logits_soft_cap": 20.0},
    "D128-segments": {"D": 128, "segments": True, "causal": True},
    "D64-pattern": {"D": 64, "H": 8, "Hkv": 2, "pattern": 64, "causal": True},
    "D128-bias": {"D": 128, "T": 1024, "bias": True},
}
# small tiles: what compiles is asked, not what fits
ONE_CHIP = {
    "D64-float16": {"D": 64, "T": 256, "dtype": "float16", "causal": True},
    "D40-Dv24-float32": {"D": 40, "Dv": 24, "T": 300, "dtype": "float32"},
    "D128-dropout": {"D": 128, "T": 256, "dropout_prob": 0.1, "dropout_seed": 0},
    "D128-logits-float16": {"D": 128, "T": 256, "logits_dtype": "float16"},
}


@pytest.fixture(scope="module")
def mesh_of(tpu_devices):
    return lambda chip: Mesh(np.array(tpu_devices(CHIPS[chip])[:1]), ("x",))


class Program:
    """A training step of one attention layer: projections, attention, projection, and every gradient."""

    def __init__(self, mesh, D, T=2048, S=None, H=4, Hkv=2, Dv=None, dtype="bfloat16", segments=False, **options):
        self.mesh, self.dtype = mesh, dtype
        self.lengths, self.heads, self.dims = (T, S or T), (H, Hkv), (D, Dv or D)
        self.segments, self.pattern = segments, options.pop("pattern", None)
        self.bias, self.sinks = options.pop("bias", False), options.pop("sinks", False)
        self.options = options

    def arrays(self):
        (T, S), (H, Hkv), (D, Dv) = self.lengths, self.heads, self.dims
        shapes = {"x": (B, T, E), "y": (B, S, E), "wq": (E, H * D), "wk": (E, Hkv * D), "wv": (E, Hkv * Dv)}
        shapes["wo"] = (H * Dv, E)
        shapes |= {"bias": (1, H, T, S)} if self.bias else {}
        shapes |= {"softmax_aux": (H,)} if self.sinks else {}
        return {name: self.struct(shape) for name, shape in shapes.items()}

    def struct(self, shape, dtype=None):
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype, sharding=sharding)

    def loss(self, arrays, ids):
        (T, S), (H, Hkv), (D, Dv) = self.lengths, self.heads, self.dims
        q = (arrays["x"] @ arrays["wq"]).reshape(B, T, H, D)
        k = (arrays["y"] @ arrays["wk"]).reshape(B, S, Hkv, D)
        v = (arrays["y"] @ arrays["wv"]).reshape(B, S, Hkv, Dv)
        mask = MaskInfo.from_segments(ids) if self.segments else None
        if self.pattern:
            pattern = BlockPattern.sliding_blocks(T // self.pattern, 1, block_size=self.pattern)
            mask = MaskInfo.from_block_pattern(pattern, q_len=T)
        more = {name: arrays[name] for name in ("bias", "softmax_aux") if name in arrays}
        out = flash_attention(q, k, v, mask_info=mask, mesh=self.mesh, **more, **self.options)
        return (out.reshape(B, T, H * Dv) @ arrays["wo"]).astype(jnp.float32).sum()

    def compiled(self):
        ids = self.struct((B, self.lengths[0]), "int32")
        return jax.jit(jax.grad(self.loss)).lower(self.arrays(), ids).compile().as_text()

    def sizes(self):
        """Elements of q, k, v, out and a bias; no other array of the layer has as many."""
        (T, S), (H, Hkv), (D, Dv) = self.lengths, self.heads, self.dims
        return {B * T * H * D, B * S * Hkv * D, B * S * Hkv * Dv, B * T * H * Dv, H * T * S}


def moved(text, sizes):
    """Instructions that only move a tensor of one of these sizes, or pad to more than the smallest."""
    lines = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?\S+ = \w+\[([\d,]*)\]\S* (copy|transpose|pad|reshape|gather)\(", line)
        elements = int(np.prod([int(n) for n in match[1].split(",") if n])) if match else 0
        if match and (elements in sizes or (match[2] == "pad" and elements > min(sizes))):
            lines.append(line.strip()[:160])
    return lines


def kernels(text):
    return sorted(re.findall(r"%?(softmax_\w+?)(?:\.\d+)? = .*custom-call", text))


def check(mesh, case):
    program = Program(mesh, **case)
    text = program.compiled()
    expected = ["softmax_dbias"] * program.bias + ["softmax_dkv", "softmax_dq", "softmax_forward"]
    assert kernels(text) == expected
    assert moved(text, program.sizes()) == []


# one case on the newest, the others where memory is least, but for what the pattern's has too; `make tpu-aot` takes all
ON_NEWEST = ("D128-causal",)
LATER = ("D64-causal-gqa",)


def on_chip(chip, case):
    quick = case not in LATER and chip == ("v6e" if case in ON_NEWEST else "v4")
    return pytest.param(chip, case, marks=[] if quick else [pytest.mark.tpu_aot_more])


@pytest.mark.parametrize(("chip", "case"), [on_chip(chip, case) for chip in CHIPS for case in CASES])
def test_fits_and_moves_nothing_big(chip, case, mesh_of):
    check(mesh_of(chip), CASES[case])


@pytest.mark.parametrize("case", ONE_CHIP)
def test_other_options_compile(case, mesh_of):
    check(mesh_of("v5e"), ONE_CHIP[case])


def test_a_bare_call_moves_nothing_big_where_lanes_are_lengths(mesh_of):
    """XLA lays out an argument whose last dimension does not fill lanes as the kernels want it."""
    mesh = mesh_of("v5e")
    sharding = NamedSharding(mesh, PartitionSpec())
    q, k = (jax.ShapeDtypeStruct((2, 2048, heads, 64), "bfloat16", sharding=sharding) for heads in (8, 2))
    text = jax.jit(lambda q, k, v: flash_attention(q, k, v, causal=True, mesh=mesh)).lower(q, k, k).compile().as_text()
    assert kernels(text) == ["softmax_forward"]
    assert moved(text, {q.size, k.size}) == []


def test_the_unnormalised_output_compiles(mesh_of):
    """Around its kernel XLA gathers the best key of each row, so that the gradient through the maximum is right."""
    program = Program(mesh_of("v5e"), 128, T=256, normalize_output=False)
    assert kernels(program.compiled()) == ["softmax_dkv", "softmax_dq", "softmax_forward"]


@pytest.mark.parametrize("checked", [False, True], ids=["in_specs", "a user's own shard_map"])
def test_four_chips_do_not_talk(checked, tpu_devices):
    mesh = Mesh(np.array(tpu_devices("v5e:2x2")).reshape(2, 2), ("b", "h"))
    spec = PartitionSpec("b", None, "h")
    q = jax.ShapeDtypeStruct((4, 512, 4, 128), "bfloat16", sharding=NamedSharding(mesh, spec))

    def attend(q, k, v):
        if not checked:
            return flash_attention(q, k, v, causal=True, mesh=mesh, in_specs=(spec,) * 3)
        sharded = jax.shard_map(
            lambda *x: flash_attention(*x, causal=True, mesh=mesh), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
        )
        return sharded(q, k, v)

    step = jax.jit(lambda *x: jax.vjp(attend, *x)[1](x[0]))
    text = step.lower(q, q, q).compile().as_text()
    assert kernels(text) == ["softmax_dkv", "softmax_dq", "softmax_forward"]
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
