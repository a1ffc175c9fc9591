"""What there is on this machine: versions, devices, and which platforms work."""

import platform as host
from importlib import metadata
from typing import NamedTuple

import jax

import ejkernel
from ejkernel.ops import PLATFORMS, get_operation, list_operations
from ejkernel.ops.dispatch import refusals
from ejkernel.ops.target import describe_device, target_of
from ejkernel.ops.tuned_files import shipped_file, user_file

PACKAGES = ("jax", "jaxlib", "numpy", "triton", "jax-triton", "libtpu", "torch")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of what the library uses, from the metadata of packages: none is imported."""
    by_package = {"ejkernel": ejkernel.__version__, "python": host.python_version()}
    for package in packages:
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            by_package[package] = "not installed"
    return by_package


def devices() -> list[str]:
    """One line per kind of device JAX sees."""
    kinds: dict[str, int] = {}
    for device in jax.devices():
        target = describe_device(device)
        line = target.kind if target.kind == target.arch else f"{target.kind} ({target.arch})"
        kinds[line] = kinds.get(line, 0) + 1
    return [f"{count} x {line}" for line, count in kinds.items()]


def tuned_files() -> dict[str, str]:
    """Where tuned configs for the default device would come from, and whether they do."""
    kind = target_of(()).kind
    files = {"yours": user_file(kind), "shipped": shipped_file(kind)}
    return {name: f"{path}{'' if path.exists() else ' (none)'}" for name, path in files.items()}


class Works(NamedTuple):
    """The operations that a platform can do on this machine; the reasons where it can do none."""

    operations: list[str]
    reasons: list[str]


def platforms() -> dict[str, Works]:
    """For every platform, what it can do on the default device."""
    target = target_of(())
    works = {}
    for platform in PLATFORMS:
        operations, reasons = [], {}
        for name in list_operations():
            operation = get_operation(name)
            if platform not in operation.implementations:
                continue
            refused = [refusals(operation, platform, call.on(target)) for call in operation.probes().values()]
            if not refused or not all(refused):
                operations.append(name)
            else:
                reasons |= dict.fromkeys(refused[0])
        works[platform] = Works(operations, [] if operations else list(reasons))
    return works
