"""BinSGDM: the ratio of two running means, sent by random votes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.optimizers.parts.moments import as_float32
from onebit_jax.workers.axes import check_floats
from onebit_jax.workers.per_worker import per_worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.typing import ArrayLike


class ScaleByBinsgdmState(NamedTuple):
    """State of `scale_by_binsgdm`.

    Attributes:
      own: each worker's running means, float32: `mu` of its own gradients,
        `magnitude` of their magnitudes.
      exchange: state of the exchange.
    """

    own: Any
    exchange: Any


class _RunningMeans(NamedTuple):
    mu: optax.Params
    magnitude: optax.Params


def scale_by_binsgdm(
    exchange: Exchange, decay: ArrayLike = 0.95, eps: ArrayLike = 1e-8
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales each worker's own gradients by BinSGDM.

    .. math::
      m_t^{(i)} &= \beta m_{t-1}^{(i)} + (1 - \beta) g_t^{(i)}, \quad
      b_t^{(i)} = \beta b_{t-1}^{(i)} + (1 - \beta) |g_t^{(i)}| \\
      u_t &= E\left[m_t^{(i)} / (b_t^{(i)} + \epsilon)\right]

    with E the exchange. The ratio is in [-1, 1], which `random_vote_mean` exchanges by
    one bit a value without bias: no scale, no error feedback, no warm-up and no stages.
    The running means stay each worker's own.

    The paper, as far as it could be read, leaves open what becomes of a value whose
    gradients have stopped: both means fall alike, and without :math:`\epsilon` the
    ratio would stay, and move it, until they underflow. It names no decay: a small
    network learnt about as well with 0.9 as with 0.95, and less with 0.8 and with 0.99
    (docs/notes/votes.md). Both means begin at zero, which cancels in the ratio.

    Args:
      exchange: what workers do with their ratios, such as `random_vote_mean('data')`.
      decay: :math:`\beta` of both running means.
      eps: :math:`\epsilon`, in the gradients' unit; values with smaller gradients move
        little.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients. Running means are float32 whatever the parameters are;
      updates have the gradients' dtype.

    Raises:
      TypeError: if `exchange` is not an exchange.
      ValueError: if `eps` is not more than 0.

    Example:
      >>> import jax.numpy as jnp, onebit_jax, optax
      >>> tx = optax.chain(
      ...     scale_by_binsgdm(onebit_jax.random_vote_mean('data')),
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
      Lu et al., BinSGDM, 2023, https://openreview.net/forum?id=Mlo2kM11ZB.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(
            "BinSGDM needs an exchange, such as random_vote_mean('data'), got "
            f"{exchange!r}."
        )
    if isinstance(eps, (int, float)) and not eps > 0:
        raise ValueError(f"eps must be more than 0, such as 1e-8, got {eps}.")
    beta, least = as_float32(decay), as_float32(eps)

    def own_init(params: optax.Params) -> _RunningMeans:
        check_floats(params, "BinSGDM")
        mu, magnitude = (
            optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(2)
        )
        return _RunningMeans(mu, magnitude)

    def own_update(
        updates: optax.Updates, state: Any, params: Any = None
    ) -> tuple[optax.Updates, Any]:
        del params
        gradients = optax.tree.cast(updates, jnp.float32)
        mu = optax.tree.update_moment(gradients, state.mu, beta, 1)
        magnitudes = jax.tree.map(jnp.abs, gradients)
        magnitude = optax.tree.update_moment(magnitudes, state.magnitude, beta, 1)
        ratios = jax.tree.map(lambda m, b: m / (b + least), mu, magnitude)
        return ratios, _RunningMeans(mu, magnitude)

    own_ratio = per_worker(
        optax.GradientTransformation(own_init, own_update), exchange.axes
    )

    def init_fn(params: optax.Params) -> Any:
        return ScaleByBinsgdmState(own_ratio.init(params), exchange.init(params))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, Any]:
        del params, extra_args
        ratios, own = own_ratio.update(updates, state.own)
        agreed, exchanged = exchange.update(ratios, state.exchange)
        return optax.tree.cast_like(agreed, updates), ScaleByBinsgdmState(
            own, exchanged
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def binsgdm(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    decay: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""BinSGDM: from the first step on one bit a value from every worker.

    .. math:: p_t = p_{t-1} - \alpha_t (u_t + \lambda p_{t-1})

    with :math:`u_t` of `scale_by_binsgdm`, a mean of votes, in [-1, 1]. The learning
    rate is therefore the largest step of a coordinate, as Lion's is. As the votes'
    randomness does not fall with the gradients, the learning rate has to, by its
    schedule. A value without gradients stays where an even number of workers gets mean
    votes back, as `random_vote_mean` does it by default. With an odd number, or with
    ``back='vote'``, its votes are a random walk. The paper, as far as it could be read,
    names neither a schedule nor weight decay; here weight decay is decoupled, as
    AdamW's, and none by default.

    Args:
      learning_rate: a number, or a schedule from the step.
      exchange: what workers do with their ratios, such as `random_vote_mean('data')`.
      decay: :math:`\beta` of both running means.
      eps: added to the mean magnitude, so that a value whose gradients have stopped
        stays.
      weight_decay: λ. As in `optax.adamw`, it is multiplied by the learning rate.
      mask: a tree of booleans like the parameters', or a function from parameters to
        one, that says which leaves decay; None for all.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients and the parameters; `onebit_jax.data_parallel` does so.

    Raises:
      TypeError: if `exchange` is not an exchange.
      ValueError: if `eps` is not more than 0.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax, optax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> schedule = optax.linear_schedule(0.1, 0.0, 100)
      >>> tx = onebit_jax.binsgdm(schedule, onebit_jax.random_vote_mean('data'))
      >>> def loss_fn(p, x):
      ...     return jnp.mean((x @ (p - 1)) ** 2)
      >>> run = onebit_jax.data_parallel(loss_fn, tx, mesh)
      >>> params, state = run.init(jnp.zeros(2))
      >>> for _ in range(100):
      ...     params, state, loss = run.step(params, state, jnp.ones((1, 2)))
      >>> print(loss < 0.1)
      True

    References:
      Lu et al., BinSGDM, 2023, https://openreview.net/forum?id=Mlo2kM11ZB.
    """
    return optax.chain(
        scale_by_binsgdm(exchange, decay, eps),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
