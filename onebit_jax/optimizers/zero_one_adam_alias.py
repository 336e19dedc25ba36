"""0/1 Adam, ready to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optax

from onebit_jax.optimizers.parts.bound import BOUND
from onebit_jax.optimizers.parts.checks import check_parts, gradient_mean
from onebit_jax.optimizers.parts.floor import FLOOR
from onebit_jax.optimizers.parts.freeze import warn_if_rising
from onebit_jax.optimizers.parts.intervals import IntervalRule, growing_intervals
from onebit_jax.optimizers.parts.moments import as_float32
from onebit_jax.optimizers.zero_one_adam import BeforeFreeze, Decay, ZeroOneAdam

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.typing import ArrayLike

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.parts.floor import FloorAtMean
    from onebit_jax.optimizers.parts.freeze import FreezeRule

REFRESH = growing_intervals(16)
SYNC = growing_intervals(32768, longest=16)

AS_DEEPSPEED: dict[str, Any] = {
    "before_freeze": "gradient",
    "decay": "accumulated",
    "bias_correction": False,
    "floor": None,
    "bound": None,
}
"""Arguments of `zero_one_adam` with which it computes what DeepSpeed 0.19.6 does.

With `deepspeed_sign_mean` as the exchange, `freeze_at(var_freeze_step + 1)`,
`refresh=growing_intervals(var_update_scaler, aligned=True)` and
`sync=growing_intervals(local_step_scaler, longest=local_step_clipper,
counting='steps', aligned=True)`.

DeepSpeed's first call only raises its count. For its numbers the count has to begin
at 1: `state = state._replace(count=state.count + 1)` after `init`.

