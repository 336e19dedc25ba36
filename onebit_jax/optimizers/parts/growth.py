"""Growth of a frozen variance with the mean squares of the mean gradient."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.workers.arithmetic import (
    means,
    numbers_of,
    parted,
    replicated,
    row,
)
from onebit_jax.workers.stages import run_nested_stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from jax import Array
    from jax.typing import ArrayLike
    from jaxtyping import Float, Float32, Int32

# A row or column with less than this share of its leaf's mean square is taken to have
# had no gradients.
_NEGLIGIBLE = 1e-6
# A row and a column change the leaf's own growth by no smaller factor. A row whose
# gradients stop is still sent as signs, which a smaller variance would enlarge.
_LEAST_GROWTH = 0.25
# How many random sums are sent of a leaf that is no matrix.
_SUMS = 8


class MatrixMeans(NamedTuple):
    """Mean squares of the mean gradient in a leaf of matrices, or what stands for them.

    Attributes:
      whole: (..., 1, 1), that of each matrix.
      rows: (..., rows, 1), those of its rows.
      columns: (..., 1, columns), those of its columns.
    """

    whole: Float32[Array, "*n 1 1"]
    rows: Float32[Array, "*n rows 1"]
    columns: Float32[Array, "*n 1 columns"]


class MeanSquares(NamedTuple):
    """Mean squares of the mean gradient, running means over steps.

    Attributes:
      wholes: (leaves,) those of the leaves that are no matrices, in their order.
      matrices: `MatrixMeans` in the place of each other leaf; None for the rest.
    """

    wholes: Float32[Array, " leaves"]
    matrices: optax.Params


class GrowthState(NamedTuple):
    """State of `GrowthByMeanSquares`.

    Attributes:
      now: the mean squares, zeros until the variance is frozen.
      frozen: the same when it was frozen.
      measured: number of steps after the freeze that have measured.
    """

    now: MeanSquares
    frozen: MeanSquares
    measured: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class GrowthByMeanSquares:
    r"""Multiplies a frozen variance by the growth of its rows and columns.

    With p, r and c the mean squares of the mean gradient :math:`\bar g` in a matrix, in
    a row and in a column of it, running means of decay :math:`\beta_2`, and T the step
    of the freeze,

    .. math::
      \rho_{t,kl} = \max\left(
      \frac{r_{t,k}}{r_{T,k}} \frac{c_{t,l}}{c_{T,l}} \frac{p_T}{p_t},
      \frac{p_t}{4 p_T} \right)

    Each row and each column has a factor of growth; the pattern within the matrix stays
    as it was frozen. A matrix is the last two dimensions of a leaf, and those before
    them number matrices; where one of the two is less than `least`, and in one
    dimension, :math:`\rho` is the growth of the leaf's p alone. A kernel of many heads
    of few values each is better given with heads and values as one dimension. A matrix,
    or leaf, without gradients before the freeze has p as its variance.

    After the freeze no worker knows the mean gradient, and sums with random signs s
    stand for it: :math:`(\sum_l s_l \bar g_{kl})^2`, the square of the mean of what
    each worker sums over a row, is :math:`\sum_l \bar g_{kl}^2` in the mean, whatever
    the gradient is, and a column's likewise. One step in `period` measures.

    Attributes:
      period: steps after the freeze of which one measures.
      least: the fewest rows and columns that are followed. In the mean of a period of
        8 steps their sums are a half of the signs' bytes in a matrix of 16 by 16, an
        eighth in one of 64 by 64.

    Raises:
      ValueError: if one of the two is less than 1, or the period more than 2**31 - 1.
      TypeError: if one is not an integer.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(
      ...     0.1,
      ...     onebit_jax.sign_mean('data', exact_below=0),
      ...     onebit_jax.freeze_at(1),
      ...     b1=0.0,
      ...     compressed=onebit_jax.Compressed(
      ...         lead=None, growth=onebit_jax.GrowthByMeanSquares(period=2)
      ...     ),
      ... )
      >>> run = onebit_jax.simulated(lambda p, x: jnp.mean(x) * p, tx, workers=2)
      >>> params, state = run.init(jnp.float32(0))
      >>> for scale in 1.0, 2.0:
      ...     params, state, loss = run.step(params, state, scale * jnp.ones(2))
      ...     print(f'{params:.3f}')  # without growth -0.100 and -0.300
      -0.100
      -0.215

    References:
      Alon, Matias and Szegedy, The space complexity of approximating the frequency
      moments, 1999, section 2.2, for squares of random sums; Shazeer and Stern,
      Adafactor, 2018, https://arxiv.org/abs/1804.04235, for a variance as a product of
      rows and columns.
    """

    period: int = 8
    least: int = 16

    def __post_init__(self) -> None:
        if not 1 <= operator.index(self.period) < 2**31:
            raise ValueError(
                f"period must be from 1 step to 2**31 - 1, got {self.period}."
            )
        if operator.index(self.least) < 1:
            raise ValueError(f"least must be at least 1 row, got {self.least}.")

    def init(self, params: optax.Params) -> GrowthState:
        """The mean squares before any gradient."""
        float32 = jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params
        )
        shapes = jax.eval_shape(self._means, float32)
        # Each anew: a buffer that is in a state twice cannot be donated.
        now, frozen = (
            jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            for _ in range(2)
        )
        return GrowthState(now, frozen, jnp.zeros([], jnp.int32))

    def freeze(self, nu: optax.Params, state: GrowthState) -> GrowthState:
        """Sets the mean squares, of now and the freeze, to those of a frozen variance.

        Args:
          nu: the variances, without bias correction.
          state: so far.

        Returns:
          The new state.
        """
        now = self._means(nu)
        return state._replace(now=now, frozen=jax.tree.map(replicated, now))

    def follow(
        self,
        gradients: optax.Updates,
        state: GrowthState,
        *,
        decay: ArrayLike,
        count: Int32[Array, ""],
        axes: tuple[str, ...],
    ) -> GrowthState:
        r"""Adds gradients by their random sums, in one all-reduce, for a whole period.

        Args:
          gradients: each worker's own.
          state: so far.
          decay: :math:`\beta_2`.
          count: number of this step from 1, which decides whether it measures, and the
            signs.
          axes: the mesh axes whose members are the workers.

        Returns:
          The new state; the one so far in a step that does not measure.
        """
        followed = run_nested_stage(
            "measuring",
            count % self.period == 0,
            lambda: self._measured(gradients, state, decay, count, axes),
            lambda: state,
        )
        return jax.tree.map(replicated, followed)

    def _measured(
        self,
        gradients: optax.Updates,
        state: GrowthState,
        decay: ArrayLike,
        count: Int32[Array, ""],
        axes: tuple[str, ...],
    ) -> GrowthState:
        leaves, treedef = jax.tree.flatten(gradients)
        signs = self._signs(leaves, count)
        (matrices, others), (of_lines, of_others) = (
            self._by_kind(leaves, x) for x in (leaves, signs)
        )
        sums = (
            list(map(_sums_of_lines, matrices, of_lines)),
            list(map(_some_sums, others, of_others)),
        )
        lines, some = means(jax.tree.map(replicated, sums), axes)
        squares = MeanSquares(
            row(
                lambda s, x: jnp.sum(jnp.square(s)) / float(max(x.size, 1)),
                some,
                others,
            ),
            self._placed(leaves, treedef, map(_of_sums, lines, matrices)),
        )
        now = optax.tree.update_moment(squares, state.now, decay**self.period, 1)
        return state._replace(now=now, measured=state.measured + 1)

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
        leaves, treedef = jax.tree.flatten(nu)
        mean = jax.tree.map(lambda x: x / weight_now * weight_frozen, state.now)
        matrices, others = self._by_kind(leaves, leaves)
        lines = map(_grown, matrices, *map(_nodes, (mean, state.frozen)))
        wholes = iter(_grown_wholes(others, mean.wholes, state.frozen.wholes))
        grown = [next(lines if self._by_lines(v) else wholes) for v in leaves]
        return treedef.unflatten(grown)

    def _by_lines(self, x: Array) -> bool:
        return x.ndim > 1 and min(x.shape[-2:]) >= self.least and x.size > 0

    def _by_kind(
        self, leaves: list[Array], of_leaves: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The parts that are of matrices, and those of other leaves."""
        kinds = [self._by_lines(x) for x in leaves]
        return (
            [y for is_one, y in zip(kinds, of_leaves, strict=True) if is_one],
            [y for is_one, y in zip(kinds, of_leaves, strict=True) if not is_one],
        )

    def _signs(
        self, leaves: list[Array], count: Int32[Array, ""]
    ) -> list[list[Float32[Array, " size"]]]:
        """Random signs for the sums of each leaf, along each axis that is summed."""
        sizes = [
            x.shape[-2:] if self._by_lines(x) else _signs_by_axis(x) for x in leaves
        ]
        each = list(itertools.chain.from_iterable(sizes))
        starts = list(itertools.accumulate(each, initial=0))[:-1]
        # One draw: a draw for each leaf took a third of the compiling.
        key = jax.random.fold_in(jax.random.key(0), count)
        drawn = jax.random.rademacher(key, (sum(each),), jnp.float32)
        # Left to automatic axes, devices would draw shares, and send parts around.
        parts = map(replicated, parted(replicated(drawn), starts, each))
        return [list(itertools.islice(parts, len(of_leaf))) for of_leaf in sizes]

    def _means(self, squares: optax.Params) -> MeanSquares:
        leaves, treedef = jax.tree.flatten(squares)
        matrices, others = self._by_kind(leaves, leaves)
        return MeanSquares(
            row(lambda x: jnp.sum(x) / float(max(x.size, 1)), others),
            self._placed(leaves, treedef, map(_means_of_lines, matrices)),
        )

    def _placed(
        self, leaves: list[Array], treedef: Any, of_matrices: Iterator[MatrixMeans]
    ) -> optax.Params:
        """A tree of what is of matrices, and of None."""
        return treedef.unflatten(
            [next(of_matrices) if self._by_lines(x) else None for x in leaves]
        )


