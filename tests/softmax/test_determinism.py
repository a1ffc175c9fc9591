"""Same inputs, same bits: outputs and every gradient, ten times, on every platform of this machine.

An interpreter takes one program after another: `test_pallas_tpu.py` looks for races in it instead.
"""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from ejkernel.modules import flash_attention
from ejkernel.ops import deterministic
from harness import cotangents_for, with_gradients
from harness.softmax import Case, call_case, check_refusal, refusals, segments

RUNS = 10
# XLA decides for whole programs whether cuDNN may sum in any order; others are asked by `deterministic()`
COMPILER_OPTIONS = {"cudnn": {"xla_gpu_exclude_nondeterministic_ops": True}}
# asked so, these refuse a gradient
NEVER_REPEAT = ("cute",)

PLAIN = Case("plain", B=1, T=40, D=64, dtype="bfloat16", lse=False)
CASES = (
    PLAIN,
    replace(PLAIN, id="gqa-causal", H=4, Hkv=2, options={"causal": True}),
    replace(PLAIN, id="segments", mask=partial(segments, padding=9), options={"causal": True}),
    replace(PLAIN, id="bias-sinks", bias="1HT1", sinks="H", options={"causal": True}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_ten_runs_give_the_same_bits(case, native):
    if native.device != "cpu":  # enough programs to race; XLA's loop takes minutes with the tiles of a short case
        case = replace(case, B=4, T=2000, H=4 * case.H, Hkv=4 * (case.Hkv or case.H), tiles=(256, 128))
    if reasons := refusals(case, native):
        check_refusal(case, native, reasons)
        return
    function, arrays = partial(call_case, case, native), case.arrays()
    cotangents = cotangents_for(function, arrays, case.dtype)
    program = with_gradients(function, COMPILER_OPTIONS.get(native.name))
    with deterministic(native.name not in COMPILER_OPTIONS):
        if native.name in NEVER_REPEAT:
            with pytest.raises(NotImplementedError, match="its gradients differ between runs"):
                program(arrays, cotangents)
            return
        check_repeats(program, arrays, cotangents)


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.id)
def test_outputs_are_the_same_bits_always(case, native):
    """Whatever the backward does."""
    case = replace(case, B=4, T=120)
    if native.device != "cpu":
        case = replace(case, T=500, tiles=(128, 128))
    if reasons := refusals(case, native):
        check_refusal(case, native, reasons)
        return
    check_repeats(jax.jit(partial(call_case, case, native)), case.arrays())


def check_repeats(program, *arguments):
    first = jax.device_get(program(*arguments))
    for run in range(1, RUNS):
        again = jax.device_get(program(*arguments))
        for (path, x), y in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(again), strict=True):
            assert x.tobytes() == y.tobytes(), f"run {run}: {np.sum(x != y)} entries of {jax.tree_util.keystr(path)}"


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
def test_auto_repeats_on_request(D):
    case = replace(PLAIN, B=4, T=2000, H=16, D=D, options={"causal": True})

    def attend(arrays):
        return {"out": flash_attention(**arrays, causal=True)}

    with deterministic():
        program, arrays = with_gradients(attend), case.arrays()
        cotangents = cotangents_for(attend, arrays, case.dtype)
        runs = [jax.device_get(program(arrays, cotangents)) for _ in range(RUNS)]
    for run in runs[1:]:
        assert all(
            x.tobytes() == y.tobytes() for x, y in zip(jax.tree.leaves(runs[0]), jax.tree.leaves(run), strict=True)
        )
