"""Output, lse and every gradient of selected attention against the reference, with poison where nothing may be read.

Cases run on every platform of this machine, those of FOR_GPUS on GPUs alone, and core ones in the interpreter.
"""

from harness import by_case
from harness.native_sparse import CASES, CORE, CORE_IDS, FOR_GPUS, FOR_GPUS_IDS, Case, check_case

AS_USERS_COMPILE = ("bfloat16-by-keys", "packed-by-keys")


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
