"""Sixteen threads at once, each with another operation, config or setting: none sees what another does."""

import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ejkernel import explain, use_config
from ejkernel.modules import flash_attention
from ejkernel.ops import deterministic
from ejkernel.ops.tuned_files import TunedConfigs, keep
from harness.samples import SAMPLES

THREADS = 16


def at_the_same_time(*work: Callable[[], Any]) -> list[Any]:
    """What each returns, all begun at one moment; an error of any is raised."""
    found: list[Any] = [None] * len(work)
    start = threading.Barrier(len(work))

    def run(number: int) -> None:
        start.wait(60)
        try:
            found[number] = work[number]()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "a thread hangs"
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def test_different_operations():
    """Traced, compiled and run side by side, with the answers that each has alone."""
    one_each = {sample.function: name for name, sample in SAMPLES.items() if name != "ring"}
    names = list(one_each.values())[:THREADS]
    assert len(names) == THREADS

    def call(name: str) -> list[np.ndarray]:
        sample = SAMPLES[name]
        found = jax.jit(lambda arrays: sample.function(**arrays, **sample.made()))(sample.given())
        return [np.asarray(x) for x in jax.tree.leaves(found)]

    at_once = at_the_same_time(*(lambda name=name: call(name) for name in names))
    jax.clear_caches()
    for name, found in zip(names, at_once, strict=True):
        for x, alone in zip(found, call(name), strict=True):
            np.testing.assert_array_equal(x, alone, err_msg=name)


def test_settings_stay_in_their_thread():
    """Configs and settings hold where they were entered."""
    q = jax.ShapeDtypeStruct((1, 64, 2, 16), "float32")
    inside = threading.Barrier(THREADS)

    def asked(number: int) -> Any:
        with use_config("flash_attention", {"block_q": 8 * (number + 1)}), deterministic(number % 2 == 0):
            inside.wait(60)
            found = [explain(flash_attention, q, q, q, platform="xla") for _ in range(5)]
            inside.wait(60)
        return {one.config.block_q for one in found}, explain(flash_attention, q, q, q).config_source

    for number, (sizes, after) in enumerate(at_the_same_time(*(lambda n=n: asked(n) for n in range(THREADS)))):
        assert sizes == {8 * (number + 1)} and after == "default"


def test_keeping_configs(tmp_path):
    """Every thread's are in the file, and readers never see half of one."""
    path = tmp_path / "cpu.json"

    def write(number: int) -> None:
        for n in range(5):
            keep(TunedConfigs().add("flash_attention", f"T{n}", f"p{number}", {"block_q": number}, 1.0), path)

    def read() -> None:
        for _ in range(100):
            TunedConfigs.load(path)  # warns, which is an error here, where it is unreadable

    at_the_same_time(*(lambda n=n: write(n) for n in range(THREADS - 4)), *[read] * 4)
    found = TunedConfigs.load(path)
    for n in range(5):
        assert found.times("flash_attention", f"T{n}").keys() == {f"p{number}" for number in range(THREADS - 4)}
