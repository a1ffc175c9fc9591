"""Mask and score functions in the TPU kernels, in their interpreter; test_functions.py has more, on every platform."""

from collections import ChainMap
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter  # no public word on races yet

from ejkernel.expressions.evaluation import evaluate
from ejkernel.expressions.nodes import BOOL, CONST, INT, I, J, apply, cast, nodes, score, select
from ejkernel.kernels.common.pallas_tpu import SMEM_BYTES
from ejkernel.kernels.common.pallas_tpu_rules import for_mosaic
from ejkernel.kernels.softmax import pallas_tpu
from ejkernel.kernels.softmax.pallas_tpu import tiles as tpu_tiles
from ejkernel.kernels.softmax.pallas_tpu.schedule import flatten
from ejkernel.kernels.softmax.reference import reference
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import flash_attention
from ejkernel.ops import Target, explain, interpret
from harness import check, normal
from harness.gallery import MASKS, SCORES, Sizes

SIZES = Sizes(2, 4, 37, 53)
V5E = Target("tpu", "tpu_v5_lite", "tpu")


def tokens(sizes=SIZES, Hkv=2, D=16, Dv=None, dtype="float32"):
    B, H, T, S = sizes
    shapes = {"query": (B, T, H, D), "key": (B, S, Hkv, D), "value": (B, S, Hkv, Dv or D)}
    return {name: normal(name, shape, dtype) for name, shape in shapes.items()}


def from_gallery(*names, sizes=SIZES):
    given = [{"mask_fn": MASKS[n](sizes)} if n in MASKS else {"score_fn": SCORES[n](sizes)} for n in names]
    return dict(ChainMap(*given))


def in_kernels(*qkv, **options):
    with interpret():
        return flash_attention(*qkv, platform="pallas", cfg={"block_q": 32, "block_k": 32}, **options)


def checked(arrays, dtype, options_of):
    """Outputs and all gradients, those of what functions close over too, against the definition."""

    def parts(given):
        return [given[name] for name in ("query", "key", "value")], options_of(given)

    def ours(given):
        qkv, options = parts(given)
        return dict(zip(("out", "lse"), in_kernels(*qkv, return_lse=True, **options), strict=True))

    def definition(given, dtype):
        qkv, options = parts(given)
        return reference(canonicalise(*qkv, **options), dtype)

    check(ours, definition, arrays, dtype)


# beside those that test_functions.py has on every platform
@pytest.mark.parametrize("names", [("images",), ("paged", "alibi-arithmetic")], ids="-".join)
def test_the_gallery(names):
    checked(tokens(), "float32", lambda given: from_gallery(*names))


def test_in_bfloat16():
    names = "global-and-local", "forgetting"
    checked(tokens(Hkv=1, dtype="bfloat16"), "bfloat16", lambda given: from_gallery(*names))


# Operands -------------------------------------------------------------------------------------------------------

GROUPED = Sizes(2, 4, 33, 40)
B, H, T, S = GROUPED
TRAINED = {
    "temperature": (H,),
    "of_batch": (B,),
    "rows": (B, H, T),
    "shared_rows": (T,),
    "columns": (B, H, S),
    "columns_of_batch": (B, S),
}


def functions(given):
    """Scalars, rows and columns of every kind, and a derivative by each that depends on the score."""
    temperature, of_batch, rows, shared_rows, columns, columns_of_batch = (given[name] for name in TRAINED)

    def score_fn(s, b, h, i, j):
        x = s * temperature[h] + rows[b, h, i] * columns[b, h, j] + jnp.abs(i - j) * of_batch[b]
        return jnp.where(i % 3 == j % 3, jnp.tanh(x * shared_rows[i]), x) + columns_of_batch[b, j]

    prefix, ends = jnp.array([7, 30]), jnp.arange(S) + 5
    return {"mask_fn": lambda b, h, i, j: (j < prefix[b] + h) | (i < ends[j]), "score_fn": score_fn}


def operand_arrays():
    return tokens(GROUPED, D=24, Dv=40) | {name: normal(name, shape) for name, shape in TRAINED.items()}


