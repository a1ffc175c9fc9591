"""Times that can be compared: medians of samples taken in turns, each long enough that starting it weighs nothing."""

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

SAMPLE_SECONDS = 0.025
# what takes longer than this is measured only so often: it is not a close race
SLOW_SECONDS, SLOW_REPEATS = 1.0, 3
# on a CPU the idle threads of the one before spin for a while and would slow the next
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


def in_turns(runs: Mapping[str, Callable[[int], float]], repeats: int, pause: float = 0.0) -> dict[str, Samples]:
    """Samples of each, one of each in every turn: a clock that drifts slows all alike.

    Turns differ in their order, which is the same in every run, so that nobody always follows the same one, which may
    leave a device warm. A run takes a number of calls and returns the seconds these took together.
    """
    calls = {name: _enough(run) for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name in random.Random(turn).sample(list(runs), len(runs)):
            if turn >= SLOW_REPEATS and found[name][0] > SLOW_SECONDS:
                continue
            time.sleep(pause)
            found[name].append(runs[name](calls[name]) / calls[name])
    return {name: Samples(found[name], calls[name]) for name in runs}


def _enough(run: Callable[[int], float]) -> int:
    """Calls that fill a sample. A single one tells little: on a GPU it is mostly the way there and back."""
    calls = 1
    for _ in range(6):
        seconds = run(calls)
        if SAMPLE_SECONDS <= seconds < SLOW_SECONDS:  # or was that a hiccup?
            seconds = min(seconds, run(calls))
        if seconds >= SAMPLE_SECONDS:
            break
        calls = max(calls + 1, math.ceil(calls * SAMPLE_SECONDS / seconds))
    return calls
