"""Mask and score functions of queries and the keys that they gathered."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.expressions.evaluation import evaluate
from ejkernel.expressions.nodes import LOOKUP, Expression
from ejkernel.kernels.common.rules import array_name, table_index
from ejkernel.kernels.native_sparse.spec import dimensions
from ejkernel.kernels.softmax.rules import ARRAYS, slopes
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays


def float_operands(call: Call) -> Arrays:
    """What has gradients."""
    return {name: x for name, x in call.arrays.items() if name in ARRAYS and ARRAYS[name].grad}


def seen_alike(call: Call) -> Call:
    """A call in which the heads of a group see the same keys: where a mask may differ, a group is one head."""
    dims = dimensions(call)
    heads = [x.shape[1] for name, x in call.arrays.items() if name in ARRAYS]
    if call.spec.rules.mask is None or max(heads, default=1) == 1:
        return call
    repeated = {name: jnp.repeat(call[name], dims.G, axis=2) for name in ("key", "value", "indices")}
    return replace(call, arrays=call.arrays | repeated)


@dataclass(frozen=True)
class GatheredPairs:
    """Pairs (B, Hkv, C, G, K * block_size) of queries (C,) and keys (B, Hkv, C, K * block_size), by their indices."""

    call: Call
    queries: jax.Array
    keys: jax.Array

    def seen(self, visible: jax.Array) -> jax.Array:
        """Of the pairs that all heads of a group may see, those that the mask function shows, to all alike."""
        rule = self.call.spec.rules.mask
        return visible if rule is None else (visible[:, :, :, None] & self._value(rule))[:, :, :, 0]

    def scored(self, logits: jax.Array) -> jax.Array:
        rule = self.call.spec.rules.score
        return logits if rule is None else self._value(rule, logits)

    def gradients(self, logits: jax.Array, seen: jax.Array, dscored: jax.Array, sums: Arrays) -> tuple[Any, Arrays]:
        """From the gradient of the scored logits that of the logits before, and of operands added to their sums."""
        rule = self.call.spec.rules.score
        if rule is None:
            return dscored, sums

        def through(slope: Expression) -> jax.Array:
            # what is hidden may have any slope
            return jnp.where(seen, dscored * self._value(slope, logits), 0.0)

        for node, slope in slopes(rule).operands:
            index = tuple(self._value(i, logits) for i in node.args)
            read = partial(self._read, node, index, shape=logits.shape)
            name = array_name(node)
            (added,) = jax.vjp(read, self.call[name])[1](through(slope))
            sums = sums | {name: sums[name] + added}
        return through(slopes(rule).score), sums

    def _value(self, rule: Expression, logits: Any = None) -> jax.Array:
        def read(node: Expression, index: tuple[Any, ...] = ()) -> jax.Array:
            return self._read(node, index, self.call[array_name(node)])

        axes = {"i": self.queries[:, None, None], "j": self.keys[:, :, :, None]}
        return jnp.asarray(evaluate(rule, axes, score=logits, operand=read, load=read))

    def _read(self, node: Expression, index: tuple[Any, ...], array: jax.Array, shape: Any = None) -> jax.Array:
        """An operand, or entries of a table, of all pairs."""
        dims = dimensions(self.call)
        head = jnp.arange(dims.H).reshape(dims.Hkv, 1, dims.G, 1)
        b = jnp.arange(dims.B).reshape(-1, 1, 1, 1, 1) if array.shape[0] > 1 else 0
        h = head if array.shape[1] > 1 else 0
        if node.name == LOOKUP:
            values = array[b, h, table_index(node, index)]
        else:
            kind, number = node.data
            at = {"row": (self.queries[:, None, None],), "column": (self.keys[:, :, :, None],)}.get(kind, ())
            values = array[(b, h, number, *at)]
        return values if shape is None else jnp.broadcast_to(values, shape)
