"""Majority vote: the sign of the sum of signs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.exchanges.exchange import Exchange
from onebit_jax.workers.arithmetic import gather
from onebit_jax.workers.axes import AxisNames, as_tuple, bound_workers, check_local
from onebit_jax.workers.transfers import Transfer
from pallas_kernels import pack_signs, unpack_bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onebit_jax.workers.worker_local import WorkerLocal


def vote_mean(axis: AxisNames) -> Exchange:
    r"""Returns the sign of the sum of the workers' signs: a bit a value each way.

    .. math::
      \bar x = \mathrm{sign}\left(\textstyle\sum_i \mathrm{sign}(x^{(i)})\right), \quad
      \mathrm{sign}(0) = 1

    Without a scale and without errors: for updates that are signs themselves, such as
    Distributed Lion's. All values go in one all-to-all, their signs packed, and the
    votes come back in one all-gather. A vote that is tied, as even numbers of workers
    can be, is 1, and so is one on zeros alone: mask parameters that have no gradients.
    A value that is not finite votes by its sign, NaN for -1: chain `skip_nonfinite`
    around it.

    Args:
      axis: name, or names, of the mesh axes whose members are the workers.

    Returns:
      An exchange without a state.

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
    return VoteMean(as_tuple(axis))


@dataclasses.dataclass(frozen=True)
class VoteMean(Exchange):
    """The exchange of `vote_mean`."""

    axes: tuple[str, ...]

    def update(
        self,
        updates: optax.Updates,
        state: WorkerLocal,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, WorkerLocal]:
        """The votes, as 1 and -1 in the dtypes of the updates."""
        del params
        workers = bound_workers(self.axes)
        check_local(updates, self.axes, "vote_mean")
        leaves, treedef = jax.tree.flatten(updates)
        size = sum(x.size for x in leaves)
        if not size:
            return jax.tree.map(lambda x: lax.pmean(x, self.axes), updates), state
        flat = jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in leaves])
        flat = jnp.pad(flat, (0, 32 * workers * _served(size, workers) - size))
        ballots = pack_signs(flat.reshape(workers, 32, -1))
        ballots = lax.all_to_all(ballots, self.axes, 0, 0)
        ayes = jnp.sum(unpack_bits(ballots), axis=0, dtype=jnp.uint32)
        won = jnp.where(2 * ayes >= workers, jnp.float32(1), jnp.float32(-1))
        votes = gather(pack_signs(won), self.axes)
        signs = 2 * unpack_bits(votes).reshape(-1).astype(jnp.int32) - 1
        results, first = [], 0
        for x in leaves:
            leaf = signs[first : first + x.size].reshape(x.shape)
            results.append(leaf.astype(x.dtype))
            first += x.size
        return treedef.unflatten(results), state

    def wire_cost(
        self, params: optax.Params, axis_sizes: Mapping[str, int]
    ) -> tuple[Transfer, ...]:
        """An all-to-all and an all-gather of packed signs."""
        size = sum(p.size for p in jax.tree.leaves(params))
        workers = self.workers(axis_sizes)
        payload = 4 * workers * _served(size, workers)
        return (
            Transfer("all-to-all", payload, self.axes),
            Transfer("all-gather", payload, self.axes),
        )


def _served(size: int, workers: int) -> int:
    """Words of signs that each worker counts."""
    return -(-size // (32 * workers))
