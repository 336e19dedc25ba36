"""Distributed Lion: every worker's own Lion, and a vote on their signs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.exchanges.random_vote_mean import RandomVoteState
from onebit_jax.optimizers.parts.moments import as_float32
from onebit_jax.workers.axes import bound_workers, check_floats
from onebit_jax.workers.per_worker import per_worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float, Float32, Int32

_NAME = "distributed Lion"
_LITTLE = np.float32(1e-30)


class ScaleByDistributedLionState(NamedTuple):
    """State of `scale_by_distributed_lion`.

    Attributes:
      count: number of steps taken.
      own: each worker's momentum of its own gradients, float32.
      exchange: state of the exchange.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    own: Any
    exchange: Any


def scale_by_distributed_lion(
    exchange: Exchange, b1: ArrayLike = 0.9, b2: ArrayLike = 0.99
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales each worker's own gradients by Distributed Lion.

    .. math::
      c_t^{(i)} &= \beta_1 m_{t-1}^{(i)} + (1 - \beta_1) g_t^{(i)}, \quad
      m_t^{(i)} = \beta_2 m_{t-1}^{(i)} + (1 - \beta_2) g_t^{(i)} \\
      u_t &= E\left[c_t^{(i)}\right]

    with E the exchange: the majority of the signs of c with `vote_mean('data')`, the
    mean of these with `vote_mean('data', back='mean')`. The momenta stay each worker's
    own. There is no warm-up, no scale and no error feedback. With one worker it is
    `optax.scale_by_lion`, but where c is 0.

    A bit cannot say 0. A tie of an even number of workers is 1, in every step, so that
    parameters would drift. Therefore values change their sign before the exchange, and
    again after it, where the sum of their indices and of the number of steps is odd:
    ties go up and down in turn, and neighbours the other way.

    A c of 0, which a parameter without gradients always has, abstains: every other
    worker votes 1 for it and the next one -1, and the workers change places every other
    step, so that these votes leave the decision to those who have gradients. One of
    four workers moves what it alone has gradients of half as far as if all had them.

    Args:
      exchange: what workers vote by, such as `vote_mean('data')`; not votes that are
        drawn, nor an exchange that keeps errors, as values change their sign from step
        to step and errors would not.
      b1: :math:`\beta_1`, the momentum's share of what is sent.
      b2: :math:`\beta_2`, decay of the momentum.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients. Momenta are float32 whatever the parameters are; updates
      have the gradients' dtype.

    Raises:
      TypeError: if `exchange` is not an exchange of votes, or, from `init`, if its
        votes are drawn.

    Example:
      >>> import jax.numpy as jnp, onebit_jax, optax
      >>> tx = optax.chain(
      ...     scale_by_distributed_lion(onebit_jax.vote_mean('data')),
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
      Liu et al., Communication efficient distributed training with Distributed Lion,
      2024, https://arxiv.org/abs/2404.00438, Algorithm 1.
    """
    if not isinstance(exchange, Exchange):
        raise TypeError(
            f"{_NAME} needs an exchange, such as vote_mean('data'), got {exchange!r}."
        )
    if exchange.keeps_scale:
        raise TypeError(
            f"{_NAME} needs an exchange of votes, such as vote_mean('data'), got "
            f"{exchange!r}: with another, put optax.lion behind the exchange; one of "
            "your own that returns votes says so by keeps_scale = False."
        )
    own_lion = per_worker(_lion(as_float32(b1), as_float32(b2)), exchange.axes)

    def init_fn(params: optax.Params) -> Any:
        exchanged = exchange.init(params)
        if any(map(_is_random, jax.tree.leaves(exchanged, is_leaf=_is_random))):
            raise TypeError(
                f"{_NAME} votes by signs, and {exchange!r} draws votes by magnitudes: "
                "give it vote_mean('data')."
            )
        return ScaleByDistributedLionState(
            jnp.zeros([], jnp.int32), own_lion.init(params), exchanged
        )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, Any]:
        del params, extra_args
        sent, own = own_lion.update(updates, state.own)
        abstention = _abstention(exchange.senders, state.count)
        sent = jax.tree.map(lambda c: _turn(c, state.count), sent)
        sent = jax.tree.map(lambda c: jnp.where(c == 0, abstention, c), sent)
        agreed, exchanged = exchange.update(sent, state.exchange)
        agreed = jax.tree.map(lambda u: _turn(u, state.count), agreed)
        return optax.tree.cast_like(agreed, updates), ScaleByDistributedLionState(
            jnp.asarray(optax.safe_increment(state.count)), own, exchanged
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _lion(share: ArrayLike, decay: ArrayLike) -> optax.GradientTransformation:
    """Lion's mixture of momentum and gradient, whose sign is its update."""

    def init_fn(params: optax.Params) -> optax.TraceState:
        check_floats(params, _NAME)
        return optax.TraceState(optax.tree.zeros_like(params, dtype=jnp.float32))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, Any]:
        del params
        gradients = optax.tree.cast(updates, jnp.float32)
        sent = optax.tree.update_moment(gradients, state.trace, share, 1)
        momentum = optax.tree.update_moment(gradients, state.trace, decay, 1)
        return sent, optax.TraceState(momentum)

    return optax.GradientTransformation(init_fn, update_fn)


def _abstention(axes: tuple[str, ...], count: Int32[Array, ""]) -> Float32[Array, ""]:
    """The value that a worker sends instead of 0, by its place in this step."""
    place = (lax.axis_index(axes) + count // 2) % bound_workers(axes)
    # Inside a host its mean must not count beside the gradients of others.
    return jnp.where(place % 2 == 1, -_LITTLE, _LITTLE)


def _turn(x: Float[Array, ...], count: Int32[Array, ""]) -> Float[Array, ...]:
    """Changes the sign of every other value, and in the next step of the others."""
    for dimension in range(x.ndim):
        count = count + lax.broadcasted_iota(jnp.int32, x.shape, dimension)
    return jnp.where(count % 2 == 1, -x, x)


def _is_random(state: Any) -> bool:
    return isinstance(state, RandomVoteState)


def distributed_lion(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Any | Callable[[optax.Params], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Distributed Lion: from the first step on one bit a value there and one back.

    .. math:: p_t = p_{t-1} - \alpha_t (u_t + \lambda p_{t-1})

    with :math:`u_t` of `scale_by_distributed_lion`. Its workers vote on the signs of
    momenta of their own. Lion on what an exchange agrees of the gradients is another
    algorithm, `optax.chain(exchange, optax.lion(...))`.

    Args:
      learning_rate: a number, or a schedule from the step.
      exchange: what workers vote by, such as `vote_mean('data')`.
      b1: the momentum's share of what is sent.
      b2: decay of the momentum.
      weight_decay: λ. As in `optax.lion`, it is multiplied by the learning rate.
      mask: a tree of booleans like the parameters', or a function from parameters to
        one, that says which leaves decay; None for all.

    Returns:
      A transformation whose `update` must be called inside `jax.shard_map` with each
      worker's own gradients and the parameters; `onebit_jax.data_parallel` does so.

    Raises:
      TypeError: if `exchange` is not an exchange of votes, or, from `init`, if its
        votes are drawn.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax, optax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> schedule = optax.linear_schedule(0.1, 0.0, 100)
      >>> tx = onebit_jax.distributed_lion(schedule, onebit_jax.vote_mean('data'))
      >>> def loss_fn(p, x):
      ...     return jnp.mean((x @ (p - 1)) ** 2)
      >>> run = onebit_jax.data_parallel(loss_fn, tx, mesh)
      >>> params, state = run.init(jnp.zeros(2))
      >>> for _ in range(100):
      ...     params, state, loss = run.step(params, state, jnp.ones((1, 2)))
      >>> print(loss < 0.01)
      True

    References:
      Liu et al., Communication efficient distributed training with Distributed Lion,
      2024, https://arxiv.org/abs/2404.00438, Algorithm 1; Chen et al., Symbolic
      discovery of optimization algorithms, 2023, https://arxiv.org/abs/2302.06675.
    """
    return optax.chain(
        scale_by_distributed_lion(exchange, b1, b2),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
