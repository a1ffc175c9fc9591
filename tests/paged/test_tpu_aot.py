"""The paged TPU kernel, compiled by libtpu for chips that are not there: it fits, and the cache is not copied."""

import re
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ejkernel.kernels.common.pallas_tpu import chip_of
from ejkernel.kernels.common.struct_call import struct_call
from ejkernel.kernels.paged import calls, pallas_tpu
from ejkernel.modules import page_attention, prefill_page_attention, ragged_decode_attention, ragged_page_attention
from ejkernel.ops.target import describe_device

pytestmark = pytest.mark.tpu_aot

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
KEYS = 8192  # that a row of the table holds


def decode(B=32, T=1, H=32, Hkv=8, D=128, Dv=None, L=64, dtype="bfloat16", cache=None, pages=4096):
    shapes = [((B, T, H, D), dtype), *(((pages, L, Hkv, d), cache or dtype) for d in (D, Dv or D))]
    return page_attention, calls.page_call, [*shapes, ((B,), "int32"), ((B, KEYS // L), "int32")]


def mixed(T=2048, N=64, H=32, Hkv=8, D=128, L=64, dtype="bfloat16", cache=None, pages=4096):
    lengths = [((N,), "int32"), ((N, KEYS // L), "int32"), ((N + 1,), "int32"), ((), "int32")]
    return (
        ragged_page_attention,
        calls.ragged_page_call,
        [((T, H, D), dtype), ((pages, L, 2 * Hkv, D), cache or dtype), *lengths],
    )


def prefill(T=2048, H=32, Hkv=8, D=128, L=64, dtype="bfloat16", pages=4096):
    caches = [((pages, L, Hkv, D), dtype)] * 2
    return (
        prefill_page_attention,
        calls.prefill_call,
        [((T, H, D), dtype), *caches, ((), "int32"), ((KEYS // L,), "int32")],
    )


def contiguous(B=32, S=8192, H=32, Hkv=8, D=128, dtype="bfloat16"):
    caches = [((B, S, Hkv, D), dtype)] * 2
    return ragged_decode_attention, calls.ragged_decode_call, [((B, H, D), dtype), *caches, *[((B,), "int32")] * 2]


CASES = {
    "decode-page-64": decode(),
    "decode-page-16": decode(L=16),
    "decode-int8": decode(cache="int8"),
    "decode-e4m3": decode(cache="float8_e4m3fn"),
    "mixed": mixed(),
    "contiguous": contiguous(S=5000),
}
ONE_CHIP = {
    "four-tokens": decode(T=4),
    "page-1": decode(L=1, pages=65536, B=8),
    "page-256": decode(L=256),
    "float32": decode(dtype="float32"),
    "one-key-head": decode(H=64, Hkv=1),
    "one-key-head-int8": decode(H=64, Hkv=1, cache="int8"),
    "three-key-heads": decode(H=12, Hkv=3),
    "many-key-heads": decode(Hkv=32),
    "D256": decode(H=16, Hkv=4, D=256),
    "e5m2": decode(cache="float8_e5m2"),
    "e5m2-mixed": mixed(cache="float8_e5m2"),
    "e5m2-D256": decode(H=16, Hkv=4, D=256, cache="float8_e5m2"),
    "mixed-float32": mixed(T=512, dtype="float32"),
    "mixed-float32-e4m3": mixed(T=512, dtype="float32", cache="float8_e4m3fn"),
    "prefill": prefill(),
    "prefill-float32": prefill(T=512, dtype="float32"),
    "contiguous-one-key-head": contiguous(Hkv=1),
}
# each takes up to half a minute; its dtypes and dimensions meet others here, its tokens those of `test_options`
SLOW = (
    "e5m2-D256", "e5m2-mixed", "mixed-float32-e4m3", "prefill-float32", "four-tokens", "one-key-head-int8",
    "contiguous-one-key-head", "D64-mixed",
)  # fmt: skip
# arrays whose last dimension does not fill lanes lie in another order unless they are made with this one
ROW_MAJOR = {
    "D64": decode(D=64),
    "D64-mixed": mixed(D=64),
    "D192-Dv128": decode(D=192, Dv=128),
    "D40-float32": decode(D=40, dtype="float32"),
}


def check(device, function, call_for, shapes, row_major=False, **options):
    mesh = Mesh(np.array([device]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())

    def struct(shape, dtype):
        ordered = row_major and len(shape) == 4
        where = Format(Layout(tuple(range(len(shape)))), sharding) if ordered else sharding
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    program = jax.jit(lambda *a: function(*a, platform="pallas", mesh=mesh, **options))
    compiled = program.lower(*(struct(*shape) for shape in shapes)).compile()
    text = compiled.as_text()
    (kernel,) = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert "paged_attention" in kernel
    assert moved(text, max(prod(shape) for shape, _ in shapes)) == []
    given = {name: lambda x=x: x for name, x in options.items()}
    assert_fits(device, kernel, struct_call(call_for, *(jax.ShapeDtypeStruct(*shape) for shape in shapes), **given))


def assert_fits(device, kernel, call):
    """What libtpu allocated is no more than the arithmetic says, and that is within the chip."""
    call = call.on(describe_device(device))
    expected = pallas_tpu.vmem_bytes(call, pallas_tpu.default_config(call))
    used = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', kernel)
    assert used is not None
    assert int(used[1]) <= expected <= chip_of(call.target).vmem_budget


def moved(text, cache):
    """Instructions that make something as large as a cache."""
    copies = []
    for line in text.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?\S+ = \(?\w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
        if (
            match
            and match[2] not in ("parameter", "bitcast")
            and prod(int(n) for n in match[1].split(",") if n) >= cache
        ):
            copies.append(line.strip()[:160])
    return copies


MORE = pytest.mark.tpu_aot_more
# one case on the newest, the others where memory is least; `make tpu-aot` takes all
ON_NEWEST = ("decode-page-64",)


def on_chip(chip, case):
    quick = chip == "v4" or (chip == "v6e" and case in ON_NEWEST)
    return pytest.param(chip, case, marks=[] if quick else [MORE])


def quickly(cases):
    return pytest.mark.parametrize("case", [pytest.param(name, marks=[MORE] * (name in SLOW)) for name in cases])


@pytest.mark.parametrize(("chip", "case"), [on_chip(chip, case) for chip in CHIPS for case in CASES])
def test_fits_and_leaves_the_cache_in_place(chip, case, tpu_devices):
    check(tpu_devices(CHIPS[chip])[0], *CASES[case])


@quickly(ONE_CHIP)
def test_other_shapes(case, tpu_devices):
    check(tpu_devices(CHIPS["v5e"])[0], *ONE_CHIP[case])


@quickly(ROW_MAJOR)
def test_other_head_dims_in_row_major_order(case, tpu_devices):
    check(tpu_devices(CHIPS["v5e"])[0], *ROW_MAJOR[case], row_major=True)


def test_options(tpu_devices):
    scales = {"k_scale": np.float32(0.5), "v_scale": np.ones(8, np.float32), "softmax_aux": np.ones(32, np.float32)}
    options = {"sliding_window": 1000, "logits_soft_cap": 20.0, "return_lse": True}
    check(tpu_devices(CHIPS["v5e"])[0], *decode(T=4), **scales, **options)


@pytest.mark.parametrize("case", ["decode", pytest.param("mixed", marks=MORE)])
def test_functions(case, tpu_devices):
    slopes, shape = np.ones(32, np.float32), {"decode": decode(T=4), "mixed": mixed(N=32)}[case]
    functions = {"score_fn": lambda s, b, h, i, j: s - jnp.asarray(slopes)[h] * (i - j), "chunk_size": 1000}
    check(tpu_devices(CHIPS["v5e"])[0], *shape, **functions, tree_mask=np.ones((32, 40, 40), bool))
