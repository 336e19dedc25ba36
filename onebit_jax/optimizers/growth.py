"""Growth of a frozen variance with the mean squares of the workers' gradients."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.workers.arithmetic import whole
from onebit_jax.workers.axes import bound_workers, check_workers, worker_count
from onebit_jax.workers.transfers import Transfer
from onebit_jax.workers.worker_local import WorkerLocal

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float32, Int32

# A row or column of less than this share of its leaf's mean square had no gradient to
# speak of.
_NEGLIGIBLE = 1e-6
# The fewest rows and columns whose mean squares are worth their bytes: in a matrix of
# 16 by 16 they are an eighth of the signs.
_LEAST_LINES = 16
# The furthest that a row and a column may bring a variance down. The signs of a row
# that has no more gradients go on; Adam's momentum would be zero.
_LEAST_GROWTH = 0.25


class MeanSquares(NamedTuple):
    """Mean squares of the workers' gradients, the same on all workers.

    Attributes:
      leaves: for each leaf, a running mean over steps.
      shares: (lines,) for each row and each column of each matrix, its mean square
        when it was last exchanged, divided by its leaf's; None without a matrix.
    """

    leaves: optax.Params
    shares: Any


class GrowthState(NamedTuple):
    """State of `GrowthByMeanSquares`.

    Attributes:
      now: the running means so far.
      frozen: the same when the variance was frozen.
      line_means: each worker's own running means of rows and columns.
    """

    now: MeanSquares
    frozen: MeanSquares
    line_means: WorkerLocal


@dataclasses.dataclass(frozen=True)
class GrowthByMeanSquares:
    r"""Multiplies a frozen variance by the growth of its gradients' mean square.

    With p, r and c the mean squares of the workers' gradients in a leaf, in a row and
    in a column of a matrix, running means of decay :math:`\beta_2`, and T the step of
    the freeze,

    .. math::
      \rho_{t,kl} = \frac{p_t}{p_T} \max\left(
      \frac{r_{t,k} / p_t}{r_{T,k} / p_T}
      \frac{c_{t,l} / p_t}{c_{T,l} / p_T}, \tfrac14\right)

    What stays frozen is how a matrix's variance differs from a product of one factor a
    row and one a column. A matrix is the last two dimensions of a leaf, those before
    them number matrices, and c is then relative to its matrix; where one of the two is
    less than 16, and in one dimension, :math:`\rho` is p's growth alone. A kernel of
    many heads of few values each is better given with heads and values as one
    dimension. A leaf without gradients before the freeze has p as its variance.

    In each step p is exchanged, in the warm-up with all shares r / p and c / p, after
    the freeze with one in `period` of them.

    Attributes:
      period: steps after the freeze in which each row and column is exchanged once.

    References:
      Shazeer and Stern, Adafactor, 2018, https://arxiv.org/abs/1804.04235, for a
      variance as a product of rows and columns.
    """

    period: int = 32

    def __post_init__(self) -> None:
        if operator.index(self.period) < 1:
            raise ValueError(f"period must be at least 1 step, got {self.period}.")

    def init(self, params: optax.Params, axes: tuple[str, ...]) -> GrowthState:
        """The mean squares before any gradient."""
        _, slices = worker_count(axes)
        lines = sum(math.prod(s) for p in _leaves(params) for s in line_shapes(p.shape))
        zero = MeanSquares(
            jax.tree.map(lambda _: jnp.zeros([], jnp.float32), params),
            jnp.ones(lines, jnp.float32) if lines else None,
        )
        line_means = jnp.zeros((slices, lines), jnp.float32) if lines else None
        return GrowthState(zero, zero, WorkerLocal(line_means, axes, "average"))

    def update(
        self,
        gradients: optax.Updates,
        state: GrowthState,
        *,
        decay: ArrayLike,
        count: Int32[Array, ""],
        all_lines: bool,
    ) -> GrowthState:
        r"""Adds gradients to the running means, in one all-reduce.

        Args:
          gradients: each worker's own.
          state: so far.
          decay: :math:`\beta_2`.
          count: steps, this one included.
          all_lines: whether all rows and columns are exchanged, as in the warm-up.

        Returns:
          The new state.
        """
        leaves, treedef = jax.tree.flatten(gradients)
        if not leaves:
            return state
        measured = [_mean_squares(g) for g in leaves]
        message = jnp.stack([mean for mean, _ in measured])
        lines = [x for _, of_leaf in measured for x in of_leaf]
        line_means, first, length = state.line_means, 0, 0
        if lines:
            new = _moved_line_means(jnp.concatenate(lines), line_means, decay)
            line_means = dataclasses.replace(line_means, value=new[None])
            length = -(-new.size // (1 if all_lines else self.period))
            number = count % (1 if all_lines else self.period)
            first = jnp.minimum(number * length, new.size - length)
            exchanged = lax.dynamic_slice_in_dim(new, first, length)
            message = jnp.concatenate([message, exchanged])
        means = lax.pmean(message, line_means.axes)
        squares = treedef.unflatten(list(means[: len(leaves)]))
        now = state.now._replace(
            leaves=optax.tree.update_moment(squares, state.now.leaves, decay, 1)
        )
        if lines:
            of_leaf = [
                jnp.full(sum(map(math.prod, line_shapes(g.shape))), p)
                for p, g in zip(_leaves(now.leaves), leaves, strict=True)
                if line_shapes(g.shape)
            ]
            of_leaf = whole(jnp.concatenate(of_leaf))
            of_leaf = lax.dynamic_slice_in_dim(of_leaf, first, length)
            shares = _ratio(means[len(leaves) :], of_leaf)
            shares = lax.dynamic_update_slice_in_dim(state.now.shares, shares, first, 0)
            now = now._replace(shares=whole(shares))
        return state._replace(now=now, line_means=line_means)

    def grow(
        self,
        nu: optax.Params,
        state: GrowthState,
        *,
        weight_now: ArrayLike,
        weight_frozen: ArrayLike,
    ) -> optax.Params:
        """Frozen variances times their growth.

        Args:
          nu: the frozen variances, without bias correction.
          state: with the mean squares at the freeze.
          weight_now: weight of all gradients so far in a running mean from zero.
          weight_frozen: the same at the freeze.

        Returns:
          The variances, without bias correction.
        """

        def of_leaf(v: Array, p: Array, before: Array, lines: Any, were: Any) -> Array:
            p, before = p / weight_now, before / weight_frozen
            v = jnp.where(before > 0, v * _ratio(p, before), p * weight_frozen)
            if lines is None:
                return v
            rows, columns = (
                x / _one_if_negligible(y) for x, y in zip(lines, were, strict=True)
            )
            return v * jnp.maximum(whole(rows) * whole(columns), _LEAST_GROWTH)

        now, frozen = state.now, state.frozen
        by_leaf = _shares_by_leaf(nu, now.shares), _shares_by_leaf(nu, frozen.shares)
        return jax.tree.map(of_leaf, nu, now.leaves, frozen.leaves, *by_leaf)

    def means(self, nu: optax.Params, state: GrowthState) -> optax.Params:
        """Each leaf's mean variance, times the shares of its rows and columns."""

        def of_leaf(v: Array, lines: Any) -> Array:
            mean = jnp.mean(v)
            if lines is not None:
                rows, columns = (whole(_one_if_negligible(x)) for x in lines)
                mean = mean * rows * columns
            return mean

        return jax.tree.map(of_leaf, nu, _shares_by_leaf(nu, state.now.shares))

    def wire_cost(
        self, params: Any, axes: tuple[str, ...], *, all_lines: bool
    ) -> tuple[Transfer, ...]:
        """The all-reduce of `update`."""
        leaves = _leaves(params)
        lines = sum(math.prod(s) for p in leaves for s in line_shapes(p.shape))
        lines = -(-lines // (1 if all_lines else self.period))
        return (Transfer("all-reduce", 4 * (len(leaves) + lines), axes),)


def line_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the mean squares of rows and of columns; none for what is no matrix.

    The last two dimensions are a matrix, those before them number matrices.
    """
    if len(shape) < 2 or min(shape[-2:]) < _LEAST_LINES or not math.prod(shape):
        return ()
    return shape[:-1], (*shape[:-2], shape[-1])


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree)


def _moved_line_means(
    squares: Float32[Array, " lines"], line_means: WorkerLocal, decay: ArrayLike
) -> Float32[Array, " lines"]:
    """This worker's running means with the mean squares of one more step."""
    squares = whole(squares)
    before = line_means.value
    fits = getattr(before, "shape", None) == (1, squares.size)
    workers = bound_workers(line_means.axes)
    check_workers(fits, "1-bit Adam", workers, line_means.axes)
    return whole(optax.tree.update_moment(squares, before[0], decay, 1))


def _mean_squares(x: Array) -> tuple[Float32[Array, ""], list[Float32[Array, " n"]]]:
    """The mean square of a leaf, and those of its rows and columns."""
    squares = jnp.square(x.astype(jnp.float32))
    if not line_shapes(x.shape):
        return jnp.sum(squares) / float(max(x.size, 1)), []
    rows, columns = jnp.mean(squares, axis=-1), jnp.mean(squares, axis=-2)
    return jnp.mean(rows), [whole(x.reshape(-1)) for x in (rows, columns)]


def _shares_by_leaf(tree: optax.Params, shares: Any) -> optax.Params:
    """For each leaf None, or the shares of its rows and, of its matrix's, columns."""
    leaves, treedef = jax.tree.flatten(tree)
    result, first = [], 0
    for x in leaves:
        lines = []
        for shape in line_shapes(x.shape):
            last = first + math.prod(shape)
            lines.append(whole(shares[first:last].reshape(shape)))
            first = last
        if lines:
            rows, columns = lines
            of_matrix = jnp.mean(columns, axis=-1, keepdims=True)
            columns = whole(_ratio(columns, of_matrix))
            lines = rows[..., :, None], columns[..., None, :]
        result.append(lines or None)
    return treedef.unflatten(result)


def _one_if_negligible(share: Array) -> Array:
    # A row without gradients has its leaf's mean for a variance.
    return jnp.where(share < _NEGLIGIBLE, 1, share)


def _ratio(x: Array, y: Array) -> Array:
    """The quotient, and one where the divisor is zero or not finite."""
    divides = (y > 0) & jnp.isfinite(y)
    return jnp.where(divides, x / jnp.where(divides, y, 1), 1)
