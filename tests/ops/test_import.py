"""Importing the library does nothing but import: no files, no settings, no devices, none of the heavy packages."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys
import jax  # sets variables and loads libtpu itself
before, loaded = dict(os.environ), set(sys.modules)
config = {name: getattr(jax.config, name) for name in dir(jax.config) if name.startswith("jax_")}
{imports}
after = {name: getattr(jax.config, name) for name in config}
print(json.dumps({
    "environment": sorted(set(os.environ.items()) ^ set(before.items())),
    "config": sorted(name for name in config if repr(config[name]) != repr(after[name])),
    "heavy": sorted({"triton", "torch", "libtpu", "matplotlib", "jax_triton"} & (set(sys.modules) - loaded)),
    "backends": sorted(jax._src.xla_bridge._backends),
}))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What changed by importing, in a process with an empty home."""
    home = tmp_path_factory.mktemp("home")
    imports = "import ejkernel; ejkernel.modules.flash_attention, ejkernel.ops.explain, ejkernel.types.MaskInfo"
    environment = {"HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PATH"] = os.environ["PATH"]
    script = SCRIPT.replace("{imports}", imports)
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"files": sorted(str(p) for p in home.rglob("*"))}


def test_no_files(report):
    assert report["files"] == []


def test_no_environment_variables(report):
    assert report["environment"] == []


def test_no_jax_settings(report):
    assert report["config"] == []


def test_no_heavy_packages(report):
    assert report["heavy"] == []


def test_no_devices_are_started(report):
    assert report["backends"] == []
