"""The delta rule in Triton.

Forward: what chunks need whatever the state is, all side by side; then the states, from chunk to chunk. Backward: the
states again, kept for each chunk; their gradients, from the last chunk to the first; then those of all tokens, side by
side. Between them only the inverses and scores of chunks are kept; with decays of channels they are made again, with
what meets the state.
"""

from dataclasses import replace

import jax.numpy as jnp

from ejkernel.kernels.linear.delta.triton.config import Config, default_config, search_space, unsupported
from ejkernel.kernels.linear.reference import without_padding
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays

KEPT = ("inverse", "scores")


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    from ejkernel.kernels.linear.delta.triton.launches import Launches  # loads Triton

    launches, kept = Launches.of(call, config), {}
    if config.chunk == 1:
        out, state = launches.tokens()
    else:
        prepared = launches.prepare()
        out, state, *_ = launches.forward(prepared)
        kept = {name: x for name, x in prepared._asdict().items() if name in KEPT and "gk" not in call}
    outputs = {"out": without_padding(call, out)} if call.spec.with_out else {}
    return outputs | ({"state": state} if call.spec.with_state else {}), kept


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    from ejkernel.kernels.linear.delta.triton.launches import Launches, Prepared

    dout = cotangents.get("out", jnp.zeros_like(call["value"]))
    launches = Launches.of(call, config if config.chunk > 1 else replace(config, chunk=16))
    prepared = Prepared(*(residuals[name] for name in KEPT)) if residuals else launches.prepare()
    _, _, states, written = launches.forward(prepared, with_states=True)
    drest, dstates, dstart = launches.backward(prepared, dout, cotangents.get("state"))
    gradients = launches.gradients(dout, written, drest, states, dstates)
    gradients = {name: without_padding(call, x) for name, x in gradients.items()}
    return gradients | ({"initial_state": dstart} if "initial_state" in call else {})


IMPLEMENTATION = Implementation(
    Config,
    unsupported,
    default_config,
    search_space,
    forward,
    backward,
    shared_residuals=False,
    residuals=dict.fromkeys(KEPT, "B T H chunk"),
)
