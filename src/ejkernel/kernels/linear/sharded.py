"""Sequences split over devices along their length: states are passed on, tokens stay where they are."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.linear.spec import dimensions
from ejkernel.ops import Call
from ejkernel.ops.operation import Arrays


class _Transition(NamedTuple):
    """What the tokens of some devices make of a state: h becomes `keep_k * h * keep_v + state`.

    Attributes:
        state: (B, N, H, D, Dv).
        keep_k: (B, N, H, D, 1).
        keep_v: (B, N, H, 1, Dv).
    """

    state: jax.Array
    keep_k: jax.Array
    keep_v: jax.Array

    def after(self, other: "_Transition") -> "_Transition":
        """Both, the other first."""
        state = self.keep_k * other.state * self.keep_v + self.state
        return _Transition(state, self.keep_k * other.keep_k, self.keep_v * other.keep_v)

    def of(self, initial: jax.Array, unchanged: jax.Array) -> jax.Array:
        """What becomes of a state; where it is `unchanged`, that state itself."""
        keep_k, keep_v = (jnp.where(unchanged, 1.0, x) for x in (self.keep_k, self.keep_v))
        return keep_k * initial * keep_v + self.state


def along_length(call: Call, axes: tuple[str, ...], run: Callable[[Call], Arrays]) -> Arrays:
    """What a device computes of a call whose tokens are split over `axes`."""
    return passed_on(call, axes, run, _transition, call.spec.reverse)


def passed_on(
    call: Call, axes: tuple[str, ...], run: Callable[[Call], Arrays], transition_of: Any, reverse: bool
) -> Arrays:
    """The outputs of a device's tokens, from the state that all devices before it leave.

    Every device runs its tokens once for the transition alone (`transition_of(call, run)`), gets the state before them
    from the others in log2(devices) exchanges of one transition per head and sequence, and then runs its tokens as if
    they were all.
    """
    devices, device = lax.axis_size(axes), lax.axis_index(axes)
    order = devices - 1 - device if reverse else device
    arrays = dict(call.arrays)
    if "cu_seqlens" in call:
        # sequences may go on beyond a device: of each some tokens are on this one, or none
        T = call["query"].shape[1]
        arrays["cu_seqlens"] = jnp.clip(call["cu_seqlens"] - device * T, 0, T)
    call = replace(call, arrays=arrays)
    initial = arrays.pop("initial_state", None)
    of_state = replace(call, spec=replace(call.spec, with_out=False, with_state=True), arrays=arrays)
    start = _before(transition_of(of_state, run), initial, axes, devices, order, reverse)
    outputs = run(replace(call, arrays=arrays | {"initial_state": start}))
    if "state" in outputs:
        last = jnp.where(order == devices - 1, outputs["state"], 0.0)
        outputs = outputs | {"state": lax.psum(last, axes)}
    return outputs


def _transition(call: Call, run: Callable[[Call], Arrays]) -> _Transition:
    return _Transition(run(call)["state"], *_kept(call))


def _kept(call: Call) -> tuple[jax.Array, jax.Array]:
    """How much the tokens of a device keep of the state of every sequence: of key channels, and of value channels."""
    B, T, H, _, _, N = dimensions(call)
    if "cu_seqlens" in call:
        token, cu = jnp.arange(T)[None, :, None], call["cu_seqlens"]
        member = (cu[:, None, :-1] <= token) & (token < cu[:, None, 1:])
    else:
        member = jnp.ones((1, T, 1), bool)
    member = jnp.broadcast_to(member, (B, T, N))

    def total(gates: jax.Array) -> jax.Array:
        """(B, T, H, ...) to (B, N, H, ...): selected, not multiplied by zero, for padding may be nan."""
        some = member.reshape(B, T, N, *(1,) * (gates.ndim - 2))
        return jnp.where(some, gates.astype(jnp.float32)[:, :, None], 0.0).sum(1)

    log_k = jnp.zeros((B, N, H, 1, 1), jnp.float32)
    if "g" in call:
        log_k += total(call["g"])[..., None, None]
    if "g_gamma" in call:
        log_k += (member.sum(1, dtype=jnp.float32)[:, :, None] * call["g_gamma"][:, None])[..., None, None]
    if "gk" in call:
        log_k += total(call["gk"])[..., None]
    log_v = total(call["gv"])[..., None, :] if "gv" in call else jnp.zeros((B, N, H, 1, 1), jnp.float32)
    return jnp.exp(log_k), jnp.exp(log_v)


def _before(
    transition: Any,
    initial: jax.Array | None,
    axes: tuple[str, ...],
    devices: int,
    order: jax.Array,
    reverse: bool,
) -> jax.Array:
    """The state before a device's tokens: of all devices that come before it, after the initial state."""

    def from_earlier(distance: int) -> Any:
        """That of the device so far before this one; zeros where there is none."""
        offset = -distance if reverse else distance
        pairs = [(i, i + offset) for i in range(devices) if 0 <= i + offset < devices]
        return jax.tree.map(lambda x: lax.ppermute(x, axes, pairs), transition)

    distance = 1
    while distance < devices:
        both = transition.after(from_earlier(distance))
        transition = jax.tree.map(partial(jnp.where, order >= distance), both, transition)
        distance *= 2
    earlier = from_earlier(1)  # zeros, of the first device
    return earlier.state if initial is None else earlier.of(initial, order == 0)
