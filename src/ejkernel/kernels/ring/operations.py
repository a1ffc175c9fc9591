"""The operation of the ring family: its implementations are those of softmax attention, on each device."""

from ejkernel.kernels.ring.sharded import HOP, along_length
from ejkernel.kernels.ring.spec import ARRAYS, OUTPUTS, Spec
from ejkernel.kernels.softmax import operations as softmax
from ejkernel.ops import Call, Operation, Splits

_REFUSED = ("block pattern", "packed sequences", "unnormalised output")


def probes() -> dict[str, Call]:
    """Those of softmax attention, on one device."""
    able = {name: call for name, call in softmax.probes().items() if name not in _REFUSED}
    return {name: Call(Spec(**vars(call.spec)), call.arrays) for name, call in able.items()}


RING_ATTENTION = Operation(
    name="ring_attention",
    arrays=ARRAYS,
    outputs=OUTPUTS,
    implementations=softmax.IMPLEMENTATIONS,
    preference=softmax.FLASH_ATTENTION.preference,
    bucket=softmax.bucket,
    splits=Splits(free=("B", "H", "Hkv"), tied=(("T", "S"),), grouped=(("H", "Hkv"),), passed_on={"T": along_length}),
    example=softmax.example,
    probes=probes,
    of_nothing=softmax.of_nothing,
    configs_of=HOP.configs_of,
)

OPERATIONS = (RING_ATTENTION,)
