"""Ctrl-C ends a command with 130, wherever it strikes."""

import os
import signal
import subprocess
import sys

import pytest

from ejkernel.cli import interrupt
from ejkernel.cli.interrupt import at_once, end_on_interrupt
from ejkernel.cli.workers import _uninterrupted

# in the middle of a computation, where taking Python down crashes, and where Python ignores exceptions
SWALLOWED = """
import gc, os, signal, time
import jax, jax.numpy as jnp
from ejkernel.cli.interrupt import end_on_interrupt

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def command():
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 10**6, lambda i, y: jnp.cos(y @ x), x))(jnp.ones((256, 256)))
    gc.callbacks.append(lambda phase, info: gc.callbacks.pop() and os.kill(os.getpid(), signal.SIGINT))
    gc.collect()
    try:
        time.sleep(60)
    finally:
        print("cleaned up")

end_on_interrupt(command)
"""


def test_an_interrupt_that_python_would_swallow():
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED], capture_output=True, text=True, timeout=120, env=os.environ
    )
    assert done.returncode == 130, done.stderr
    assert done.stdout == "cleaned up\n" and done.stderr == "interrupted\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(130)], ids=repr)
def test_python_is_not_taken_down(error, monkeypatch):
    ended = []
    monkeypatch.setattr(interrupt.os, "_exit", ended.append)

    def command():
        raise error

    end_on_interrupt(command)
    assert ended == [130]


# while JAX is imported, in code that ignores exceptions
IMPORTING = """
import os, runpy, signal, sys, time

class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "jax":
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
            except KeyboardInterrupt:
                pass

sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["ejkernel", "--version"]
"""
STARTS = {
    "script": "from ejkernel.cli.main import main; sys.exit(main())",
    "module": "runpy.run_module('ejkernel', run_name='__main__', alter_sys=True)",
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_while_jax_is_imported(start):
    done = subprocess.run([sys.executable, "-c", IMPORTING + start], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler], ids=["ignored", "usual"])
def test_what_handles_interrupts_is_put_back(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with at_once():
            assert (signal.getsignal(signal.SIGINT) is handler) == (handler is signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_handler_is_there_before_jax():
    code = "import sys, ejkernel.__main__; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


def test_other_exits_pass():
    for code in (0, 1, 2):
        with pytest.raises(SystemExit) as exit:
            end_on_interrupt(lambda code=code: sys.exit(code))
        assert exit.value.code == code


def test_processes_that_measure_leave_it_to_the_one_that_started_them():
    with _uninterrupted():
        child = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
        done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
        assert done.stdout == "True\n"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


COMPILING = """
import os, signal, sys, time
from dataclasses import replace
from ejkernel.cli.main import main
from ejkernel.kernels.pooling import checks, family
from ejkernel.modules import mean_pooling

def compiles_for_long(*, platform=None, **options):
    if platform is not None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(300)
    return mean_pooling(**options)

signal.signal(signal.SIGINT, signal.default_int_handler)
pooled = checks.check("pooled", (1, 8, 1, 4), "float32", chunk_size=4)
function = replace(family.FAMILY.functions["mean_pooling"], where=compiles_for_long)
family.FAMILY = replace(family.FAMILY, checks=lambda: [pooled], functions={"mean_pooling": function})
sys.argv = ["ejkernel", "verify", "mean_pooling"]
main()
"""


IN_A_PROCESS = """
import signal, sys
from dataclasses import replace
from ejkernel.cli import verify
from ejkernel.cli.main import main
from ejkernel.kernels.pooling import checks, family

class Interrupts:
    def __reduce__(self):
        interrupt = "__import__('os').kill(__import__('os').getppid(), 2)"
        return eval, (f"lambda call, dtype: ({interrupt}, __import__('time').sleep(300))",)

signal.signal(signal.SIGINT, signal.default_int_handler)
verify._processes = lambda: 2
pooled = replace(checks.check("pooled", (1, 8, 1, 4), "float32", chunk_size=4), definition=Interrupts())
family.FAMILY = replace(family.FAMILY, checks=lambda: [pooled])
sys.argv = ["ejkernel", "verify", "mean_pooling"]
main()
"""


@pytest.mark.parametrize("script", [COMPILING, IN_A_PROCESS], ids=["compiling", "in-a-process"])
def test_verify_waits_for_nobody(script):
    """Not for what is being compiled; and a process that slept on would keep its output open, and this test waiting."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "interrupted\n"
