"""Settings of the whole suite. JAX reads its environment on import, so nothing here imports it at the top.

On a CPU there are 8 host devices, and XLA optimises little: the suite compiles hundreds of small programs and runs
each once. What is compiled as users compile it says so (`optimised=True` in `harness`).
`pytest -m gpu` leaves JAX its accelerator and runs the tests marked `gpu`, on every platform of a GPU.
"""

import ctypes
import gc
import importlib.util
import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `import harness`, also where pyproject.toml is not read

# all but the first make compiling more than three times as fast
HOST_FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if version("jaxlib") < "0.11":  # JAX 0.11 has no other emitters, and ends on an unknown flag
    HOST_FLAGS.append("--xla_cpu_use_fusion_emitters=false")


_FLAGS = pytest.StashKey[str]()


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    config.addinivalue_line("markers", "tpu_aot: compiles for TPUs with libtpu, on any x86-64 machine")
    config.addinivalue_line("markers", "tpu_aot_more: the same for further generations, with `make tpu-aot`")
    config.addinivalue_line("markers", "cuda_aot_more: for NVIDIA GPUs, what differs little, with `make cuda-aot`")
    config.addinivalue_line("filterwarnings", "error")
    # the kernels of fa4-jax use names that its compiler, CUTLASS's, has newer ones for
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:fa4_jax|cutlass")
    # PyTorch on a CPU without bfloat16, about its own matmuls
    config.addinivalue_line("filterwarnings", "ignore:mkldnn_matmul failed:UserWarning")
    os.environ.pop("COLUMNS", None)  # pytest-xdist's workers have 80, where tables break into lines
    if not wants_gpu(config):
        os.environ["JAX_PLATFORMS"] = "cpu"
        given = os.environ.get("XLA_FLAGS", "")
        missing = [flag for flag in HOST_FLAGS if flag.split("=")[0] not in given]
        os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    config.stash[_FLAGS] = os.environ.get("XLA_FLAGS", "")
    # tracing makes many objects that live long; Python's own thresholds have it look at all of them again and again
    gc.set_threshold(100_000, 50, 100)
    use_hypothesis_profile()


def use_hypothesis_profile():
    from hypothesis import HealthCheck, settings

    # compiling is slow, a failure must repeat, and nothing is to be written into the checkout
    skipped_checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile(
        "ejkernel",
        deadline=None,
        max_examples=15,
        derandomize=True,
        database=None,
        suppress_health_check=skipped_checks,
    )
    settings.load_profile("ejkernel")


def wants_gpu(config) -> bool:
    asked = config.getoption("markexpr", "") or ""
    return "gpu" in asked and "not gpu" not in asked


def pytest_generate_tests(metafunc):
    """`platform` runs a test on every platform of this machine: those of the CPU, or with `-m gpu` those of a GPU.

    `native` leaves out interpreters, which take long: large tiles are for the hardware, and small ones show an
    interpreter the same. `interpreted` leaves out all others.
    """
    marks = metafunc.definition.iter_markers("parametrize")
    names_platform = any(
        "platform" in str(mark.args[0] if mark.args else mark.kwargs.get("argnames")) for mark in marks
    )
    wanted = [name for name in ("platform", "native", "interpreted") if name in metafunc.fixturenames]
    if names_platform or not wanted:
        return
    from ejkernel.ops import PLATFORMS as rows
    from harness import PLATFORMS

    device = "gpu" if wants_gpu(metafunc.config) else "cpu"
    marks = [pytest.mark.gpu] if device == "gpu" else []
    kinds = {"platform": (True, False), "native": (False,), "interpreted": (True,)}[wanted[0]]
    here = [p for p in PLATFORMS if p.device == device and not rows[p.name].missing()]
    chosen = [p for p in here if p.interpreted in kinds]
    metafunc.parametrize(wanted[0], [pytest.param(p, id=p.id, marks=marks) for p in chosen])


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is not None:
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs an NVIDIA GPU")
    if item.get_closest_marker("tpu_aot") is not None and importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs an x86-64 machine: libtpu, which compiles for TPUs, has no build for others")


# compiled programs pile up, and are forgotten when a worker has grown by so many bytes since it last forgot them. Not
# more often: what is forgotten is traced anew, and what a worker has besides (libraries, say) is nearly as much
MOST_GROWTH = 0.3e9
LEAST_MEMORY = 1.6e9
_kept = 0


def pytest_runtest_teardown(item):
    global _kept
    if "jax" in sys.modules and _memory() > max(LEAST_MEMORY, _kept + MOST_GROWTH):
        sys.modules["jax"].clear_caches()
        gc.collect()
        _give_memory_back()
        _kept = _memory()


def _memory() -> int:
    """Bytes that this process has now; where that is not to be had, the most that it ever had."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _give_memory_back():
    """glibc keeps most of what is freed: of 1.9 GB after some tests 0.6 were in use."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class _Failures:
    """Names what failed at once: a run that is cut short has no summary."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.config.get_terminal_writer().line(f"\nFAILED {report.nodeid} ({report.when})")


# seconds of one core that the tests of a folder may take in all, beside another worker: two cores do it in 30 minutes
BUDGETS = {
    "softmax": 1150, "expressions": 70, "paged": 380, "pooling": 25, "linear": 480, "native_sparse": 240, "ring": 210,
    "types": 140, "ops": 330, "toy_family": 30, "cli": 115, "benchmarks": 150, "bridge": 20, "seeds": 25,
    "examples": 65, "operators": 50, "ejgpu": 20, "pytorch": 125, "hardening": 90,
}  # fmt: skip


def pytest_terminal_summary(terminalreporter):
    """The slowest files, and each folder's share of its budget."""
    files: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                name = report.nodeid.split("::")[0]
                files[name] = files.get(name, 0.0) + report.duration
    slowest = sorted(files, key=lambda name: -files[name])[:10]
    if not slowest or files[slowest[0]] < 10.0:
        return
    terminalreporter.section("slowest files")
    for name in slowest:
        terminalreporter.write_line(f"{files[name]:7.0f} s  {name}")
    for folder, budget in BUDGETS.items():
        spent = sum(seconds for name, seconds in files.items() if name.startswith(f"tests/{folder}/"))
        if spent:
            terminalreporter.write_line(f"{spent:7.0f} s  of {budget} s for tests/{folder} ({spent / budget:.0%})")


@pytest.fixture(scope="session")
def xla_flags(pytestconfig):
    """XLA's flags of this suite, for processes of a test's own: `tpu_devices` takes them out of the environment."""
    return pytestconfig.stash[_FLAGS]


@pytest.fixture(scope="session")
def tpu_devices():
    """A function from a topology, such as "v5e:2x2", to its devices, which libtpu compiles for."""
    import jax

    jax.devices()  # the CPU's XLA has read its flags now; libtpu has an XLA of its own and ends on a flag it lacks
    given = {name: os.environ.get(name) for name in ("XLA_FLAGS", "ALLOW_MULTIPLE_LIBTPU_LOAD")}
    os.environ.pop("XLA_FLAGS", None)
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # every worker of a run loads it
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    yield lambda name: topologies.get_topology_desc(topology_name=name, platform="tpu").devices
    os.environ.update({name: value for name, value in given.items() if value is not None})


@pytest.fixture(autouse=True, scope="session")
def own_tuned_files(tmp_path_factory):
    """What this machine's user has tuned must not decide a test."""
    os.environ["EJKERNEL_CACHE_DIR"] = str(tmp_path_factory.mktemp("tuned"))
    os.environ.pop("EJKERNEL_CHECKS", None)
    yield
    del os.environ["EJKERNEL_CACHE_DIR"]
