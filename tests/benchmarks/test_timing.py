"""How often a program runs in a sample, and the time that is reported for a call."""

import pytest

from benchmarks.measuring.timing import SAMPLE_SECONDS, interleaved_samples


def device(start, each):
    """Seconds that `calls` calls take together: the launch and the wait, and the time of each."""
    return lambda calls: start + each * calls


@pytest.mark.parametrize("start, each", [(0.005, 4e-4), (0.0, 2e-6), (0.02, 1e-3)])
def test_a_sample_is_long_whatever_the_first_call_took(start, each):
    samples = interleaved_samples({"a": device(start, each)}, repeats=2)["a"]
    assert SAMPLE_SECONDS * 0.99 <= samples.calls * samples.median < 3 * SAMPLE_SECONDS
    assert len(samples.seconds) == 2


def test_a_hiccup_does_not_make_a_sample():
    seconds = iter([0.1])
    samples = interleaved_samples({"a": lambda calls: next(seconds, 1e-3 * calls)}, repeats=3)["a"]
    assert samples.calls == 25
