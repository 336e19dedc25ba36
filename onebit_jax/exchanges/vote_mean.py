"""Majority vote: the sign of the sum of signs, or their mean."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args

from onebit_jax.exchanges.ballots import (
    declared_voters,
    exchange_votes,
)
from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.workers.axes import AxisNames, as_tuple
from onebit_jax.workers.worker_local import WorkerLocal

if TYPE_CHECKING:
    import optax
    from jax import Array


Back = Literal["majority", "mean"]


def vote_mean(
    axis: AxisNames, *, back: Back = "majority", bucket_size: int = 2**27
) -> Exchange:
    r"""Returns the sign of the sum of the workers' signs, or the mean of these.

    .. math::
      \bar x = \mathrm{sign}\left(\textstyle\sum_i \mathrm{sign}(x^{(i)})\right)
      \quad \text{or} \quad
      \bar x = \tfrac1n \textstyle\sum_i \mathrm{sign}(x^{(i)}), \quad
      \mathrm{sign}(0) = 1

    Without a scale and without errors: for updates that are signs themselves, such as
    Distributed Lion's. All values go in one all-to-all, their signs packed. What was
    agreed comes back in one all-gather: a bit a value, or with back='mean' a count of
    votes as a digit of base n + 1. In a ring a worker then sends :math:`1 + \log_2(n +
    1)` bits a value, times (n - 1) / n; by an all-reduce of the digits it would send
    :math:`2 \log_2(n + 1)`.

    A vote that is tied, as even numbers of workers can be, is 1 with back='majority',
    and so is the vote of a worker whose value is 0. Those without gradients, as for an
    embedding that one worker alone has seen, all vote for 1 and outvote it. Mask what
    has no gradients, and where a few workers have them choose `distributed_lion`, whose
    abstentions cancel, or an exchange with scales, such as `sign_mean`. A value that is
    not finite votes by its sign, NaN for -1: wrap the optimizer in `skip_nonfinite`.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      back: 'majority' or 'mean', what the servers send back.
      bucket_size: the most values that one pair of collectives exchanges, but at least
        a leaf. The collectives of one bucket can overlap with the computation of
        another.

    Returns:
      An exchange without a state.

    Raises:
      ValueError: if `back` is not one of these, or, from `update` with back='mean', if
        there are more than 65,535 workers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = vote_mean('data')
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P('data'), out_specs=P())
      ... def f(g):
      ...     return tx.update(g[0], tx.init(g[0]))[0]
      >>> f(jnp.array([[2.0, -3.0, 0.0]]))
      Array([ 1., -1.,  1.], dtype=float32)

    References:
      Bernstein et al., signSGD with majority vote, 2019,
      https://arxiv.org/abs/1810.05291; Liu et al., Communication efficient distributed
      training with Distributed Lion, 2024, https://arxiv.org/abs/2404.00438.
    """
    if back not in get_args(Back):
        raise ValueError(f"back must be 'majority' or 'mean', got {back!r}.")
    return VoteMean(as_tuple(axis), back, bucket_size)


@dataclasses.dataclass(frozen=True)
class VoteMean(Exchange):
    """The exchange of `vote_mean`.

    Attributes:
      axes: the worker axes.
      back: what servers send back.
      bucket_size: the most values that one pair of collectives exchanges.
    """

    axes: tuple[str, ...]
    back: Back
    bucket_size: int
    keeps_scale = False

    def init(self, params: optax.Params) -> WorkerLocal:
        """The declaration of the workers."""
        del params
        return declared_voters(self.axes)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, Any]:
        """The majority's votes, or the means of all, in the dtypes of the updates."""
        del params

        def as_it_is(x: Array, bucket: int) -> Array:
            del bucket
            return x

        verdict = as_it_is if self.back == "majority" else None
        agreed = exchange_votes(
            updates,
            self.axes,
            "vote_mean",
            bucket_size=self.bucket_size,
            ballot=as_it_is,
            verdict=verdict,
        )
        return agreed, state
