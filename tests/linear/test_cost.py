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


def flops(function, given):
    return jax.jit(function).lower(given).compile().cost_analysis()["flops"]


def training_flops(given, wanted, loss=loss, **options):
    def gradients(given):
        return jax.grad(lambda x: loss(given | x, **options))({name: given[name] for name in wanted})

    return flops(gradients, given)


def test_gradients_nobody_uses_are_left_out_by_the_compiler():
    """Every gradient is a scan of its own, see kernels/linear/scans.py."""
    given = structs(130, "initial_state")
    everything = training_flops(given, tuple(given))
    for name in given:
        assert training_flops(given, (name,)) < 0.7 * everything


def test_a_decay_that_is_known_has_no_gradient_to_compute():
    """Lightning's; what a jitted function is given is not known."""
    given = structs(130, "g_gamma")

    def scans(given, **options):
        """Scans over chunks, and in each one of states."""
        return str(jax.make_jaxpr(jax.grad(partial(loss, **options)))(given)).count("scan[") // 2

    known = {name: given[name] for name in ("query", "key", "value")}
    assert scans(known, function=lightning_attention, layer_idx=0, num_layers=2) == 4
    assert scans(known, g_gamma=np.zeros(H, np.float32)) == 4
    assert scans(given) == 5


def test_outputs_nobody_differentiates():
    """A loss of the final state alone has no gradient of the queries: only reverse scans."""

    def loss_of_state(given):
        return jnp.sin(recurrent_attention(**given, return_state=True)[1]).sum()

    given = structs(130, "gk", "initial_state")
    wanted = ("query", "key", "value")
    assert training_flops(given, wanted, loss_of_state) < 0.8 * training_flops(given, wanted, return_state=True)
    numbers = {name: normal(name, x.shape) for name, x in given.items()}
    assert not np.any(jax.grad(loss_of_state)(numbers)["query"])


def test_outputs_nobody_uses():
    """The final state comes with the output; an output that is not used is not computed."""
    given = structs(130, "gk")
    both = partial(recurrent_attention, return_state=True)
    everything = flops(lambda x: both(**x), given)
    assert flops(lambda x: both(**x)[0], given) <= everything
    assert flops(lambda x: both(**x)[1], given) < 0.5 * everything
