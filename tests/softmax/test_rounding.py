"""Rounded logits are part of the definition: the check of a case sees whether they are rounded, and to what."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.softmax.reference import reference
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.modules import flash_attention
from harness import check
from harness.platforms import PLATFORMS
from harness.softmax import CASES, Case, call_case, definition

ROUNDED = [case for case in CASES if "logits_dtype" in case.options]
XLA = PLATFORMS[0]


def check_instead(case: Case, function) -> None:
    """Check a function as if it were an implementation of the case."""
    check(function, partial(definition, case), case.arrays(), case.dtype, rounded="query")


def with_logits(case: Case, dtype) -> Case:
    return replace(case, options={**case.options, "logits_dtype": dtype})


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_only_the_right_dtype_passes(case, dtype):
    function = partial(call_case, with_logits(case, dtype), XLA)
    if dtype == case.options["logits_dtype"]:
        check_instead(case, function)
    else:
        with pytest.raises(AssertionError, match=r"output .*: error"):
            check_instead(case, function)


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.id)
@pytest.mark.parametrize("order", ["backwards", "pairs"])
def test_what_lies_at_a_boundary_may_fall_on_either_side(case, order):
    """Products summed in another order: some logits round the other way, and the check allows for it."""
    at = np.arange(case.D)[::-1] if order == "backwards" else np.arange(case.D).reshape(2, -1).T.ravel()

    def another_order(arrays):
        permuted = {name: arrays[name][..., at] for name in ("query", "key")}
        return call_case(case, XLA, arrays | permuted)

    check_instead(case, another_order)


def test_compilers_may_not_take_the_rounding_out():
    """XLA for GPUs removes a conversion to a narrow dtype and back; that is visible in the program only."""
    q = jax.ShapeDtypeStruct((1, 8, 1, 4), jnp.float32)
    text = jax.jit(lambda q: reference(canonicalise(q, q, q, logits_dtype="bfloat16"))).lower(q).as_text()
    assert "reduce_precision" in text and "bf16" not in text


@pytest.mark.parametrize(
    ("dtype", "given", "default", "multiplied"),
    [
        ("float32", None, None, "HIGHEST"),
        ("float32", None, "tensorfloat32", "HIGH"),
        ("float32", "default", None, "DEFAULT"),
        ("float32", (jax.lax.Precision.HIGH,) * 2, None, "HIGH"),
        ("bfloat16", None, None, "DEFAULT"),
    ],
)
def test_float32_is_multiplied_as_such_unless_told_otherwise(dtype, given, default, multiplied):
    """On GPUs and TPUs XLA rounds what it multiplies; that is visible in the program only."""
    q = jax.ShapeDtypeStruct((1, 8, 1, 4), dtype)

    def step(q):
        return jax.vjp(lambda x: flash_attention(x, x, x, precision=given, platform="xla"), q)[1](q)

    with jax.default_matmul_precision(default):
        text = jax.jit(step).lower(q).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    kinds = [set(re.findall(r"precision = \[(\w+), (\w+)\]", line)) or {("DEFAULT", "DEFAULT")} for line in products]
    assert len(products) >= 6 and all(kind == {(multiplied, multiplied)} for kind in kinds)


def test_other_ways_to_say_the_same():
    q = jax.ShapeDtypeStruct((1, 8, 1, 4), jnp.float32)
    preset = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
    said = [
        {"precision": preset},
        {"precision": "TF32_TF32_F32"},
        {"precision": [preset, preset], "logits_dtype": None},
    ]
    specs = []
    for options in said:
        jax.eval_shape(lambda q, options=options: specs.append(canonicalise(q, q, q, **options).spec), q)
    assert specs[0].precision == preset and specs == [specs[0]] * 3
