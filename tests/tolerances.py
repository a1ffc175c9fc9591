"""How wrong a result may be: twice as wrong as the naive computation in the same dtype, and nothing hand-picked.

`exact` is the float32 reference, `naive` the same definition computed in the dtype of the inputs. A tiny floor,
relative to the largest value among results of one kind, allows for sums taken in another order.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

NAIVE_ERRORS = 2.0
# roundings of a float32 sum of some hundred terms
FLOOR = 64 * float(np.finfo(np.float32).eps)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def error(actual: np.ndarray, exact: np.ndarray) -> float:
    """The largest difference over the finite entries."""
    finite = np.isfinite(exact) & np.isfinite(actual)
    return float(np.abs(actual[finite] - exact[finite]).max(initial=0.0))


def magnitude(results: Mapping[str, Any]) -> float:
    """The largest finite value among several results."""
    return max((error(wide(x), np.zeros(np.shape(x))) for x in results.values()), default=0.0)


def assert_close(
    actual: Mapping[str, Any], exact: Mapping[str, Any], naive: Mapping[str, Any] | None = None, kind: str = ""
) -> None:
    """Results by name against the float32 reference; they are nan and inf exactly where the reference is.

    The results are of one kind (outputs, or gradients): one that cancels to zero is judged by the others' magnitude.
    """
    assert actual.keys() == exact.keys(), f"{kind}: {sorted(actual)} instead of {sorted(exact)}"
    floor = FLOOR * magnitude(exact)
    for name in exact:
        got, right = wide(actual[name]), wide(exact[name])
        assert got.shape == right.shape, f"{kind} {name}: shape {got.shape} instead of {right.shape}"
        for what, test in (("nan", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
            wrong = np.argwhere(test(got) != test(right))
            assert not len(wrong), f"{kind} {name}: {what} is misplaced at {len(wrong)} entries, first {wrong[0]}"
        # a narrow reference dtype rounds the result itself, whatever the computation
        ours, theirs = error(got, right), 0.0 if naive is None else error(wide(naive[name]), right)
        allowed = NAIVE_ERRORS * theirs + floor
        assert ours <= allowed, f"{kind} {name}: error {ours:.3g}, allowed {allowed:.3g} (naive error {theirs:.3g})"
