"""PyTorch's attention: SDPA by backend, and FlexAttention compiled for the mask."""

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.about.benchmark import FORWARD, Arrays, Contender, Program, Quiet
from ejkernel.kernels.softmax.about.cases import TRAINED, Case

Tensor = Any
# (query, key, value) -> out, all (B, H, T, D)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def peers() -> list[Contender]:
    flash = _sdpa_backend("FLASH_ATTENTION")
    cudnn = _sdpa_backend("CUDNN_ATTENTION")
    on_gpu = partial(_missing, ("gpu",))
    return [
        Contender("torch", "PyTorch SDPA", partial(_build, _sdpa), partial(_missing, ("cpu",))),
        Contender("torch-cudnn", "cuDNN (PyTorch)", partial(_build, cudnn), on_gpu),
        Contender("flash2", "FlashAttention-2", partial(_build, flash), on_gpu, _without_mask),
        Contender("flex", "FlexAttention", partial(_build, _flex), on_gpu),
    ]


def _missing(backends: tuple[str, ...], backend: str) -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    if backend not in backends:
        return f"needs {' or '.join(backends)}, this is {backend}"
    import torch

    return None if backend == "cpu" or torch.cuda.is_available() else "this PyTorch has no CUDA"


def _without_mask(case: Case) -> str | None:
    return (
        None if case.mask in ("full", "causal") else f"SDPA has no word for {case.mask}, and this backend takes no mask"
    )


# The ways to attend -----------------------------------------------------------------------------------------


def _seen(case: Case, device: Any) -> Callable[..., Tensor]:
    """FlexAttention's description of a mask: (batch, head, query, key) -> bool, on indices of any shape."""
    import torch

    W, documents = case.window or case.T, case.documents or 1
    ids = torch.arange(case.T, device=device) * documents // case.T

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < W)

    def packed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (ids[q] == ids[k])

    return {"causal": causal, "window": window, "documents": packed}[case.mask]


def _sdpa(case: Case, device: Any) -> Attend:
    """With a mask (T, T) where there is no word for it."""
    import torch

    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=case.Hkv != case.H)
    if case.mask in ("full", "causal"):
        return partial(attend, is_causal=case.causal)
    i = torch.arange(case.T, device=device)
    return partial(attend, attn_mask=_seen(case, device)(None, None, i[:, None], i[None, :]))


def _sdpa_backend(name: str) -> Callable[[Case, Any], Attend]:
    def chosen(case: Case, device: Any) -> Attend:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend, attend = getattr(SDPBackend, name), _sdpa(case, device)

        def run(*qkv: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return attend(*qkv)

        return run

    return chosen


def _flex(case: Case, device: Any) -> Attend:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if case.mask != "full":
        mask = create_block_mask(_seen(case, device), None, None, case.T, case.T, device=device)
    return partial(compiled, block_mask=mask, enable_gqa=case.Hkv != case.H)


# Running them -----------------------------------------------------------------------------------------------


def _build(make: Callable[[Case, Any], Attend], case: Case, what: str, arrays: Arrays, quiet: Quiet) -> Program:
    import torch

    # the same memory, seen as (B, H, T, D)
    named = {name: torch.from_dlpack(arrays[name]).transpose(1, 2) for name in case.shapes()}
    query, key, value = (named[name].detach().requires_grad_(what != FORWARD) for name in TRAINED)
    on_gpu = query.is_cuda
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    start = time.perf_counter()
    attend = make(case, query.device)

    def step() -> tuple[Tensor, ...]:
        if what == FORWARD:
            return (attend(query, key, value),)
        out = attend(query, key, value)
        return (out.detach(), *torch.autograd.grad(out, (query, key, value), named["dout"]))

    def seconds(calls: int) -> float:
        start, results = time.perf_counter(), None
        for _ in range(calls):
            results = step()
        wait()
        del results
        return time.perf_counter() - start

    def results() -> dict[str, jax.Array]:
        found = zip(("out", "dquery", "dkey", "dvalue"), step(), strict=False)
        answer = {name: jnp.from_dlpack(x.detach().transpose(1, 2).contiguous()) for name, x in found}
        wait()
        return answer

    seconds(1)  # compiling and running are one for PyTorch
    first = time.perf_counter() - start
    with quiet:
        return Program(seconds, results, first, _temporary_bytes(step) if on_gpu else None)


def _temporary_bytes(step: Callable[[], tuple[Tensor, ...]]) -> int:
    """The peak of a call, beyond what was there before it and what it returns."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = step()
    torch.cuda.synchronize()
    kept = sum(x.untyped_storage().nbytes() for x in results)
    return max(0, torch.cuda.max_memory_allocated() - before - kept)
