"""A scan over tokens in JAX, and flash-linear-attention in PyTorch."""

from functools import partial

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
    ]


# A scan ------------------------------------------------------------------------------------------------------


def _scan_missing(backend: str) -> str | None:
    return None if backend == "cpu" else f"a kernel a token: needs cpu, this is {backend}"


def _build_scan(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
    return jax_program(passes_of(partial(_scan, case), what, TRAINED), arrays, device_lock, chain(case, what))


def _scan(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Output and last state of the recurrence as one writes it down; documents are rows."""
    rows = case.documents or case.B
    shape = (rows, -1, case.H, case.D)
    tokens = {name: arrays[name].reshape(shape) for name in TRAINED if arrays.get(name) is not None}
    decay = jnp.exp(jnp.asarray(lightning_decay(case.H, **LAYER)))[:, None, None]

    def step(state: jax.Array, x: Arrays) -> tuple[jax.Array, jax.Array]:
        kept = state * (jnp.exp(x["g"])[..., None] if "g" in x else decay)
        state = kept + x["key"][..., None] * x["value"][..., None, :]
        return state, jnp.einsum("bhd,bhde->bhe", x["query"], state) * case.D**-0.5

    start = arrays.get("initial_state", jnp.zeros((rows, case.H, case.D, case.D)))
    last, out = lax.scan(step, start, {name: jnp.moveaxis(x, 1, 0) for name, x in tokens.items()})
    return jnp.moveaxis(out, 0, 1).reshape(case.B, case.T, case.H, case.D), last


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
    if case.gated:
        return chunk_gla(q, k, v, named["g"], cu_seqlens=lengths)[0]
    if case.decodes:
        state = named["initial_state"]
        return fused_recurrent_lightning_attn(q, k, v, **LAYER, initial_state=state, output_final_state=True)[0]
    return chunk_lightning_attn(q, k, v, **LAYER, cu_seqlens=lengths)[0]
