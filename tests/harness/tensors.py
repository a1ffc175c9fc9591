"""Attention of tensors as it is defined: the whole matrix, in float64, differentiated by PyTorch."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ejkernel.ops import interpret
from tolerances import assert_close

# where tensors are computed with: on a CPU by its own code or in Triton's interpreter, or on a GPU
IMPLEMENTATIONS = ("cpu", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu))


def running(implementation: str) -> AbstractContextManager[None]:
    return interpret() if implementation == "interpreted" else nullcontext()


def placed(implementation: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend` on tensors of the CPU, wherever it computes."""

    def moved(**tensors: Tensor) -> Any:
        return tuple(x.cpu() for x in attend(**{name: x.cuda() for name, x in tensors.items()}))

    return moved if implementation == "cuda" else attend


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Any,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, T, H, Dv) and lse (B, H, T) in the dtype of the inputs; `seen` is bool (B|1, H|1, T, S)."""
    H, D = query.shape[2:]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    x = (q @ k.transpose(-1, -2)) * (D**-0.5 if scale is None else scale)
    if soft_cap is not None:
        x = soft_cap * torch.tanh(x / soft_cap)
    seen = torch.as_tensor(seen).broadcast_to(x.shape)
    some = seen.any(-1) | torch.tensor(sinks is not None)
    x = torch.where(seen, x, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks.to(x.dtype)[None, :, None, None].expand(*x.shape[:3], 1)], -1)
    lse = torch.logsumexp(torch.where(some[..., None], x, 0.0), -1)
    p = torch.where(seen, torch.exp(torch.where(seen, x[..., : seen.shape[-1]], 0.0) - lse[..., None]), 0.0)
    return (p @ v).transpose(1, 2), torch.where(some, lse, -torch.inf)


def wide(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def outputs_and_gradients(attend: Any, tensors: Mapping[str, Tensor], cotangents: tuple[Tensor, Tensor]) -> Any:
    """What `attend(**tensors)` gives, and the gradients of what it is differentiated by, as numpy."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    out, lse = attend(**leaves)
    # a row that sees nothing has lse -inf: its cotangent counts for nothing
    finite = torch.isfinite(lse)
    dout, dlse = cotangents[0].to(out.dtype), cotangents[1].to(lse.dtype)
    ((out * dout).sum() + (torch.where(finite, lse, 0.0) * dlse).sum()).backward()
    gradients = {f"d{name}": wide(x.grad) for name, x in leaves.items()}
    return {"out": wide(out), "lse": wide(lse)}, gradients


def check(actual: Any, expected: Any, tensors: Mapping[str, Tensor], cotangents: tuple[Tensor, Tensor]) -> None:
    """Both as functions of the tensors: the first no more than twice as wrong as the second in the tensors' dtype."""
    exact = outputs_and_gradients(expected, {n: x.double() for n, x in tensors.items()}, cotangents)
    naive = outputs_and_gradients(expected, tensors, cotangents)
    ours = outputs_and_gradients(actual, tensors, cotangents)
    for kind, a, e, n in zip(("outputs", "gradients"), ours, exact, naive, strict=True):
        assert_close(a, e, n, kind)
