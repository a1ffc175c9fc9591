"""Linear attention and the delta rule, against flash-linear-attention and jax-linear-attention."""

from benchmarks.linear.cases import TRAINED, Recurrence, all_cases, chain
from benchmarks.linear.peers import peers
from benchmarks.measuring.benchmark import Benchmark
from ejkernel.kernels.linear.family import FAMILY

BENCHMARK = Benchmark(
    family=FAMILY,
    module=__name__,
    help="Linear attention, the delta rule, and decode steps, against flash-linear-attention and jax-linear-attention.",
    cases=all_cases,
    problem=Recurrence,
    platforms={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")},
    peers=peers,
    trained=TRAINED,
    chain=chain,
)
