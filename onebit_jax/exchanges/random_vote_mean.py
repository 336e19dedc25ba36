"""Random votes without bias: the mean of values in [-1, 1], by one bit each."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.exchanges.ballots import (
    declared_voters,
    exchange_votes,
)
from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.workers.axes import (
    AxisNames,
    as_tuple,
    bound_workers,
    varying_axes,
)
from onebit_jax.workers.worker_local import WorkerLocal

if TYPE_CHECKING:
    import optax
    from jax import Array
    from jaxtyping import Float32, Int32, Key, UInt32


Back = Literal["mean", "vote"]

# Random bits a value, two values a word: to draw a word for each would take longer than
# all the rest of the exchange.
_BITS = 16
_LEVELS = 2**_BITS


def random_vote_mean(
    axis: AxisNames,
    *,
    back: Back = "mean",
    seed: int = 0,
    bucket_size: int = 2**27,
) -> Exchange:
    r"""Averages values in [-1, 1] over the workers by random votes without bias.

    .. math::
      \bar x = \tfrac1n \textstyle\sum_i Q_i(x^{(i)}), \quad
      P[Q_i(x) = 1] = \frac{1 + x}{2}, \quad P[Q_i(x) = -1] = \frac{1 - x}{2}

    so that :math:`\bar x` is the mean in expectation, without errors to remember. The
    workers' votes are correlated. For each value all have one random number U in [0,
    1), and worker i votes 1 where :math:`(U + \pi_i / n) \bmod 1 < (1 + x) / 2`, with a
    random permutation :math:`\pi` of the workers each step. Equal values then have one
    of the two nearest of the n + 1 means that there are. Zeros of an even number of
    workers have exactly 0, so that parameters without gradients stay. Independent votes
    have 1.6 to 90 times the variance (docs/notes/votes.md).

    With back='mean' the servers send back the means of the votes, each of n + 1 values,
    as digits. That is an all-to-all of a bit a value and an all-gather of about
    :math:`\log_2(n + 1)` bits. With back='vote' they vote at random once more, for the
    mean of the votes, and send back one bit, as the paper has it. That is without bias
    too, but with a variance of :math:`1 - \bar x^2` whatever the number of workers is.

    A random number has 16 bits: a vote's expectation is within 2⁻¹⁶ of the value, and
    at -1, 0 and 1 exact. Values outside [-1, 1] count as the nearest end, NaN as -1:
    wrap the optimizer in `skip_nonfinite`.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.
      back: 'mean' or 'vote', what the servers send back.
      seed: of the random numbers. With the same seed, number of earlier calls and
        workers the same values are agreed on. Devices inside a host (`hierarchical`),
        and shards (`per_shard`), draw their own where their types are checked, the same
        where they are not.
      bucket_size: the most values that one pair of collectives exchanges, but at least
        a leaf.

    Returns:
      An exchange. Its state is a `RandomVoteState`; `update` computes in float32 and
      returns the dtype that it is given.

    Raises:
      ValueError: if `back` is not one of these, `seed` has more than 64 bits, or, from
        `update`, if there are more than 65,535 workers.
      TypeError: if `seed` is no integer.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = random_vote_mean('data')
      >>> @jax.jit
      ... @jax.shard_map(mesh=mesh, in_specs=P('data'), out_specs=P())
      ... def f(u):
      ...     return tx.update(u[0], tx.init(u[0]))[0]
      >>> f(jnp.array([[1.0, -1.0, 7.0]]))
      Array([ 1., -1.,  1.], dtype=float32)
      >>> votes = f(jnp.full((1, 100_000), 0.2))
      >>> print(sorted(set(votes.tolist())), abs(votes.mean() - 0.2) < 0.02)
      [-1.0, 1.0] True

    References:
      Lu et al., BinSGDM, 2023, https://openreview.net/forum?id=Mlo2kM11ZB, for random
      votes there and back; Suresh et al., Correlated quantization for distributed mean
      estimation and optimization, 2022, https://arxiv.org/abs/2203.04925.
    """
    if back not in get_args(Back):
        raise ValueError(f"back must be 'mean' or 'vote', got {back!r}.")
    seed = operator.index(seed)
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an integer of 64 bits, got {seed}.")
    return RandomVoteMean(as_tuple(axis), back, seed, bucket_size)


class RandomVoteState(NamedTuple):
    """State of `random_vote_mean`.

    Attributes:
      count: number of calls so far, which decides the random numbers.
      workers: the declaration of the workers, without arrays.
    """

    count: Int32[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]
    workers: WorkerLocal


@dataclasses.dataclass(frozen=True)
class RandomVoteMean(Exchange):
    """The exchange of `random_vote_mean`.

    Attributes:
      axes: the worker axes.
      back: what servers send back.
      seed: of the random numbers.
      bucket_size: the most values that one pair of collectives exchanges.
    """

    axes: tuple[str, ...]
    back: Back
    seed: int
    bucket_size: int
    keeps_scale = False

    def init(self, params: optax.Params) -> RandomVoteState:
        """No call so far."""
        del params
        return RandomVoteState(jnp.zeros([], jnp.int32), declared_voters(self.axes))

    def update(
        self,
        updates: optax.Updates,
        state: RandomVoteState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, RandomVoteState]:
        """The means of the votes, or the votes for them."""
        del params
        workers = bound_workers(self.axes)
        if workers >= _LEVELS:
            raise ValueError(
                f"random_vote_mean draws numbers for no more than {_LEVELS - 1} "
                f"workers, and there are {workers}: use hierarchical or vote_mean."
            )
        key = jax.random.fold_in(jax.random.key(self.seed), state.count)
        shared, permuted, served = jax.random.split(key, 3)

        def ballot(
            values: Float32[Array, "n 32 words"], bucket: int
        ) -> Float32[Array, "n 32 words"]:
            place = jax.random.permutation(permuted, workers)[lax.axis_index(self.axes)]
            shift = _share(place.astype(jnp.uint32), workers)
            key = _of_shard(_of_bucket(shared, bucket), values, self.axes)
            return values - _thresholds(key, values.shape, shift)

        def verdict(
            means: Float32[Array, "32 words"], bucket: int
        ) -> Float32[Array, "32 words"]:
            key = _of_bucket(served, bucket)
            key = jax.random.fold_in(key, lax.axis_index(self.axes))
            key = _of_shard(key, means, self.axes)
            return means - _thresholds(key, means.shape, jnp.uint32(0))

        agreed = exchange_votes(
            updates,
            self.axes,
            "random_vote_mean",
            bucket_size=self.bucket_size,
            ballot=ballot,
            verdict=verdict if self.back == "vote" else None,
        )
        return agreed, state._replace(count=state.count + 1)


def _thresholds(
    key: Key[Array, ""], shape: tuple[int, ...], shift: UInt32[Array, ""]
) -> Float32[Array, "*n 32 words"]:
    """Random thresholds in (-1, 1): a value below its threshold is voted against.

    Args:
      key: of the numbers.
      shape: of the thresholds.
      shift: levels to add to each number, modulo 2**16.
    """
    pairs = jax.random.bits(
        key, (*shape[:-2], shape[-2] // 2, shape[-1]), dtype=jnp.uint32
    )
    numbers = jnp.concatenate([pairs % _LEVELS, pairs // _LEVELS], axis=-2)
    levels = ((numbers + shift) % _LEVELS).astype(jnp.int32)
    # Odd multiples of 1 / 2**16: as many above zero as below, and none at an end.
    return (2 * levels + 1 - _LEVELS).astype(jnp.float32) / _LEVELS


def _share(place: UInt32[Array, ""], workers: int) -> UInt32[Array, ""]:
    """A worker's share of the levels: floor(place · 2¹⁶ / workers).

    Computed with products of less than 32 bits.
    """
    whole, rest = divmod(_LEVELS, workers)
    return place * jnp.uint32(whole) + place * jnp.uint32(rest) // jnp.uint32(workers)


def _of_bucket(key: Key[Array, ""], bucket: int) -> Key[Array, ""]:
    """The key of a bucket, which draws numbers of its own."""
    return jax.random.fold_in(key, bucket) if bucket else key


def _of_shard(key: Key[Array, ""], values: Array, axes: tuple[str, ...]) -> Any:
    """The key of this device, where others of its worker have values of their own."""
    further = tuple(sorted(varying_axes(values) - set(axes)))
    return jax.random.fold_in(key, lax.axis_index(further)) if further else key
