"""Accumulating gradients over several steps before they are exchanged."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.transforms.branch import no_update
from onebit_jax.workers.axes import (
    AxisNames,
    as_tuple,
    check_all_axes,
)
from onebit_jax.workers.per_worker import per_worker
from onebit_jax.workers.states import optimizer_state

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int32


@optimizer_state
class AccumulateState(NamedTuple):
    """State of `accumulate`.

    Attributes:
      micro_step: number of gradients accumulated since the last update.
      own: each worker's own sum of its gradients so far, float32.
      inner: state of the wrapped transformation.
    """

    micro_step: Int32[Array, ""]
    own: Any
    inner: Any

    wrapper = "accumulate"


def accumulate(
    tx: optax.GradientTransformation, steps: int, axis: AxisNames
) -> optax.GradientTransformationExtraArgs:
    r"""Updates once every so many steps, with the mean of their gradients.

    .. math:: \bar g^{(i)} = \tfrac1k \textstyle\sum_{j=1}^k g_j^{(i)}

    Each worker accumulates its own gradients, in float32, and nothing is exchanged
    in between; the updates in between are zero. The transformation is given the mean of
    k steps, in the gradients' dtype; its schedules and freeze rules count its
    updates, one in k steps.

    `optax.MultiSteps` cannot be used around an exchange: it takes the accumulated
    gradients for the same on all workers.

    Args:
      tx: the transformation, collectives included.
      steps: number of gradients to an update, from 1 to 2³¹ - 1.
      axis: name, or names, of the mesh axes whose members are the workers.

    Returns:
      A transformation.

    Raises:
      ValueError: if `steps` is out of range. From `update`, if an axis is not bound,
        gradients are averaged already or differ over further axes than these, or the
        state is one of another number of workers.
      TypeError: if `steps` is not an integer, or, from `update`, for gradients that are
        not real floating-point.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> tx = accumulate(onebit_jax.exact_mean('data'), 2, 'data')
      >>> def both_updates(first, second):
      ...     updates, state = tx.update(first, tx.init(first))
      ...     return updates, tx.update(second, state)[0]
      >>> own = jnp.array([[1.0], [2.0]]), jnp.array([[3.0], [6.0]])
      >>> first, second = jax.vmap(both_updates, axis_name='data')(*own)
      >>> print(first[0], second[0])
      [-0.] [3.]
    """
    steps = operator.index(steps)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if steps >= 2**31:
        raise ValueError(f"steps must be at most 2**31 - 1, got {steps}.")
    one = _Accumulate(optax.with_extra_args_support(tx), steps, as_tuple(axis))
    return optax.GradientTransformationExtraArgs(one.init, one.update)


@dataclasses.dataclass(frozen=True)
class _Accumulate:
    inner: optax.GradientTransformationExtraArgs
    steps: int
    axes: tuple[str, ...]

    @property
    def sums(self) -> optax.GradientTransformationExtraArgs:
        """From each worker's own gradients to their sums so far."""
        return per_worker(_SUM, self.axes)

    def init(self, params: optax.Params) -> Any:
        return AccumulateState(
            micro_step=jnp.zeros([], jnp.int32),
            own=self.sums.init(params),
            inner=self.inner.init(params),
        )

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        check_all_axes(updates, self.axes, "accumulate")
        sums, own = self.sums.update(updates, state.own)
        micro_step = state.micro_step + 1

        @jax.jit  # traced once, for `no_update` and for the branch
        def take() -> tuple[optax.Updates, Any]:
            # Of as many as there are: a state may have been saved with other `steps`.
            mean = jax.tree.map(
                lambda x, g: (x / micro_step.astype(jnp.float32)).astype(g.dtype),
                sums,
                updates,
            )
            new_updates, inner_state = self.inner.update(
                mean, state.inner, params, **extra_args
            )
            return new_updates, (inner_state, jax.tree.map(jnp.zeros_like, own))

        def wait() -> tuple[optax.Updates, Any]:
            return no_update(take), (state.inner, own)

        due = micro_step >= self.steps
        new_updates, (inner_state, own) = lax.cond(due, take, wait)
        return new_updates, AccumulateState(
            micro_step=jnp.where(due, 0, micro_step),
            own=own,
            inner=inner_state,
        )


def _zeros(params: optax.Params) -> optax.Params:
    return optax.tree.zeros_like(params, dtype=jnp.float32)


def _add(updates: optax.Updates, state: Any, params: Any = None) -> tuple[Any, Any]:
    del params
    sums = jax.tree.map(lambda x, g: x + g.astype(jnp.float32), state, updates)
    return sums, sums


_SUM = optax.GradientTransformation(_zeros, _add)
