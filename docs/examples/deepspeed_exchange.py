"""DeepSpeed 0.19.6's exchange of signs, in its own layout."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

import onebit_jax


class DeepSpeedState(NamedTuple):
    """The errors of each leaf, or of all as one where leaves are fused.

    Attributes:
      worker_error: (workers, padded size).
      server_error: (workers, padded size / workers).
      padding: (workers, padding), what values are padded with, the same on all workers.
    """

    worker_error: onebit_jax.WorkerLocal
    server_error: onebit_jax.WorkerLocal
    padding: onebit_jax.WorkerLocal


@dataclasses.dataclass(frozen=True)
class DeepSpeedSignMean(onebit_jax.Exchange):
    r"""`runtime/comm/compressed.py`: signs, and a scale a buffer.

    A buffer is flattened and padded to N, a multiple of n · lcm(n, 8). It has one scale
    :math:`\|x\|_2 / \sqrt N` a worker, and one a chunk of N / n values, which a worker
    serves. Padding enters the norms, and its errors are kept. One worker compresses
    nothing, and pays nothing that several have left in a state. `onebit_jax.sign_mean`
    has the smaller errors and fewer collectives.

    Attributes:
      axes: the mesh axes whose members are the workers.
      fused: whether all leaves are one buffer, one after another in the tree's order,
        as in DeepSpeed's 1-bit LAMB. Padding is then part of the momentum: it keeps
        what was agreed for it.
    """

    axes: tuple[str, ...] = ("data",)
    fused: bool = False

    def is_alone(self):
        """False: DeepSpeed freezes the variance of one worker, too."""
        return False

    def init(self, params):
        """Buffers of zeros."""
        workers, slices = worker_count(self.axes)
        sizes = [p.size for p in jax.tree.leaves(params)]
        sizes = [sum(sizes)] if self.fused else sizes
        padded = [padded_size(size, workers) for size in sizes]

        def zeros(lengths: list[int], resizing: Any) -> onebit_jax.WorkerLocal:
            buffers = [jnp.zeros((slices, n), jnp.float32) for n in lengths]
            return onebit_jax.WorkerLocal(buffers, self.axes, resizing)

        padding = [n - size for n, size in zip(padded, sizes, strict=True)]
        return DeepSpeedState(
            worker_error=zeros(padded, "average"),
            server_error=zeros([n // workers for n in padded], "concatenate"),
            padding=zeros(padding, "drop"),
        )

    def update(self, updates, state, params=None):
        """Each leaf by itself, or all as one."""
        del params
        trees = [updates] if self.fused else jax.tree.leaves(updates)
        results, means = [], []
        for tree, *buffers in zip(trees, *(node.value for node in state), strict=True):
            values, unravel = ravel_pytree(optax.tree.cast(tree, jnp.float32))
            mean, *kept = self.exchange(values, *(b[0] for b in buffers))
            means += jax.tree.leaves(unravel(mean))
            results.append([b[None] for b in kept])
        mean = jax.tree.structure(updates).unflatten(means)
        new_state = [
            dataclasses.replace(node, value=list(buffers))
            for node, buffers in zip(state, zip(*results, strict=True), strict=True)
        ]
        return optax.tree.cast_like(mean, updates), DeepSpeedState(*new_state)

    def exchange(self, values, worker_error, server_error, padding):
        """One buffer's mean, and what is kept of it."""
        workers, _ = worker_count(self.axes)
        if workers == 1 or not values.size:
            mean = lax.pmean(values, self.axes)
            return mean, worker_error, server_error, padding
        x = jnp.concatenate([values, padding]) + worker_error
        scale, bits, worker_error = compressed(x)
        bits = lax.all_to_all(bits.reshape(workers, -1), self.axes, 0, 0)
        sent = decompressed(lax.all_gather(scale, self.axes), bits)
        scale, bits, server_error = compressed(jnp.mean(sent, axis=0) + server_error)
        scales, bits = (
            lax.all_gather(x, self.axes, to="invarying") for x in (scale, bits)
        )
        mean, agreed_padding = jnp.split(
            decompressed(scales, bits).reshape(-1), [values.size]
        )
        if self.fused:
            # The sum is of the type of what each worker keeps.
            padding = agreed_padding + 0 * padding
        return mean, worker_error, server_error, padding


def compressed(x):
    """A scale, signs as bits, of which zero is positive, and the error."""
    scale = jnp.sqrt(jnp.sum(x * x)) / jnp.sqrt(jnp.float32(x.size))
    return scale, jnp.packbits(x >= 0), x - jnp.where(x >= 0, scale, -scale)


def decompressed(scales, bits):
    """(workers,) and (workers, bytes) to (workers, values)."""
    scales = scales[:, None]
    return jnp.where(jnp.unpackbits(bits, axis=1) == 1, scales, -scales)


def padded_size(size: int, workers: int) -> int:
    """The size that DeepSpeed pads so many values to."""
    quantum = workers * math.lcm(workers, 8)
    return -(-size // quantum) * quantum


def worker_count(axes: tuple[str, ...]) -> tuple[int, int]:
    """The number of workers, and of those that a worker-local array holds here."""
    try:
        return math.prod(map(lax.axis_size, axes)), 1
    except NameError:  # outside of shard_map it holds all of the mesh's
        sizes = jax.sharding.get_abstract_mesh().shape
        workers = math.prod(sizes[name] for name in axes)
        return workers, workers
