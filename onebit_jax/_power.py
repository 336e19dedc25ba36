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

# A variance below this share of its leaf's mean says that its coordinate has had no
# gradient to speak of; so does the power of a line.
LOW = 1e-6
# Steps in which every line is exchanged once, after the freeze.
PERIOD = 32
# The fewest rows and columns whose power is worth its bytes: in a matrix of 16 by 16
# they are an eighth of the signs.
_LEAST_LINES = 16
# How far the power of a row and a column may bring a variance down. The signs of a
# line that has no more gradients go on; Adam's momentum would be zero.
_LEAST_GROWTH = 0.25


# The shares of a leaf's rows and columns, to be multiplied.
_Lines = tuple[Any, Any] | None


class Power(NamedTuple):
    """The power of gradients, the same on all workers.

    Attributes:
      leaves: for each leaf, the running mean of the workers' squared gradients.
      lines: (lines,) for each row and each column of each matrix, its share of the
        leaf's power when it was last exchanged, 1 where it is the leaf's mean; None
        without a matrix.
    """

    leaves: optax.Params
    lines: Any


def init_power(params: optax.Params, lines: int) -> Power:
    """The power before any gradient."""
    return Power(
        leaves=jax.tree.map(lambda _: jnp.zeros([], jnp.float32), params),
        lines=jnp.ones(lines, jnp.float32) if lines else None,
    )


def init_own_lines(lines: int, axes: tuple[str, ...]) -> PerWorker:
    """Each worker's own running mean by lines, before any gradient."""
    _, held = _axes.worker_count(axes)
    own = jnp.zeros((held, lines), jnp.float32) if lines else None
    return PerWorker(own, axes, "each")


def line_count(params: optax.Params) -> int:
    """The rows and columns of all matrices of a tree."""
    return sum(map(_lines_of, jax.tree.leaves(params)))


