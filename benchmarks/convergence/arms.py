"""The optimizers that `benchmarks.convergence` compares."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import optax

import onebit_jax
from train.core.mesh import AXIS
from train.core.optimizer import decays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WEIGHT_DECAY = 0.01
CLIP = 1.0

ADAM = "adam"
ONEBIT_ADAM = "onebit_adam"
FROZEN = "frozen variance, exact exchange"
DEEPSPEED = "onebit_adam, DeepSpeed's layout"
NO_FEEDBACK = "onebit_adam, no error feedback"
COMPRESSED_GRADIENTS = "adam on compressed gradients"
FOUR_BITS = "adam on 4-bit gradients"
FOUR_BITS_NO_FEEDBACK = "adam on 4-bit gradients, no error feedback"

ARMS = (ADAM, ONEBIT_ADAM, FROZEN, DEEPSPEED, NO_FEEDBACK, COMPRESSED_GRADIENTS)
"""The arms of a whole study, of which the last two must fail."""


def optimizer(
    arm: str, schedule: optax.Schedule, freeze: onebit_jax.FreezeRule
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of an arm.

    Args:
      arm: A name of this module.
      schedule: The learning rate.
      freeze: When the variance is frozen, where it is.

    Returns:
      A transformation for `onebit_jax.data_parallel` over the axis `data`.
    """
    bits, exact = onebit_jax.sign_mean(AXIS), onebit_jax.exact_mean(AXIS)
    four = onebit_jax.quantized_mean(AXIS, 4)

    def adam(exchange: onebit_jax.Exchange) -> optax.GradientTransformation:
        return optax.chain(
            exchange, optax.adamw(schedule, weight_decay=WEIGHT_DECAY, mask=decays)
        )

    def onebit(
        exchange: onebit_jax.Exchange, **options: Any
    ) -> optax.GradientTransformation:
        return onebit_jax.onebit_adamw(
            schedule,
            exchange,
            freeze,
            weight_decay=WEIGHT_DECAY,
            mask=decays,
            **options,
        )

    made: dict[str, Callable[[], optax.GradientTransformation]] = {
        ADAM: lambda: adam(exact),
        ONEBIT_ADAM: lambda: onebit(bits),
        FROZEN: lambda: onebit(exact),
        DEEPSPEED: lambda: onebit(
            onebit_jax.deepspeed_sign_mean(AXIS),
            bias_correction=False,
            **onebit_jax.AS_PUBLISHED,
        ),
        NO_FEEDBACK: lambda: onebit(WithoutFeedback(bits, bits.axes)),
        COMPRESSED_GRADIENTS: lambda: adam(bits),
        FOUR_BITS: lambda: adam(four),
        FOUR_BITS_NO_FEEDBACK: lambda: adam(WithoutFeedback(four, four.axes)),
    }
    if arm not in made:
        raise SystemExit(f"There is no arm {arm!r}: choose of {', '.join(made)}.")
    return optax.chain(onebit_jax.clip_by_worker_norm(CLIP, AXIS), made[arm]())


@dataclasses.dataclass(frozen=True)
class WithoutFeedback(onebit_jax.Exchange):
    """An exchange whose errors are forgotten instead of sent later, and cause no delay.

    Attributes:
      exchange: with errors.
      axes: its own.
    """

    exchange: onebit_jax.Exchange
    axes: tuple[str, ...]

    def init(self, params: Any) -> Any:
        """The exchange's state."""
        return self.exchange.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """The exchange's update, with errors of zero."""
        agreed, errors = self.exchange.update(updates, state, params)
        return agreed, jax.tree.map(lambda e: e * 0, errors)

    def wire_cost(
        self, params: Any, axis_sizes: Mapping[str, int]
    ) -> tuple[onebit_jax.Transfer, ...]:
        """The exchange's."""
        return self.exchange.wire_cost(params, axis_sizes)
