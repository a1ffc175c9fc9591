"""Every case on every platform of this machine against the reference, with poison wherever nothing may be read."""

import pytest

from harness.paged import CASES, Case, check_case

AS_USERS_COMPILE = ("mixed-bfloat16", "splits-8-sinks-window")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case, platform):
    check_case(case, platform)


@pytest.mark.parametrize("case", [case for case in CASES if case.id in AS_USERS_COMPILE], ids=lambda case: case.id)
def test_optimised(case: Case, platform):
    check_case(case, platform, optimised=True)


def test_ids_are_unique():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
