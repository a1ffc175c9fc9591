"""The operation of the ring family: its implementations are those of softmax attention, on each device."""

from dataclasses import fields

from ejkernel.kernels.ring.sharded import HOP, along_length
from ejkernel.kernels.ring.spec import ARRAYS, OUTPUTS, Spec
from ejkernel.kernels.softmax import operations as softmax
from ejkernel.kernels.softmax import spec as softmax_spec
from ejkernel.ops import Call, Operation, Splits

_NOT_HERE = ("block pattern", "packed sequences", "unnormalised output")


def probes() -> dict[str, Call]:
    """Those of softmax attention, on one device."""
    kept = {name: call for name, call in softmax.probes().items() if name not in _NOT_HERE}
    facts = [field.name for field in fields(softmax_spec.Spec)]
    return {
        name: Call(Spec(**{fact: getattr(call.spec, fact) for fact in facts}), call.arrays)
        for name, call in kept.items()
    }


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
