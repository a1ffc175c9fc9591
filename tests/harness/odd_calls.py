"""Calls of every public function with one argument changed into something odd, drawn from a seed."""

import inspect
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from harness.samples import SAMPLES, attention_mask

CALLS = [name for name, sample in SAMPLES.items() if sample.function is not attention_mask]
# what is the framework's and not the call's: devices and specs have tests of their own
ELSEWHERE = {"mesh", "in_specs", "out_specs", "axis_name", "axis_names", "batch_axis", "head_axis"}

# anything that somebody might hand over for an option
ODD = (
    None, True, False, 0, 1, -1, 3, 2**31, -(2**40), 0.0, 0.5, -2.5, float("nan"), float("inf"), 1j, "", "yes", b"no",
    (), (1,), (1, 2), (-1, 3), (1, 2, 3), (None, None), [], [0, 2, 5], {}, {"block_q": 0}, {"nosuch": 1}, object(), len,
    int, np.int8(3), np.float64(0.25), np.bool_(True), np.array([1, 2]), np.zeros((2, 0)), np.array("x"), range(3), ...,
)  # fmt: skip
DTYPES = ("float32", "float64", "bfloat16", "float16", "int8", "int32", "int64", "uint32", "bool", "complex64")


class Call(NamedTuple):
    """A public function with arguments, of which one was changed."""

    sample: str
    changed: str
    value: Any
    arguments: dict[str, Any]

    @property
    def function(self) -> Any:
        return SAMPLES[self.sample].function

    def shapes(self) -> Any:
        """Trace the call: every check runs, nothing is compiled."""
        return jax.eval_shape(lambda: self.function(**self.arguments))

    def __str__(self) -> str:
        value = self.value
        shown = f"{value.dtype}{value.shape}" if hasattr(value, "shape") else f"{value!r:.60}"
        return f"{self.sample}: {self.function.__name__}(..., {self.changed}={shown})"


def drawn(sample: str, seed: int) -> Call:
    """A call with one argument that is another than before, in what it is or in its shape, dtype or numbers."""
    draw = Random(f"{sample} {seed}")
    given = {name: np.asarray(x) for name, x in SAMPLES[sample].given().items()}
    arguments = given | SAMPLES[sample].made()
    names = [n for n in inspect.signature(SAMPLES[sample].function).parameters if n not in ELSEWHERE]
    changed = draw.choice(names)
    old = arguments.get(changed)
    value = _other(draw, old) if isinstance(old, np.ndarray) and draw.random() < 0.8 else draw.choice(ODD)
    return Call(sample, changed, value, arguments | {changed: value})


def _other(draw: Random, x: np.ndarray) -> Any:
    """An array that differs."""
    kind = draw.choice(("dtype", "shape", "rank", "empty", "numbers", "transposed", "list", "struct", "where"))
    if kind == "dtype":
        return jnp.asarray(x).astype("float32").astype(jax.dtypes.canonicalize_dtype(draw.choice(DTYPES)))
    if kind == "shape" and x.ndim:
        axis = draw.randrange(x.ndim)
        return np.resize(x, (*x.shape[:axis], x.shape[axis] + draw.choice((-1, 1, 2, 7)), *x.shape[axis + 1 :]))
    if kind == "rank":
        return x[None] if draw.random() < 0.5 or not x.ndim else x[0]
    if kind == "empty":
        return x[:0] if x.ndim else np.zeros(0, x.dtype)
    if kind == "numbers" and np.issubdtype(x.dtype, np.integer):
        return x + np.asarray(draw.choice((-1, 1, 5, 1000, 2**20)), x.dtype)
    if kind == "transposed":
        return x.T
    if kind == "list":
        return x.tolist()
    if kind == "struct":
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jnp.asarray(x)
