"""A small transformer of the public functions: a whole training step, and a decode loop."""

from benchmarks.measuring.benchmark import Benchmark
from benchmarks.model.cases import TRAINED, Model, all_cases
from benchmarks.model.ours import decoding, training
from benchmarks.model.peers import peers
from ejkernel.family import Family, PublicFunction

BENCHMARK = Benchmark(
    family=Family("model", {"training": PublicFunction(training), "decoding": PublicFunction(decoding)}),
    module=__name__,
    help="A whole training step on packed documents, and a decode loop, in thousands of tokens a second.",
    cases=all_cases,
    problem=Model,
    platforms={"cpu": ("auto",), "gpu": ("auto",), "tpu": ("auto",)},
    peers=peers,
    trained=TRAINED,
    side_by_side=False,
)
