"""Local steps whose last synchronisation leaves nothing behind in its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import optax

import onebit_jax

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int32


@onebit_jax.optimizer_state
class LastErrorsState(NamedTuple):
    """State of `with_last_errors`.

    Attributes:
      sent: How often the errors were sent: once, in the last step.
      steps: That of the local steps.
    """

    sent: Int32[Array, ""]
    steps: Any

    is_opaque = True

    def distance(self) -> Any:
        """That of the local steps."""
        return self.steps.distance()

    def steps_by_stage(self) -> dict[str, Array]:
        """Those of the local steps, and the steps that have sent errors.

        Such a step synchronises, too. It takes the place of a local one, which sends
        nothing, so that all steps are counted once and all bytes as well.
        """
        steps = self.steps.steps_by_stage()
        return {**steps, "local": steps["local"] - self.sent, "errors": self.sent}


def with_last_errors(
    steps: optax.GradientTransformationExtraArgs,
    exchange: onebit_jax.Exchange,
    last: int | None,
) -> optax.GradientTransformationExtraArgs:
    """Local steps that end a run with an exchange of what their messages lacked.

    Args:
      steps: Local steps by an exchange that adds no outer momentum, and whose last step
        synchronises.
      exchange: What the workers do with the errors of that exchange, whose blocks it
        shares.
      last: The steps of the run; None for no such step.

    Returns:
      A transformation with the stages of the local steps, and 'errors'.
    """

    def init(params: optax.Params) -> Any:
        return LastErrorsState(jnp.zeros([], jnp.int32), steps.init(params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        new: Any
        agreed, new = steps.update(updates, state.steps, params, **extra_args)

        def send() -> tuple[optax.Updates, Any, Array]:
            zeros = optax.tree.zeros_like(updates)  # Each worker's own.
            lacked, errors = exchange.update(zeros, new.exchange)
            return optax.tree.add(agreed, lacked), errors, state.sent + 1

        stages = {"before": lambda: (agreed, new.exchange, state.sent), "errors": send}
        is_last = (new.count == (last or -1)).astype(jnp.int32)
        agreed, errors, sent = onebit_jax.run_stage(stages, is_last)
        return agreed, LastErrorsState(sent, new._replace(exchange=errors))

    return optax.GradientTransformationExtraArgs(init, update)
