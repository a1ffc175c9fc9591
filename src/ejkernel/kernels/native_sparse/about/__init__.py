"""What native sparse attention says about itself."""

from ejkernel.about.benchmark import Benchmark
from ejkernel.about.family import Family, PublicFunction
from ejkernel.kernels.native_sparse import whole
from ejkernel.kernels.native_sparse.about.cases import TRAINED, Selected, all_cases
from ejkernel.kernels.native_sparse.about.checks import checks
from ejkernel.kernels.native_sparse.about.peers import peers
from ejkernel.kernels.native_sparse.about.sizes import arguments
from ejkernel.kernels.native_sparse.spec import canonicalise

FAMILY = Family(
    name="native_sparse",
    module=__name__,
    functions={
        "native_sparse_attention": PublicFunction("ejkernel.modules", whole.canonicalise),
        "selected_attention": PublicFunction("ejkernel.modules", canonicalise),
        "select_blocks": PublicFunction("ejkernel.modules", whole.selecting_call),
    },
    arguments=arguments,
    checks=checks,
    benchmark=Benchmark(
        help="Attention to selected blocks, which neighbours share or not, against flash-linear-attention.",
        cases=all_cases,
        problem=Selected,
        platforms={"cpu": ("xla",), "gpu": ("triton",), "tpu": ("xla",)},
        peers=peers,
        trained=TRAINED,
    ),
)
