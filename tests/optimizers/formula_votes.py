"""BinSGDM and Distributed Lion in NumPy and float64, one leaf at a time.

Written from the formulas. What is exchanged is agreed on by a function from what the
workers send, (workers, *shape), to what all get; left out, by the exact mean.
"""

import numpy as np


def exact_mean(sent):
    return sent.mean(axis=0)


def majority(sent):
    """The sign of the sum of signs; zeros and ties are 1."""
    return np.where(np.where(sent >= 0, 1, -1).sum(axis=0) >= 0, 1.0, -1.0)


def mean_vote(sent):
    return np.where(sent >= 0, 1, -1).mean(axis=0)


class Binsgdm:
    """The running means of one leaf, each worker's own: (workers, *shape).

    Args:
      shape: the leaf's.
      b1: decay of both running means.
      eps: added to the mean magnitude.
      b2, freeze, place: of other optimizers.
      agree: what the exchange makes of the workers' ratios.
    """

    bounded = raised = 0

    def __init__(self, shape, b1, b2, eps, freeze, place, *, agree=exact_mean):
        del shape, b2, freeze, place
        self.decay, self.eps, self.agree = b1, eps, agree
        self.m = self.b = np.float64(0)

    def update(self, gradients):
        """The update from all workers' gradients, (workers, *shape)."""
        self.m = self.decay * self.m + (1 - self.decay) * gradients
        self.b = self.decay * self.b + (1 - self.decay) * np.abs(gradients)
        self.ratio = self.m / (self.b + self.eps)
        return self.agree(self.ratio)


class DistributedLion:
    """The momenta of one leaf, each worker's own: (workers, *shape).

    Args:
      shape: the leaf's.
      b1: the momentum's share of what is sent.
      b2: decay of the momentum.
      eps, freeze, place: of other optimizers.
      agree: what the exchange makes of what the workers send.
    """

    bounded = raised = 0

    def __init__(self, shape, b1, b2, eps, freeze, place, *, agree=exact_mean):
        del eps, freeze, place
        self.b1, self.b2, self.agree, self.step = b1, b2, agree, 0
        self.place = sum(np.indices(shape), start=np.zeros(shape, int))
        self.m = np.float64(0)

    def update(self, gradients):
        """The update from all workers' gradients, (workers, *shape)."""
        self.sent = self.b1 * self.m + (1 - self.b1) * gradients
        self.m = self.b2 * self.m + (1 - self.b2) * gradients
        turn = np.where((self.place + self.step) % 2 == 1, -1, 1)
        self.step += 1
        return turn * self.agree(turn * self.sent)
