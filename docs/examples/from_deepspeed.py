"""DeepSpeed's 1-bit optimizers from the `params` of their JSON, to the same numbers."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import onebit_jax

LearningRate = float | optax.Schedule


def onebit_adam(
    params: Mapping[str, Any], learning_rate: LearningRate | None = None
) -> optax.GradientTransformation:
    """`"type": "OneBitAdam"`, a scale for each tensor as in float32."""
    return onebit_jax.onebit_adamw(
        params["lr"] if learning_rate is None else learning_rate,
        onebit_jax.deepspeed_sign_mean("data"),
        # DeepSpeed drops the gradients of its first call.
        onebit_jax.freeze_at(max(1, params.get("freeze_step", 100_000) - 1)),
        *params.get("betas", (0.9, 0.999)),
        params.get("eps", 1e-8),
        params.get("weight_decay", 0.0),
        bias_correction=False,
        **onebit_jax.AS_PUBLISHED,
    )


def onebit_lamb(
    params: Mapping[str, Any], learning_rate: LearningRate | None = None
) -> optax.GradientTransformation:
    """`"type": "OneBitLamb"`, which exchanges all layers as one buffer."""
    return onebit_jax.onebit_lamb(
        params["lr"] if learning_rate is None else learning_rate,
        onebit_jax.deepspeed_sign_mean("data", fused=True),
        onebit_jax.freeze_at(max(1, params.get("freeze_step", 100_000) - 1)),
        *params.get("betas", (0.9, 0.999)),
        params.get("eps", 1e-8),
        params.get("weight_decay", 0.0),
        bias_correction=False,
        ratio_limits=(params.get("min_coeff", 0.01), params.get("max_coeff", 10.0)),
        ratio_decay=params.get("coeff_beta", 0.9),
        factor_limits=(params.get("factor_min", 0.5), params.get("factor_max", 4.0)),
        factor_change=params.get("factor_threshold", 0.1),
        **onebit_jax.LAMB_AS_PUBLISHED,
    )


def zero_one_adam(
    params: Mapping[str, Any], learning_rate: LearningRate | None = None
) -> optax.GradientTransformation:
    """`"type": "ZeroOneAdam"`, likewise, of a new state `counted`."""
    rate = params["lr"] if learning_rate is None else learning_rate
    return onebit_jax.zero_one_adam(
        # The dropped call is counted, and DeepSpeed's schedules begin after it.
        (lambda count: rate(count - 1)) if callable(rate) else rate,
        onebit_jax.deepspeed_sign_mean("data"),
        onebit_jax.freeze_at(params.get("var_freeze_step", 100_000) + 1),
        *params.get("betas", (0.9, 0.999)),
        params.get("eps", 1e-8),
        params.get("weight_decay", 0.0),
        refresh=onebit_jax.growing_intervals(
            params.get("var_update_scaler", 16), aligned=True
        ),
        sync=onebit_jax.growing_intervals(
            params.get("local_step_scaler", 32_678),
            longest=params.get("local_step_clipper", 16),
            counting="steps",
            aligned=True,
        ),
        **onebit_jax.AS_DEEPSPEED,
    )


def counted(state: Any) -> Any:
    """A new state that holds 0/1 Adam's, with DeepSpeed's first call counted."""
    new = optax.tree.set(
        state,
        lambda path, _: getattr(path[-1], "tuple_name", "") == "ZeroOneAdamState",
        count=jnp.int32(1),
    )
    # A count that is elsewhere would have the step compiled twice.
    return jax.device_put(new, jax.tree.map(lambda x: x.sharding, state))


def warmup(params: Mapping[str, Any], lr: float | None = None) -> optax.Schedule:
    """`"type": "WarmupLR"`: a rise by logarithms or in a line, then level.

    It rises to `warmup_max_lr` or, where that is absent, to the optimizer's `lr`.
    """
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", lr)
    steps = max(2, params.get("warmup_num_steps", 1000))

    def schedule(count):
        step = jnp.maximum(jnp.asarray(count, jnp.float32), 0.0)
        rise = jnp.log1p(step) / math.log(steps)
        if params.get("warmup_type", "log") == "linear":
            rise = step / steps
        return low + (high - low) * jnp.minimum(rise, 1.0)

    return schedule


def warmup_decay(params: Mapping[str, Any]) -> optax.Schedule:
    """`"type": "WarmupDecayLR"`: the rise, by default to 1e-3, then a line to 0."""
    low, high = params.get("warmup_min_lr", 0.0), params.get("warmup_max_lr", 1e-3)
    steps = max(2, params.get("warmup_num_steps", 1000))
    total, rise = params["total_num_steps"], warmup(params, high)

    def schedule(count):
        step = jnp.asarray(count, jnp.float32)
        fall = jnp.maximum(0.0, (total - step) / max(1, total - steps))
        return jnp.where(step < steps, rise(step), low + (high - low) * fall)

    return schedule
