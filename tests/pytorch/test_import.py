"""What importing and using the front end costs a program: neither JAX's devices nor Triton, until a kernel needs it."""

import os
import subprocess
import sys

CODE = """
import sys
import torch
before = set(sys.modules)
import dkernel
from ejkernel.ops import interpret
assert dkernel.SparseAttention is __import__("ejkernel.torch").torch.SparseAttention
module = dkernel.LocalStrideSparseAttention(2, 64, 16, 1, 2)
q = torch.ones(1, 20, 2, 16, requires_grad=True)
module(q, q, q, seqlens=[15]).sum().backward()
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
assert not loaded & {"triton", "jax_triton", "matplotlib", "rich", "typer"}, loaded
with interpret():  # all that CUDA does but for the launch itself
    module(q, q, q).sum().backward()
    table = torch.ones(20, 20, requires_grad=True)
    functions = {"mask_mod": lambda b, h, i, j: table[i, j] > 0, "score_mod": lambda s, b, h, i, j: s + table[i, j]}
    more = {"bias": table, "bounds": ([0] * 20, None), "alibi_slopes": table[0, :2], "dropout_prob": 0.1}
    from ejkernel.torch import flash_attention
    flash_attention(q, q, q, **functions, **more, dropout_seed=1).sum().backward()
import jax
print(sorted(jax._src.xla_bridge._backends))
"""


def test_no_device_of_jax_is_started():
    """Starting JAX on a GPU would take most of its memory."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
