"""The benchmark of paged attention: decoding and mixed batches, against dense attention on a contiguous cache."""

from ejkernel.bench.benchmark import Benchmark
from ejkernel.bench.paged.cases import Serving, all_cases
from ejkernel.bench.paged.contenders import all_contenders, choice

BENCHMARK = Benchmark("paged", all_cases, all_contenders, Serving, choice)
