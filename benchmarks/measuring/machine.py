"""What a measurement depends on: the device, how busy it is with other work, and versions."""

import os
import platform
from pathlib import Path
from typing import Any

import jax

from ejkernel.cli.info import devices, versions

PACKAGES = ("jax", "triton", "torch", "tokamax", "fa4-jax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


def machine() -> dict[str, Any]:
    """The device, the load of a CPU before the run, and the versions of what is installed."""
    facts: dict[str, Any] = {"device": ", ".join(devices())}
    if jax.default_backend() == "cpu":
        facts = {"device": f"{_cpu_name()}, {os.cpu_count()} cores", "load": os.getloadavg()[0]}
    return facts | {name: version for name, version in versions(PACKAGES).items() if version != "not installed"}


def _cpu_name() -> str:
    """As Linux knows it; of CPUs without a name, which ARM's are there, the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
