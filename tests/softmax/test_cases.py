"""Every case on every platform of this machine: forward, lse and every gradient against the reference."""

import pytest

from harness.softmax import CASES, COMBINATIONS, Case, check_case

AS_USERS_COMPILE = [case for case in CASES if case.id in ("63x129", "bfloat16-gqa-causal", "packed-cross-causal")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case, platform):
    check_case(case, platform)


@pytest.mark.parametrize("case", [*AS_USERS_COMPILE, *COMBINATIONS], ids=lambda case: case.id)
def test_optimised(case: Case, platform):
    check_case(case, platform, optimised=True)


def test_ids_are_unique():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
