"""Barriers in shared memory at which one lane of a warp arrives.

At those of Mosaic every thread of a warpgroup does: 128 arrivals, in the memory that products read. A wait names its
parity: that of the phase which is to be over, counted from 0 since `start`.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ejkernel.kernels.softmax.mosaic_gpu_ptx import asm, inline

NUMBER = plgpu.Layout.WG_SPLAT


def barriers(number: int) -> Any:
    """Scratch of so many; each takes two words."""
    return plgpu.SMEM((2 * number,), jnp.int32)


def start(ref: Any, warpgroups: int, *, again: bool) -> None:
    """Begin at phase 0, with so many warpgroups to arrive. All threads of a program meet here."""

    def begin(_: Any, ref: Any) -> None:
        first = ".reg .b32 thread; .reg .pred other; mov.u32 thread, %tid.x; setp.ne.u32 other, thread, 0;"
        end = "mbarrier.inval.shared::cta.b64 [$0]; " if again else ""
        init = f"mbarrier.init.shared::cta.b64 [$0], {4 * warpgroups};"
        for n in range(ir.MemRefType(ref.type).shape[0] // 2):
            at = _address(ref, arith.constant(ir.IntegerType.get_signless(32), n))
            _do(f"{first} @other bra PAST; {end} {init} PAST:", at)
        _do("fence.mbarrier_init.release.cluster; barrier.sync 0;")

    inline((plgpu.RefType(),))(begin)(ref)


def arrive(ref: Any, n: Any) -> None:
    """This warpgroup arrives at the n-th; what each of its threads did before is seen by whoever waits for it."""

    def act(_: Any, ref: Any, n: Any) -> None:
        ptx = ".reg .pred one; bar.warp.sync -1; elect.sync _|one, -1; "
        ptx += "@one mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];"
        _do(ptx, _address(ref, n.registers.item()))

    inline((plgpu.RefType(), NUMBER))(act)(ref, n)


def wait(ref: Any, n: Any, parity: Any) -> None:
    """Wait until the phase of this parity is over at the n-th."""

    def act(_: Any, ref: Any, n: Any, parity: Any) -> None:
        ptx = ".reg .pred over; AGAIN: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 over, [$0], $1; "
        ptx += "@!over bra AGAIN;"
        _do(ptx, _address(ref, n.registers.item()), parity.registers.item())

    inline((plgpu.RefType(), NUMBER, NUMBER))(act)(ref, n, parity)


def _do(ptx: str, *operands: Any) -> None:
    asm("!llvm.void", ptx, list(operands), "r")


def _address(ref: Any, n: Any) -> Any:
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [n], ir.IntegerType.get_signless(64))
