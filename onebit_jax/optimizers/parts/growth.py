"""Growth of a frozen variance with the mean squares of the mean gradient."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.workers.arithmetic import means, replicated
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


class MeanSquares(NamedTuple):
    """Mean squares of the mean gradient in a leaf, running means over steps.

    Attributes:
      whole: that of all values, a scalar; of each matrix (..., 1, 1).
      rows: (..., rows, 1), those of a matrix; None for what is no matrix.
      columns: (..., 1, columns), likewise.
    """

    whole: Any
    rows: Any = None
    columns: Any = None


class RandomSums(NamedTuple):
    """Sums of a leaf's values with random signs.

    Attributes:
      some: (8,) of a leaf that is no matrix; None of a matrix.
      rows: (..., rows, 1) of a matrix; None otherwise.
      columns: (..., 1, columns), likewise.
    """

    some: Any
    rows: Any = None
    columns: Any = None


class GrowthState(NamedTuple):
    """State of `GrowthByMeanSquares`.

    Attributes:
      now: `MeanSquares` in the place of each leaf, zeros until the variance is frozen.
      frozen: the same when it was frozen.
      measured: number of steps after the freeze that have measured.
    """

    now: optax.Params
    frozen: optax.Params
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
      ValueError: if one of the two is less than 1.
      TypeError: if one is not an integer.

    Example:
      >>> import jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(
      ...     0.1,
      ...     onebit_jax.sign_mean('data'),
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
        if operator.index(self.period) < 1:
            raise ValueError(f"period must be at least 1 step, got {self.period}.")
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
        sizes = [self._signs(x) for x in leaves]
        # One draw: a draw for each leaf took a third of the compiling.
        key = jax.random.fold_in(jax.random.key(0), count)
        signs = jax.random.rademacher(key, (sum(sizes),), jnp.float32)
        sums = tuple(map(self._sums, leaves, _cut(signs, sizes)))
        agreed = means(jax.tree.map(replicated, sums), axes)
        squares = treedef.unflatten(map(_of_sums, agreed, leaves))
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
        grown = []
        for v, now, frozen in zip(
            leaves, *map(_nodes, (state.now, state.frozen)), strict=True
        ):
            mean = jax.tree.map(lambda x: x / weight_now * weight_frozen, now)
            growth = _growth(mean, frozen)
            grown.append(jnp.where(frozen.whole > 0, v * growth, mean.whole))
        return treedef.unflatten(grown)

    def _by_lines(self, x: Array) -> bool:
        return x.ndim > 1 and min(x.shape[-2:]) >= self.least and x.size > 0

    def _means(self, squares: optax.Params) -> optax.Params:
        return jax.tree.map(lambda x: _mean_squares(x, self._by_lines(x)), squares)

    def _signs(self, x: Array) -> int:
        """The number of random signs in the sums of a leaf."""
        return sum(x.shape[-2:] if self._by_lines(x) else _signs_by_axis(x))

    def _sums(self, x: Array, signs: Float32[Array, " signs"]) -> RandomSums:
        return _random_sums(x, signs, self._by_lines(x))


def _nodes(tree: optax.Params) -> list[MeanSquares]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, MeanSquares))


def _mean_squares(squares: Float32[Array, ...], by_lines: bool) -> MeanSquares:
    if not by_lines:
        return MeanSquares(jnp.sum(squares) / float(max(squares.size, 1)))
    rows = replicated(jnp.mean(squares, axis=-1, keepdims=True))
    columns = replicated(jnp.mean(squares, axis=-2, keepdims=True))
    return MeanSquares(jnp.mean(rows, axis=-2, keepdims=True), rows, columns)


def _cut(
    signs: Float32[Array, " signs"], sizes: Sequence[int]
) -> Iterator[Float32[Array, " size"]]:
    """Parts of these sizes, each whole on every device inside a worker."""
    # Left to automatic axes, devices would draw shares and send parts of them around.
    ends = list(itertools.accumulate(sizes))
    return map(replicated, jnp.split(signs, ends[:-1]))


def _random_sums(
    x: Float[Array, ...], signs: Float32[Array, " signs"], by_lines: bool
) -> RandomSums:
    """Sums over rows and columns, or eight over parts of what is no matrix."""
    x = x.astype(jnp.float32)
    if not by_lines:
        return RandomSums(_some_sums(x, signs))
    rows, columns = _cut(signs, x.shape[-2:])
    return RandomSums(
        None,
        jnp.einsum("...kl,l->...k", x, columns)[..., None],
        jnp.einsum("...kl,k->...l", x, rows)[..., None, :],
    )


def _signs_by_axis(x: Array) -> list[int]:
    """Numbers of signs of what is no matrix: of its longest axis, and of each other."""
    longest, *others = sorted(x.shape or (1,), reverse=True)
    return [longest, *(_SUMS * size for size in others)]


def _some_sums(
    x: Float32[Array, ...], signs: Float32[Array, " signs"]
) -> Float32[Array, " 8"]:
    """Eight sums over parts of the longest axis, whole along the others.

    A value's sign is the product of its axes' signs, of which each part has its own. A
    sign drawn for each value would be as large as the leaf, whole on every device.
    """
    order = sorted(range(x.ndim), key=lambda axis: -x.shape[axis])
    x = x.transpose(order) if order else x[None]
    along, *others = _cut(signs, _signs_by_axis(x))
    missing = -len(along) % _SUMS
    x = jnp.pad(x, [(0, missing), *[(0, 0)] * len(others)])
    x = x.reshape(len(x) // _SUMS, _SUMS, *x.shape[1:])
    parts = jnp.pad(along, (0, missing)).reshape(-1, _SUMS)
    x = x * jnp.expand_dims(parts, range(2, x.ndim))
    for axis, each in enumerate(others, 2):
        away = [i for i in range(x.ndim) if i not in (1, axis)]
        x = x * jnp.expand_dims(each.reshape(_SUMS, -1), away)
    return jnp.sum(x, axis=(0, *range(2, x.ndim)))


def _of_sums(sums: RandomSums, x: Array) -> MeanSquares:
    """Mean squares of a leaf from the workers' means of its sums."""
    if sums.rows is None:
        return MeanSquares(jnp.sum(jnp.square(sums.some)) / float(max(x.size, 1)))
    rows = jnp.square(sums.rows) / float(x.shape[-1])
    columns = jnp.square(sums.columns) / float(x.shape[-2])
    of_rows = jnp.mean(rows, axis=-2, keepdims=True)
    of_columns = jnp.mean(columns, axis=-1, keepdims=True)
    return MeanSquares((of_rows + of_columns) / 2.0, rows, columns)


def _growth(now: MeanSquares, frozen: MeanSquares) -> Float32[Array, ...]:
    of_whole = _ratio(now.whole, frozen.whole)
    if now.rows is None:
        return of_whole

    def of_lines(now_: Array, frozen_: Array) -> Array:
        # A row without gradients has its leaf's mean for a variance.
        known = frozen_ > _NEGLIGIBLE * frozen.whole
        return _ratio(now_, jnp.where(known, frozen_, frozen.whole))

    rows = of_lines(now.rows, frozen.rows)
    columns = of_lines(now.columns, frozen.columns)
    product = rows * columns * _ratio(jnp.ones_like(of_whole), of_whole)
    return jnp.maximum(product, _LEAST_GROWTH * of_whole)


def _ratio(x: Array, y: Array) -> Array:
    """The quotient, and one where a mean square is zero or overflowed."""
    divides = (y > 0) & jnp.isfinite(x) & jnp.isfinite(y)
    return jnp.where(divides, x / jnp.where(divides, y, 1), 1)
