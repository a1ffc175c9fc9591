"""Attention over a paged cache, against attention over a contiguous one."""

from benchmarks.measuring.benchmark import Benchmark
from benchmarks.paged.cases import Serving, all_cases
from benchmarks.paged.peers import CHAIN, peers
from ejkernel.kernels.paged.family import FAMILY

BENCHMARK = Benchmark(
    family=FAMILY,
    module=__name__,
    help="Decoding and mixed batches on pages, against attention on a contiguous cache.",
    cases=all_cases,
    problem=Serving,
    platforms={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")},
    peers=peers,
    chain=lambda case, what: CHAIN,
)
