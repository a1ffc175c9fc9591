"""On TPUs: a step of the grid has a block of tokens of one sequence.

The state stays in VMEM from step to step.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.checks.options import config_ints
from ejkernel.kernels.common.pallas_tpu import chip_of, launch, tile_bytes
from ejkernel.ops import Implementation
from toy_family.backward import backward_by


@dataclass(frozen=True)
class Config:
    block_t: int = 128

    def __post_init__(self):
        config_ints(self, ("block_t",), power_of_two=True)


def vmem_bytes(call, config):
    """Blocks of x and of the output, each twice: one is copied while the other is computed."""
    D = call["x"].shape[-1]
    return 4 * tile_bytes((config.block_t, D), call["x"].dtype) + 5 * tile_bytes(
        (1, D), "float32"
    )


def unsupported_config(call, config):
    needed, there = vmem_bytes(call, config), chip_of(call.target).vmem_budget
    return (
        [f"{config} needs {needed} bytes of VMEM, there are {there}"] if needed > there else []
    )


def unsupported(call):
    if call["x"].dtype != jnp.float32:
        return [f"dtype {call['x'].dtype.name}: only float32"]
    return unsupported_config(call, Config(8))


def default_config(call):
    sizes = (128, 64, 32, 16)
    return next(
        (Config(n) for n in sizes if not unsupported_config(call, Config(n))), Config(8)
    )


def scan(x, state, lengths, decay, config, target, *, reverse=False):
    B, T, D = x.shape
    block_t = min(config.block_t, T)
    steps = pl.cdiv(T, block_t)

    def decayed_sum_kernel(scalars, arrays, outputs, scratch):
        (lengths_ref,), h_ref = scalars, scratch["h"]
        i_b, i_step = pl.program_id(0), pl.program_id(1)
        start = (steps - 1 - i_step if reverse else i_step) * block_t

        @pl.when(i_step == 0)
        def _():
            h_ref[...] = arrays["state"][0]

        rows = jnp.minimum(block_t, T - start)  # what lies behind the last token is no token

        def token(i, h):
            row = rows - 1 - i if reverse else i
            # a choice, not a product: what lies past the length may be NaN
            x_row = jnp.where(
                start + row < lengths_ref[i_b], arrays["x"][0, pl.ds(row, 1), :], 0.0
            )
            h = decay * h + x_row
            outputs["out"][0, pl.ds(row, 1), :] = h
            return h

        h_ref[...] = jax.lax.fori_loop(0, rows, token, h_ref[...])
        outputs["end"][0] = h_ref[...]

    def block(i_b, i_step, *scalars):
        return i_b, steps - 1 - i_step if reverse else i_step, 0

    def whole(i_b, i_step, *scalars):
        return i_b, 0, 0

    outputs = launch(
        decayed_sum_kernel,
        target=target,
        grid=(B, steps),
        scalars=[jnp.broadcast_to(lengths, (B,))],
        arrays={
            "x": (x, pl.BlockSpec((1, block_t, D), block)),
            "state": (state[:, None], pl.BlockSpec((1, 1, D), whole)),
        },
        outputs={
            "out": (
                jax.ShapeDtypeStruct((B, T, D), jnp.float32),
                pl.BlockSpec((1, block_t, D), block),
            ),
            "end": (
                jax.ShapeDtypeStruct((B, 1, D), jnp.float32),
                pl.BlockSpec((1, 1, D), whole),
            ),
        },
        scratch={"h": pltpu.VMEM((1, D), jnp.float32)},
        parallel=1,  # sequences know nothing of each other
    )
    return outputs["out"], outputs["end"][:, 0]


def forward(call, config):
    out, end = scan(
        call["x"], call["state"], call["lengths"], call.spec.decay, config, call.target
    )
    return {"out": out, "state": end}, {}


IMPLEMENTATION = Implementation(
    Config,
    unsupported,
    default_config,
    search_space=lambda call: [
        Config(n) for n in (16, 64, 128, 256, 512) if not unsupported_config(call, Config(n))
    ],
    forward=forward,
    backward=backward_by(scan),
    unsupported_config=unsupported_config,
    shared_residuals=False,
)
