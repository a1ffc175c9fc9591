"""Linear attention, against flash-linear-attention."""

from benchmarks.linear.cases import TRAINED, Recurrence, all_cases, chain
from benchmarks.linear.peers import peers
from benchmarks.measuring.benchmark import Benchmark
from ejkernel.kernels.linear.family import FAMILY

BENCHMARK = Benchmark(
    family=FAMILY,
    module=__name__,
    help="Linear attention, decays per head and per channel, and a decode step, against flash-linear-attention.",
    cases=all_cases,
    problem=Recurrence,
    platforms={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")},
    peers=peers,
    trained=TRAINED,
    chain=chain,
)
