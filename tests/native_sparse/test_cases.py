"""Output, lse and every gradient of selected attention against the reference, with poison where nothing may be read.

Every case runs on every platform of this machine, and the core ones in the interpreter.
"""

from harness import by_case
from harness.native_sparse import CASES, CORE, CORE_IDS, Case, check_case

AS_USERS_COMPILE = ("bfloat16", "packed-by-keys")


@by_case(CASES)
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
    assert len(set(ids)) == len(ids) and set(CORE_IDS) <= set(ids)
