"""1-bit LAMB in NumPy and float64, for an exchange that is exact.

Written from the formulas, one leaf at a time; a part that is not named is left out.
What layers tell each other, the magnitudes of their momenta, changes nothing where the
exchange is exact, and is a function of all leaves.
"""

import numpy as np
from optimizers.formula import LARGEST, LOW

PARTS = frozenset({"floor", "bound"})


class Leaf:
    """Moments, ratio and factor of one leaf.

    Args:
      shape: the leaf's.
      b1: decay of the momentum.
      b2: decay of both variances.
      eps: added to the root of a variance.
      freeze: number of steps after which variance and ratio are frozen.
      place: of other optimizers.
      parts: what the compressed stage has of `PARTS`.
      weight_decay: of this leaf.
      bias_correction: of the moments and of the mean ratio.
      ratio_limits: of the ratio of norms.
      ratio_decay: of the mean ratio.
      factor_limits: of the factor on the frozen ratio.
      factor_change: of that factor in a step.
    """

    def __init__(
        self,
        shape,
        b1,
        b2,
        eps,
        freeze,
        place,
        *,
        parts=PARTS,
        weight_decay=0.0,
        bias_correction=True,
        ratio_limits=(0.01, 10.0),
        ratio_decay=0.9,
        factor_limits=(0.5, 4.0),
        factor_change=0.1,
    ):
        del place
        self.b1, self.b2, self.eps, self.freeze = b1, b2, eps, freeze
        self.parts, self.weight_decay = parts, weight_decay
        self.bias_correction = bias_correction
        self.ratio_limits, self.ratio_decay = ratio_limits, ratio_decay
        self.factor_limits, self.factor_change = factor_limits, factor_change
        self.m, self.v, self.fresh = (np.zeros(shape) for _ in range(3))
        self.ratios, self.factor = [], 1.0
        self.step = self.raised = self.bounded = 0

    def update(self, gradients, params):
        """Ratio, factor and weight decay included, from (workers, *shape) and (*shape).

        Before the learning rate.
        """
        self.step += 1
        last, mean = self.m, gradients.mean(axis=0)
        self.m = self.b1 * last + (1 - self.b1) * mean
        momentum = self.corrected(self.m, self.b1, self.step)
        if self.step > self.freeze:
            return self.compressed(momentum, last, params)
        self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        update = momentum / self.root(self.v, self.step) + self.weight_decay * params
        ratio = self.ratio_of(params, update)
        self.ratios.append(ratio)
        if self.step == self.freeze:
            if "floor" in self.parts:
                low = self.v < LOW * self.v.mean()
                self.v, self.raised = np.where(low, self.v.mean(), self.v), low.sum()
            self.fresh = self.v
        return ratio * update

    def compressed(self, momentum, last, params):
        gradient = (self.m - self.b1 * last) / (1 - self.b1)
        self.fresh = self.b2 * self.fresh + (1 - self.b2) * gradient**2
        root, fresh = self.root(self.v, self.freeze), self.root(self.fresh, self.step)
        direction = momentum / root
        if "bound" in self.parts:
            self.bounded = np.sum(np.abs(direction) > LARGEST)
            direction = np.clip(direction, -LARGEST, LARGEST)
        update = direction + self.weight_decay * params
        self.factor = self.next_factor(np.max(root / fresh), direction, update)
        return self.frozen_ratio() * self.factor * update

    def next_factor(self, factor, direction, update):
        norm = np.linalg.norm(update)
        share = min(1.0, np.linalg.norm(direction) / norm) if norm else 1.0
        factor = np.clip(share * factor + (1 - share), *self.factor_limits)
        less, more = 1 - self.factor_change, 1 + self.factor_change
        return min(max(factor, less * self.factor), more * self.factor)

    def ratio_of(self, params, update):
        of_params, of_update = np.linalg.norm(params), np.linalg.norm(update)
        if of_params == 0 or of_update == 0:
            return 1.0
        return np.clip(of_params / of_update, *self.ratio_limits)

    def frozen_ratio(self):
        """The weighted mean of all ratios that were not 1; 1 without any."""
        counted = [ratio for ratio in self.ratios if ratio != 1]
        weights = self.ratio_decay ** np.arange(len(counted))[::-1]
        if not self.bias_correction:
            return np.dot(weights, counted) * (1 - self.ratio_decay)
        return np.average(counted, weights=weights) if counted else 1.0

    def corrected(self, moment, decay, steps):
        return moment / (1 - decay**steps) if self.bias_correction else moment

    def root(self, variance, steps):
        return np.sqrt(self.corrected(variance, self.b2, steps)) + self.eps


def magnitudes(momenta):
    """For each leaf the factor that brings its momentum to the mean magnitude."""
    roots = np.array([np.sqrt(np.mean(np.square(m))) for m in momenta])
    return np.mean(roots) / roots
