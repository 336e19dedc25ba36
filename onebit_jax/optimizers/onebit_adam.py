"""1-bit Adam: warm-up Adam, the variance freeze, then one bit a parameter."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypedDict

import optax

from onebit_jax.optimizers.onebit_adam_stages import OnebitAdam
from onebit_jax.optimizers.parts.bound import BOUND
from onebit_jax.optimizers.parts.checks import check_parts, gradient_mean
from onebit_jax.optimizers.parts.floor import FLOOR
from onebit_jax.optimizers.parts.growth import GrowthByMeanSquares
from onebit_jax.optimizers.parts.intervals import IntervalRule
from onebit_jax.optimizers.parts.moments import as_float32

if TYPE_CHECKING:
    from jax.typing import ArrayLike

    from onebit_jax.exchanges.exchange import Exchange
    from onebit_jax.optimizers.onebit_adam_stages import Send
    from onebit_jax.optimizers.parts.floor import FloorAtMean
    from onebit_jax.optimizers.parts.freeze import FreezeRule

LEAD = 1.14
"""Of the leads tried in docs/studies/decoder.md, that of the smallest loss."""
GROWTH = GrowthByMeanSquares()


class Parts(TypedDict):
    """The message of the compressed stage, and the parts that can be left out."""

    send: Send
    lead: ArrayLike | None
    growth: GrowthByMeanSquares | None
    floor: FloorAtMean | None
    bound: ArrayLike | None


AS_PUBLISHED: Parts = {
    "send": "momentum",
    "lead": None,
    "growth": None,
    "floor": None,
    "bound": None,
}
"""The parts of the paper's compressed stage: momentum and frozen variance alone.

