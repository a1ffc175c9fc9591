"""Memory is linear in the length, and what nobody asks for is not computed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.linear.reference import reference
from ejkernel.kernels.linear.spec import canonicalise
from ejkernel.modules import lightning_attention, recurrent_attention
from harness import normal

H, D, LONG = 2, 16, 2048


def structs(T, *gates, B=1, D=D):
    shapes = {"query": (B, T, H, D), "key": (B, T, H, D), "value": (B, T, H, D)}
    shapes |= {"g": (B, T, H), "gk": (B, T, H, D), "gv": (B, T, H, D), "g_gamma": (H,), "initial_state": (B, H, D, D)}
    wanted = ("query", "key", "value", *gates)
    return {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in wanted}


def loss(given, function=recurrent_attention, **options):
    return sum(jnp.sin(x).sum() for x in jax.tree.leaves(function(**given, **options)))


def training_memory(given, **options):
    """Bytes of scratch that XLA reserves for both passes."""
    program = jax.jit(jax.grad(partial(loss, **options))).lower(given).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gates", [(), ("g", "gk")], ids=lambda gates: "-".join(gates) or "none")
def test_memory_is_linear_in_the_length(gates):
    short, long = (training_memory(structs(T, *gates), return_state=True) for T in (LONG, 4 * LONG))
    inputs = sum(4 * x.size for x in structs(LONG, *gates).values())
    assert long < 4.5 * short
    assert short < 12 * inputs


def test_memory_is_a_small_part_of_a_token_scans():
    """Which keeps a state of every token."""
    wide = structs(LONG, D=64)
    scanned = training_memory(wide, function=lambda **x: reference(canonicalise(**x))["out"])
    assert training_memory(wide) * 10 < scanned


@pytest.mark.parametrize("packed", [False, True])
def test_the_backward_keeps_inputs_and_the_final_state(packed):
    T = 256
    given = {name: normal(name, x.shape) for name, x in structs(T, "gk", "initial_state").items()}
    options = {"cu_seqlens": jnp.array([0, T])} if packed else {}
    outputs, pull = jax.vjp(lambda x: recurrent_attention(**x, return_state=True, **options), given)
    kept = sum(x.nbytes for x in jax.tree.leaves(pull))
    assert kept <= sum(x.nbytes for x in given.values()) + outputs[1].nbytes + 64


# Walks: every gradient is a scan of its own, see kernels/linear/walks.py ------------------------------------------


def scans(function, given):
    """How many scans over the chunks there are in a program."""
    return str(jax.make_jaxpr(function)(given)).count(" scan[")


def walks(given, wanted, function=recurrent_attention, loss=loss, **options):
    """Those of the gradients of some arrays, beside the forward's."""

    def gradients(given):
        return jax.grad(lambda x: loss(given | x, function, **options))({name: given[name] for name in wanted})

    return scans(gradients, given) - scans(partial(loss, function=function, **options), given)


@pytest.mark.parametrize(
    ("wanted", "count"),
    {
        "query": 1, "key": 1, "value": 1, "initial_state": 1, "value initial_state": 1, "query key": 2,
        "query key value": 3, "gk": 2, "query key gk": 2, "gv": 2, "value gv": 2, "g": 2, "g gk": 2, "g gv": 2,
        "query key value g gk initial_state": 3, "query key value g gk gv initial_state": 4,
    }.items(),
    ids=str,
)  # fmt: skip
def test_gradients_nobody_wants_are_not_computed(wanted, count):
    given = structs(130, "g", "gk", "gv", "initial_state")
    assert walks(given, wanted.split()) == count


def test_the_decay_of_lightning_has_no_gradient_to_compute():
    options = {"function": lightning_attention, "layer_idx": 0, "num_layers": 2}
    assert walks(structs(130), ("query", "key", "value"), **options) == 3


def test_outputs_nobody_differentiates():
    """A loss of the final state alone has no gradient of the queries: only walks back."""

    def state_alone(given, function):
        return jnp.sin(function(**given, return_state=True)[1]).sum()

    given = structs(130, "gk", "initial_state")
    assert walks(given, ("query",), loss=state_alone) == 0
    assert walks(given, ("query", "key", "value", "initial_state"), loss=state_alone) == 2
    zeros = jax.grad(lambda q, rest: state_alone({"query": q, **rest}, recurrent_attention))
    numbers = {name: normal(name, x.shape) for name, x in given.items()}
    assert not np.any(zeros(numbers.pop("query"), numbers))


def flops(function, given):
    return jax.jit(function).lower(given).compile().cost_analysis()["flops"]


def test_outputs_nobody_uses():
    """The final state comes with the output; an output that is not used is not computed."""
    given = structs(130, "gk")
    both = partial(recurrent_attention, return_state=True)
    everything = flops(lambda x: both(**x), given)
    assert flops(lambda x: both(**x)[0], given) <= everything
    assert flops(lambda x: both(**x)[1], given) < 0.5 * everything
