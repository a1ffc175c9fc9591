"""Expressions against the functions they were made from: values, bounds of blocks, derivatives, functions of Triton."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.expressions.binding import Binder, Rule
from ejkernel.expressions.binding import Sizes as BoundSizes
from ejkernel.expressions.bounds import axis_interval, bounds, has_operands, operand_interval
from ejkernel.expressions.derivatives import derivatives
from ejkernel.expressions.evaluation import evaluate
from ejkernel.expressions.nodes import FLOAT, LOOKUP, OPERAND, SCORE, B, H, I, J, apply, const, nodes, score
from ejkernel.expressions.tracing import NotAnExpression, traced
from harness.gallery import HOSTILE, MASKS, SCORES, Sizes, values

SIZES = Sizes(B=2, H=4, T=40, S=56)


def bound(function, name, sizes=SIZES, scores=False):
    found = traced(function, name, scores=scores)
    binder = Binder(BoundSizes(*sizes))
    expression = binder.bound(Rule(found.expression, found.arrays))
    return expression, binder.arrays()


def whole_tile(expression, arrays, sizes=SIZES, score=None):
    """The value of a bound expression for all heads, (B, H, T, S)."""
    axes = {
        "i": jnp.arange(sizes.T, dtype=jnp.int32)[:, None],
        "j": jnp.arange(sizes.S, dtype=jnp.int32)[None],
    }

    def operand(node):
        kind, number = node.data
        x = arrays[f"{'float' if node.dtype == FLOAT else 'int'}_{kind}s"][:, :, number]
        return (
            {"scalar": x[..., None, None], "row": x[..., :, None], "column": x[..., None, :]}[kind]
            if x.ndim > 2
            else x[..., None, None]
        )

    def load(node, index):
        offset, shape = node.data
        table = arrays[f"{'float' if node.dtype == FLOAT else 'int'}_tables"][
            :, :, offset : offset + int(np.prod(shape))
        ]
        clamped = [jnp.clip(x, 0, n - 1) for x, n in zip(index, shape, strict=True)]
        return table.reshape(*table.shape[:2], *shape)[(..., *clamped)]

    value = evaluate(expression, axes, score=score, operand=operand, load=load)
    return jnp.broadcast_to(value, sizes)


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_has_the_values_of_its_function(name):
    function = MASKS[name](SIZES)
    expression, arrays = bound(function, "mask_fn")
    np.testing.assert_array_equal(whole_tile(expression, arrays), values(function, SIZES))


@pytest.mark.parametrize("name", SCORES)
def test_a_score_has_the_values_and_derivatives_of_its_function(name):
    function = SCORES[name](SIZES)
    expression, arrays = bound(function, "score_fn", scores=True)
    logits = 3 * jax.random.normal(jax.random.key(0), SIZES)
    expected, vjp = jax.vjp(lambda x: values(function, SIZES, x), logits)
    np.testing.assert_allclose(whole_tile(expression, arrays, score=logits), expected, rtol=1e-5, atol=1e-5)
    slope = derivatives(expression, [score()])[score()]
    np.testing.assert_allclose(whole_tile(slope, arrays, score=logits), vjp(jnp.ones(SIZES))[0], rtol=1e-5, atol=1e-5)


def test_derivatives_by_operands():
    slopes, gates = jnp.linspace(0.1, 1.0, SIZES.H), jax.random.normal(jax.random.key(1), (SIZES.S,))

    def function(s, b, h, i, j, slopes=slopes, gates=gates):
        return 3 * jnp.tanh((s - slopes[h] * jnp.abs(i - j)) * gates[j] / 3) + jnp.maximum(gates[i], gates[j])

    expression, arrays = bound(function, "score_fn", scores=True)
    operands = [n for n in nodes(expression) if n.name in (OPERAND, LOOKUP) and n.dtype == FLOAT]
    logits = jax.random.normal(jax.random.key(0), SIZES)
    for node, slope in derivatives(expression, operands).items():

        def of_operand(x, node=node):
            kind, number = node.data
            changed = arrays | {f"float_{kind}s": arrays[f"float_{kind}s"].at[:, :, number].add(x)}
            return whole_tile(expression, changed, score=logits)

        np.testing.assert_allclose(
            whole_tile(slope, arrays, score=logits), jax.jacfwd(of_operand)(0.0), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("block", [(8, 8), (16, 5), (7, 64)], ids=str)
@pytest.mark.parametrize("name", [*MASKS, *HOSTILE])
def test_bounds_of_blocks_hold(name, block):
    function = (MASKS | HOSTILE)[name](SIZES)
    expression, arrays = bound(function, "mask_fn")
    xp = jnp if has_operands(expression) else np
    rows, columns = axis_interval(SIZES.T, block[0], xp), axis_interval(SIZES.S, block[1], xp)
    axes = {"i": type(rows)(*(x[:, None] for x in rows[:2])), "j": columns}

    def operand(node):
        kind, number = node.data
        x = arrays[f"{'float' if node.dtype == FLOAT else 'int'}_{kind}s"][:, :, number]
        found = operand_interval(x, {"row": block[0], "column": block[1]}.get(kind))
        return type(found)(
            *(y[..., :, None] if kind == "row" else y[..., None, :] if kind == "column" else y for y in found)
        )

    every, some = (
        np.broadcast_to(x, (SIZES.B, SIZES.H, len(rows.low), len(columns.low)))
        for x in bounds(expression, axes, operand, xp)[:2]
    )
    seen = np.asarray(values(function, SIZES))
    wasted = 0
    for at in np.ndindex(*some.shape):
        b, h, i, j = at
        tile = seen[b, h, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        assert some[at] or not tile.any()
        assert tile.all() or not every[at]
        wasted += bool(some[at]) and not tile.any()
    if name in ("causal", "window", "prefix", "documents", "tree", "jagged", "window-by-head", "nothing", "everything"):
        assert wasted <= some.size // 8


def test_gradients_that_are_not_those_of_what_is_computed():
    """stop_gradient counts; a derivative of one's own is refused, and JAX's own functions are known."""
    expression, arrays = bound(lambda s, b, h, i, j: s + jax.lax.stop_gradient(s) * 0.5, "score_fn", scores=True)
    np.testing.assert_array_equal(whole_tile(expression, arrays, score=jnp.full(SIZES, 2.0)), 3.0)
    np.testing.assert_array_equal(whole_tile(derivatives(expression, [score()])[score()], arrays), 1.0)

    @jax.custom_jvp
    def steep(x):
        return x * 1.0

    steep.defjvp(lambda primals, tangents: (steep(*primals), 50 * tangents[0]))
    with pytest.raises(NotAnExpression, match="derivative of one's own"):
        traced(lambda s, b, h, i, j: steep(s), "score_fn", scores=True)
    assert traced(lambda s, b, h, i, j: jax.nn.silu(s), "score_fn", scores=True).arrays == ()


def test_equal_functions_are_one_expression():
    one, other = (traced(SCORES["alibi"](SIZES), "score_fn", scores=True) for _ in range(2))
    assert one.expression is other.expression
    assert copy.deepcopy(one.expression) is one.expression is pickle.loads(pickle.dumps(one.expression))
    assert traced(lambda b, h, i, j: j <= i, "f", scores=False).expression is (J <= I)


def test_what_is_known_of_indices_is_not_computed():
    x = jnp.arange(9.0)
    found = traced(lambda b, h, i, j: x[i] > x[j], "f", scores=False).expression
    assert "select" not in repr(found)
    assert repr(traced(lambda b, h, i, j: i // 4 == j % 3, "f", scores=False).expression) == "(i // 4) == (j % 3)"
    zero = const(0, "int32")
    assert apply("lt", I, zero) is const(False, "bool")
    # which may wrap around, or be divided by 0
    for x in (I * 2**20, I + J + H, I - J, I // J, apply("abs", I)):
        assert apply("lt", x, zero) is not const(False, "bool")
    assert {B, H, I, J} == {n for n in nodes(B + H + I + J) if n.name == "axis"}
    assert SCORE in score().axes


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, i, j: i, "must give a bool"),
        (lambda b, h, i, j: (i > j, i < j), "must give one bool"),
        (lambda b, h, i, j: jax.lax.dynamic_slice(jnp.arange(9.0), [i], [2]).sum() > 0, "index to one number"),
        (lambda b, h, i, j: jax.lax.erf(i * 1.0) > 0, "erf has no counterpart"),
        (lambda b, h, i, j: jnp.ones((3, 4))[i].sum() > 0, "compute with single numbers"),
        (lambda b, h, i, j: jnp.ones(9, jnp.uint8)[i] + jnp.ones(9, jnp.uint8)[j] < 9, "add in uint8: cast to int32"),
        (lambda b, h, i, j: i < j if i < 3 else j < i, "say jnp.where, & and"),
        (lambda i, j: i < j, "takes 2 positional arguments"),
        (lambda b, h, i, j: jnp.ones(9)[i, j] > 0, "Too many indices"),
        (lambda b, h, i, j: jnp.ones(9, jnp.complex64)[i] == 1, "complex64"),
    ],
)
def test_what_no_expression_can_say_is_refused(function, message):
    with pytest.raises((NotAnExpression, TypeError, ValueError, IndexError), match=message) as refused:
        traced(function, "mask_fn", scores=False)
    assert "mask_fn(b, h, i, j)" in str(refused.value)
    if refused.type is NotAnExpression:
        assert "test_expressions.py" in str(refused.value)
    with pytest.raises(TypeError, match="mask_fn must be a function"):
        traced(3, "mask_fn", scores=False)  # pyright: ignore[reportArgumentType]
