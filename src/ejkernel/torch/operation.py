"""The one operation behind every public name here: eager through an autograd function, compiled through a custom op.

Both run the same two functions, `run_forward` and `run_backward`. The autograd function costs a call a few
microseconds; the custom op is what `torch.compile` and tensor subclasses see.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ejkernel.ops import interpreting
from ejkernel.torch.calls import (
    NAMES,
    TRAINED,
    Cotangents,
    Gradients,
    Options,
    Tensors,
    are_heads_first,
    empty_rows,
    output_dtype,
)
from ejkernel.torch.inputs import Inputs
from ejkernel.torch.pattern import Pattern


class Extras(NamedTuple):
    """What logits are made of beside queries and keys, and what is done to weights: see `NAMES`."""

    sinks: Tensor | None = None
    bias: Tensor | None = None
    floats: Tensor | None = None
    ints: Tensor | None = None
    dropout_seeds: Tensor | None = None


NO_EXTRAS = Extras()


def attend(inputs: Inputs, extras: Extras, options: Options, layouts: Any = None) -> tuple[Tensor, Tensor]:
    """out (B, T, H, Dv) and lse (B, H, T), both differentiable.

    `layouts` are the layouts of a call that was seen to be of plain tensors, eager, and not empty.
    """
    query, key, value, lengths = inputs
    if layouts is None and (query.shape[0] == 0 or query.shape[1] == 0 or key.shape[1] == 0):
        return _nothing_seen(inputs, extras)
    if layouts is None and (torch.compiler.is_compiling() or query.is_meta or not is_plain(query, key, value)):
        return torch.ops.ejkernel.attention(query, key, value, *extras, *lengths, *options)
    tensors = (query, key, value, *extras, *lengths)
    if torch._C._are_functorch_transforms_active():
        return _Transformed.apply(*tensors, options)  # pyright: ignore[reportReturnType]
    trained = query.requires_grad or key.requires_grad or value.requires_grad
    if extras is not NO_EXTRAS:
        trained = trained or any(x is not None and x.requires_grad for x in extras[:3])
    if trained and torch.is_grad_enabled():
        return _Attention.apply(*tensors, options)  # pyright: ignore[reportReturnType]
    return run_forward(tensors, options, layouts)  # at no cost of autograd's


_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(query: Any, key: Any, value: Any) -> bool:
    """Whether these are tensors as such, with memory of their own, and not of some class that stands for them."""
    return query.__class__ in _PLAIN and key.__class__ in _PLAIN and value.__class__ in _PLAIN


def _nothing_seen(inputs: Inputs, extras: Extras) -> tuple[Tensor, Tensor]:
    """Without a batch, queries or keys: zeros, with gradients of zeros, and the lse of the sinks alone."""
    (B, T, H, _), Dv = inputs.query.shape, inputs.value.shape[3]
    # sums over nothing: what the tensors hold does not matter
    sinks, *others = extras[:3]
    zero = sum(x[:0].float().sum() for x in (*inputs[:3], *others) if x is not None)
    out = inputs.query.new_zeros((B, T, H, Dv), dtype=torch.float32) + zero
    lse = inputs.query.new_full((B, H, T), -torch.inf, dtype=torch.float32) if sinks is None else sinks[None, :, None]
    return out.to(output_dtype(inputs.query)), lse.expand(B, H, T) + zero


# What runs --------------------------------------------------------------------------------------------------


@cache
def _module(name: str) -> Any:
    return import_module(f"ejkernel.torch.{name}")


def _implementation(query: Tensor) -> Any:
    if query.is_cuda or interpreting():
        return _module("launches")
    if query.device.type != "cpu":
        raise NotImplementedError(f"{query.device} tensors: CUDA and CPU ones are supported")
    return _module("cpu")


def run_forward(tensors: Tensors, options: Options, layouts: Any = None) -> tuple[Tensor, Tensor]:
    """`layouts` are those of q, k and v, where they are known: launches are looked up by them."""
    module = _implementation(tensors[0])
    return (
        module.forward(tensors, options, layouts) if module is _module("launches") else module.forward(tensors, options)
    )


def run_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tensors: Tensors,
    options: Options,
    needed: Sequence[bool] = (True,) * TRAINED,
) -> Gradients:
    module = _implementation(tensors[0])
    dout = torch.zeros_like(out) if dout is None else dout
    return module.backward(tensors, options, Cotangents(out, lse, dout, dlse), Gradients(*needed[:TRAINED]))


# Eager ------------------------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    # with a context in the forward: `setup_context` would inspect the signature at every call
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors, options = args[:-1], args[-1]
        outputs = run_forward(tensors, options)
        _save_for_backward(ctx, tensors, options, outputs)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
        if dout is None and dlse is None:
            return (None,) * (len(NAMES) + 1)
        out, lse, *tensors = ctx.saved_tensors
        gradients = run_backward(dout, dlse, out, lse, tuple(tensors), ctx.options, ctx.needs_input_grad)
        wanted = (g if needed else None for g, needed in zip(gradients, ctx.needs_input_grad, strict=False))
        return (*wanted, *(None,) * (len(NAMES) + 1 - TRAINED))


def _save_for_backward(ctx: Any, tensors: Tensors, options: Options, outputs: tuple[Tensor, Tensor]) -> None:
    ctx.options = options
    # the backward may come when the module, and with it the pattern, is gone
    ctx.pattern = Pattern.known(options.pattern) if options.pattern else None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*outputs, *tensors)


class _Transformed(_Attention):
    """The same inside `torch.func`, for its gradients; vmap is refused."""

    @staticmethod
    def forward(*args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return run_forward(args[:-1], args[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _save_for_backward(ctx, inputs[:-1], inputs[-1], output)


# Compiled ---------------------------------------------------------------------------------------------------


_TENSORS = ", ".join(f"{'Tensor' if n < 3 else 'Tensor?'} {name}" for n, name in enumerate(NAMES))
# those of `Options`
_OPTIONS = (
    "float scale, SymInt? lo, SymInt? hi, float? soft_cap, str pattern, SymInt block_m, SymInt block_n, float dropout, "
    "str functions"
)
_FORWARD = f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)"
_GRADIENTS = f"({', '.join(['Tensor'] * TRAINED)})"
_BACKWARD = f"(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_OPTIONS}) -> {_GRADIENTS}"


@torch.library.custom_op("ejkernel::attention", mutates_args=(), schema=_FORWARD)
def _attention(*args: Any) -> Any:
    return run_forward(args[: len(NAMES)], Options(*args[len(NAMES) :]))


@torch.library.custom_op("ejkernel::attention_backward", mutates_args=(), schema=_BACKWARD)
def _attention_backward(dout: Any, dlse: Any, out: Tensor, lse: Tensor, *args: Any) -> Any:
    gradients = run_backward(dout, dlse, out, lse, args[: len(NAMES)], Options(*args[len(NAMES) :]))
    # an op has no optional outputs
    return tuple(out.new_empty(0) if x is None else x for x in gradients)


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _D = query.shape
    heads_first = are_heads_first(query, key, value)
    out = empty_rows(query, (B, T, H, value.shape[3]), heads_first, output_dtype(query))
    return out, query.new_empty((B, H, T), dtype=torch.float32)


@_attention_backward.register_fake
def _(dout: Any, dlse: Any, out: Any, lse: Any, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Any:
    heads_first = are_heads_first(query, key, value)
    gradients = (empty_rows(x, tuple(x.shape), heads_first, x.dtype) for x in (query, key, value))
    trained = others[: TRAINED - 3]
    return (*gradients, *(query.new_empty(0) if x is None else torch.empty_like(x) for x in trained))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save_for_backward(ctx, inputs[: len(NAMES)], Options(*inputs[len(NAMES) :]), output)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:
    out, lse, *tensors = ctx.saved_tensors
    gradients = torch.ops.ejkernel.attention_backward(dout, dlse, out, lse, *tensors, *ctx.options)
    given = (None if x is None else dx for x, dx in zip(tensors, gradients, strict=False))
    return (*given, *(None,) * (len(NAMES) - TRAINED + len(ctx.options)))


_attention.register_autograd(_differentiate, setup_context=_save_inputs)
