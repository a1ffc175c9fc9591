"""What the model says about itself to `ejkernel bench`, in the words of the families it is made of."""

from ejkernel.about.benchmark import Benchmark
from ejkernel.about.family import Family, PublicFunction
from ejkernel.models.cases import TRAINED, Model, all_cases
from ejkernel.models.ours import decoding, training
from ejkernel.models.peers import peers

FAMILY = Family(
    name="model",
    module=__name__,
    functions={"training": PublicFunction(training), "decoding": PublicFunction(decoding)},
    benchmark=Benchmark(
        help="A whole training step on packed documents, and a decode loop, in thousands of tokens a second.",
        cases=all_cases,
        problem=Model,
        platforms={"cpu": ("auto",), "gpu": ("auto",), "tpu": ("auto",)},
        peers=peers,
        trained=TRAINED,
        side_by_side=False,
    ),
)
