"""PyTorch's attention: SDPA by backend, and FlexAttention compiled for the mask."""

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.measuring.benchmark import FORWARD, Arrays, Contender, DeviceLock, Program
from benchmarks.measuring.torch_program import Step, Tensor, missing, torch_program
from benchmarks.softmax.cases import QKV, Case

# (query, key, value) -> out, all (B, H, T, D)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def peers() -> list[Contender]:
    flash = _sdpa_backend("FLASH_ATTENTION")
    cudnn = _sdpa_backend("CUDNN_ATTENTION")
    on_gpu = partial(missing, ("gpu",), "torch")
    return [
        Contender("torch", "PyTorch SDPA", partial(_build, _sdpa), partial(missing, ("cpu",), "torch"), _without_score),
        Contender("torch-cudnn", "cuDNN (PyTorch)", partial(_build, cudnn), on_gpu, _without_score),
        Contender("flash2", "FlashAttention-2", partial(_build, flash), on_gpu, _without_mask),
        Contender("flex", "FlexAttention", partial(_build, _flex), on_gpu, _within_jax),
    ]


def _within_jax(case: Case) -> str | None:
    return "shapes of models are compared within JAX" if case.model else None


def _without_score(case: Case) -> str | None:
    if case.alibi or case.soft_cap is not None:
        return f"SDPA has no word for {'ALiBi' if case.alibi else 'a soft cap'}"
    return _within_jax(case)


def _without_mask(case: Case) -> str | None:
    if case.mask in ("full", "causal"):
        return _without_score(case)
    return f"SDPA has no word for {case.mask}, and this backend takes no mask"


# The ways to attend -----------------------------------------------------------------------------------------


def _seen(case: Case, device: Any) -> Callable[..., Tensor]:
    """FlexAttention's description of a mask: (batch, head, query, key) -> bool, on indices of any shape."""
    import torch

    numbers: Arrays = {name: torch.as_tensor(x, device=device) for name, x in case.numbers().items()}
    if "segments" in numbers:
        numbers["segments"] = tuple(numbers["segments"])  # rows, so that none is cut out for each pair

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return case.visible(q, k, numbers)

    return visible


def _score(case: Case, device: Any) -> Callable[..., Tensor] | None:
    """FlexAttention's description of what is done to a logit."""
    import torch

    cap, slopes = case.soft_cap, torch.as_tensor(case.numbers().get("slopes", 0.0), device=device)
    if case.alibi:
        return lambda score, b, h, q, k: score - slopes[h] * (q - k).abs()
    return None if cap is None else lambda score, b, h, q, k: cap * torch.tanh(score / cap)


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
    return partial(compiled, score_mod=_score(case, device), block_mask=mask, enable_gqa=case.Hkv != case.H)


# Running them -----------------------------------------------------------------------------------------------


def _build(
    make: Callable[[Case, Any], Attend], case: Case, what: str, arrays: Arrays, device_lock: DeviceLock
) -> Program:
    import torch

    # the same memory, seen as (B, H, T, D)
    named = {name: torch.from_dlpack(arrays[name]).transpose(1, 2) for name in case.shapes()}
    query, key, value = (named[name].detach().requires_grad_(what != FORWARD) for name in QKV)

    def made() -> Step:
        attend = make(case, query.device)

        def step() -> dict[str, Tensor]:
            out = attend(query, key, value)
            if what == FORWARD:
                return {"out": out}
            gradients = torch.autograd.grad(out, (query, key, value), named["dout"])
            return {"out": out.detach(), **dict(zip(("dquery", "dkey", "dvalue"), gradients, strict=True))}

        return step

    return torch_program(made, query.is_cuda, device_lock, view=lambda x: x.transpose(1, 2))