def _nodes(squares: MeanSquares) -> list[MatrixMeans]:
    def is_one(node: object) -> bool:
        return isinstance(node, MatrixMeans)

    return jax.tree.leaves(squares.matrices, is_leaf=is_one)


def _means_of_lines(squares: Float32[Array, "*n m k"]) -> MatrixMeans:
    rows = replicated(jnp.mean(squares, axis=-1, keepdims=True))
    columns = replicated(jnp.mean(squares, axis=-2, keepdims=True))
    return MatrixMeans(jnp.mean(rows, axis=-2, keepdims=True), rows, columns)


def _sums_of_lines(
    x: Float[Array, "*n m k"], signs: list[Float32[Array, " size"]]
) -> tuple[Float32[Array, "*n m 1"], Float32[Array, "*n 1 k"]]:
    """The sums of each row and of each column, with random signs."""
    x, (of_rows, of_columns) = x.astype(jnp.float32), signs
    return (
        jnp.einsum("...kl,l->...k", x, of_columns)[..., None],
        jnp.einsum("...kl,k->...l", x, of_rows)[..., None, :],
    )


def _signs_by_axis(x: Array) -> list[int]:
    """Numbers of signs of what is no matrix: of its longest axis, and of each other."""
    longest, *others = sorted(x.shape or (1,), reverse=True)
    return [longest, *(_SUMS * size for size in others)]