def update_power(
    gradients: optax.Updates,
    power: Power,
    own: PerWorker,
    *,
    decay: ArrayLike,
    count: Int32[Array, ""],
    period: int,
) -> tuple[Power, PerWorker]:
    """Adds gradients to the running means, in one all-reduce.

    Args:
      gradients: each worker's own.
      power: so far.
      own: each worker's running mean by lines so far.
      decay: of the running means.
      count: steps, this one included.
      period: steps in which every line is exchanged once.

    Returns:
      Power and the worker's own running mean.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    if not leaves:
        return power, own
    measured = list(map(_mean_squares, leaves))
    sent = jnp.stack([mean for mean, _ in measured])
    lines = [x for _, of_leaf in measured for x in of_leaf]
    start = length = 0
    if lines:
        new = _axes.whole(jnp.concatenate(lines))
        before = own.value
        fits = getattr(before, "shape", None) == (1, new.size)
        workers = _axes.bound_workers(own.axes)
        _axes.check_workers(fits, "1-bit Adam", workers, own.axes)
        new = _axes.whole(optax.tree.update_moment(new, before[0], decay, 1))
        own = PerWorker(new[None], own.axes, own.role)
        length = -(-new.size // period)
        start = jnp.minimum(count % period * length, new.size - length)
        part = lax.dynamic_slice_in_dim(new, start, length)
        sent = jnp.concatenate([sent, part])
    received = lax.pmean(sent, own.axes)
    squares = treedef.unflatten(list(received[: len(leaves)]))
    power = power._replace(
        leaves=optax.tree.update_moment(squares, power.leaves, decay, 1)
    )
    if lines:
        pairs = zip(jax.tree.leaves(power.leaves), leaves, strict=True)
        of_leaf = [jnp.full(_lines_of(g), p) for p, g in pairs if _lines_of(g)]
        of_leaf = _axes.whole(jnp.concatenate(of_leaf))
        of_leaf = lax.dynamic_slice_in_dim(of_leaf, start, length)
        shares = _ratio(received[len(leaves) :], of_leaf)
        shares = lax.dynamic_update_slice_in_dim(power.lines, shares, start, 0)
        power = power._replace(lines=_axes.whole(shares))
    return power, own


def followed(
    nu: optax.Params, now: Power, then: Power, weight: ArrayLike
) -> optax.Params:
    """Frozen variances that follow the power of their gradients.

    Args:
      nu: variances, without bias correction.
      now: the power, of leaves with bias correction.
      then: the same at the freeze.
      weight: the variances' bias correction.

    Returns:
      The variances, without bias correction.
    """

    def of_leaf(
        v: Array, power: Array, frozen: Array, by: _Lines, was: _Lines
    ) -> Array:
        # A leaf without gradients before the freeze has no variance to be scaled: the
        # power is one, the same for all of it.
        v = jnp.where(frozen > 0, v * _ratio(power, frozen), power * weight)
        if by is None or was is None:
            return v
        rows, columns = (x / _known(y) for x, y in zip(by, was, strict=True))
        growth = _axes.whole(rows) * _axes.whole(columns)
        return v * jnp.maximum(growth, _LEAST_GROWTH)

    return jax.tree.map(
        of_leaf, nu, now.leaves, then.leaves, _by_leaf(nu, now), _by_leaf(nu, then)
    )


def raise_low(
    nu: optax.Params, power: Power
) -> tuple[optax.Params, Float32[Array, ""]]:
    """Variances with the low ones raised, and their share.

    A low one becomes its leaf's mean, by the shares of its row and its column, so that
    it follows their growth as others do.
    """
    low = jax.tree.map(lambda v: v < LOW * jnp.mean(v), nu)

    def of_leaf(v: Array, is_low: Array, by: _Lines) -> Array:
        mean = jnp.mean(v)
        if by is not None:
            rows, columns = (_axes.whole(_known(x)) for x in by)
            mean = mean * rows * columns
        return jnp.where(is_low, mean, v)

    raised = jax.tree.map(of_leaf, nu, low, _by_leaf(nu, power))
    size = max(sum(v.size for v in jax.tree.leaves(nu)), 1)
    number = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(low))
    return raised, jnp.asarray(number / float(size), jnp.float32)


def line_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the power of rows and of that of columns; none for what is no matrix.

    The last two dimensions are a matrix, those before them number matrices.
    """
    if len(shape) < 2 or min(shape[-2:]) < _LEAST_LINES or not math.prod(shape):
        return ()
    return shape[:-1], (*shape[:-2], shape[-1])


def _lines_of(x: Array) -> int:
    return sum(map(math.prod, line_shapes(x.shape)))


def _mean_squares(x: Array) -> tuple[Float32[Array, ""], list[Float32[Array, " n"]]]:
    """The mean square of a leaf, and those of its lines."""
    squares = jnp.square(x.astype(jnp.float32))
    if not line_shapes(x.shape):
        return jnp.sum(squares) / float(max(x.size, 1)), []
    rows, columns = jnp.mean(squares, axis=-1), jnp.mean(squares, axis=-2)
    return jnp.mean(rows), [_axes.whole(x.reshape(-1)) for x in (rows, columns)]


def _by_leaf(tree: optax.Params, power: Power) -> optax.Params:
    """For each leaf None, or the shares of its rows and, of its matrix's, columns."""
    leaves, treedef = jax.tree.flatten(tree)
    result, start = [], 0
    for x in leaves:
        parts = []
        for shape in line_shapes(x.shape):
            end = start + math.prod(shape)
            parts.append(_axes.whole(power.lines[start:end].reshape(shape)))
            start = end
        if parts:
            rows, columns = parts
            of_matrix = jnp.mean(columns, axis=-1, keepdims=True)
            columns = _axes.whole(_ratio(columns, of_matrix))
            parts = rows[..., :, None], columns[..., None, :]
        result.append(parts or None)
    return treedef.unflatten(result)


def _known(share: Array) -> Array:
    # What had no gradient has its leaf's mean for a variance.
    return jnp.where(share < LOW, 1, share)


def _ratio(x: Array, y: Array) -> Array:
    """One where it cannot be told."""
    told = (y > 0) & jnp.isfinite(y)
    return jnp.where(told, x / jnp.where(told, y, 1), 1)
