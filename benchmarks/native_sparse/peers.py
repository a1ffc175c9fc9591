"""flash-linear-attention in PyTorch."""

from functools import partial

from benchmarks.measuring.benchmark import FORWARD, Arrays, Contender, DeviceLock, Program
from benchmarks.measuring.torch_program import Step, Tensor, missing, torch_program
from benchmarks.native_sparse.cases import BLOCK, TRAINED, Case


def peers() -> list[Contender]:
    """All, installed or not."""
    return [Contender("fla", "flash-linear-attention", _build_fla, partial(missing, ("gpu",), "fla"))]


def _build_fla(case: Case, what: str, arrays: Arrays, device_lock: DeviceLock) -> Program:
    import torch
    from fla.ops.nsa import parallel_nsa

    named = {name: torch.from_dlpack(x) for name, x in arrays.items()}
    indices = named["block_indices"].long()
    trained = {name: named[name].detach().requires_grad_(what != FORWARD) for name in TRAINED}

    def make() -> Step:
        def step() -> dict[str, Tensor]:
            tokens = (trained[name] for name in TRAINED)
            out = parallel_nsa(*tokens, block_indices=indices, block_counts=case.K, block_size=BLOCK)
            if what == FORWARD:
                return {"out": out}
            gradients = torch.autograd.grad(out, [*trained.values()], named["dout"])
            return {"out": out.detach(), **{f"d{name}": x for name, x in zip(trained, gradients, strict=True)}}

        return step

    return torch_program(make, True, device_lock)
