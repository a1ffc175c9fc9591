"""One odd argument in a call of any public function: a clear error or an answer; never a crash, a hang or a nan.

`make hardening` makes ten thousand such calls: `EJKERNEL_ODD_CALLS` says how many.
"""

import inspect
import math
import os
import re

import jax
import jax.numpy as jnp
import pytest

from harness.odd_calls import CALLS, Call, drawn

EACH = -(-int(os.environ.get("EJKERNEL_ODD_CALLS", "400")) // len(CALLS))
# of those that turn out to be legal, how many are computed: compiling takes a thousand times as long as checking
COMPUTED = -(-EACH // 25)


def refusal(call: Call) -> str | None:
    """What is said against a call, if anything."""
    try:
        call.shapes()
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return None


def names_an_argument(call: Call, message: str) -> bool:
    """As the caller knows it. Of configs the fields are named, and what a function given raises passes through."""
    arguments = inspect.signature(call.function).parameters
    return call.changed in ("cfg", "init_bias") or bool({*re.findall(r"\w+", message)} & {*arguments})


@pytest.mark.parametrize("sample", CALLS)
def test_odd_arguments(sample):
    legal = []
    for call in (drawn(sample, seed) for seed in range(EACH)):
        message = refusal(call)
        legal += [call] if message is None else []
        assert message is None or names_an_argument(call, message), f"{call}: {message}"
    finite = [call for call in legal if not isinstance(call.value, float) or math.isfinite(call.value)]
    for call in finite[:COMPUTED]:
        found = jax.jit(lambda call=call: call.function(**call.arguments))()
        for x in jax.tree.leaves(found):
            assert not jnp.isnan(x.astype(jnp.float32)).any(), str(call)
