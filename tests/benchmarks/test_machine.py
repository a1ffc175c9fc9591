"""What is written down of the machine that a benchmark ran on."""

import os

import jax
import pytest

from benchmarks.measuring import machine

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")


def test_a_cpu_without_a_name_is_called_by_its_architecture(monkeypatch):
    """Those of ARM have none in /proc/cpuinfo."""
    monkeypatch.setattr(machine.Path, "exists", lambda self: False)
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    facts = machine.machine()
    assert facts["device"] == f"{machine.platform.machine()}, {os.cpu_count()} cores"
    assert facts["load"] >= 0 and facts["jax"] == jax.__version__ and "not installed" not in facts.values()
