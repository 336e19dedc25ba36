"""1-bit Adam in NumPy and float64, for an exchange that is exact.

Written from the formulas, one leaf at a time; a part that is not named is left out.
"""

import numpy as np

PARTS = frozenset({"lead", "growth", "floor", "bound"})
LOW, PERIOD, LEAST_GROWTH, LARGEST = 1e-6, 32, 0.25, 3.0


class Leaf:
    """Moments of one leaf, and the mean squares that its variance grows by.

    Args:
      shape: the leaf's.
      workers: number of workers.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      freeze: number of steps after which the variance is frozen.
      delay: steps by which the exchange is late.
      parts: what the compressed stage has of `PARTS`.
      lines: the first row's, and the number of all leaves' rows and columns together,
        of which a share is exchanged in each compressed step; None without any.
    """

    def __init__(self, shape, workers, b1, b2, eps, freeze, delay, parts, lines):
        self.b1, self.b2, self.eps, self.freeze = b1, b2, eps, freeze
        self.delay, self.parts, self.step = delay, parts, 0
        self.m, self.momentum, self.v = (np.zeros(shape) for _ in range(3))
        self.power, self.frozen_power = 0.0, np.nan
        self.place = lines
        number = sum(shape) if lines is not None else 0
        self.own = np.zeros((workers, number))
        self.shares, self.frozen_shares = np.ones(number), np.ones(number)
        self.raised = 0

    def update(self, gradients):
        """The update from all workers' gradients, (workers, *shape)."""
        self.step += 1
        frozen = self.step > self.freeze
        mean = gradients.mean(axis=0)
        self.m = self.b1 * self.m + (1 - self.b1) * mean
        last, self.momentum = self.momentum, self.m / (1 - self.b1**self.step)
        self.measure(gradients, frozen)
        if not frozen:
            self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        variance = self.v / (1 - self.b2 ** min(self.step, self.freeze))
        ahead = self.momentum
        if frozen and "growth" in self.parts:
            variance = variance * self.growth()
        if frozen and "lead" in self.parts:
            ahead = ahead + self.delay * (ahead - last)
        update = ahead / (np.sqrt(variance) + self.eps)
        if self.step == self.freeze:
            self.at_freeze()
        if frozen and "bound" in self.parts:
            return np.clip(update, -LARGEST, LARGEST)
        return update

    def measure(self, gradients, frozen):
        """Running means of squares, of the leaf and of its rows and columns."""
        squares = gradients**2
        self.power = self.b2 * self.power + (1 - self.b2) * squares.mean()
        if self.place is None:
            return
        lines = [squares.mean(axis=axis) for axis in (2, 1)]
        lines = np.concatenate(lines, axis=1)
        self.own = self.b2 * self.own + (1 - self.b2) * lines
        shares = self.own.mean(axis=0) / self.power
        first, number = self.place
        length = -(-number // PERIOD)
        start = min(self.step % PERIOD * length, number - length) - first
        now = slice(max(start, 0), max(start + length, 0)) if frozen else slice(None)
        self.shares[now] = shares[now]

    def by_lines(self, shares):
        rows, columns = np.split(shares, [len(self.m)])
        return rows, columns / columns.mean()

    def known(self, shares):
        return np.where(shares < LOW, 1, shares)

    def growth(self):
        now = self.power / (1 - self.b2**self.step) / self.frozen_power
        if self.place is None:
            return now
        pairs = zip(
            self.by_lines(self.shares), self.by_lines(self.frozen_shares), strict=True
        )
        rows, columns = (new / self.known(old) for new, old in pairs)
        return now * np.maximum(np.outer(rows, columns), LEAST_GROWTH)

    def at_freeze(self):
        self.frozen_power = self.power / (1 - self.b2**self.freeze)
        self.frozen_shares = self.shares.copy()
        if "floor" not in self.parts:
            return
        low, mean = self.v < LOW * self.v.mean(), self.v.mean()
        if self.place is not None:
            rows, columns = map(self.known, self.by_lines(self.shares))
            mean = mean * np.outer(rows, columns)
        self.v, self.raised = np.where(low, mean, self.v), low.sum()
