"""The one place where a forward meets its backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from ejkernel.ops.batching import batch_size, fold_backward, fold_forward
from ejkernel.ops.empty import allow_empty, allow_empty_gradient
from ejkernel.ops.operation import Arrays, Call, Dims, Plan
from ejkernel.ops.partitioning import partitioned
from ejkernel.ops.recording import stand_in_backward, stand_in_forward
from ejkernel.ops.settings import deterministic
from ejkernel.ops.sharding import on_mesh_of, varying_like


@contextmanager
def default_rules() -> Iterator[None]:
    """In 32 bits and with JAX's own promotion: what users set otherwise is for the code around a kernel."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _call(plan: Plan, arrays: Arrays) -> Call:
    """The call as it will run: vmap may have made its batch larger than the one the plan was chosen for."""
    call = plan.call(arrays)
    if reasons := plan.implementation.unsupported_config(call, plan.config):
        raise NotImplementedError(
            f"{plan.operation.name}: with the batch of {batch_size(arrays)} that vmap makes, {'; '.join(reasons)}. "
            f"Map over smaller parts (jax.lax.map with batch_size=), or give another platform"
        )
    return call


def _results(plan: Plan) -> dict[str, Dims]:
    """The dimensions of outputs and residuals."""
    known = {**plan.implementation.residuals, **plan.operation.outputs}
    return {name: Dims(names) for name, names in known.items()}


def _whole(plan: Plan) -> frozenset[str]:
    """The arrays that have a row for every one of the batch."""
    return frozenset(name for name, dims in plan.operation.arrays.items() if not dims.broadcasts)


# compiled here, so that calls outside jit share programs too: a plan is hashable and says all that is static
@partial(jax.custom_jvp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def forward(plan: Plan, arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Outputs, and the residuals that a backward needs; `execute` is differentiable, this is not."""
    if plan.recorded is not None:
        return fold_forward(stand_in_forward(plan, forward), _whole(plan))(arrays)

    def one(arrays: Arrays) -> tuple[Arrays, Arrays]:
        with on_mesh_of(arrays), default_rules(), deterministic(plan.deterministic):
            results = plan.implementation.forward(_call(plan, arrays), plan.config)
        return varying_like(results, arrays)  # kernels do not say what their results vary over

    operation = plan.operation
    split = partitioned(one, operation.splits, [operation.arrays], _results(plan)) if plan.implicit else one
    return fold_forward(allow_empty(split, operation, _results(plan)), _whole(plan))(arrays)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def backward(plan: Plan, arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
    """Gradients by array name, from the cotangents of those outputs that have one."""
    trained = frozenset(name for name, dims in plan.operation.arrays.items() if dims.grad)
    whole = trained | _whole(plan)
    if plan.recorded is not None:
        return fold_backward(stand_in_backward(plan), whole)(arrays, residuals, cotangents)

    def one(arrays: Arrays, residuals: Arrays, cotangents: Arrays) -> Arrays:
        given = arrays, residuals, cotangents
        # it may be traced where other settings hold than where its forward was
        with on_mesh_of(given), default_rules(), deterministic(plan.deterministic):
            assert plan.implementation.backward is not None
            gradients = plan.implementation.backward(_call(plan, arrays), residuals, cotangents, plan.config)
        return varying_like(gradients, given)

    operation = plan.operation
    groups = [operation.arrays, _results(plan), _results(plan)]
    split = partitioned(one, operation.splits, groups, operation.arrays, gradients=True) if plan.implicit else one
    return fold_backward(allow_empty_gradient(split, operation), whole)(arrays, residuals, cotangents)


def _differentiated_again(plan: Plan, *_: Any) -> Any:
    raise NotImplementedError(
        f"{plan.operation.name} can be differentiated once, in reverse: it has no second derivative (jax.hessian, "
        "grad of grad) and no forward mode"
    )


forward.defjvp(_differentiated_again)
backward.defjvp(_differentiated_again)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _execute(plan: Plan, arrays: Arrays) -> Arrays:
    return _named(forward(plan, arrays)[0])


def execute(plan: Plan, arrays: Arrays) -> Arrays:
    """Run a plan: differentiable in the arrays the operation declares, and vmap-able in all."""
    # lse of a row that sees nothing is -inf, and a result even where nobody asks for it
    with jax.debug_infs(False), _mesh_said():
        return _executed(plan, arrays)


def _mesh_said() -> Any:
    """The abstract mesh that there is, also where it is none.

    A gradient is traced under a mesh of no axes, what it differentiates under none, and to the cache of JAX 0.10 these
    differ: the forward would be traced twice.
    """
    return jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())


# outside jit, a shard_map has no symbolic zeros (0.10 to 0.12)
@partial(jax.jit, static_argnums=0)
def _executed(plan: Plan, arrays: Arrays) -> Arrays:
    return _execute(plan, arrays)


def _named(arrays: Arrays) -> Arrays:
    """Under names that a policy of jax.checkpoint may keep: `ejkernel_out`, `ejkernel_lse`."""
    return {name: checkpoint_name(x, f"ejkernel_{name}") for name, x in arrays.items()}


def _execute_fwd(plan: Plan, primals: Any):
    arrays = {name: primal.value for name, primal in primals.items()}
    outputs, residuals = forward(plan, arrays)
    outputs = _named(outputs)
    # what is an output too is kept once
    kept = {name: outputs.get(name, x) for name, x in _named(residuals).items()}
    return outputs, (arrays, kept)


def _execute_bwd(plan: Plan, saved: tuple[Arrays, Arrays], cotangents: dict[str, Any]):
    arrays, residuals = saved
    given = {name: ct for name, ct in cotangents.items() if not isinstance(ct, SymbolicZero)}
    given = {name: ct for name, ct in given.items() if ct.dtype != jax.dtypes.float0}
    if given and plan.no_gradient is not None:
        raise NotImplementedError(f"{plan.operation.name} cannot be differentiated: {plan.no_gradient}")
    gradients = backward(plan.gradient or plan, arrays, residuals, given) if given else {}
    return ({name: gradients.get(name) for name in arrays},)


# JAX has symbolic zeros or optimize_remat, not both; residuals are outputs here, so the latter would save nothing
_execute.defvjp(_execute_fwd, _execute_bwd, symbolic_zeros=True)
