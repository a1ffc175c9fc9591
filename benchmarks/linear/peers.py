"""A scan over tokens in JAX, flash-linear-attention in PyTorch, and jax-linear-attention, for Hopper GPUs."""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.linear.cases import LAYER, TRAINED, Case, chain
from benchmarks.measuring.benchmark import FORWARD, Arrays, Contender, DeviceLock, Program, jax_program, passes_of
from benchmarks.measuring.torch_program import Step, Tensor, missing, torch_program
from ejkernel.kernels.linear.spec import lightning_decay


def peers() -> list[Contender]:
    """All, installed or not."""
    return [
        Contender("scan", "token scan (JAX)", _build_scan, _scan_missing),
        Contender("fla", "flash-linear-attention", _build_fla, partial(missing, ("gpu",), "fla")),
        Contender("jla", "jax-linear-attention", _build_jla, _jla_missing, _not_of_jla),
    ]


# A scan ------------------------------------------------------------------------------------------------------


def _scan_missing(backend: str) -> str | None:
    return None if backend == "cpu" else f"a kernel a token: needs cpu, this is {backend}"


def _build_scan(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
    return jax_program(passes_of(partial(_scan, case), what, TRAINED), arrays, device_lock, chain(case, what))


def _scan(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Output and last state of the recurrence as one writes it down; documents are rows."""
    rows, shapes = case.rows, case.shapes()
    tokens = {n: arrays[n].reshape(rows, -1, *shapes[n][2:]) for n in TRAINED if arrays.get(n) is not None}
    for name in ("query", "key"):
        tokens[name] = jnp.repeat(tokens[name], case.H // (case.Hk or case.H), 2)
    decay = jnp.exp(jnp.asarray(lightning_decay(case.H, **LAYER)))[:, None, None]

    def step(state: jax.Array, x: Arrays) -> tuple[jax.Array, jax.Array]:
        kept = state * (jnp.exp(x["g"].reshape(*x["g"].shape[:2], -1, 1)) if "g" in x else decay)
        value = x["value"]
        if "beta" in x:
            value = x["beta"][..., None] * (value - jnp.einsum("bhd,bhde->bhe", x["key"], kept))
        state = kept + x["key"][..., None] * value[..., None, :]
        return state, jnp.einsum("bhd,bhde->bhe", x["query"], state) * case.D**-0.5

    start = arrays.get("initial_state", jnp.zeros(case.state_shape))
    last, out = lax.scan(step, start, {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()})
    return jnp.moveaxis(out, 0, 1).reshape(case.shapes()["dout"]), last


# flash-linear-attention ----------------------------------------------------------------------------------------


def _build_fla(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
    import torch

    named = {name: torch.from_dlpack(x) for name, x in arrays.items()}
    if "cu_seqlens" in named:
        named["cu_seqlens"] = named["cu_seqlens"].long()  # once: what it makes of a tensor it keeps for the next call
    trained = {name: named[name].detach().requires_grad_(what != FORWARD) for name in TRAINED if name in named}

    def make() -> Step:
        def step() -> dict[str, Tensor]:
            out = _fla(case, {**named, **trained})
            if what == FORWARD:
                return {"out": out}
            gradients = torch.autograd.grad(out, [*trained.values()], named["dout"])
            return {"out": out.detach(), **{f"d{name}": x for name, x in zip(trained, gradients, strict=True)}}

        return step

    return torch_program(make, True, device_lock)


def _fla(case: Case, named: dict[str, Tensor]) -> Tensor:
    from fla.ops.gla import chunk_gla
    from fla.ops.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn

    q, k, v = (named[name] for name in ("query", "key", "value"))
    lengths = named.get("cu_seqlens")
    if case.erases:
        return _fla_delta(case, named)
    if case.gated:
        return chunk_gla(q, k, v, named["g"], cu_seqlens=lengths)[0]
    if case.decodes:
        state = named["initial_state"]
        return fused_recurrent_lightning_attn(q, k, v, **LAYER, initial_state=state, output_final_state=True)[0]
    return chunk_lightning_attn(q, k, v, **LAYER, cu_seqlens=lengths)[0]


def _fla_delta(case: Case, named: dict[str, Tensor]) -> Tensor:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.kda import chunk_kda

    arrays = [named[name] for name in TRAINED]
    if case.decodes:
        state = named["initial_state"]
        return fused_recurrent_gated_delta_rule(*arrays, initial_state=state, output_final_state=True)[0]
    lengths = None
    if case.documents is not None:
        lengths = torch.arange(case.documents + 1, device=arrays[0].device) * (case.T // case.documents)
    return (chunk_kda if case.gated else chunk_gated_delta_rule)(*arrays, cu_seqlens=lengths)[0]


# jax-linear-attention ------------------------------------------------------------------------------------------


def _jla_missing(backend: str) -> str | None:
    if find_spec("jla") is None:
        return "jla is not installed"
    return None if backend == "gpu" else f"needs gpu, this is {backend}"


def _not_of_jla(case: Case) -> str | None:
    if case.decodes:
        return "it decodes in plain JAX"
    if not case.erases:
        return "compared with in the delta rule alone"
    return None if case.D in (64, 128) and case.Dv is None else "head dims are 64 and 128"


def _build_jla(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
    return jax_program(passes_of(partial(_jla, case), what, TRAINED), arrays, device_lock, chain(case, what))


def _jla(case: Case, arrays: Arrays) -> jax.Array:
    from jla.ops.mosaic_gpu.gated_delta_rule import gated_delta_rule
    from jla.ops.mosaic_gpu.kda import kda

    ids = arrays.get("segment_ids")
    return (kda if case.gated else gated_delta_rule)(*(arrays[name] for name in TRAINED), segment_ids=ids)[0]
