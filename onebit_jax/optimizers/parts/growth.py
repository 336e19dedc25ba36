"""Growth of a frozen variance with the mean squares of the mean gradient."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.workers.arithmetic import (
    made_once,
    means,
    numbers_of,
    parted,
    replicated,
    row,
)
from onebit_jax.workers.stages import run_nested_stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
    """Mean squares of the mean gradient in matrices, or what stands for them.

    Attributes:
      whole: (matrices, 1, 1), those of each matrix.
      rows: (matrices, rows, 1), those of its rows.
      columns: (matrices, 1, columns), those of its columns.
    """

    whole: Float32[Array, "n 1 1"]
    rows: Float32[Array, "n rows 1"]
    columns: Float32[Array, "n 1 columns"]


class MeanSquares(NamedTuple):
    """Mean squares of the mean gradient, running means over steps.

    Attributes:
      wholes: (leaves,) those of the leaves that are no matrices, in their order.
      matrices: those of the matrices of each shape, in the order of their leaves.
    """

    wholes: Float32[Array, " leaves"]
    matrices: tuple[MatrixMeans, ...]


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
        leaves = jax.tree.leaves(gradients)
        signs = self._signs(leaves, count)
        shapes, others = self._by_shape(leaves)
        sums = (
            [
                _together(_sums_of_lines(leaves[i], signs[i]) for i in places)
                for places in shapes
            ],
            [_some_sums(leaves[i], signs[i]) for i in others],
        )
        lines, some = means(jax.tree.map(replicated, sums), axes)
        squares = MeanSquares(
            row(
                lambda s, x: jnp.sum(jnp.square(s)) / float(max(x.size, 1)),
                some,
                [leaves[i] for i in others],
            ),
            tuple(map(_of_sums, lines)),
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
        shapes, others = self._by_shape(leaves)
        mean = jax.tree.map(lambda x: x / weight_now * weight_frozen, state.now)
        wholes = _grown_wholes(
            [leaves[i] for i in others], mean.wholes, state.frozen.wholes
        )
        grown = dict(zip(others, wholes, strict=True))
        for places, now, frozen in zip(
            shapes, mean.matrices, state.frozen.matrices, strict=True
        ):
            matrices = _grown([leaves[i] for i in places], now, frozen)
            grown |= zip(places, matrices, strict=True)
        return treedef.unflatten([grown[i] for i in range(len(leaves))])

    def _by_lines(self, x: Array) -> bool:
        return x.ndim > 1 and min(x.shape[-2:]) >= self.least and x.size > 0

    def _by_shape(self, leaves: Sequence[Array]) -> tuple[list[list[int]], list[int]]:
        """The places of the leaves of matrices of each shape, and of the other leaves.

        What is small is made for all matrices of one shape at once: for each leaf by
        itself it was half of what a compiler had to do.
        """
        shapes: dict[tuple[int, ...], list[int]] = {}
        others = []
        for i, x in enumerate(leaves):
            if self._by_lines(x):
                shapes.setdefault(x.shape[-2:], []).append(i)
            else:
                others.append(i)
        return list(shapes.values()), others

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
        # Left to automatic axes, devices would draw shares, and send parts around; and
        # the kernel of each leaf would draw its part again.
        drawn = made_once(replicated(drawn))
        parts = map(replicated, parted(drawn, starts, each))
        return [list(itertools.islice(parts, len(of_leaf))) for of_leaf in sizes]

    def _means(self, squares: optax.Params) -> MeanSquares:
        leaves = jax.tree.leaves(squares)
        shapes, others = self._by_shape(leaves)
        return MeanSquares(
            row(
                lambda x: jnp.sum(x) / float(max(x.size, 1)),
                [leaves[i] for i in others],
            ),
            tuple(_means_of_lines([leaves[i] for i in places]) for places in shapes),
        )


def _together(
    of_leaves: Iterable[tuple[Float32[Array, "*n m 1"], Float32[Array, "*n 1 k"]]],
) -> tuple[Float32[Array, "n m 1"], Float32[Array, "n 1 k"]]:
    """Lines of all matrices of one shape: the rows', and the columns'."""
    rows, columns = (
        jnp.concatenate([replicated(x).reshape(-1, *x.shape[-2:]) for x in xs])
        for xs in zip(*of_leaves, strict=True)
    )
    return rows, columns


def _means_of_lines(leaves: list[Float32[Array, "*n m k"]]) -> MatrixMeans:
    rows, columns = _together(
        (
            jnp.mean(x, axis=-1, keepdims=True),
            jnp.mean(x, axis=-2, keepdims=True),
        )
        for x in leaves
    )
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
    sums: tuple[Float32[Array, "n m 1"], Float32[Array, "n 1 k"]],
) -> MatrixMeans:
    """Mean squares of matrices from the workers' means of their sums."""
    (_, m, _), (_, _, k) = (x.shape for x in sums)
    rows = jnp.square(sums[0]) / float(k)
    columns = jnp.square(sums[1]) / float(m)
    of_rows = jnp.mean(rows, axis=-2, keepdims=True)
    of_columns = jnp.mean(columns, axis=-1, keepdims=True)
    return MatrixMeans((of_rows + of_columns) / 2.0, rows, columns)


def _grown(
    nu: list[Float32[Array, "*n m k"]], now: MatrixMeans, frozen: MatrixMeans
) -> Iterator[Float32[Array, "*n m k"]]:
    """Grown variances of matrices of one shape, leaf by leaf."""
    numbers = [math.prod(v.shape[:-2]) for v in nu]
    starts = list(itertools.accumulate(numbers, initial=0))[:-1]
    factors = parted(made_once(_factors(now, frozen)), starts, numbers)
    for v, of_leaf in zip(nu, factors, strict=True):
        rows, columns, least, added = (
            x.reshape(*v.shape[:-2], *x.shape[1:]) for x in of_leaf
        )
        yield v * jnp.maximum(rows * columns, least) + added


def _factors(now: MatrixMeans, frozen: MatrixMeans) -> tuple[Array, ...]:
    """By what variances grow: of rows, of columns; at least; what is added."""
    # Without gradients before the freeze the variances of a matrix are zero, or too
    # small for a mean.
    known = frozen.whole > 0

    def of_lines(now_: Array, frozen_: Array) -> Array:
        # A row without gradients has its matrix's mean for a variance.
        has_own = frozen_ > _NEGLIGIBLE * frozen.whole
        ratio = _ratio(now_, jnp.where(has_own, frozen_, frozen.whole))
        return jnp.where(known, ratio, 1)

    of_whole = _ratio(now.whole, frozen.whole)
    others = jnp.where(known, _ratio(jnp.ones_like(of_whole), of_whole), 0)
    return (
        # First, as the product of rows and columns may overflow.
        of_lines(now.rows, frozen.rows) * others,
        of_lines(now.columns, frozen.columns),
        jnp.where(known, _LEAST_GROWTH * of_whole, 0),
        jnp.where(known, 0, now.whole),
    )


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
