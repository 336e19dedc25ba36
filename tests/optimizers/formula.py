"""1-bit Adam in NumPy and float64, for an exchange that is exact.

Written from the formulas, one leaf at a time; a part that is not named is left out.
"""

import jax
import numpy as np

PARTS = frozenset({"growth", "floor", "bound"})
LOW, LARGEST, LEAST, LINES, SUMS, PERIOD = 1e-6, 3.0, 0.25, 16, 8, 8


def mean_squares(x):
    """Of a leaf, its rows and its columns; thrice the leaf's where it is no matrix."""
    squares = np.square(x)
    whole = np.mean(squares)
    if not is_matrix(x):
        return several(whole, whole, whole)
    rows, columns = (squares.mean(axis, keepdims=True) for axis in (1, 0))
    return several(whole, rows, columns)


def estimated(x, place, step):
    """The same by random sums, for one of the leaves of these shapes."""
    own = signs(place, step)
    if not is_matrix(x):
        flat = x.reshape(-1) * own  # of one axis, or none
        sums = np.array([flat[i::SUMS].sum() for i in range(SUMS)])
        return several(*[np.sum(sums**2) / x.size] * 3)
    rows, columns = x.shape
    of_rows, of_columns = np.split(own, [rows])
    of_each_row = np.square(x @ of_columns)[:, None] / columns
    of_each_column = np.square(of_rows @ x)[None] / rows
    whole = (of_each_row.mean() + of_each_column.mean()) / 2
    return several(whole, of_each_row, of_each_column)


def signs(place, step):
    """A leaf's part of all leaves' random signs."""
    leaf, shapes = place
    leaves = [np.empty(shape) for shape in shapes]
    ends = np.cumsum([sum(x.shape) if is_matrix(x) else x.size for x in leaves])
    key = jax.random.fold_in(jax.random.key(0), step)
    drawn = jax.random.rademacher(key, (int(ends[-1]),), "f4")
    return np.split(np.asarray(drawn, float), ends)[leaf]


def several(*arrays):
    """Arrays of different shapes as one, for arithmetic with all of them."""
    found = np.empty(len(arrays), object)
    for i, each in enumerate(arrays):
        found[i] = each
    return found


def is_matrix(x):
    return x.ndim == 2 and min(x.shape) >= LINES


class Leaf:
    """Moments of one leaf, and the mean squares that its variance grows by.

    Args:
      shape: the leaf's.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      freeze: number of steps after which the variance is frozen.
      place: which of the leaves it is, and the shapes of all.
      parts: what the compressed stage has of `PARTS`.
      lead: steps by which its momentum is led.
      refreshes: numbers of the steps that refresh the variance until then; None for
        all.
    """

    def __init__(
        self, shape, b1, b2, eps, freeze, place, *, parts, lead=0.0, refreshes=None
    ):
        self.refreshes, self.last = refreshes, 0
        self.b1, self.b2, self.eps, self.freeze = b1, b2, eps, freeze
        self.place, self.parts, self.lead, self.step = place, parts, lead, 0
        self.m, self.momentum, self.v = (np.zeros(shape) for _ in range(3))
        self.squares = self.frozen_squares = mean_squares(np.zeros(shape))
        self.followed = self.raised = self.bounded = 0

    def update(self, gradients):
        """The update from all workers' gradients, (workers, *shape)."""
        self.step += 1
        frozen = self.step > self.freeze
        due = self.refreshes is None or self.step in self.refreshes
        mean = gradients.mean(axis=0)
        self.m = self.b1 * self.m + (1 - self.b1) * mean
        last, self.momentum = self.momentum, self.m / (1 - self.b1**self.step)
        if frozen or due:
            self.follow(mean, frozen)
        if due and not frozen:
            decay = self.b2 ** (self.step - self.last)
            self.v = decay * self.v + (1 - decay) * mean**2
            self.last = self.step
        variance = self.v / (1 - self.b2**self.last)
        if self.refreshes is not None and not frozen:
            variance, _ = self.floored(variance)
        ahead = self.momentum
        if frozen or not due:
            ahead = ahead + self.lead * (ahead - last)
        if frozen and "growth" in self.parts:
            variance = variance * self.growth()
        update = ahead / (np.sqrt(variance) + self.eps)
        if self.step == self.freeze:
            self.at_freeze()
        if frozen and "bound" in self.parts and self.step % PERIOD == 0:
            self.bounded = np.sum(np.abs(update) > LARGEST)
        if "bound" in self.parts and (frozen or self.refreshes is not None):
            return np.clip(update, -LARGEST, LARGEST)
        return update

    def follow(self, mean, frozen):
        """Every mean gradient, and once none knows it, sums of one in a period."""
        if frozen and self.step % PERIOD:
            return
        steps = PERIOD if frozen else self.step - self.last
        of = estimated(mean, self.place, self.step) if frozen else mean_squares(mean)
        decay = self.b2**steps
        self.squares = decay * self.squares + (1 - decay) * of
        self.followed += steps

    def growth(self):
        """Of each value, by its row, its column and the whole."""
        p, r, c = self.squares / (1 - self.b2**self.followed)
        p0, r0, c0 = self.frozen_squares
        r0, c0 = (np.where(x < LOW * p0, p0, x) for x in (r0, c0))
        return np.maximum(r / r0 * (c / c0) * (p0 / p), LEAST * p / p0)

    def at_freeze(self):
        self.frozen_squares = self.squares / (1 - self.b2**self.freeze)
        self.v, self.raised = self.floored(self.v)

    def floored(self, variance):
        """The variance with its negligible values raised, and how many there were."""
        if "floor" not in self.parts:
            return variance, 0
        low = variance < LOW * variance.mean()
        return np.where(low, variance.mean(), variance), low.sum()
