"""Softmax attention, dense and masked, against JAX's and PyTorch's best."""

from benchmarks.measuring.benchmark import Benchmark
from benchmarks.softmax.cases import TRAINED, Attention, all_cases
from benchmarks.softmax.peers import peers
from ejkernel.kernels.softmax.family import FAMILY

BENCHMARK = Benchmark(
    family=FAMILY,
    module=__name__,
    help="Attention, dense and masked, both passes, against JAX's and PyTorch's best.",
    cases=all_cases,
    problem=Attention,
    platforms={"cpu": ("xla",), "gpu": ("auto", "triton", "pallas", "cudnn", "cute"), "tpu": ("pallas", "xla")},
    peers=peers,
    trained=TRAINED,
)
