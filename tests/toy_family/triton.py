"""In Triton: a program has a sequence and a block of channels, and passes along the tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ejkernel.bridge import triton_call
from ejkernel.checks.options import config_ints
from ejkernel.ops import Implementation
from toy_family.backward import backward_by


@dataclass(frozen=True)
class Config:
    block_d: int = 64
    num_warps: int = 1

    def __post_init__(self):
        config_ints(self, ("block_d", "num_warps"), power_of_two=True)


@triton.jit
def decayed_sum_kernel(
    p_x,
    p_state,
    p_lengths,
    decay,
    T,
    p_out,
    p_end,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REVERSE: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = o_d < D
    length = tl.load(p_lengths + i_b)
    # [BLOCK_D]
    b_h = tl.load(p_state + i_b * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    for i in range(T):
        i_t = T - 1 - i if REVERSE else i
        o_x = (i_b * T + i_t) * D + o_d
        # what lies past the length is not read: it may be NaN
        b_x = tl.load(p_x + o_x, mask=m_d & (i_t < length), other=0.0).to(tl.float32)
        b_h = decay * b_h + b_x
        tl.store(p_out + o_x, b_h.to(p_out.dtype.element_ty), mask=m_d)
    tl.store(p_end + i_b * D + o_d, b_h.to(p_end.dtype.element_ty), mask=m_d)


def scan(x, state, lengths, decay, config, target, *, reverse=False):
    B, T, D = x.shape
    return triton_call(
        decayed_sum_kernel,
        x,
        state,
        jnp.broadcast_to(lengths, (B,)),
        decay,
        T,
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        grid=(B, triton.cdiv(D, config.block_d)),
        num_warps=config.num_warps,
        D=D,
        BLOCK_D=config.block_d,
        REVERSE=reverse,
    )


def forward(call, config):
    out, end = scan(
        call["x"], call["state"], call["lengths"], call.spec.decay, config, call.target
    )
    return {"out": out, "state": end}, {}


IMPLEMENTATION = Implementation(
    Config,
    unsupported=lambda call: [],
    default_config=lambda call: Config(),
    search_space=lambda call: [
        Config(block_d, warps) for block_d in (32, 64, 128) for warps in (1, 2, 4)
    ],
    forward=forward,
    backward=backward_by(scan),
    shared_residuals=False,  # XLA's are its own
)
