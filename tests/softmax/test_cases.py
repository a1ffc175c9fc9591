"""Every case on every platform of this machine: forward, lse and every gradient against the reference."""

import pytest

from harness.softmax import CASES, WIDE, Case, check_case

AS_USERS_COMPILE = ("bfloat16-gqa-causal", "packed-cross-causal", "segments-bias-sinks-soft-cap-dropout")


@pytest.mark.parametrize("case", [case for case in CASES if case not in WIDE], ids=lambda case: case.id)
def test_case(case: Case, platform):
    check_case(case, platform)


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.id)
def test_wide_case(case: Case, native):
    check_case(case, native)


@pytest.mark.parametrize("case", [case for case in CASES if case.id in AS_USERS_COMPILE], ids=lambda case: case.id)
def test_optimised(case: Case, platform):
    check_case(case, platform, optimised=True)


def test_ids_are_unique():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
