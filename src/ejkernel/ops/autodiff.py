"""The one place where a forward meets its backward."""

from functools import partial

import jax

from ejkernel.ops.batching import fold_backward, fold_forward
from ejkernel.ops.operation import Arrays, Plan


def _forward(plan: Plan, arrays: Arrays) -> tuple[Arrays, Arrays]:
    return plan.implementation.forward(plan.call(arrays), plan.config)


def _backward(plan: Plan, arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
    return plan.implementation.backward(plan.call(arrays), residuals, cotangents, plan.config)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def execute(plan: Plan, arrays: Arrays) -> Arrays:
    """Run a plan: differentiable in the arrays the operation declares, and vmap-able in all."""
    return fold_forward(partial(_forward, plan))(arrays)[0]


def _execute_fwd(plan: Plan, arrays: Arrays):
    outputs, residuals = fold_forward(partial(_forward, plan))(arrays)
    return outputs, (arrays, residuals)


def _execute_bwd(plan: Plan, saved: tuple[Arrays, Arrays], cotangents: Arrays):
    arrays, residuals = saved
    floats = {name: ct for name, ct in cotangents.items() if ct.dtype != jax.dtypes.float0}
    gradients = fold_backward(partial(_backward, plan))(arrays, residuals, floats)
    return ({name: gradients.get(name) for name in arrays},)


execute.defvjp(_execute_fwd, _execute_bwd)
