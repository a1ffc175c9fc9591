"""The TPU kernels, compiled by libtpu for chips that are not here: they fit, and nothing big is moved around them."""

import re
from functools import partial
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.modules import flash_attention
from ejkernel.types import BlockPattern, MaskInfo
from harness.gallery import MASKS, SCORES, Sizes

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
    "D128-float32-segments-sinks-soft-cap": {
        "D": 128,
        "dtype": "float32",
        "T": 1024,
        "segments": True,
        "causal": True,
        "sinks": True,
        "logits_soft_cap": 20.0,
    },
    "D64-pattern": {"D": 64, "H": 8, "Hkv": 2, "pattern": 64, "causal": True},
    "D128-bias": {"D": 128, "T": 1024, "bias": True},
    "D128-functions": {"D": 128, "T": 512, "functions": True},
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
        self.functions = options.pop("functions", False)
        self.options = options

    def arrays(self):
        (T, S), (H, Hkv), (D, Dv) = self.lengths, self.heads, self.dims
        shapes = {"x": (B, T, E), "y": (B, S, E), "wq": (E, H * D), "wk": (E, Hkv * D), "wv": (E, Hkv * Dv)}
        shapes["wo"] = (H * Dv, E)
        shapes |= {"bias": (1, H, T, S)} if self.bias else {}
        shapes |= {"softmax_aux": (H,)} if self.sinks else {}
        shapes |= {"slopes": (H,), "gates": (B, H, T)} if self.functions else {}
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
        more |= trained_functions(arrays["slopes"], arrays["gates"], ids) if self.functions else {}
        out = flash_attention(q, k, v, mask_info=mask, mesh=self.mesh, **more, **self.options)
        return (out.reshape(B, T, H * Dv) @ arrays["wo"]).astype(jnp.float32).sum()

    def compiled(self):
        ids = self.struct((B, self.lengths[0]), "int32")
        return jax.jit(jax.grad(self.loss)).lower(self.arrays(), ids).compile().as_text()

    def sizes(self):
        """Elements of q, k, v, out and a bias; no other array of the layer has as many."""
        (T, S), (H, Hkv), (D, Dv) = self.lengths, self.heads, self.dims
        return {B * T * H * D, B * S * Hkv * D, B * S * Hkv * Dv, B * T * H * Dv, H * T * S}


def trained_functions(slopes, gates, ids):
    """Segments with a prefix, ALiBi and forgetting gates; what is read lies in scalars, rows and columns."""
    prefix, total = ids[:, 0], jnp.cumsum(gates.astype(jnp.float32), axis=-1)
    slopes = slopes.astype(jnp.float32)
    return {
        "mask_fn": lambda b, h, i, j: (ids[b, i] == ids[b, j]) & ((j <= i) | (j < prefix[b])),
        "score_fn": lambda s, b, h, i, j: s - slopes[h] * jnp.abs(i - j) + total[b, h, i] - total[b, h, j],
    }


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
    expected = PLAIN + ["softmax_dbias"] * program.bias
    expected += ["softmax_drow", "softmax_drow", "softmax_dcolumn"] * program.functions
    assert kernels(text) == sorted(expected)
    assert moved(text, program.sizes()) == []


PLAIN = ["softmax_dkv", "softmax_dq", "softmax_forward"]

# one case on the newest, the others where memory is least, but for what others have too; `make tpu-aot` takes all
ON_NEWEST = ("D64-pattern",)
LATER = ("D64-causal-gqa", "D128-causal", "D128-float32-sinks-soft-cap", "D128-segments")


def on_chip(chip, case):
    quick = case not in LATER and chip == ("v6e" if case in ON_NEWEST else "v4")
    return pytest.param(chip, case, marks=[] if quick else [pytest.mark.tpu_aot_more])


@pytest.mark.parametrize(("chip", "case"), [on_chip(chip, case) for chip in CHIPS for case in CASES])
def test_fits_and_moves_nothing_big(chip, case, mesh_of):
    check(mesh_of(chip), CASES[case])


TABLES = ("matrix", "blocks", "relative", "matrix-bias")  # which a TPU refuses
# which kernels know as options, or which is among what is hard below
NOT_QUICKLY = ("causal", "window", "documents", "nothing", "everything", "identity", "soft-cap", "divisions")


def pairs(quick):
    """A mask and a score each."""
    masks, scores = ([n for n in names if n not in TABLES and (n in NOT_QUICKLY) != quick] for names in (MASKS, SCORES))
    return zip_longest(masks, scores)


@pytest.mark.parametrize(
    ("chip", "mask", "score"),
    [
        pytest.param(chip, *pair, marks=[] if quick and chip == "v4" else [pytest.mark.tpu_aot_more])
        for chip in CHIPS
        for quick in (True, False)
        for pair in pairs(quick)
    ],
)
def test_the_gallery_compiles(chip, mask, score, mesh_of):
    T = 256
    sizes = Sizes(B, 4, T, T)
    functions = {"mask_fn": MASKS[mask](sizes)} | ({"score_fn": SCORES[score](sizes)} if score else {})
    assert kernels(Program(mesh_of(chip), 64, T=T, **functions).compiled()) == PLAIN


# of what the compiler has no operation for, and of every shape that an operation may have
HARD_MASKS = {
    "division": lambda x, b, h, i, j: (i // (j % 7 + 1) == x[h]) | (j // (h + 1) < i % 5),
    "select": lambda x, b, h, i, j: jnp.where(i % 2 == 0, jnp.where(h < 2, j <= i, x[j] > 3), (x[i] > 0) < (j > i)),
    "sign": lambda x, b, h, i, j: (jnp.sign(i - j) * x[i] >= 0) ^ ~(jnp.abs(i - j) > x[j]),
}
HARD_SCORES = {
    "expm1": lambda s, x, b, h, i, j: jnp.expm1(s * 0.1) * jnp.sign(s) + jnp.maximum(s, x[j] * 1.0),
    "of-one-side": lambda s, x, b, h, i, j: x[i] * 2.0,
    "of-a-head": lambda s, x, b, h, i, j: jnp.where(h < 2, 1.0, x[h] * 1.0),
}


@pytest.mark.parametrize(("mask", "score"), [*zip(HARD_MASKS, HARD_SCORES, strict=True)])
def test_what_is_hard_for_the_compiler(mask, score, mesh_of):
    T, x = 256, jnp.arange(256) % 9
    given = {"mask_fn": partial(HARD_MASKS[mask], x), "score_fn": lambda s, *at: HARD_SCORES[score](s, x, *at)}
    assert kernels(Program(mesh_of("v5e"), 64, T=T, **given).compiled()) == PLAIN


def test_a_kernel_for_an_operand_runs_where_its_gradient_is_asked_for(mesh_of):
    sharding = NamedSharding(mesh_of("v5e"), PartitionSpec())
    structs = [jax.ShapeDtypeStruct(shape, "float32", sharding=sharding) for shape in ((B, 256, 4, 64), (4,), (256,))]

    def total(x, slopes, shift):
        score_fn = lambda s, b, h, i, j: s * slopes[h] + shift[j]  # noqa: E731
        return flash_attention(x, x, x, score_fn=score_fn, mesh=sharding.mesh).sum()

    for wanted, expected in ((0, ["softmax_dkv", "softmax_dq"]), (1, ["softmax_drow"]), (2, ["softmax_dcolumn"])):
        text = jax.jit(jax.grad(total, wanted)).lower(*structs).compile().as_text()
        assert kernels(text) == [*expected, "softmax_forward"]


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
    assert kernels(program.compiled()) == PLAIN


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
    assert kernels(text) == PLAIN
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
