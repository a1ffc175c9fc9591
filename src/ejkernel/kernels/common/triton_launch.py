"""Launches of Triton kernels by the names of their parameters, and the second one where a first left a nan.

A fast kernel may let a hidden value leak: 0 * nan is nan. It marks the blocks of its results that hold a nan (`p_bad`,
its last output). The same kernel, compiled nan-safe (GUARD), computes those blocks again with hidden values kept out of
its products, and leaves at once where nothing is marked (`p_flags`). It writes into what the first wrote (`p_old_*`).
So nan-safety costs the fast kernel's loop nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class TritonLaunch:
    """How kernels of a call are launched.

    Attributes:
        values: what the kernels' parameters may be given, by name; a kernel takes those that its signature names.
        constants: the struct that every kernel has as its constexpr `C`.
        grid: the program counts.
        warps: of a program.
        stages: of its pipelines.
    """

    values: Mapping[str, Any]
    constants: Any
    grid: tuple[int, ...]
    warps: int
    stages: int

    def run(self, kernel: Any, out_shape: Any, *, aliases: Mapping[str, int] | None = None, **more: Any) -> Any:
        """The outputs of a kernel, which is given `more` too. `aliases` are arguments to the numbers of outputs."""
        from ejkernel.bridge import triton_call_by_name

        return triton_call_by_name(
            kernel,
            {**self.values, **more},
            aliases=aliases,
            out_shape=out_shape,
            grid=self.grid,
            num_warps=self.warps,
            num_stages=self.stages,
            C=self.constants,
        )


def run_nan_safe(
    kernel: Any,
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    fast: TritonLaunch,
    nan_safe: TritonLaunch | None,
    flags: tuple[int, int],
    **more: Any,
) -> list[jax.Array]:
    """The outputs of a fast launch, computed again by a nan-safe one where they hold a nan.

    `flags` is the shape of the marks. `nan_safe` is None where nothing is hidden, so that nothing can leak.
    """
    old = [f"p_old_{name}" for name in outputs]
    marks = jax.ShapeDtypeStruct(flags, jnp.int32)
    *results, bad = fast.run(kernel, [*outputs.values(), marks], **more, **dict.fromkeys(old), p_flags=None)
    if nan_safe is None:
        return results
    shapes = [*outputs.values(), jax.ShapeDtypeStruct((1,), jnp.int32)]  # it marks nothing
    aliases = {name: number for number, name in enumerate(old)}
    given = dict(zip(old, results, strict=True))
    return nan_safe.run(kernel, shapes, aliases=aliases, **more, **given, p_flags=bad)[:-1]
