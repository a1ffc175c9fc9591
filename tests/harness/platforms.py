"""Where a test runs."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import callback

from ejkernel.ops import interpret


def on_numpy(*arrays: np.ndarray, callback: Any, **_: Any) -> Any:
    return jax.tree.map(np.asarray, callback(*arrays))


# the interpreter of TPU kernels calls Python for every load and store, which takes numpy's arrays; JAX would send all
# arguments to a device first, and take six times as long
callback.io_callback_impl = on_numpy


@dataclass(frozen=True)
class Platform:
    """A platform of the library on a device of this machine.

    Attributes:
        name: what `platform=` is given.
        device: "cpu" or "gpu".
        interpreted: whether the kernels run in their interpreter.
        tiles: whether the platform takes a case's tile sizes; otherwise it chooses its own.
        scale: what a case's tile sizes are multiplied by, for an interpreter whose every step is slow.
        precision: what float32 matmuls need to be float32.
    """

    name: str
    device: str = "cpu"
    interpreted: bool = False
    tiles: bool = False
    scale: int = 1
    precision: str | None = None

    @property
    def id(self) -> str:
        how = "-interpreted" if self.interpreted else ""
        return self.name + how if self.device == "cpu" else f"{self.name}-{self.device}"

    def context(self) -> AbstractContextManager[None]:
        return interpret() if self.interpreted else nullcontext()

    def options(self, tiles: tuple[int, int], dtype: str) -> dict[str, Any]:
        """The keywords that send a call of a public function here."""
        options: dict[str, Any] = {"platform": self.name}
        if self.tiles:
            options["cfg"] = {"block_q": self.scale * tiles[0], "block_k": self.scale * tiles[1]}
        if self.precision is not None and dtype == "float32":
            options["precision"] = self.precision
        return options


# one line each; a platform that refuses a case is checked to say why
PLATFORMS = (
    Platform("xla", tiles=True),
    Platform("triton", interpreted=True),
    Platform("pallas", interpreted=True, tiles=True, scale=2),
    Platform("xla", "gpu", tiles=True, precision="highest"),
    Platform("pallas", "gpu"),
    Platform("cudnn", "gpu"),
    Platform("cute", "gpu"),
    Platform("triton", "gpu", precision="highest"),
)