def test_gradients_of_operands_of_grouped_heads_beside_all_options():
    options = {
        "bias": normal("bias", (1, H, T, S)),
        "softmax_aux": jnp.linspace(-1, 1, H),
        "logits_soft_cap": 3.0,
        "dropout_prob": 0.2,
        "dropout_seed": 5,
        "sliding_window": (20, 30),
    }
    checked(operand_arrays(), "float32", lambda given: functions(given) | options)


def test_no_races_and_the_same_bits_every_time(monkeypatch):
    monkeypatch.setattr(tpu_tiles, "launch", partial(tpu_tiles.launch, copies=True))

    def attend(given):
        rows, columns = given["rows"], given["columns"]
        score_fn = lambda s, b, h, i, j: s * rows[b, h, i] + columns[b, h, j]  # noqa: E731
        qkv = (given[name] for name in ("query", "key", "value"))
        return in_kernels(*qkv, score_fn=score_fn, mask_fn=lambda b, h, i, j: (j <= i) | (j < 7 * b))

    @jax.jit
    def step(given):
        out, pull = jax.vjp(attend, given)
        return out, pull(out)

    arrays = {name: x for name, x in operand_arrays().items() if name in ("query", "key", "value", "rows", "columns")}
    first = step(arrays)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(step(arrays)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert interpreter.races is not None and not interpreter.races.races_found


def test_what_a_function_hides_is_not_read():
    arrays, shift = tokens(), jnp.zeros(SIZES.S)

    @jax.jit
    def step(given, shift):
        def attend(given, shift):
            hidden = {"mask_fn": lambda b, h, i, j: (j < 20) | (j >= 30)}
            qkv = (given[name] for name in ("query", "key", "value"))
            return in_kernels(*qkv, score_fn=lambda s, b, h, i, j: s * jnp.exp(s * 0.1) + shift[j], **hidden)

        out, pull = jax.vjp(attend, given, shift)
        return out, pull(out)

    expected = step(arrays, shift)
    for poison in (np.nan, np.inf):
        ill = arrays | {name: arrays[name].at[:, 20:30].set(poison) for name in ("key", "value")}
        for a, b in zip(jax.tree.leaves(step(ill, shift)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)


# What Mosaic has no operation for ----------------------------------------------------------------------------------

REPLACED = {
    "sign of an integer": apply("sign", I - 3),
    "sign of a float": apply("sign", score()),
    "division by a variable": (I - 8) // (J - 5),
    "division by a negative number": (I - 8) // -3,
    "expm1": apply("expm1", score()),
    "select of bools": cast(select(I < J, apply("ne", J, I + 3), I // 2 < J), INT),
    **{f"{name} of bools": cast(apply(name, I < J, J < 9), INT) for name in ("lt", "le", "gt", "ge")},
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_operations_have_the_same_value(name):
    expression = REPLACED[name]
    i, j = np.arange(17, dtype=np.int32)[:, None], np.arange(13, dtype=np.int32)
    j = j[j != 5]  # a divisor is not 0
    logits = jnp.asarray(np.linspace(-4, 4, 17 * 12).reshape(17, 12), jnp.float32).at[0, 0].set(jnp.nan).at[8].set(0.0)
    value = partial(evaluate, axes={"i": i, "j": j}, score=logits)
    made = for_mosaic(expression)
    np.testing.assert_allclose(value(made), value(expression), rtol=1e-6, atol=1e-7)
    for node in nodes(made):
        assert node.name not in ("sign", "expm1")
        assert node.name != "select" or node.dtype != BOOL
        assert node.name not in ("lt", "le", "gt", "ge") or node.args[0].dtype != BOOL
        assert node.name != "floordiv" or node.args[1].name == CONST


def test_tables_and_powers_are_refused_by_name():
    q = jax.ShapeDtypeStruct((2, 37, 4, 16), "float32")
    k = jax.ShapeDtypeStruct((2, 53, 2, 16), "float32")

    def refusals(**options):
        with interpret():
            return explain(flash_attention, q, k, k, platform="pallas", **options).refusals["pallas"]

    for name in ("matrix", "blocks", "relative", "matrix-bias"):
        (reason,) = refusals(**from_gallery(name))
        assert reason.startswith("a table that is read at query and key: table(0, ")
    (reason,) = refusals(score_fn=lambda s, b, h, i, j: s**1.5)
    assert reason == "pow(score, 1.5): the base of a power may be negative"


# Schedules and memory ----------------------------------------------------------------------------------------------


def call_of(sizes=Sizes(2, 4, 2048, 2048), **options):
    B, H, T, S = sizes
    q, k = jax.ShapeDtypeStruct((B, T, H, 128), "bfloat16"), jax.ShapeDtypeStruct((B, S, 2, 128), "bfloat16")
    found = []
    jax.eval_shape(lambda *qkv: found.append(canonicalise(*qkv, **options)), q, k, k)
    return found[0].on(V5E)


def steps(side="q", **options):
    found = []
    jax.eval_shape(lambda x: found.append(flatten(call_of(**options), 128, 128, side, 2 if side == "k" else 1)), 0)
    return found[0]


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_mask_of_indices_alone_has_a_static_grid(side):
    """Stripes: each row visits its own block and every fourth."""
    mask_fn = lambda b, h, i, j: (j <= i) & ((i // 128 == j // 128) | (j // 128 % 4 == 0))  # noqa: E731
    visited = np.array([[j <= i and (i == j or j % 4 == 0) for j in range(16)] for i in range(16)])
    each = 2 if side == "k" else 1
    assert steps(side, mask_fn=mask_fn).number == each * visited.sum()


def test_a_grid_of_values_is_no_longer_than_what_indices_leave():
    seen = jnp.arange(2048) % 7 > 0
    by_value, causal = (
        steps(mask_fn=mask_fn)
        for mask_fn in (lambda b, h, i, j: (j <= i) & (seen[i] | seen[j]) & (i - j < 600), lambda b, h, i, j: j <= i)
    )
    assert not isinstance(by_value.number, int)
    assert by_value.length < causal.length == 16 * 17 // 2


def test_vmem_counts_what_functions_read():
    config = pallas_tpu.Config(512, 256)
    plain = pallas_tpu.vmem_bytes(call_of(), config)
    ids = jnp.arange(2048) % 5
    masked = pallas_tpu.vmem_bytes(call_of(mask_fn=lambda b, h, i, j: (ids[i] < ids[j]) | (j < 9)), config)
    blocks = 2 * 32 * (512 + 256)  # twice: eight sublanes of a row and of a column
    assert masked == {kernel: need + blocks for kernel, need in plain.items()}
    tile, gates = 4 * 512 * 256, normal("gates", (2048,))
    scored = pallas_tpu.vmem_bytes(call_of(score_fn=lambda s, b, h, i, j: s + gates[i]), config)
    assert scored.pop("drow") < scored["dq"]
    assert scored == {kernel: need + tile + 2 * 32 * 512 for kernel, need in plain.items()}
    bent = pallas_tpu.vmem_bytes(call_of(score_fn=lambda s, b, h, i, j: s * s), config)
    assert bent == {kernel: need + (1 if kernel == "forward" else 3) * tile for kernel, need in plain.items()}


def test_scalars_of_heads_lie_in_scalar_memory():
    slopes = [normal(f"slopes {n}", (64, 128)) for n in range(20)]
    score_fn = lambda s, b, h, i, j: sum((x[b, h] * ((i - j) // n) for n, x in enumerate(slopes, 2)), s)  # noqa: E731
    call = call_of(Sizes(64, 128, 128, 128), score_fn=score_fn)
    assert call["float_scalars"].shape == (64, 128, 20)
    (reason, *_) = pallas_tpu.unsupported(call)
    assert "KiB of scalar memory, 512 are to spare" in reason
    assert SMEM_BYTES // 2 < 64 * 128 * 20 * 4
