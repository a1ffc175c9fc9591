"""How checks are shared among workers: processes on a GPU, threads elsewhere."""

import pickle
from dataclasses import replace

import jax
import pytest

from ejkernel.cli import verify
from ejkernel.cli.families import families
from ejkernel.cli.verify import CHECK, TIME, _Job, _Scheduler
from ejkernel.cli.workers import Lost
from ejkernel.family import Error
from ejkernel.kernels.pooling import checks as pooling
from ejkernel.kernels.softmax.checks import attention

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU")

SMALL = attention("small", "B1 T24 H2 D8", dtype="float32", causal=True)
HALF = attention("half", "B1 T8 H1 D4", dtype="bfloat16", peer=False)
POOLED = pooling.check("pooled", (1, 8, 1, 4), "float32", chunk_size=4)


class Source:
    """A function for another process, which cannot import this file."""

    def __init__(self, source):
        self.source = source

    def __reduce__(self):
        return eval, (self.source,)


def outcomes(*checks):
    """Of the checks, and their names in the order in which they were reported."""
    reported = []
    all_outcomes = verify.verify(
        [(check, ["xla"]) for check in checks], lambda outcome: reported.append(outcome.check.name)
    )
    return all_outcomes, reported


def test_processes_find_what_threads_find(monkeypatch, xla_flags):
    """But for the last bit of a sum, which another process's threads may round another way."""
    monkeypatch.setenv("XLA_FLAGS", xla_flags)
    threads, _ = outcomes(SMALL, HALF, POOLED)
    monkeypatch.setattr(verify, "_processes", lambda: 2)
    processes, reported = outcomes(SMALL, HALF, POOLED)
    assert sorted(reported) == ["half", "pooled", "small"]
    for one, other in zip(threads, processes, strict=True):
        assert one.ok and other.seconds is not None
        assert (other.peer_seconds is None) == (other.check.peer is None)
        assert (one.check, one.platform, one.crash) == (other.check, other.platform, other.crash)
        for in_thread, in_process in ((one.output, other.output), (one.gradient, other.gradient)):
            assert (in_thread is None) == (in_process is None)
            if in_thread is not None and in_process is not None:
                assert abs(in_thread.error - in_process.error) <= 0.2 * in_thread.limit
                assert in_thread.limit == pytest.approx(in_process.limit, rel=0.2)


def test_a_process_that_dies_takes_one_check_with_it(monkeypatch):
    monkeypatch.setattr(verify, "_processes", lambda: 1)  # another takes its place
    dies = Source("lambda call, dtype: __import__('os')._exit(7)")
    lost, fine = outcomes(replace(HALF, definition=dies), POOLED)[0]
    assert lost.crash == "its process ended with exit code 7" and not lost.ok
    assert fine.ok and fine.seconds is not None


def test_every_check_can_be_sent_to_a_process():
    for family in families().values():
        for check in family.checks():
            assert pickle.loads(pickle.dumps(check)).name == check.name


@pytest.mark.parametrize("family", families())
def test_every_check_calls_its_public_function(family):
    """Which gives outputs of the definition's shapes."""
    for check in families()[family].checks():
        case = verify._Case(check)
        assert "xla" in verify.platforms_for(check)[0]
        arrays, fixed, cotangents = case.inputs
        ours = jax.tree.leaves(jax.eval_shape(case.public("xla"), arrays, fixed))
        assert [x.shape for x in ours] == [x.shape for x in cotangents.values()], check.name


def test_what_returns_its_weights_is_checked_in_its_dtype():
    (check,) = (check for check in families()["softmax"].checks() if check.operation == "attention")
    (outcome,), _ = outcomes(check)
    assert outcome.ok and outcome.output.limit > 1e-4


@pytest.mark.parametrize("family", families())
def test_definitions_and_peers_need_no_mode_of_the_user(family, monkeypatch):
    """They are traced and lowered in JAX's usual rules, whatever ours is checked in."""

    def lowered(function, inputs, options=None):
        program = jax.jit(verify._both_passes(function, check.differentiable)).lower(*inputs)
        return lambda *_: program.out_info

    monkeypatch.setattr(jax, "device_get", lambda shapes: shapes)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for check in families()[family].checks():
            case = verify._Case(check)
            monkeypatch.setattr(case, "_compiled", lowered)
            case._by_definition(jax.numpy.dtype(check.dtype), case.inputs)
            assert check.peer is None or case.peer()


def test_who_took_its_device_down_does_no_more(monkeypatch):
    def broken(*_):
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(verify, "device_works", lambda: False)
    monkeypatch.setattr(verify.os, "cpu_count", lambda: 1)
    before, lost, after = outcomes(POOLED, replace(HALF, definition=broken), POOLED)[0]
    assert lost.crash == "RuntimeError: an illegal address"
    assert before.ok and before.seconds is None  # its program is gone
    assert after.ok and after.seconds is not None


class Workers:
    """A scheduler, and workers that do nothing but note what they are asked."""

    def __init__(self, count, *jobs, slow=()):
        given = [_Job(number, replace(SMALL, slow=number in slow), platform) for number, platform in jobs]
        self.scheduler = _Scheduler(given, lambda _: None)
        for _ in range(count):
            self.scheduler.start_worker()
        self.requests = {}

    def requested(self):
        """What each worker is asked to do now; None stands for the end."""
        while self.scheduler.starting:
            worker, requests = self.scheduler.starting.popleft()
            self.requests[worker] = requests
        received = {}
        for worker in [worker for worker, requests in self.requests.items() if requests.poll()]:
            try:
                received[worker] = self.requests[worker].recv()
            except EOFError:
                received[worker] = self.requests.pop(worker).close()
        return received

    def answer(self, worker, answer):
        self.scheduler.on_answer(worker, answer)
        return self.requested()


FIELDS = {"output": Error(0.0, 0.0, 1.0), "gradient": None}


def test_workers_stay_with_the_checks_they_know():
    workers = Workers(2, (0, "xla"), (1, "xla"), (1, "triton"), (1, "pallas"), (2, "xla"))
    assert workers.requested() == {0: (CHECK, 1), 1: (CHECK, 0)}  # the one with most jobs first
    assert workers.answer(0, FIELDS) == {0: (CHECK, 2)}
    assert workers.answer(1, FIELDS) == {1: (CHECK, 4)}
    assert workers.answer(1, FIELDS) == {1: (CHECK, 3)}  # nobody else has got to it


def test_slow_checks_are_begun_first():
    workers = Workers(1, (0, "xla"), (0, "triton"), (1, "xla"), slow=(1,))
    assert workers.requested() == {0: (CHECK, 2)}


def test_times_are_taken_one_at_a_time_when_all_is_checked():
    workers = Workers(3, (0, "xla"), (0, "triton"), (0, None))
    assert workers.requested() == {n: (CHECK, n) for n in range(3)}
    assert workers.answer(0, FIELDS) == workers.answer(2, {}) == {}
    assert workers.answer(1, FIELDS) == {1: (TIME, 1)}
    assert workers.answer(0, Lost("killed while it waited")) == {0: None}
    assert workers.answer(1, Lost("killed")) == {1: None, 2: (TIME, 2)}
    assert workers.answer(2, {"seconds": 3.0}) == {2: None}
    xla, triton = workers.scheduler.outcomes()
    assert xla.ok and (xla.seconds, xla.peer_seconds) == (None, 3.0)
    assert triton.crash == "while it was timed: killed"
