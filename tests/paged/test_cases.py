"""Cases on every platform of this machine against the reference, with poison wherever nothing may be read.

Those of FOR_GPUS run on GPUs alone, and interpreters run the core ones.
"""

from harness import by_case
from harness.paged import CASES, CORE, CORE_IDS, FOR_GPUS, FOR_GPUS_IDS, Case, check_case

AS_USERS_COMPILE = ("mixed-bfloat16", "splits-8-sinks-window")


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
    assert len(set(ids)) == len(ids) and {*CORE_IDS, *FOR_GPUS_IDS} <= set(ids)
