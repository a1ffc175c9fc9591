"""What must not be read, filled with numbers that show if it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.softmax.reference import visible
from ejkernel.kernels.softmax.spec import canonicalise
from harness.softmax import Arrays, Case

_SEEN: dict[str, np.ndarray] = {}


def seen_by(case: Case) -> np.ndarray:
    """Which query sees which key, (B, H, T, S); once per case, by its id."""
    if case.id not in _SEEN:
        _SEEN[case.id] = _evaluate(case)
    return _SEEN[case.id]


def _evaluate(case: Case) -> np.ndarray:
    call = canonicalise(**case.arrays(), **case.keywords())
    B, H = call["query"].shape[0], call["query"].shape[2]
    mask = np.asarray(jax.jit(lambda: visible(call))())
    return np.broadcast_to(mask, (B, H, *mask.shape[2:]))


def hides(case: Case) -> bool:
    """Whether a query sees nothing, or a key is seen by nobody."""
    everything = case.mask is None and not case.cum_q and "sliding_window" not in case.options
    if everything and not (case.options.get("causal") and case.kv_len < case.T):
        return False
    seen = seen_by(case)
    return not seen.any((1, 2)).all() or not seen.any((1, 3)).all()


def poisons(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """By turns nan, both infinities, and numbers so large that a product of two is infinite."""
    largest = 0.9 * float(jnp.finfo(dtype).max)
    return np.resize([np.nan, np.inf, -np.inf, largest, -largest], shape)


def filled(x: Any, rows: np.ndarray, values: Any) -> Any:
    """x (B, L, heads, dim) or (L, heads, dim) with `values` (B, L), or one value, in the rows (B, L) that are set."""
    rows, values = (np.broadcast_to(y, rows.shape) if x.ndim == 4 else np.broadcast_to(y, rows.shape)[0]
                    for y in (rows, values))  # fmt: skip
    return jnp.where(rows[..., None, None], jnp.asarray(values[..., None, None], x.dtype), x)


def poisoned(case: Case, arrays: Arrays) -> Arrays:
    """The arrays with poison wherever nothing looks."""
    seen = seen_by(case)
    nobody, nothing = ~seen.any((1, 2)), ~seen.any((1, 3))  # keys (B, S), queries (B, T)
    arrays = dict(arrays)
    for name, rows in (("query", nothing), ("key", nobody), ("value", nobody)):
        arrays[name] = filled(arrays[name], rows, poisons(rows.shape, arrays[name].dtype))
    bias = arrays.get("bias")
    if bias is not None and bias.shape[-2:] == seen.shape[2:]:
        hidden = ~seen
        for axis, n in enumerate((1,) * (4 - bias.ndim) + bias.shape):
            hidden = hidden.all(axis, keepdims=True) if n == 1 else hidden
        values = jnp.asarray(poisons(bias.shape, bias.dtype), bias.dtype)
        arrays["bias"] = jnp.where(hidden.reshape(bias.shape), values, bias)
    return arrays
