"""What is said of another device does not depend on what is installed here."""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest

from ejkernel import ops

# of every operation: what runs on three devices, and its table
CODE = """
import json, sys
for name in {absent}:
    sys.modules[name] = None
from ejkernel import explain, ops
from ejkernel.cli.families import family_of
from ejkernel.cli.sizes import described
said = {{}}
for name in ops.list_operations():
    if name in ("attention", "ring_attention"):
        continue
    for device in ("h200", "b200", "v6e"):
        told = explain(family_of(name).function(name), **described(name, {{}}), device=device)
        said[f"{{name}} on {{device}}"] = [told.platform, str(told.config), told.refusals]
    said[name] = ops.support_table(name)
print(json.dumps(said))
"""


def answers(*absent: str) -> dict[str, object]:
    code = CODE.format(absent=absent)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def answers_here() -> dict[str, object]:
    """In this process, where all are imported already."""
    with redirect_stdout(StringIO()) as printed:
        exec(CODE.format(absent=()), {})
    return json.loads(printed.getvalue().splitlines()[-1])


def test_another_device_has_its_packages():
    here, without = answers_here(), answers("triton", "jax_triton", "torch", "fa4_jax")
    assert here == without
    assert here["page_attention on h200"][0] == here["recurrent_attention on h200"][0] == "triton"
    assert "not installed" not in json.dumps(here)


@pytest.mark.parametrize("name", [n for n in ops.list_operations() if ops.get_operation(n).made_of])
def test_a_function_of_several_calls_has_their_tables(name):
    for part in ops.get_operation(name).made_of:
        assert f"{part}:\n\n| feature |" in ops.support_table(name)
