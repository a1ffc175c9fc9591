"""What the family of attention over a cache says about itself."""

from ejkernel.about.benchmark import Benchmark
from ejkernel.about.family import Family, PublicFunction, Roofline
from ejkernel.kernels.paged import calls
from ejkernel.kernels.paged.about.cases import Serving, all_cases
from ejkernel.kernels.paged.about.checks import checks
from ejkernel.kernels.paged.about.peers import CHAIN, peers
from ejkernel.kernels.paged.about.sizes import arguments


def _roofline(batch: int = 32, length: int = 4096, width: int = 4096) -> Roofline:
    from ejkernel.kernels.paged.about.roofline import table  # loads the kernels for TPUs

    return Roofline(f"A decode step over pages, {batch} sequences of {length} keys", table(batch, length, width))


FAMILY = Family(
    name="paged",
    module=__name__,
    functions={
        "page_attention": PublicFunction("ejkernel.modules", calls.page_call),
        "ragged_page_attention": PublicFunction("ejkernel.modules", calls.ragged_page_call),
        "prefill_page_attention": PublicFunction("ejkernel.modules", calls.prefill_call),
        "decode_attention": PublicFunction("ejkernel.modules", calls.decode_call),
        "ragged_decode_attention": PublicFunction("ejkernel.modules", calls.ragged_decode_call),
    },
    arguments=arguments,
    checks=checks,
    benchmark=Benchmark(
        help="Decoding and mixed batches on pages, against attention on a contiguous cache.",
        cases=all_cases,
        problem=Serving,
        platforms={"cpu": ("xla",), "gpu": ("triton", "xla"), "tpu": ("pallas", "xla")},
        peers=peers,
        chain=lambda case, what: CHAIN,
    ),
    roofline=_roofline,
)
