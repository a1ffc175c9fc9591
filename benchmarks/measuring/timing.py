"""Times that can be compared: medians of interleaved samples, each so long that the cost to start it does not count."""

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

SAMPLE_SECONDS = 0.025
# a call that takes longer than this gets only so many samples: no close comparison depends on it
SLOW_SECONDS, SLOW_REPEATS = 1.0, 3
# on a CPU, threads of the previous run spin for a while after it and would slow the next
PAUSE_SECONDS = 0.3


class Samples(NamedTuple):
    """Seconds of one call, sample by sample, and how many calls made a sample."""

    seconds: list[float]
    calls: int

    @property
    def median(self) -> float:
        ordered = sorted(self.seconds)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[-middle - 1]) / 2


def interleaved_samples(
    runs: Mapping[str, Callable[[int], float]], repeats: int, pause: float = 0.0
) -> dict[str, Samples]:
    """Samples of each, round-robin: a clock that drifts slows all of them by as much.

    Every round has another order, the same in each process, so that no run always follows the same other one, which may
    leave the device warm. A run takes a number of calls and returns the seconds these took together.
    """
    calls = {name: _calls_of_a_sample(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        for name in random.Random(repeat).sample(list(runs), len(runs)):
            if repeat >= SLOW_REPEATS and seconds[name][0] > SLOW_SECONDS:
                continue
            time.sleep(pause)
            seconds[name].append(runs[name](calls[name]) / calls[name])
    return {name: Samples(seconds[name], calls[name]) for name in runs}


def _calls_of_a_sample(run: Callable[[int], float]) -> int:
    """So many that they take SAMPLE_SECONDS. Of a single call, most on a GPU is the launch and the wait for it."""
    calls = 1
    for _ in range(6):
        seconds = run(calls)
        if SAMPLE_SECONDS <= seconds < SLOW_SECONDS:  # again, for the first may have been disturbed
            seconds = min(seconds, run(calls))
        if seconds >= SAMPLE_SECONDS:
            break
        calls = max(calls + 1, math.ceil(calls * SAMPLE_SECONDS / seconds))
    return calls
