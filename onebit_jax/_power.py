"""The power of the workers' gradients, which a frozen variance follows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import _axes
from onebit_jax._per_worker import PerWorker

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32

# A part this small of a mean has had no gradient to speak of.
LOW = 1e-6
# Steps in which every line is exchanged once, after the freeze.
PERIOD = 32
# The fewest rows and columns whose power is worth its bytes: in a matrix of 16 by 16
# they are an eighth of the signs.
_LEAST_LINES = 16
# How far the power of a row and a column may bring a variance down. The signs of a
# line that has no more gradients go on; Adam's momentum would be zero.
_LEAST_SHARE = 0.25


class Power(NamedTuple):
    """The power of gradients, the same on all workers.

    Attributes:
      leaves: for each leaf, the running mean of the workers' squared gradients.
      lines: (lines,) the same of each row and each column of each matrix, with bias
        correction, as it was when it was last exchanged; None without a matrix.
    """

    leaves: optax.Params
    lines: Any


def init_power(params: optax.Params) -> Power:
    """The power before any gradient."""
    shapes = [x for p in jax.tree.leaves(params) for x in line_shapes(p.shape)]
    lines = sum(map(math.prod, shapes))
    return Power(
        leaves=jax.tree.map(lambda _: jnp.zeros([], jnp.float32), params),
        lines=jnp.zeros(lines, jnp.float32) if lines else None,
    )


def init_own_lines(params: optax.Params, axes: tuple[str, ...]) -> PerWorker:
    """Each worker's own running mean by lines, before any gradient."""
    _, held = _axes.worker_count(axes)
    own = jax.tree.map(
        lambda x: jnp.zeros((held, *x.shape), x.dtype), init_power(params).lines
    )
    return PerWorker(own, axes, "each")


def update_power(
    gradients: optax.Updates,
    power: Power,
    own: PerWorker,
    *,
    decay: ArrayLike,
    weight: ArrayLike,
    count: Int32[Array, ""],
    period: int,
) -> tuple[Power, PerWorker]:
    """Adds gradients to the running means, in one all-reduce.

    Args:
      gradients: each worker's own.
      power: so far.
      own: each worker's running mean by lines so far.
      decay: of the running means.
      weight: what all gradients, these included, weigh in a running mean.
      count: steps, this one included.
      period: steps in which every line is exchanged once.

    Returns:
      Power and the worker's own running mean.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    if not leaves:
        return power, own
    means, lines = zip(*map(_mean_squares, leaves), strict=True)
    sent, lines = jnp.stack(means), [x for pair in lines for x in pair]
    agreed, start = power.lines, jnp.int32(0)
    if lines:
        workers = _axes.bound_workers(own.axes)
        fits = own.value.shape == (1, *power.lines.shape)
        _axes.check_workers(fits, "1-bit Adam", workers, own.axes)
        new = _axes.whole(jnp.concatenate(lines))
        new = _axes.whole(optax.tree.update_moment(new, own.value[0], decay, 1))
        own = PerWorker(new[None], own.axes, own.role)
        length = -(-new.size // period)
        start = jnp.minimum(count % period * length, new.size - length)
        # Corrected when it is sent: it is of that step until it is sent again.
        part = lax.dynamic_slice_in_dim(new / weight, start, length)
        sent = jnp.concatenate([sent, part])
    received = lax.pmean(sent, own.axes)
    squares, part = received[: len(leaves)], received[len(leaves) :]
    if lines:
        agreed = _axes.whole(lax.dynamic_update_slice_in_dim(agreed, part, start, 0))
    squares = treedef.unflatten(list(squares))
    return Power(optax.tree.update_moment(squares, power.leaves, decay, 1), agreed), own


def followed(
    nu: optax.Params, now: Power, then: Power, weight: ArrayLike
) -> optax.Params:
    """Frozen variances that follow the power of their gradients.

    Args:
      nu: variances, without bias correction.
      now: the power, with bias correction.
      then: the same at the freeze.
      weight: the variances' bias correction.

    Returns:
      The variances, without bias correction.
    """
    leaves, treedef = jax.tree.flatten(nu)
    pairs = zip(
        leaves, jax.tree.leaves(now.leaves), jax.tree.leaves(then.leaves), strict=True
    )
    result, start = [], 0
    for v, power, frozen_power in pairs:
        # A leaf without gradients before the freeze has no variance to be scaled: the
        # power is one, the same for all of it.
        v = jnp.where(
            frozen_power > 0,
            v * (power / jnp.where(frozen_power > 0, frozen_power, 1)),
            power * weight,
        )
        shapes = line_shapes(v.shape)
        if shapes:
            end = start + sum(map(math.prod, shapes))
            lines = now.lines[start:end], then.lines[start:end]
            v = v * _lines_growth(*lines, *shapes)
            start = end
        result.append(v)
    return treedef.unflatten(result)


def line_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the power of rows and of that of columns; none for what is no matrix.

    The last two dimensions are a matrix, those before them number matrices.
    """
    if len(shape) < 2 or min(shape[-2:]) < _LEAST_LINES:
        return ()
    return shape[:-1], (*shape[:-2], shape[-1])


def _mean_squares(x: Array) -> tuple[Float32[Array, ""], list[Float32[Array, " n"]]]:
    """The mean square of a leaf, and those of its lines."""
    squares = jnp.square(x.astype(jnp.float32))
    if not line_shapes(x.shape):
        return jnp.sum(squares) / float(max(x.size, 1)), []
    rows, columns = jnp.mean(squares, axis=-1), jnp.mean(squares, axis=-2)
    return jnp.mean(rows), [_axes.whole(x.reshape(-1)) for x in (rows, columns)]


def _lines_growth(
    now: Array, then: Array, rows: tuple[int, ...], columns: tuple[int, ...]
) -> Array:
    """How the power of a leaf's entries has grown by its lines, beside the leaf's."""
    middle = math.prod(rows)
    rows_now, rows_then = now[:middle].reshape(rows), then[:middle].reshape(rows)
    by_row = _growth(rows_now, rows_then, -1)
    by_column = _growth(
        now[middle:].reshape(columns), then[middle:].reshape(columns), -1
    )
    by_line = by_row[..., :, None] * by_column[..., None, :]
    by_matrix = _growth(jnp.mean(rows_now, -1), jnp.mean(rows_then, -1), None)
    return by_matrix[..., None, None] * jnp.maximum(by_line, _LEAST_SHARE)


def _growth(now: Array, then: Array, axis: int | None) -> Array:
    """Of powers, each relative to the mean of all along an axis."""
    # Where there was no gradient the frozen variance is its leaf's mean.
    before = _shares(then, axis)
    before = jnp.where(before < LOW, 1, before)
    return _axes.whole(_shares(now, axis) / before)


def _shares(power: Array, axis: int | None) -> Array:
    """Powers relative to their mean; one where there is none."""
    mean = jnp.mean(power, axis=axis, keepdims=True)
    return jnp.where(mean > 0, power / jnp.where(mean > 0, mean, 1), 1)