def _some_sums(
    x: Float[Array, "*shape"], signs: list[Float32[Array, " signs"]]
) -> Float32[Array, " 8"]:
    """Eight sums over parts of the longest axis, whole along the others.

    A value's sign is the product of its axes' signs, of which each part has its own. A
    sign drawn for each value would be as large as the leaf, whole on every device.
    """
    order = sorted(range(x.ndim), key=lambda axis: -x.shape[axis])
    x = x.astype(jnp.float32).transpose(order) if order else x.astype(jnp.float32)[None]
    along, *others = signs
    missing = -len(along) % _SUMS
    x = jnp.pad(x, [(0, missing), *[(0, 0)] * len(others)])
    x = x.reshape(len(x) // _SUMS, _SUMS, *x.shape[1:])
    parts = jnp.pad(along, (0, missing)).reshape(-1, _SUMS)
    x = x * jnp.expand_dims(parts, range(2, x.ndim))
    for axis, each in enumerate(others, 2):
        away = [i for i in range(x.ndim) if i not in (1, axis)]
        x = x * jnp.expand_dims(each.reshape(_SUMS, -1), away)
    return jnp.sum(x, axis=(0, *range(2, x.ndim)))


def _of_sums(
    sums: tuple[Float32[Array, "*n m 1"], Float32[Array, "*n 1 k"]],
    x: Float[Array, "*n m k"],
) -> MatrixMeans:
    """Mean squares of matrices from the workers' means of their sums."""
    rows = jnp.square(sums[0]) / float(x.shape[-1])
    columns = jnp.square(sums[1]) / float(x.shape[-2])
    of_rows = jnp.mean(rows, axis=-2, keepdims=True)
    of_columns = jnp.mean(columns, axis=-1, keepdims=True)
    return MatrixMeans((of_rows + of_columns) / 2.0, rows, columns)


def _grown(
    nu: Float32[Array, "*n m k"], now: MatrixMeans, frozen: MatrixMeans
) -> Float32[Array, "*n m k"]:
    def of_lines(now_: Array, frozen_: Array) -> Array:
        # A row without gradients has its leaf's mean for a variance.
        known = frozen_ > _NEGLIGIBLE * frozen.whole
        return _ratio(now_, jnp.where(known, frozen_, frozen.whole))

    of_whole = _ratio(now.whole, frozen.whole)
    rows = of_lines(now.rows, frozen.rows)
    columns = of_lines(now.columns, frozen.columns)
    product = rows * columns * _ratio(jnp.ones_like(of_whole), of_whole)
    growth = jnp.maximum(product, _LEAST_GROWTH * of_whole)
    return jnp.where(frozen.whole > 0, nu * growth, now.whole)


def _grown_wholes(
    nu: list[Array], now: Float32[Array, " leaves"], frozen: Float32[Array, " leaves"]
) -> list[Array]:
    # Without gradients before the freeze all variances of a leaf are zero.
    growth = jnp.where(frozen > 0, _ratio(now, frozen), 0)
    added = jnp.where(frozen > 0, 0, now)
    return jax.tree.map(
        lambda v, times, plus: v * times + plus, nu, *numbers_of(nu, growth, added)
    )


def _ratio(x: Array, y: Array) -> Array:
    """The quotient, and one where a mean square is zero or overflowed."""
    divides = (y > 0) & jnp.isfinite(x) & jnp.isfinite(y)
    return jnp.where(divides, x / jnp.where(divides, y, 1), 1)