Without floor and bound, values that had no gradients in the warm-up, such as positions
beyond its sequences, have a variance of zero and a step of the scale / eps.
"""


def scale_by_onebit_adam(
    exchange: Exchange,
    freeze: FreezeRule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    *,
    bias_correction: bool = True,
    warmup_exchange: Exchange | None = None,
    refresh: IntervalRule | None = None,
    send: Send = "momentum",
    lead: ArrayLike | None = LEAD,
    growth: GrowthByMeanSquares | None = GROWTH,
    floor: FloorAtMean | None = FLOOR,
    bound: ArrayLike | None = BOUND,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales each worker's own gradients by 1-bit Adam.

    In the warm-up, Adam on the exact mean of the gradients; a single worker, which has
    nobody to exchange with, stays in it. After the freeze, with
    :math:`v` as it was then, after T steps, and :math:`E` the exchange,

    .. math::
      m_t &= E[\beta_1 m_{t-1} + (1 - \beta_1) g_t^{(i)}], \quad
      \hat m_t = \frac{m_t}{1 - \beta_1^t} \\
      u_t &= \mathrm{clip}\left(\frac{\hat m_t + d (\hat m_t - \hat m_{t-1})}
      {\sqrt{\rho_t v / (1 - \beta_2^T)} + \epsilon}, \pm B\right)

    The paper has no growth :math:`\rho`, floor of v, bound B and lead d. Without them
    (`**AS_PUBLISHED`) and without bias correction it is the paper's.

    Args:
      exchange: what workers do after the freeze with their momenta, or with
        `send='gradient'` their gradients, such as `sign_mean('data')`.
      freeze: when the variance is frozen; not before the learning rate has risen,
        which nothing here can see. `onebit_adam` knows the learning rate, and warns.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      bias_correction: whether both moments are corrected for their start from
        zero. The variance's correction is frozen with it.
      warmup_exchange: what workers do with their gradients in the warm-up, such as
        `quantized_mean('data', 4)` for an eighth of the bytes; None for the exact
        mean. The errors of this exchange stay in the state after the freeze, where
        steps of the stage 'warmup' alone use them.
      refresh: which steps of the warm-up are Adam's and refresh the variance, such as
        `growing_intervals(32, longest=8)`; the first always is one. The steps between
        them, of the stage 'between', exchange as those after the freeze do. A variance
        that was last refreshed k steps ago counts the new squares for k steps, with
        :math:`1 - \beta_2^k`: two thirds of it are the last gradient's where k is
        1,000. Floor, bound and, in the steps between, lead act in the warm-up too.
        Only steps that refresh ask the freeze rule, so that the freeze may come up to
        an interval later; `freeze_when_stable`, which compares variances a number of
        steps apart, is refused. None for all steps of the warm-up.
      send: 'momentum' to exchange momenta, as the paper does, 'gradient' to exchange
        gradients and take their momentum, :math:`m_t = \beta_1 m_{t-1} +
        (1 - \beta_1) E[g_t^{(i)}]`.
      lead: d, the steps by which the momentum is extrapolated in steps that exchange
        by `exchange`, whose error feedback delays it. d = b1 is Nesterov's momentum.
        None for none. More than the default without a bound has diverged.
      growth: :math:`\rho_t`, of gradients that grow after the freeze and would
        otherwise raise the learning rate with them; None for 1.
      floor: what becomes of variances near zero at the freeze; None to leave them.
      bound: B, the largest update of a coordinate after the freeze; None for none. A
        sign cannot say how small a value is: where a block holds coordinates of very
        different variances, those of the smallest get the largest updates. Adam's
        own are at most :math:`(1-\beta_1)/\sqrt{(1-\beta_2)(1-\beta_1^2/\beta_2)}`,
        7.3 with the default decays.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with
      each worker's own gradients. Moments are float32 whatever the parameters are;
      updates have the gradients' dtype. `update` takes one extra argument, `stage`:
      None (default) compiles all stages into one program that chooses by the
      state; 'warmup', 'between' or 'compressed' compiles one. One compressed step in
      `growth.period` measures the growth; its bytes are counted apart, as those of
      the stage 'compressed/measuring'. A
      'warmup' step with a frozen variance exchanges gradients as the warm-up does, and
      leaves the variance frozen; a compressed step with a variance that is not frozen
      freezes it as it is, and must not be the first step: there is no variance yet
      (`data_parallel` refuses it).

    Raises:
      TypeError: if an argument is not of its type, or an exchange returns votes.
      ValueError: if `send` is neither 'gradient' nor 'momentum', the lead is negative
        or not finite, the bound is not more than 0, the exchanges' axes differ, or
        `freeze_when_stable` is to compare variances of steps that do not refresh.

    Example:
      >>> import jax.numpy as jnp, onebit_jax, optax
      >>> tx = optax.chain(
      ...     scale_by_onebit_adam(
      ...         onebit_jax.sign_mean('data'), onebit_jax.freeze_at(1)
      ...     ),
      ...     optax.scale_by_learning_rate(0.1),
      ... )
      >>> batch = jnp.array([[3.0, -5.0], [1.0, -1.0]])  # a line a worker
      >>> run = onebit_jax.simulated(lambda p, x: jnp.mean(x @ p), tx, workers=2)
      >>> params, state = run.init(jnp.zeros(2))
      >>> for _ in range(2):
      ...     params, state, loss = run.step(params, state, batch)
      >>> print(params.round(3))
      [-0.2  0.2]

    References:
      Tang et al., 1-bit Adam, 2021, https://arxiv.org/abs/2102.02888,
      Algorithm 1.
    """
    check_parts("1-bit Adam", exchange, freeze, floor, bound)
    if send not in ("gradient", "momentum"):
        raise ValueError(f"send must be 'gradient' or 'momentum', got {send!r}.")
    for name, part, kind in (
        ("refresh", refresh, IntervalRule),
        ("growth", growth, GrowthByMeanSquares),
    ):
        if part is not None and not isinstance(part, kind):
            raise TypeError(f"{name} must be a {kind.__name__} or None, got {part!r}.")
    if refresh is not None and freeze.by_norm:
        raise ValueError(
            "freeze_when_stable needs a variance that is refreshed in every step: "
            "leave refresh out, or use freeze_at."
        )
    if isinstance(lead, (int, float)) and not 0 <= lead < math.inf:
        raise ValueError(
            f"lead must be a finite number of steps from 0 on, or None, got {lead}."
        )
    adam = OnebitAdam(
        exchange=exchange,
        warmup_exchange=gradient_mean(warmup_exchange, exchange, "warmup_exchange"),
        freeze=freeze,
        b1=as_float32(b1),
        b2=as_float32(b2),
        eps=as_float32(eps),
        bias_correction=bias_correction,
        refresh=refresh,
        send=send,
        lead=None if lead is None else as_float32(lead),
        growth=growth,
        floor=floor,
        bound=bound,
    )
    init: Any = adam.init
    return optax.GradientTransformationExtraArgs(init, adam.update)
