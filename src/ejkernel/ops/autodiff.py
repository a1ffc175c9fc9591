"""The one place where a forward meets its backward."""

from functools import partial

import jax

from ejkernel.ops.batching import batch_size, fold_backward, fold_forward
from ejkernel.ops.empty import allow_empty, allow_empty_gradient
from ejkernel.ops.operation import Arrays, Call, Plan
from ejkernel.ops.sharding import among


def _call(plan: Plan, arrays: Arrays) -> Call:
    """The call as it will run: vmap may have made its batch larger than the one the plan was chosen for."""
    call = plan.call(arrays)
    check = getattr(plan.implementation, "unsupported_config", None)
    if check is not None and (reasons := check(call, plan.config)):
        raise NotImplementedError(
            f"{plan.operation.name}: with the batch of {batch_size(arrays)} that vmap makes, {'; '.join(reasons)}. "
            f"Map over smaller parts (jax.lax.map with batch_size=), or give another platform"
        )
    return call


# compiled here, so that calls outside jit share programs too: a plan is hashable and says all that is static
@partial(jax.jit, static_argnums=0)
def _forward(plan: Plan, arrays: Arrays) -> tuple[Arrays, Arrays]:
    def forward(arrays: Arrays) -> tuple[Arrays, Arrays]:
        with among(arrays):
            return plan.implementation.forward(_call(plan, arrays), plan.config)

    whole = frozenset(name for name, dims in plan.operation.arrays.items() if not dims.broadcasts)
    return fold_forward(allow_empty(forward), whole)(arrays)


@partial(jax.jit, static_argnums=0)
def _backward(plan: Plan, arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
    def backward(arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
        with among((arrays, residuals, cotangents)):
            return plan.implementation.backward(_call(plan, arrays), residuals, cotangents, plan.config)

    trained = [name for name, dims in plan.operation.arrays.items() if dims.grad]
    return fold_backward(allow_empty_gradient(backward, trained))(arrays, residuals, cotangents)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def execute(plan: Plan, arrays: Arrays) -> Arrays:
    """Run a plan: differentiable in the arrays the operation declares, and vmap-able in all."""
    return _forward(plan, arrays)[0]


def _execute_fwd(plan: Plan, arrays: Arrays):
    outputs, residuals = _forward(plan, arrays)
    return outputs, (arrays, residuals)


def _execute_bwd(plan: Plan, saved: tuple[Arrays, Arrays], cotangents: Arrays):
    arrays, residuals = saved
    floats = {name: ct for name, ct in cotangents.items() if ct.dtype != jax.dtypes.float0}
    gradients = _backward(plan.gradient or plan, arrays, residuals, floats)
    return ({name: gradients.get(name) for name in arrays},)


execute.defvjp(_execute_fwd, _execute_bwd)
