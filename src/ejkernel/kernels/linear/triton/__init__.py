"""Linear attention in Triton."""

from ejkernel.kernels.linear import scans
from ejkernel.kernels.linear.triton.config import Config, default_config, search_space, unsupported
from ejkernel.ops import Call, Implementation
from ejkernel.ops.operation import Arrays


def forward(call: Call, config: Config) -> tuple[Arrays, Arrays]:
    from ejkernel.kernels.linear.triton.runner import ScanRunner  # loads Triton

    runner = ScanRunner(config)
    outputs, residuals = scans.forward(call, runner)
    # states between segments, for the scan that gives dquery
    residuals |= {"starts": runner.states[0].starts} if runner.states else {}
    return outputs, residuals | ({} if runner.chunk_lengths is None else {"chunk_lengths": runner.chunk_lengths})


def backward(call: Call, residuals: Arrays, cotangents: Arrays, config: Config) -> Arrays:
    from ejkernel.kernels.linear.triton.runner import ScanRunner, States

    runner = ScanRunner(config)
    runner.chunk_lengths = residuals.get("chunk_lengths")
    if "starts" in residuals:
        runner.states.append(States(call["key"], call["value"], residuals["starts"], None))
    return scans.backward(call, residuals, cotangents, runner)


IMPLEMENTATION = Implementation(
    Config,
    unsupported,
    default_config,
    search_space,
    forward,
    backward,
    shared_residuals=False,
    residuals={"starts": "B segments H D Dv"},
)
