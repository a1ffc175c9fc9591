"""Attention to selected blocks, against flash-linear-attention."""

from benchmarks.measuring.benchmark import Benchmark
from benchmarks.native_sparse.cases import TRAINED, Selected, all_cases
from benchmarks.native_sparse.peers import peers
from ejkernel.kernels.native_sparse.family import FAMILY

BENCHMARK = Benchmark(
    family=FAMILY,
    module=__name__,
    help="Attention to selected blocks, which neighbours share or not, against flash-linear-attention.",
    cases=all_cases,
    problem=Selected,
    platforms={"cpu": ("xla",), "gpu": ("triton",), "tpu": ("xla",)},
    peers=peers,
    trained=TRAINED,
)
