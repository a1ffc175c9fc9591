"""What the family of softmax attention says about itself."""

from ejkernel.about.benchmark import Benchmark
from ejkernel.about.family import Family, PublicFunction, Roofline
from ejkernel.kernels.softmax.about.cases import TRAINED, Attention, all_cases
from ejkernel.kernels.softmax.about.checks import checks, pattern_call
from ejkernel.kernels.softmax.about.peers import peers
from ejkernel.kernels.softmax.about.sizes import arguments
from ejkernel.kernels.softmax.spec import canonicalise


def _roofline(batch: int = 2, length: int = 8192, width: int = 2048) -> Roofline:
    from ejkernel.kernels.softmax.about.roofline import table  # loads the kernels for TPUs

    return Roofline(f"Attention, batch {batch}, {length} tokens, heads * head_dim {width}", table(batch, length, width))


FAMILY = Family(
    name="softmax",
    module=__name__,
    functions={
        "flash_attention": PublicFunction("ejkernel.modules", canonicalise),
        "blocksparse_attention": PublicFunction("ejkernel.modules", pattern_call),
        "scaled_dot_product_attention": PublicFunction("ejkernel.modules", canonicalise),
    },
    arguments=arguments,
    checks=checks,
    benchmark=Benchmark(
        help="Attention, dense and masked, both passes, against JAX's and PyTorch's best.",
        cases=all_cases,
        problem=Attention,
        platforms={"cpu": ("xla",), "gpu": ("auto", "triton", "pallas", "cudnn", "cute"), "tpu": ("pallas", "xla")},
        peers=peers,
        trained=TRAINED,
    ),
    roofline=_roofline,
)
