"""The Mosaic GPU kernels on a machine without a GPU: `python tests/hopper_interpreter.py wide-D64-gqa-causal`.

Runs cases of softmax attention, out and gradients, in the interpreter of JAX 0.11, against the reference. It
shows wrong numbers, barriers that wait forever and arrivals that nobody waited for; not what comes of a product that is
still running, since it computes them at once. `--cfg "{'warpgroups': 2}"` changes the default config. What that
interpreter lacks is added here: accumulators that begin with a value, operands in registers, sums in global memory.
"""

# ruff: noqa: E402  # JAX and the harness read what is set first

import argparse
import ast
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# its threads wait for each other: fewer would wait forever
os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "32"}
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback, effects
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CALLS = callback.io_callback_impl  # which the harness replaces, for another interpreter

from ejkernel.kernels.softmax import mosaic_gpu
from ejkernel.kernels.softmax.mosaic_gpu import private_mosaic
from ejkernel.kernels.softmax.spec import canonicalise
from ejkernel.ops import Target
from harness.checks import Arrays, expected_results
from harness.poison import hides, poisoned
from harness.softmax import CASES, Case, definition
from tolerances import assert_close


class Initial:
    """A value that an accumulator begins with."""

    def __init__(self, value: jax.Array):
        self.value = value


# by the identity of a reference, that value
INITIAL: dict[int, jax.Array] = {}


class Box:
    """A reference to what is no accumulator, in `run_state`."""

    def __init__(self, value: Any):
        self.value = value

    def __getitem__(self, _: Any) -> Any:
        return self.value

    def __setitem__(self, _: Any, value: Any) -> None:
        self.value = value


def run_state(real: Callable[..., Any], body: Callable[..., None]) -> Callable[[Any], Any]:
    def run(state: Any) -> Any:
        leaves, tree = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, Initial))
        initial = [x.value for x in leaves if isinstance(x, Initial)]
        if not initial:
            return real(body)(state)

        def scoped(*accumulators: Any) -> list[Any]:
            given = iter(accumulators)
            refs = [next(given) if isinstance(x, Initial) else Box(x) for x in leaves]
            INITIAL.update({id(ref): x.value for x, ref in zip(leaves, refs) if isinstance(x, Initial)})
            body(jax.tree.unflatten(tree, refs))
            return [x.value + ref[...] if isinstance(x, Initial) else ref[...] for x, ref in zip(leaves, refs)]

        found = pl.run_scoped(scoped, *[plgpu.ACC(x.shape, jnp.float32) for x in initial])
        return jax.tree.unflatten(tree, found)

    return run


def accumulator_load(real: Callable[..., jax.Array], ref: Any, **how: Any) -> jax.Array:
    return real(ref, **how) + INITIAL.get(id(ref), 0.0)


def copy_smem_to_gmem(real: Callable[..., None], source: Any, target: Any, *, reduction_op: Any = None, **how: Any):
    if reduction_op is None:
        return real(source, target, **how)

    @pl.when(how["predicate"])
    def _add() -> None:
        target[...] = target[...] + source[...]


class Operands:
    """Shared memory in which an array of two dimensions is its own address."""

    def __init__(self, memory: Any):
        self.memory = memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def access(self, key: Any, transforms: Any) -> Any:
        return None if isinstance(key, np.ndarray) else self.memory.access(key, transforms)

    def get_buffer_content(self, key: Any, *others: Any, **named: Any) -> Any:
        return (
            (key, None, None) if isinstance(key, np.ndarray) else self.memory.get_buffer_content(key, *others, **named)
        )


def install() -> None:
    callback.io_callback_impl = CALLS
    for kind in (core.MemoryEffect, core._WGMMAPipelineEffect):
        for group in (effects.lowerable_effects, effects.control_flow_allowed_effects):
            group.add_type(kind)
        effects.custom_derivatives_allowed_effects.add_type(kind)
    plgpu.ACC.init = staticmethod(Initial)
    pl.run_state = partial(run_state, pl.run_state)
    plgpu.wgmma_accumulator_load = partial(accumulator_load, plgpu.wgmma_accumulator_load)
    plgpu.copy_smem_to_gmem = partial(copy_smem_to_gmem, plgpu.copy_smem_to_gmem)
    address, memory = gpu_callbacks.HostAllocationKey.from_array, gpu_callbacks._get_shared_memory
    gpu_callbacks.HostAllocationKey.from_array = staticmethod(
        lambda x: np.asarray(x) if np.ndim(x) == 2 else address(x)
    )
    gpu_callbacks._get_shared_memory = lambda: Operands(memory())
    # what they have of PTX
    private_mosaic.row_max = lambda x: x.max(axis=1)
    private_mosaic.rescale = lambda x, factors: x * factors[:, None]
    private_mosaic.to_float32 = lambda x: x.astype(jnp.float32)
    plgpu.kernel = partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams(inline_mgpu="ignore"))


def both(case: Case, cfg: dict[str, Any], arrays: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
    """Outputs, and gradients of queries, keys, values and one sink a head; not compiled: effects are ordered."""
    call = canonicalise(**arrays, **case.keywords()).on(Target("gpu", "nvidia_h200", "sm_90", cores=4))
    config = replace(mosaic_gpu.default_config(call), **cfg)
    if reasons := mosaic_gpu.unsupported_config(call, config):
        raise NotImplementedError("; ".join(reasons))
    outputs, residuals = mosaic_gpu.IMPLEMENTATION.forward(call, config)
    given = {
        name: cotangents[name].astype(x.dtype).reshape(x.shape) for name, x in outputs.items() if name in cotangents
    }
    gradients = mosaic_gpu.IMPLEMENTATION.backward(call, residuals, given, config)
    found = {name: gradients[name].reshape(arrays[name].shape) for name in ("query", "key", "value")}
    if case.sinks == "H":
        found["softmax_aux"] = gradients["sinks"][0].astype(arrays["softmax_aux"].dtype)
    return {name: outputs[name].reshape(x.shape) for name, x in cotangents.items()}, found


def compare(case: Case, cfg: dict[str, Any]) -> None:
    arrays = case.arrays()
    cotangents, exact, naive, _ = expected_results(partial(definition, case), arrays, case.dtype)
    for how in ("", "poisoned: ") if hides(case) else ("",):
        ours = both(case, cfg, poisoned(case, arrays) if how else arrays, cotangents)
        for kind, got, right, rough in zip(("output", "gradient of"), ours, exact, naive, strict=True):
            told = [{name: x[name] for name in got} for x in (right, rough)]
            assert_close(got, *told, how + kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", help="by their ids; all that have tiles of these kernels")
    parser.add_argument("--cfg", default="{}", help="what differs from the default config, as a Python dict")
    given = parser.parse_args()
    if unknown := set(given.cases) - {case.id for case in CASES}:
        raise SystemExit(f"no cases: {', '.join(sorted(unknown))}")
    install()
    cfg, wrong = ast.literal_eval(given.cfg), 0
    for case in CASES:
        suits = case.dtype != "float32" and case.D > 32
        if case.id not in given.cases if given.cases else not suits:
            continue
        began = time.monotonic()
        try:
            compare(case, cfg)
            said = "right"
        except Exception as crash:  # what one case raises must not end the others
            wrong, said = wrong + 1, f"{type(crash).__name__}: {str(crash)[-500:]}"
        print(f"{case.id}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    raise SystemExit(f"{wrong} wrong" if wrong else 0)


if __name__ == "__main__":
    main()
