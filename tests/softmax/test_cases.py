"""Forward, lse and every gradient of a case against the reference, with poison wherever nothing may be read.

Cases run on every platform of this machine, those of FOR_GPUS on GPUs alone, and core ones in the interpreters.
"""

from functools import partial

from harness import by_case, check
from harness.poison import hides, poisoned
from harness.softmax import (
    CASES,
    CORE,
    CORE_IDS,
    FOR_GPUS,
    SMALL_FOR_GPUS,
    WIDE_ON_CPUS,
    Case,
    call_case,
    definition,
    runs,
)

AS_USERS_COMPILE = ("packed-cross-causal", "segments-bias-sinks-soft-cap-dropout")


def check_case(case: Case, platform, *, optimised: bool = False) -> None:
    """A platform that refuses a case must say why."""
    if not runs(case, platform):
        return
    check(
        partial(call_case, case, platform),
        partial(definition, case),
        case.arrays(),
        case.dtype,
        rounded="query" if "logits_dtype" in case.options else "",
        optimised=optimised,
        poison=partial(poisoned, case) if hides(case) else None,
        poison_only=platform.interpreted,
        name=case.id,
    )


@by_case(CASES, FOR_GPUS)
def test_case(case: Case, native):
    check_case(case, native)


@by_case(CORE)
def test_core_case(case: Case, interpreted):
    check_case(case, interpreted)


@by_case(case for case in CASES if case.id in AS_USERS_COMPILE)
def test_optimised(case: Case, native):
    check_case(case, native, optimised=True)


def test_ids_are_unique_and_known():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids) and {*CORE_IDS, *WIDE_ON_CPUS, *SMALL_FOR_GPUS} <= set(ids)


HIDING = (
    "causal-T>S", "window-lopsided-T<S", "segments-padding-causal", "segments-cross-padding-window", "lengths-zero",
    "lengths-cross-causal", "kv-lengths-zero", "positions-in-segments-causal", "mask-per-batch", "pattern-across-tiles",
    "pattern-per-batch", "bias-HTS-masked", "soft-cap-segments", "dropout-bfloat16-segments", "packed-padding",
    "packed-cross-causal", "unnormalised-causal-T>S", "unnormalised-segments-no-lse", "everything-masked",
    "everything-bfloat16", "segments-bias-sinks-soft-cap-dropout", "wide-D96-lengths-window",
    "wide-D128-segments-gqa-causal", "wide-D128-pattern-gqa-causal", "wide-D256-segments-soft-cap",
)  # fmt: skip


def test_cases_of_every_kind_hide_something():
    by_id = {case.id: case for case in CASES}
    assert [name for name in HIDING if not hides(by_id[name])] == []
