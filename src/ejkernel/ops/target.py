"""Which device a call is for: the given mesh, the ambient mesh, the arrays, then the default device."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax import core as jax_core

from ejkernel.checks.names import unknown
from ejkernel.ops.private_jax import entered_meshes
from ejkernel.ops.settings import settings

Device = Any  # jax.Device is an alias that type checkers do not know


@dataclass(frozen=True)
class Target:
    """The device a call is compiled for.

    Attributes:
        backend: `"cpu"`, `"gpu"` or `"tpu"`.
        kind: the device's name in lower case with underscores, such as `nvidia_h200` or `tpu_v5_lite`.
        arch: what kernels compile for, such as `sm_90`; tuned configs of another device of it serve too.
        interpreted: whether kernels of absent hardware run in their interpreters, on this CPU.
        cores: streaming multiprocessors of a GPU; 0 where unknown.
    """

    backend: str
    kind: str
    arch: str
    interpreted: bool = False
    cores: int = 0

    @property
    def names(self) -> tuple[str, str, str]:
        """What rows of tables may name it by, most specific first."""
        return self.kind, self.arch, self.backend

    @property
    def capability(self) -> int:
        """The CUDA compute capability as a number (90 for `sm_90`), 0 elsewhere."""
        match = re.fullmatch(r"sm_(\d+)", self.arch)
        return int(match.group(1)) if match else 0


# devices that can be asked about where there is none of them
NAMED = {
    "cpu": Target("cpu", "cpu", "cpu"),
    "a100": Target("gpu", "nvidia_a100_sxm4_80gb", "sm_80", cores=108),
    "h100": Target("gpu", "nvidia_h100_80gb_hbm3", "sm_90", cores=132),
    "h200": Target("gpu", "nvidia_h200", "sm_90", cores=132),
    "b200": Target("gpu", "nvidia_b200", "sm_100", cores=148),
    "l4": Target("gpu", "nvidia_l4", "sm_89", cores=58),
    "rtx4090": Target("gpu", "nvidia_geforce_rtx_4090", "sm_89", cores=128),
    "v4": Target("tpu", "tpu_v4", "tpu"),
    "v5e": Target("tpu", "tpu_v5_lite", "tpu"),
    "v5p": Target("tpu", "tpu_v5", "tpu"),
    "v6e": Target("tpu", "tpu_v6_lite", "tpu"),
}


def named_target(name: str) -> Target:
    """The device of that name, which need not be here.

    >>> named_target("h200").arch
    'sm_90'
    """
    if name.lower() not in NAMED:
        raise ValueError(unknown("device", name, NAMED))
    return NAMED[name.lower()]


def describe_device(device: Device) -> Target:
    """The target that stands for one JAX device."""
    kind = re.sub(r"[^a-z0-9]+", "_", device.device_kind.lower()).strip("_")
    if device.platform in ("gpu", "cuda"):
        capability = str(getattr(device, "compute_capability", "0.0")).replace(".", "")
        return Target("gpu", kind, f"sm_{capability}", cores=getattr(device, "core_count", 0))
    if device.platform == "rocm":
        return Target("gpu", kind, str(getattr(device, "compute_capability", "gfx")))
    return Target(device.platform, kind, device.platform)


def ambient_mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
    """The mesh set by `jax.set_mesh` or by `with mesh:`; an abstract one where nothing else is known."""
    for mesh in entered_meshes():
        if isinstance(mesh, jax.sharding.Mesh) and mesh.size:
            return mesh
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _ambient_mesh_device() -> Device | None:
    mesh = ambient_mesh()
    return mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else None


def target_of(arrays: Iterable[object], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None) -> Target:
    """The device a call on `arrays` is for."""
    if (given := settings().device) is not None:
        return given
    if mesh is not None and isinstance(mesh, jax.sharding.Mesh):
        return describe_device(mesh.devices.flat[0])
    if (device := _ambient_mesh_device()) is not None:
        return describe_device(device)
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax_core.Tracer) and array.committed:
            return describe_device(next(iter(array.devices())))
    return describe_device(default_device())


def default_device() -> Device:
    """The device JAX places new arrays on."""
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(chosen, str):
        return jax.devices(chosen)[0]
    return chosen if chosen is not None else jax.devices()[0]


def device_kind() -> str:
    """The kind of the default device, as used in tuned files.

    >>> import jax
    >>> from ejkernel.ops import device_kind
    >>> device_kind() == jax.devices()[0].device_kind.lower() or "_" in device_kind()
    True
    """
    return describe_device(default_device()).kind
