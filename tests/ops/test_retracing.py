"""A setting is part of what JAX knows a program by: entered after a first call, it holds as before one."""

import threading
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels.softmax import xla
from ejkernel.modules import flash_attention
from ejkernel.ops import autotune, deterministic, dispatch, explain, implicit_sharding, interpret, tuning, use_config
from ejkernel.ops.settings import settings

Q = jnp.ones((1, 32, 2, 8))
OTHER = xla.Config(8, 16)


@contextmanager
def tuned():
    with autotune(save=False, progress=False):
        yield


SETTINGS = {
    "deterministic": deterministic,
    "use_config": lambda: use_config("flash_attention", {"block_q": 8, "block_k": 16}),
    "use_config of a Config": lambda: use_config("flash_attention", OTHER),
    "autotune": tuned,
    "interpret": interpret,
    "implicit_sharding": lambda: implicit_sharding(False),
}


@pytest.fixture
def planned(monkeypatch):
    """What was planned for every call, in order; no kernel runs."""
    plans = []
    execute = dispatch.execute

    def noted(plan, arrays):
        state = settings()
        plans.append(
            (plan.config, plan.deterministic, plan.implicit, plan.target.interpreted, state.tuning is not None)
        )
        return execute(plan, arrays)

    monkeypatch.setattr(dispatch, "execute", noted)
    monkeypatch.setattr(xla.IMPLEMENTATION, "search_space", lambda call: [OTHER])
    fast = {OTHER: (1e-6, 1e-6)}
    monkeypatch.setattr(tuning, "_measure", lambda o, i, c, config, a: fast.get(config, (1.0, 1.0)))
    return plans


def plain(x):
    return flash_attention(x, x, x, causal=True)


def in_scan(x):
    return jax.lax.scan(lambda x, _: (plain(x), None), x, length=2)[0]


def in_vmap(x):
    return jax.vmap(plain)(x[None])[0]


def in_grad(x):
    return jax.grad(lambda x: plain(x).sum())(x)


PLACES = [plain, in_scan, in_vmap, in_grad]


def used(jitted, function):
    """Called, or traced alone where compiling would say nothing more."""
    return jitted(Q) if function is plain else jitted.trace(Q)


@pytest.mark.parametrize("function", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", SETTINGS)
class TestEverySetting:
    def test_before_the_first_call_and_after_it(self, planned, name, function):
        inside = jax.jit(lambda x: function(x))
        with SETTINGS[name]():
            used(inside, function)
        expected = set(planned)
        planned.clear()
        jitted = jax.jit(lambda x: function(x))
        used(jitted, function)
        outside = set(planned)
        assert outside.isdisjoint(expected)
        planned.clear()
        with SETTINGS[name]():
            used(jitted, function)
        assert set(planned) == expected
        planned.clear()
        used(jitted, function)
        assert not planned  # the program of outside is still there

    def test_it_does_not_leak(self, planned, name, function):
        jitted = jax.jit(lambda x: function(x))
        with SETTINGS[name]():
            used(jitted, function)
        inside = set(planned)
        planned.clear()
        used(jitted, function)
        assert planned and set(planned).isdisjoint(inside)


@pytest.mark.parametrize("name", SETTINGS)
def test_in_another_thread_nothing_is_set(planned, name):
    jitted = jax.jit(lambda x: plain(x))
    jitted(Q)
    planned.clear()
    with SETTINGS[name]():
        other = threading.Thread(target=jitted, args=(Q,))
        other.start()
        other.join()
        assert not planned
        jitted(Q)
        assert planned


def test_nested(planned):
    jitted = jax.jit(lambda x: plain(x))
    with deterministic():
        jitted(Q)
        with deterministic(False), use_config("flash_attention", OTHER):
            jitted(Q)
        with use_config("flash_attention", OTHER):
            jitted(Q)
        jitted(Q)
    assert [(plan[1], plan[0] == OTHER) for plan in planned] == [(True, False), (False, True), (True, True)]


def test_equal_settings_share_a_program(planned):
    jitted = jax.jit(lambda x: plain(x))
    for _ in range(2):
        with use_config("flash_attention", {"block_q": 8, "block_k": 16}):
            jitted(Q)
    assert len(planned) == 1


def test_a_gradient_follows_its_forward():
    """The call was made outside; where its gradient is traced does not matter."""
    out, pull = jax.vjp(plain, Q)
    (expected,) = pull(out)
    with deterministic(), use_config("flash_attention", {"block_q": 8}):
        assert (pull(out)[0] == expected).all()


def test_winners_reach_programs_that_were_traced_before(planned, monkeypatch, tmp_path):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path))
    jitted = jax.jit(lambda x: plain(x))
    jitted(Q)
    with autotune(progress=False):
        jitted(Q)
    planned.clear()
    jitted(Q)
    assert [plan[0] for plan in planned] == [OTHER]


def test_a_config_that_cannot_be_hashed_is_refused():
    with (
        pytest.raises(TypeError, match="must have fields that can be hashed"),
        use_config("flash_attention", {"block_q": {}}),
    ):
        pass


def test_explain_of_a_program_that_ran():
    jitted = jax.jit(lambda x: plain(x))
    jitted(Q)
    assert explain(jitted, Q).platform == "xla"
    with use_config("flash_attention", OTHER):
        assert explain(jitted, Q).config == OTHER
    assert explain(jitted, Q).config != OTHER
