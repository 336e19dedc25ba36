"""Ballots: a vote of one bit a value, counted by servers, and what these send back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.exchanges.codec import stored
from onebit_jax.exchanges.count_mean import MAX_WORKERS
from onebit_jax.workers.arithmetic import gather, parted
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
    from jax import Array
    from jaxtyping import Float32

_ROWS = 32  # bits of a word

Ballot = Callable[["Float32[Array, 'n 32 w']", int], "Float32[Array, 'n 32 w']"]
Verdict = Callable[["Float32[Array, '32 w']", int], "Float32[Array, '32 w']"]


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
    bucket_size: int,
    ballot: Ballot,
    verdict: Verdict | None,
) -> optax.Updates:
    r"""Counts the workers' votes: an all-to-all of bits, and an all-gather.

    Each worker sends the signs of its ballots, and serves an equal share of the values:
    it counts their votes and sends back their mean, :math:`(2 c - n) / n` of c votes
    for 1, or a bit.

    Args:
      updates: each worker's own tree.
      axes: the worker axes.
      who: the exchange's name, for error messages.
      bucket_size: the most values that one pair of collectives exchanges, but at least
        a leaf.
      ballot: from a worker's values, a row for each server, and the number of their
        bucket to the values whose signs it votes; zero votes 1, NaN -1.
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
    results: list[Any] = []
    for number, bucket in enumerate(_buckets(leaves, bucket_size)):
        flat = jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in bucket])
        if flat.size:
            flat = _counted(flat, number, axes, ballot, verdict)
        else:
            flat = lax.pmean(flat, axes)
        # Made once: each leaf would count the votes of all.
        flat, sizes = lax.optimization_barrier(flat), [x.size for x in bucket]
        starts = list(itertools.accumulate(sizes, initial=0))[:-1]
        for x, leaf in zip(bucket, parted(flat, starts, sizes), strict=True):
            results.append(leaf.reshape(x.shape).astype(x.dtype))
    return treedef.unflatten(results)


def _buckets(leaves: list[Array], size: int) -> list[list[Array]]:
    """Leaves in a row, as many as have no more values together; at least one."""
    buckets: list[list[Array]] = []
    room = 0
    for x in leaves:
        if x.size > room or not buckets:
            buckets.append([])
            room = size
        buckets[-1].append(x)
        room -= x.size
    return buckets


def _counted(
    flat: Float32[Array, " size"],
    number: int,
    axes: tuple[str, ...],
    ballot: Ballot,
    verdict: Verdict | None,
) -> Float32[Array, " size"]:
    """The means, or signs, of one bucket."""
    workers, size = bound_workers(axes), flat.size
    flat = jnp.pad(flat, (0, -size % (_ROWS * workers)))
    ballots = stored(pack_signs(ballot(flat.reshape(workers, _ROWS, -1), number)))
    ballots = lax.all_to_all(ballots, axes, 0, 0)
    positive = jnp.sum(unpack_bits(ballots), axis=0, dtype=jnp.uint32)
    if verdict is None:
        digits = stored(pack_digits(positive.reshape(1, -1), workers)[0])
        digits = gather(digits, axes)
        agreed = _mean(unpack_digits(digits, workers, positive.size), workers)
    else:
        mean = _mean(positive.astype(jnp.int32).astype(jnp.float32), workers)
        signs = gather(stored(pack_signs(verdict(mean, number))), axes)
        agreed = unpack_signs(signs, jnp.ones(workers, jnp.float32))
    return agreed.reshape(-1)[:size]


def _mean(positive: Array, workers: int) -> Array:
    return (2 * positive - workers) / workers
