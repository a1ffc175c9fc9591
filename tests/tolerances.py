"""How wrong a result may be: twice as wrong as the naive computation in the same dtype, and nothing hand-picked.

`exact` is the float32 reference, `naive` the same definition computed in the dtype of the inputs. A tiny floor,
relative to the largest value among results of one kind, allows for sums taken in another order.
"""

from collections.abc import Mapping, Sequence
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


def spread(results: Sequence[Mapping[str, Any]], exact: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """How far results may lie from the exact one, entry by entry."""
    with np.errstate(invalid="ignore"):  # inf - inf; assert_close has checked where they are
        return {name: np.max([abs(wide(r[name]) - wide(x)) for r in results], axis=0) for name, x in exact.items()}


def assert_close(
    actual: Mapping[str, Any],
    exact: Mapping[str, Any],
    naive: Mapping[str, Any] | None = None,
    kind: str = "",
    either: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Results by name against the float32 reference; they are nan and inf exactly where the reference is.

    The results are of one kind (outputs, or gradients): one that cancels to zero is judged by the others' magnitude.
    `either` allows for more, entry by entry: `spread` of what the reference may be.
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
        theirs = 0.0 if naive is None else error(wide(naive[name]), right)
        allowed = np.full(right.shape, NAIVE_ERRORS * theirs + floor)
        if either is not None:
            allowed += NAIVE_ERRORS * either[name]
        finite = np.isfinite(right)
        ours = np.where(finite, abs(np.where(finite, got, 0) - np.where(finite, right, 0)), 0.0)
        at = np.unravel_index(np.argmax(np.where(finite, ours - allowed, -np.inf)), right.shape)
        assert not finite.any() or ours[at] <= allowed[at], (
            f"{kind} {name}: error {ours[at]:.3g}, allowed {allowed[at]:.3g} (naive error {theirs:.3g})"
        )
