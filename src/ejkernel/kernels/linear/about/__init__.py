"""What the family of linear attention says about itself."""

from ejkernel.about.benchmark import Benchmark
from ejkernel.about.family import Family, PublicFunction, Roofline
from ejkernel.kernels.linear.about.cases import TRAINED, Recurrence, all_cases, chain
from ejkernel.kernels.linear.about.checks import checks
from ejkernel.kernels.linear.about.peers import peers
from ejkernel.kernels.linear.about.sizes import arguments
from ejkernel.kernels.linear.spec import canonicalise, gla_call, lightning_call


def _roofline(batch: int = 8, length: int = 2048, width: int = 2048) -> Roofline:
    from ejkernel.kernels.linear.about.roofline import table  # loads the kernels for TPUs

    title = f"Linear attention, batch {batch}, {length} tokens, heads * head_dim {width}"
    return Roofline(title, table(batch, length, width))


FAMILY = Family(
    name="linear",
    module=__name__,
    functions={
        "recurrent_attention": PublicFunction("ejkernel.modules", canonicalise),
        "gla_attention": PublicFunction("ejkernel.modules", gla_call),
        "lightning_attention": PublicFunction("ejkernel.modules", lightning_call),
    },
    arguments=arguments,
    checks=checks,
    benchmark=Benchmark(
        help="Linear attention, decays per head and per channel, and a decode step, against flash-linear-attention.",
        cases=all_cases,
        problem=Recurrence,
        platforms={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")},
        peers=peers,
        trained=TRAINED,
        chain=chain,
    ),
    roofline=_roofline,
)
