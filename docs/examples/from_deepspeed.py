"""DeepSpeed's 1-bit optimizers and schedules by their settings, to the same numbers.

Each function takes the `params` of its JSON by name, `onebit_adam(**params)`. A
schedule goes in as the rate, `onebit_adam(**params | {"lr": schedule})`, which is
`warmup(lr, **settings)` or `warmup_decay(**settings)`. Of several groups of parameters
`mask` says which leaves decay, as Optax's; `exp_avg_mask` is DeepSpeed's, a function.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax
from deepspeed_exchange import DeepSpeedSignMean

import onebit_jax

LearningRate = float | optax.Schedule
Mask = Callable[[optax.Updates], optax.Updates]


@dataclasses.dataclass(frozen=True)
class Masked(onebit_jax.Exchange):
    """`exp_avg_mask`: zero where what is agreed has no gradients.

    Without it a row that has had none has a variance of zero and, by its signs, a
    momentum of the scale's size, and its step is their quotient, scale / eps.
    """

    axes: tuple[str, ...]
    exchange: onebit_jax.Exchange
    mask: Mask

    def is_alone(self):
        """As the exchange."""
        return self.exchange.is_alone()

    def init(self, params):
        """The exchange's state."""
        return self.exchange.init(params)

    def update(self, updates, state, params=None):
        """The exchange's means, masked."""
        mean, state = self.exchange.update(updates, state, params)
        return self.mask(mean), state


def exchange_of(mask: Mask | None, *, fused: bool = False) -> onebit_jax.Exchange:
    """DeepSpeed's exchange, masked where there is a mask."""
    exchange = DeepSpeedSignMean(fused=fused)
    if mask is None:
        return exchange
    if not callable(mask):
        raise TypeError(
            "exp_avg_mask is a function here, from a tree to one with zeros set."
        )
    return Masked(exchange.axes, exchange, mask)


def check_numbers(*values: Any) -> None:
    """Refuses words in the place of numbers, as "auto" of Hugging Face's JSON."""
    for value in values:
        if isinstance(value, str):
            raise TypeError(f"{value!r} stands for a number: give the number.")


def check(others: dict[str, Any]) -> None:
    """Refuses what DeepSpeed's optimizers do not know, or refuse themselves."""
    unused = {"bias_correction", "eps_inside_sqrt", "cuda_aware", "comm_backend_name"}
    refused = {"amsgrad", "max_grad_norm"}
    for name, value in others.items():
        if name in refused and value:
            raise TypeError(f"DeepSpeed refuses {name!r} too: leave it out.")
        if name not in unused | refused:
            raise TypeError(
                f"{name!r} is not a setting of this optimizer: correct its name, or "
                "leave it out."
            )


def onebit_adam(
    lr: LearningRate,
    freeze_step: int = 100_000,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    exp_avg_mask: Mask | None = None,
    **others: Any,
) -> optax.GradientTransformation:
    """`"type": "OneBitAdam"`, a scale for each tensor as in float32."""
    check(others)
    check_numbers(lr, freeze_step, betas, eps, weight_decay)
    return onebit_jax.onebit_adamw(
        lr,
        exchange_of(exp_avg_mask),
        # DeepSpeed drops the gradients of its first call.
        onebit_jax.freeze_at(max(1, freeze_step - 1)),
        *betas,
        eps,
        weight_decay,
        mask,
        bias_correction=False,
        compressed=onebit_jax.Compressed.published(),
    )


def onebit_lamb(
    lr: LearningRate,
    freeze_step: int = 100_000,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    mask: Any = None,
    exp_avg_mask: Mask | None = None,
    **others: Any,
) -> optax.GradientTransformation:
    """`"type": "OneBitLamb"`, which exchanges all layers as one buffer."""
    check(others)
    check_numbers(lr, freeze_step, betas, eps, weight_decay)
    return onebit_jax.onebit_lamb(
        lr,
        exchange_of(exp_avg_mask, fused=True),
        onebit_jax.freeze_at(max(1, freeze_step - 1)),
        *betas,
        eps,
        weight_decay,
        mask,
        bias_correction=False,
        ratio_limits=(min_coeff, max_coeff),
        ratio_decay=coeff_beta,
        factor_limits=(factor_min, factor_max),
        factor_change=factor_threshold,
        compressed=onebit_jax.Compressed.published(),
    )


def zero_one_adam(
    lr: LearningRate,
    var_freeze_step: int = 100_000,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32_678,
    local_step_clipper: int = 16,
    mask: Any = None,
    exp_avg_mask: Mask | None = None,
    **others: Any,
) -> optax.GradientTransformation:
    """`"type": "ZeroOneAdam"`, likewise."""
    check(others)
    check_numbers(lr, var_freeze_step, betas, eps, weight_decay)
    tx = onebit_jax.zero_one_adam(
        # The dropped call is counted, and DeepSpeed's schedules begin after it.
        (lambda count: lr(count - 1)) if callable(lr) else lr,
        exchange_of(exp_avg_mask),
        onebit_jax.freeze_at(var_freeze_step + 1),
        *betas,
        eps,
        weight_decay,
        mask,
        refresh=onebit_jax.growing_intervals(var_update_scaler, aligned=True),
        sync=onebit_jax.growing_intervals(
            local_step_scaler,
            longest=local_step_clipper,
            counting="steps",
            aligned=True,
        ),
        before_freeze="gradient",
        decay="accumulated",
        bias_correction=False,
        compressed=onebit_jax.Compressed.published(),
    )
    return tx._replace(init=lambda params: counted(tx.init(params)))


def counted(state: Any) -> Any:
    """A new state of 0/1 Adam with DeepSpeed's first call counted."""
    return optax.tree.set(
        state,
        lambda path, _: getattr(path[-1], "tuple_name", "") == "ZeroOneAdamState",
        count=jnp.int32(1),
    )


def warmup(
    lr: float,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> optax.Schedule:
    """`"type": "WarmupLR"`: a rise by logarithms or in a line, then level.

    It rises to `warmup_max_lr` or, where that is absent, to the optimizer's `lr`.
    """
    check_numbers(lr, warmup_min_lr, warmup_max_lr, warmup_num_steps)
    high = lr if warmup_max_lr is None else warmup_max_lr
    steps = max(2, warmup_num_steps)

    def schedule(count):
        step = jnp.maximum(jnp.asarray(count, jnp.float32), 0.0)
        rise = jnp.log1p(step) / math.log(steps)
        if warmup_type == "linear":
            rise = step / steps
        return warmup_min_lr + (high - warmup_min_lr) * jnp.minimum(rise, 1.0)

    return schedule


def warmup_decay(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 1e-3,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> optax.Schedule:
    """`"type": "WarmupDecayLR"`: the rise, by default to 1e-3, then a line to 0."""
    low, high = warmup_min_lr, warmup_max_lr
    steps = max(2, warmup_num_steps)
    rise = warmup(high, low, high, steps, warmup_type)

    def schedule(count):
        step = jnp.asarray(count, jnp.float32)
        left = (total_num_steps - step) / max(1, total_num_steps - steps)
        fall = low + (high - low) * jnp.maximum(0.0, left)
        return jnp.where(step < steps, rise(step), fall)

    return schedule
