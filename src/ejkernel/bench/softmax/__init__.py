"""The benchmark of softmax attention: dense and masked, forward and backward, against JAX's and PyTorch's best."""

from ejkernel.bench.benchmark import Benchmark
from ejkernel.bench.softmax.cases import Attention, all_cases
from ejkernel.bench.softmax.contenders import all_contenders, choice

BENCHMARK = Benchmark("softmax", all_cases, all_contenders, Attention, choice)
