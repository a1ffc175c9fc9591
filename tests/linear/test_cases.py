"""Output, final state and every gradient of a case against the reference, with poison wherever nothing may be read.

Cases run on every platform of this machine, those of FOR_GPUS on GPUs alone, and core ones in the interpreters.
"""

from harness import by_case
from harness.linear import CASES, CORE, CORE_IDS, FOR_GPUS, FOR_GPUS_IDS, LARGE, Case, check_case, missing_from_grid

AS_USERS_COMPILE = ("channel-mixed-bfloat16",)


@by_case(CASES, FOR_GPUS)
def test_case(case: Case, native):
    check_case(case, native)


@by_case(CORE)
def test_core_case(case: Case, interpreted):
    check_case(case, interpreted)


@by_case(LARGE, for_gpus=LARGE)
def test_large_case(case: Case, native):
    check_case(case, native)


@by_case(case for case in CASES if case.id in AS_USERS_COMPILE)
def test_optimised(case: Case, native):
    check_case(case, native, optimised=True)


def test_ids_are_unique_and_known():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids) and {*CORE_IDS, *FOR_GPUS_IDS} <= set(ids)


def test_every_dtype_meets_weak_and_strong_decays():
    assert not missing_from_grid(CASES)
    assert not missing_from_grid(case for case in CASES if case not in FOR_GPUS)
    assert not missing_from_grid(CORE)
