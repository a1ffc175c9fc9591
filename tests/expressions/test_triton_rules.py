"""Functions of Triton made from expressions: in the interpreter, and compiled for GPUs that are not there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from ejkernel.bridge import triton_call_by_name
from ejkernel.bridge.compile import compile_launches
from ejkernel.expressions.binding import Binder, Rule
from ejkernel.expressions.binding import Sizes as BoundSizes
from ejkernel.expressions.tracing import traced
from ejkernel.kernels.common.triton_rules import DeviceFunction, flat_operands
from harness.gallery import MASKS, SCORES, Sizes, values

SIZES = Sizes(B=2, H=4, T=40, S=56)


@dataclasses.dataclass(frozen=True)
class Constants:
    RULE: DeviceFunction
    N: int


@triton.jit
def rule_kernel(p_ints, p_floats, p_s, T, S, s_ints_b, s_ints_h, s_floats_b, s_floats_h, p_out, C: tl.constexpr):
    i_b, i_h = tl.program_id(0), tl.program_id(1)
    p_ints += i_b * s_ints_b + i_h * s_ints_h
    p_floats += i_b * s_floats_b + i_h * s_floats_h
    o_i, o_j = tl.arange(0, C.N)[:, None], tl.arange(0, C.N)[None, :]
    o_tile = ((i_b * tl.num_programs(1) + i_h) * T + o_i) * S + o_j
    m_in = (o_i < T) & (o_j < S)
    b_s = tl.load(p_s + o_tile, mask=m_in, other=0.0)
    b_value = C.RULE.call(o_i, o_j, b_s, p_ints, p_floats, T, S)
    tl.store(p_out + o_tile, (b_value + b_s * 0.0).to(tl.float32), mask=m_in)


def by_triton(name, scores):
    function = (SCORES if scores else MASKS)[name](SIZES)
    found = traced(function, "f", scores=scores)
    binder = Binder(BoundSizes(*SIZES))
    expression = binder.bound(Rule(found.expression, found.arrays))
    layouts, flat = flat_operands(binder.arrays())

    def run(logits):
        strides = {}
        for dtype in ("ints", "floats"):
            x = flat[f"p_{dtype}"]
            B, H, n = (1, 1, 0) if x is None else x.shape
            strides |= {f"s_{dtype}_b": H * n if B > 1 else 0, f"s_{dtype}_h": n if H > 1 else 0}
        return triton_call_by_name(
            rule_kernel,
            {**flat, **strides, "p_s": logits, "T": SIZES.T, "S": SIZES.S},
            out_shape=jax.ShapeDtypeStruct(SIZES, jnp.float32),
            grid=(SIZES.B, SIZES.H),
            C=Constants(DeviceFunction(expression, layouts), 64),
        )

    return function, run


LOGITS = 3 * np.asarray(jax.random.normal(jax.random.key(0), SIZES))


@pytest.mark.parametrize("name", MASKS)
def test_masks_in_the_interpreter(name):
    function, run = by_triton(name, False)
    np.testing.assert_array_equal(jax.jit(run)(LOGITS), values(function, SIZES))


@pytest.mark.parametrize("name", SCORES)
def test_scores_in_the_interpreter(name):
    function, run = by_triton(name, True)
    np.testing.assert_allclose(jax.jit(run)(LOGITS), values(function, SIZES, LOGITS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "scores"), [("documents-prefix", False), ("natten", False), ("relative", True), ("soft-cap", True)]
)
def test_compiled_for_a_gpu(name, scores):
    _, run = by_triton(name, scores)
    (report,) = compile_launches(run, LOGITS, target="sm_90")
    assert not report.problems
