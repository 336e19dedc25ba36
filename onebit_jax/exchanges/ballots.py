"""Ballots: a vote of one bit a value, counted by servers, and what these send back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.exchanges.codec import stored
from onebit_jax.exchanges.count_mean import MAX_WORKERS
from onebit_jax.workers.arithmetic import gather
from onebit_jax.workers.axes import bound_workers, check_local
from onebit_jax.workers.worker_local import WorkerLocal
from pallas_kernels import (
    pack_digits,
    pack_signs,
    unpack_bits,
    unpack_digits,
    unpack_signs,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jaxtyping import Float32

_ROWS = 32  # bits of a word


def declared_voters(axes: tuple[str, ...]) -> WorkerLocal:
    """The declaration of workers that vote, without arrays.

    They vote on all leaves put together, so that sharded parameters are refused: their
    parts would have to be sent around.
    """
    return WorkerLocal((), axes, "concatenate")


def exchange_votes(
    updates: optax.Updates,
    axes: tuple[str, ...],
    who: str,
    *,
    ballot: Callable[[Float32[Array, "n 32 w"]], Float32[Array, "n 32 w"]],
    verdict: Callable[[Float32[Array, "32 w"]], Float32[Array, "32 w"]] | None,
) -> optax.Updates:
    r"""Counts the workers' votes: an all-to-all of bits, and an all-gather.

    Each worker sends the signs of its ballots, and serves an equal share of the values:
    it counts their votes and sends back their mean, :math:`(2 c - n) / n` of c votes
    for 1, or a bit.

    Args:
      updates: each worker's own tree.
      axes: the worker axes.
      who: the exchange's name, for error messages.
      ballot: from a worker's values, a row for each server, to the values whose signs
        it votes; zero votes 1, NaN -1.
      verdict: from the means of the votes that are counted here to the values whose
        signs are sent back; None to send back the means, as digits of base n + 1.

    Returns:
      The means, or the signs, in the dtypes of the updates.
    """
    workers = bound_workers(axes)
    if verdict is None and workers > MAX_WORKERS:
        raise ValueError(
            f"{who} sends back counts of no more than {MAX_WORKERS} workers, and there "
            f"are {workers}: use back='majority'."
        )
    check_local(updates, axes, who)
    leaves, treedef = jax.tree.flatten(updates)
    size = sum(x.size for x in leaves)
    if not size:
        return jax.tree.map(lambda x: lax.pmean(x, axes), updates)
    flat = jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in leaves])
    flat = jnp.pad(flat, (0, _ROWS * workers * _served(size, workers) - size))
    ballots = stored(pack_signs(ballot(flat.reshape(workers, _ROWS, -1))))
    ballots = lax.all_to_all(ballots, axes, 0, 0)
    ayes = jnp.sum(unpack_bits(ballots), axis=0, dtype=jnp.uint32)
    if verdict is None:
        digits = stored(pack_digits(ayes.reshape(1, -1), workers)[0])
        digits = gather(digits, axes)
        agreed = _mean(unpack_digits(digits, workers, ayes.size), workers)
    else:
        mean = _mean(ayes.astype(jnp.int32).astype(jnp.float32), workers)
        signs = gather(stored(pack_signs(verdict(mean))), axes)
        agreed = unpack_signs(signs, jnp.ones(workers, jnp.float32))
    agreed, results, first = agreed.reshape(-1), [], 0
    for x in leaves:
        leaf = agreed[first : first + x.size].reshape(x.shape)
        results.append(leaf.astype(x.dtype))
        first += x.size
    return treedef.unflatten(results)


def _served(size: int, workers: int) -> int:
    """Words of ballots that each worker counts."""
    return -(-size // (_ROWS * workers))


def _mean(ayes: Array, workers: int) -> Array:
    return (2 * ayes - workers) / workers
