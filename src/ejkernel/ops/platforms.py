"""The platforms: one row each."""

import importlib.util
import re
from dataclasses import dataclass
from importlib import metadata

from ejkernel.ops.settings import settings
from ejkernel.ops.target import NAMED, Target

# a device of each backend, for questions about hardware that is not here
TYPICAL = {"cpu": NAMED["cpu"], "gpu": NAMED["h200"], "tpu": NAMED["v5e"]}
DEVICES = {"cpu": "a CPU", "gpu": "an NVIDIA GPU", "tpu": "a TPU"}


@dataclass(frozen=True)
class Platform:
    """What a platform needs.

    Attributes:
        name: what `platform=` is given.
        backends: where it runs.
        packages: what must be installed beside JAX, by the names they are imported under.
        extra: the extra of this package that installs them.
        python: the oldest Python they are made for, where that is newer than the oldest here.
        known: of packages (and of JAX) that its kernels use beyond their documentation, the first version that nobody
            has tried yet.
        interpreter: the backend whose kernels `ejkernel.ops.interpret()` runs on a CPU.
    """

    name: str
    backends: tuple[str, ...]
    packages: tuple[str, ...] = ()
    extra: str | None = None
    python: str | None = None
    interpreter: str | None = None
    known: tuple[tuple[str, str], ...] = ()

    def backend(self, target: Target) -> str:
        """The backend whose kernels it would run: an interpreter stands in for the absent one."""
        return (self.interpreter or "cpu") if target.interpreted else target.backend

    def runs_on(self, target: Target) -> tuple[str, ...]:
        """The names by which the row of its implementation is found, most specific first."""
        return (self.backend(target),) if target.interpreted else target.names

    @property
    def needs(self) -> str:
        return " or ".join(DEVICES[backend] for backend in self.backends)

    def missing(self) -> list[str]:
        """Why it cannot be loaded, as far as that is seen without loading it; another device has its packages."""
        if settings().device is not None:
            return []
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        on = f", on Python {self.python} or newer" if self.python else ""
        install = f"pip install 'ejkernel-attention[{self.extra}]'{on}"
        return [f"the package {name} is not installed ({install})" for name in absent]

    def newer_packages(self) -> list[str]:
        """The packages whose version is newer than any that was tried."""
        tried = [(name, version(name), before) for name, before in self.known]
        return [f"{name} {has}" for name, has, before in tried if has and _numbers(has) >= _numbers(before)]


def version(package: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


_JAX = ("jax", "0.13")
_ROWS = (
    Platform("xla", ("cpu", "gpu", "tpu")),
    Platform(
        "triton",
        ("gpu",),
        packages=("triton", "jax_triton"),
        extra="cuda",
        interpreter="gpu",
        known=(("jax", "0.13"), ("triton", "3.10"), ("jax-triton", "0.5")),
    ),
    Platform("pallas", ("gpu", "tpu"), interpreter="tpu", known=(_JAX,)),
    Platform("cudnn", ("gpu",), known=(_JAX,)),
    Platform(
        "cute", ("gpu",), packages=("fa4_jax",), extra="fa4", python="3.12", known=(("jax", "0.13"), ("fa4-jax", "0.2"))
    ),
)
PLATFORMS = {row.name: row for row in _ROWS}
