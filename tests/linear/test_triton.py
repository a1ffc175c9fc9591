"""However Triton's kernels cut a scan, into chunks, segments side by side and single tokens, it is the same scan."""

from functools import partial

import pytest

from harness import check
from harness.linear import CASES, call_case, definition
from harness.platforms import PLATFORMS

TRITON = next(platform for platform in PLATFORMS if platform.name == "triton" and platform.interpreted)
BY_ID = {case.id: case for case in CASES}
CUTS = {
    "T130-channel": {"chunk": 1, "block_c": 16},
    "token-mixed": {"chunk": 16, "segment": 48, "block_c": 16},
    "packed-head": {"chunk": 32, "segment": 32},
    "packed-all-reverse": {"chunk": 16, "segment": 16, "block_c": 16},
}


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_is_the_same_scan(name):
    case = BY_ID[name]
    function = partial(call_case, case, TRITON, cfg=CUTS[name])
    check(function, partial(definition, case), case.arrays(), case.dtype)
