"""A forward leaves the same for its backward on every platform, so that another platform's backward may follow it."""

from dataclasses import replace
from functools import partial

import pytest

from ejkernel.kernels.softmax.operations import FLASH_ATTENTION
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops.autodiff import execute
from ejkernel.ops.dispatch import choose
from ejkernel.ops.target import target_of
from harness import check
from harness.softmax import Case, definition, runs, segments

CAUSAL = Case("causal", B=1, T=40, H=4, Hkv=2, D=64, dtype="bfloat16", lse=False, options={"causal": True})
CASES = (CAUSAL, replace(CAUSAL, id="segments-sinks", mask=partial(segments, padding=9), sinks="H"))


def attend(case, platform, ours_first, arrays):
    """The forward of `platform` and the backward of XLA, or the other way round."""
    call = canonicalise(**arrays, **case.keywords())
    call = call.on(replace(target_of(call.arrays.values()), interpreted=platform.interpreted))
    with platform.context():
        plans = [choose(FLASH_ATTENTION, call, name, None)[0] for name in (platform.name, "xla")]
    first, second = plans if ours_first else plans[::-1]
    return {"out": execute(replace(first, gradient=second), call.arrays)["out"]}


@pytest.mark.parametrize("ours_first", [True, False], ids=("forward", "backward"))
@pytest.mark.parametrize(
    "case", [pytest.param(CASES[0], marks=pytest.mark.gpu), CASES[1]], ids=[case.id for case in CASES]
)
def test_gradients_cross_platforms(case, ours_first, native):
    check_crossing(case, ours_first, native)


@pytest.mark.parametrize("ours_first", [True, False], ids=("forward", "backward"))
def test_gradients_cross_interpreters(ours_first, interpreted):
    check_crossing(CASES[-1], ours_first, interpreted)


def check_crossing(case, ours_first, platform):
    if runs(case, platform):
        check(partial(attend, case, platform, ours_first), partial(definition, case), case.arrays(), case.dtype)
