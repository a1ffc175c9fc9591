"""The value of an expression in jax.numpy: for the definition, XLA, and inside Pallas kernels, which are traced.

`ejkernel.torch` has a namespace of its own for tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.expressions.nodes import (
    AXIS,
    BOOL,
    CONST,
    FLOAT,
    INT,
    LOAD,
    LOOKUP,
    OPERAND,
    SCORE,
    Expression,
    nodes,
)

_DTYPES = {BOOL: jnp.bool_, INT: jnp.int32, FLOAT: jnp.float32}


def _quotient(x: Any, y: Any) -> Any:
    return lax.div(*jnp.broadcast_arrays(x, y))


def _rem(x: Any, y: Any) -> Any:
    return lax.rem(*jnp.broadcast_arrays(x, y))


def _floordiv(x: Any, y: Any) -> Any:
    # fewer operations than jnp.floor_divide where the divisor is a positive number, which it mostly is
    if isinstance(y, np.integer) and y > 0:
        return _quotient(jnp.where(x < 0, x - (y - 1), x), y)
    return jnp.floor_divide(x, y)


def _mod(x: Any, y: Any) -> Any:
    if isinstance(y, np.integer) and y > 0:
        remainder = _rem(x, y)
        return jnp.where(remainder < 0, remainder + y, remainder)
    return jnp.mod(x, y)


_JNP: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floordiv": _floordiv,
    "mod": _mod,
    "quotient": _quotient,
    "rem": _rem,
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "shift_left": jnp.left_shift,
    "shift_right": jnp.right_shift,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "log": jnp.log,
    "log1p": jnp.log1p,
    "expm1": jnp.expm1,
    "tanh": jnp.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + jnp.exp(-x)),
    "sin": jnp.sin,
    "cos": jnp.cos,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "pow": jnp.power,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "select": jnp.where,
    "stop": lambda x: x,
}


def _constant(x: Any, node: Expression) -> Any:
    return np.dtype(node.dtype).type(x)


def _cast(x: Any, node: Expression) -> Any:
    if node.dtype == BOOL:
        return jnp.asarray(x) != 0
    x = jnp.asarray(x)
    # by way of int32: not every compiler of kernels has the other way from bool
    return (x.astype(jnp.int32) if x.dtype == jnp.bool_ else x).astype(_DTYPES[node.dtype])


class Namespace(NamedTuple):
    """How expressions are computed on arrays of a kind.

    Attributes:
        operations: functions by the names of `OPERATIONS`, but for casts.
        constant: a number in the dtype of a node.
        cast: a value in the dtype of a node.
        stop: what keeps a gradient from passing.
    """

    operations: Mapping[str, Callable[..., Any]]
    constant: Callable[[Any, Expression], Any]
    cast: Callable[[Any, Expression], Any]
    stop: Callable[[Any], Any]


JAX = Namespace(_JNP, _constant, _cast, lax.stop_gradient)


def evaluate(
    expression: Expression,
    axes: Mapping[str, Any],
    *,
    score: Any = None,
    load: Callable[[Expression, tuple[Any, ...]], Any] | None = None,
    operand: Callable[[Expression], Any] | None = None,
    stop: Callable[[Any], Any] = _JNP["stop"],
    namespace: Namespace = JAX,
) -> Any:
    """The value of an expression.

    Args:
        expression: what to evaluate.
        axes: the values of "b", "h", "i", "j", int32, which broadcast against each other.
        score: the logits.
        load: the value of a `load` or `lookup`, from the node and the values of its indices.
        operand: the value of an operand of a bound expression.
        stop: what keeps a gradient from passing, where the result is differentiated as it is computed.
        namespace: of the arrays.
    """
    values: dict[Expression, Any] = {}
    for node in nodes(expression):
        args = tuple(values[arg] for arg in node.args)
        if node.name == CONST:
            value = namespace.constant(node.data, node)
        elif node.name == AXIS:
            value = axes[node.data]
        elif node.name == SCORE:
            value = score
        elif node.name == OPERAND:
            assert operand is not None
            value = operand(node)
        elif node.name in (LOAD, LOOKUP):
            assert load is not None
            value = load(node, args)
        elif node.name == "cast":
            value = namespace.cast(args[0], node)
        elif node.name == "stop":
            value = stop(args[0])
        else:
            value = namespace.operations[node.name](*args)
        values[node] = value
    return values[expression]


def gather(array: Any, index: Sequence[Any]) -> Any:
    """Entries of an array at indices that broadcast against each other, clamped to what there is."""
    return array[tuple(clamped(index, array.shape))]


def clamped(index: Sequence[Any], shape: Sequence[int]) -> list[Any]:
    """Indices of the leading dimensions of a shape, within it."""
    return [i if isinstance(i, int) else i.clip(0, n - 1) for i, n in zip(index, shape, strict=False)]