Without floor and bound, the step of values without gradients is the scale / eps, from
the first step of the stage 'gradient' on.
"""


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    refresh: IntervalRule = REFRESH,
    variance_exchange: Exchange | None = None,
    sync: IntervalRule = SYNC,
    before_freeze: BeforeFreeze = "momentum",
    decay: Decay = "agreed",
    bias_correction: bool = True,
    floor: FloorAtMean | None = FLOOR,
    bound: ArrayLike | None = BOUND,
) -> optax.GradientTransformationExtraArgs:
    r"""0/1 Adam with decoupled weight decay.

    Each worker i takes steps of its own, with :math:`\gamma_t = \alpha_t / (1 -
    \beta_1^t)`,

    .. math::
      m^{(i)} &\leftarrow \beta_1 m^{(i)} + (1 - \beta_1) g_t^{(i)} \\
      d^{(i)} &\leftarrow d^{(i)} - \gamma_t \,\mathrm{clip}\left(
      \frac{m^{(i)}}{\sqrt{\hat v} + \epsilon}, \pm B_t\right), \quad
      \Gamma \leftarrow \Gamma + \gamma_t

    and computes its gradients at :math:`p + d^{(i)}` (`onebit_jax.local_params`).
    :math:`B_t` is B in a step that the worker takes alone. In one that synchronises
    it is n B, so that none of the n workers alone moves the mean by more than B, and,
    with :math:`E` the exchange,

    .. math::
      \bar m &= -\tfrac1\Gamma E[d^{(i)} (\sqrt{\hat v} + \epsilon)], \quad
      p \leftarrow p - \Gamma \,\mathrm{clip}\left(
      \frac{\bar m}{\sqrt{\hat v} + \epsilon}, \pm B\right) \\
      m^{(i)} &\leftarrow \bar m, \quad
      d^{(i)} \leftarrow 0, \quad \Gamma \leftarrow 0

    and in one that refreshes the variance, before all of this,
    :math:`v \leftarrow \beta_2 v + (1 - \beta_2) \bar g_t^2` with the exact mean of
    the gradients. Until the freeze every step synchronises and those that `refresh`
    says refresh; after it the variance stays, and those that `sync` says synchronise.
    One worker alone, and one host by `hierarchical`, refreshes in every step and
    freezes nothing, as Adam does.

    Where the paper and DeepSpeed 0.19.6 differ, the paper's is the default, and
    `**AS_DEEPSPEED` is the other. DeepSpeed exchanges gradients until the freeze,
    exactly where the variance is due, and forgets the errors at the freeze
    (`before_freeze`); its weight decay enters what is exchanged, and so the momentum
    (`decay`); it corrects no moment for its start from zero. Here as there it is the
    momentum with this step's gradient that is accumulated: without it a
    synchronisation in every step would drop the gradients.

    Args:
      learning_rate: :math:`\alpha`, a number, or a schedule from the step that does not
        fall sharply: errors of the exchange are as large as the learning rates of the
        steps that made them; over far smaller ones they make the momentum explode.
      exchange: what workers do with what they have accumulated, such as `sign_mean`.
      freeze: when the variance is refreshed no more, such as `freeze_at(1000)`; not
        before the learning rate's warm-up ends. `freeze_when_stable` freezes in steps
        that refresh alone, and compares with the variance as it was Δ steps before:
        where refreshes are nearly as far apart it tells nothing, so limit their
        intervals, as `growing_intervals(16, longest=8)` does, or take `freeze_at`.
      b1: decay of the momentum.
      b2: decay of the variance, each time that it is refreshed.
      eps: added to the root of the variance.
      weight_decay: :math:`\lambda`, a number or a schedule from the step. An 'agreed'
        decay is multiplied by the learning rate, as in `optax.adamw`, an 'accumulated'
        one by :math:`\gamma_t`, which bias correction makes larger in the first steps.
      mask: a tree of booleans like the parameters', or a function from parameters to
        one, that says which leaves decay; None for all.
      refresh: which steps before the freeze refresh the variance, beside the first.
      variance_exchange: what workers do with the gradients that refresh it, such as
        `quantized_mean('data', 4)`; None for the exact mean.
      sync: which steps after the freeze synchronise; `every(1)` for all. By default,
        which is the paper's, the first 32,768 all do: give it for shorter runs.
      before_freeze: what is exchanged until the freeze, 'momentum' or 'gradient'.
      decay: 'agreed' for a decay of the agreed parameters in every step, 'accumulated'
        for a decay of each worker's own that is exchanged with its steps.
      bias_correction: whether both moments are corrected for their start from zero.
      floor: what becomes of variances near zero at the freeze; None to leave them.
      bound: B, the largest agreed step of a coordinate in units of :math:`\Gamma`;
        None for none.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients, at its own parameters, and with the agreed parameters.
      In a chain it must be the last: what scaled its updates would not scale the
      workers' own steps. Its updates are those of the agreed parameters and contain the
      learning rate; but for the decay they are zero in a step that does not
      synchronise. It takes one
      extra argument, `stage`: 'variance', 'gradient' (where gradients are exchanged),
      'compressed' or 'local', which has no collective; None for a program of all.

    Raises:
      TypeError: if an argument is not of its type, or an exchange returns votes.
      ValueError: if `before_freeze` or `decay` is neither of its values, the bound is
        not more than 0, or, from `update`, without parameters.

    Warns:
      UserWarning: if the variance may be frozen while the learning rate still rises.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.zero_one_adam(
      ...     0.1,
      ...     onebit_jax.sign_mean('data'),
      ...     onebit_jax.freeze_at(1),
      ...     sync=onebit_jax.every(2),
      ... )
      >>> batch = jnp.array([[3.0, -5.0], [1.0, -1.0]])  # a line a worker
      >>> run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, workers=2)
      >>> params, state = run.init(jnp.zeros(2))
      >>> for _ in range(3):
      ...     params, state, loss = run.step(params, state, batch)
      ...     print(params.round(3))
      [-0.1  0.1]
      [-0.1  0.1]
      [-0.3  0.3]

    References:
      Lu et al., 0/1 Adam, 2022, https://arxiv.org/abs/2202.06009, Algorithm 1 and
      section 6.
    """
    check_parts("0/1 Adam", exchange, freeze, floor, bound)
    _check(refresh, sync, before_freeze, decay)
    warn_if_rising(learning_rate, freeze)
    if not callable(weight_decay):
        weight_decay = as_float32(weight_decay)
    adam = ZeroOneAdam(
        learning_rate=learning_rate,
        exchange=exchange,
        freeze=freeze,
        b1=as_float32(b1),
        b2=as_float32(b2),
        eps=as_float32(eps),
        refresh=refresh,
        variance_exchange=gradient_mean(
            variance_exchange, exchange, "variance_exchange"
        ),
        sync=sync,
        before_freeze=before_freeze,
        decay=decay,
        weight_decay=optax.add_decayed_weights(weight_decay, mask),
        bias_correction=bias_correction,
        floor=floor,
        bound=bound,
    )
    init: Any = adam.init
    return optax.GradientTransformationExtraArgs(init, adam.update)


def _check(refresh: Any, sync: Any, before_freeze: str, decay: str) -> None:
    for name, rule in (("refresh", refresh), ("sync", sync)):
        if not isinstance(rule, IntervalRule):
            raise TypeError(
                f"{name} must be a rule of intervals, such as growing_intervals(16), "
                f"got {rule!r}."
            )
    if before_freeze not in ("momentum", "gradient"):
        raise ValueError(
            f"before_freeze must be 'momentum' or 'gradient', got {before_freeze!r}."
        )
    if decay not in ("agreed", "accumulated"):
        raise ValueError(f"decay must be 'agreed' or 'accumulated', got {decay!r}.")
