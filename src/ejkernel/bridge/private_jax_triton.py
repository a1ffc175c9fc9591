"""All that this package knows of jax-triton: nothing else imports it.

Seen in jax-triton 0.3.1 and 0.4.1. Between them the options of `triton_call` changed their names and how they count
operands, and 0.4 deprecates what is used here in favour of refs, which cannot be lowered without a GPU. Both change
`TRITON_CACHE_DIR` when they are imported. A `triton_call` of one meaning for both would replace `launch_on_gpu`, and an
import without effects the rest.
"""

import inspect
import os
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.bridge.launch import Launch, Slot

_IMPORTING = threading.Lock()
# given explicitly, because Triton changes its default in 3.10
_FUSED = {"enable_fp_fusion": True}


def launch_on_gpu(launch: Launch, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The outputs of a launch, traced for a GPU of NVIDIA."""
    call = imported_jax_triton().triton_call
    aliased = {operand for operand, _ in launch.aliases}
    # any pointer will do for an absent array; one that is aliased would be copied first
    absent = next((x for i, x in enumerate(arrays) if i not in aliased), jnp.zeros(16, jnp.int8))
    options = {
        "kernel": launch.kernel,
        "grid": launch.grid,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        **dict(launch.constexprs),
    }
    if "out_type" not in inspect.signature(call).parameters:  # jax-triton 0.3
        # a Python float would reach the kernel as float64
        arguments = [np.float32(a) if isinstance(a, float) else a for a in launch.fill(arrays, absent)]
        options |= {"out_shape": launch.outputs, "input_output_aliases": dict(_aliases_after_fill(launch)), **_FUSED}
        return call(*arguments, **options)
    # jax-triton 0.4 gives an aliased output no pointer of its own: the array is passed for the output's parameter
    arguments = launch.fill([absent if i in aliased else x for i, x in enumerate(arrays)], absent)
    names = launch.kernel.arg_names[len(arguments) :]
    options |= {names[output]: arrays[operand] for operand, output in launch.aliases}
    aliases = {len(arguments) + n: output for n, output in enumerate(sorted(output for _, output in launch.aliases))}
    options |= {"out_type": launch.outputs, "input_output_aliases": aliases, "backend_options": _FUSED}
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return call(*arguments, **options)


def _aliases_after_fill(launch: Launch) -> list[tuple[int, int]]:
    """Aliases by operand of jax-triton 0.3, for which an absent array is an operand too."""
    operands = [
        i
        for i, slot in enumerate(argument for argument in launch.arguments if isinstance(argument, Slot))
        if slot is Slot.ARRAY
    ]
    return [(operands[operand], output) for operand, output in launch.aliases]


def imported_jax_triton() -> ModuleType:
    """jax-triton; importing it blanks (0.3) or removes (0.4) TRITON_CACHE_DIR, which is put back."""
    with _IMPORTING:  # another thread would see it blank, and put that back
        kept = os.environ.get("TRITON_CACHE_DIR")
        try:
            import jax_triton
        finally:
            if kept is None:
                os.environ.pop("TRITON_CACHE_DIR", None)
            else:
                os.environ["TRITON_CACHE_DIR"] = kept
    return jax_triton
