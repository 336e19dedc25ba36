"""0/1 Adam in NumPy and float64, one leaf, for an exchange that is exact."""

import numpy as np

BOUND, LOW = 3.0, 1e-6


def due_steps(double_after, steps, longest=2**30):
    """Numbers, from 1, of the steps that are due at growing intervals."""
    due, number, interval = [], 1, 1
    while number <= steps:
        due.append(number)
        if len(due) % double_after == 0:
            interval = min(2 * interval, longest)
        number += interval
    return due


class Leaf:
    """Moments of one leaf, of all workers, in learning rates of one.

    Args:
      shape: the leaf's.
      b1: decay of the momentum.
      b2: decay of the variance.
      eps: added to the root of the variance.
      freeze: number of steps after which the variance is frozen.
      place: not looked at.
      refreshes: numbers of the steps that refresh the variance until then.
      syncs: numbers, counted from the freeze, of those that synchronise after it.
      published: True without floor and bound.
    """

    def __init__(
        self, shape, b1, b2, eps, freeze, place, *, refreshes, syncs, published
    ):
        self.b1, self.b2, self.eps, self.freeze = b1, b2, eps, freeze
        self.refreshes, self.syncs, self.published = refreshes, syncs, published
        self.own_m, self.moved = np.zeros((1, *shape)), np.zeros((1, *shape))
        self.v, self.step, self.refreshed, self.rates = np.zeros(shape), 0, 0, 0.0
        self.raised = self.bounded = 0

    def cut(self, steps, times=1):
        bound = times * BOUND
        return steps if self.published else np.clip(steps, -bound, bound)

    def update(self, gradients):
        """The update of the agreed parameters from all workers' gradients."""
        self.step += 1
        if self.step <= self.freeze and self.step in self.refreshes:
            self.refreshed += 1
            mean = gradients.mean(axis=0)
            self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        root = np.sqrt(self.v / (1 - self.b2**self.refreshed)) + self.eps
        self.own_m = self.b1 * self.own_m + (1 - self.b1) * gradients
        rate = 1 / (1 - self.b1**self.step)
        agrees = self.step <= self.freeze or self.step - self.freeze in self.syncs
        times = len(gradients) if agrees else 1
        self.moved = self.moved - rate * self.cut(self.own_m / root, times)
        self.rates += rate
        update = np.zeros_like(self.v)
        if agrees:
            mean = (self.moved * root).mean(axis=0) / -self.rates
            update = self.rates * self.cut(mean / root)
            self.own_m, self.moved = (
                np.broadcast_to(x, gradients.shape) for x in (mean, 0 * mean)
            )
            self.rates = 0.0
        if self.step == self.freeze and not self.published:
            low = self.v < LOW * self.v.mean()
            self.v, self.raised = np.where(low, self.v.mean(), self.v), low.sum()
        return update
