"""The optimizers in NumPy and float64, one leaf at a time, written from the formulas.

Each has `update`, from all workers' gradients, (workers, *shape), and the leaf's agreed
parameters to the update before the learning rate, weight decay included; its moments;
`raised`, how many frozen variances the floor raised; and `used`, the names of the parts
and limits that have changed something. A part that is not named is left out. What
workers send is agreed on by its exact mean, but for votes.
"""

import jax
import numpy as np

PARTS = frozenset({"growth", "floor", "bound"})
LOW, LARGEST, LEAST, LINES, SUMS, PERIOD = 1e-6, 3.0, 0.25, 16, 8, 8


class Leaf:
    """Base of the transcriptions of one leaf.

    Args:
      shape: the leaf's.
      place: which of the leaves it is, and the shapes of all.
      freeze: number of steps after which the variance is frozen.
      weight_decay: of this leaf.
      parts: what the compressed stage has of `PARTS`.
      bias_correction: of the moments.
      b1, b2, eps: of the moments.
    """

    def __init__(
        self,
        shape,
        place,
        freeze,
        weight_decay,
        *,
        parts=PARTS,
        bias_correction=True,
        b1=0,
        b2=0,
        eps=0,
    ):
        self.b1, self.b2, self.eps, self.freeze = b1, b2, eps, freeze
        self.bias_correction = bias_correction
        self.place, self.parts, self.weight_decay = place, parts, weight_decay
        self.m, self.v = (np.zeros(shape) for _ in range(2))
        self.step = self.raised = 0
        self.used = set()

    def bounded(self, update, times=1):
        if "bound" not in self.parts:
            return update
        return self.clipped("bound", update, -times * LARGEST, times * LARGEST)

    def clipped(self, name, x, low, high):
        if np.any(x < low):
            self.used.add(f"{name}, low")
        if np.any(x > high):
            self.used.add(f"{name}, high")
        return np.clip(x, low, high)

    def corrected(self, moment, decay, steps):
        return moment / (1 - decay**steps) if self.bias_correction else moment

    def floor(self):
        if "floor" in self.parts:
            low = self.v < LOW * self.v.mean()
            self.v, self.raised = np.where(low, self.v.mean(), self.v), low.sum()


class OnebitAdam(Leaf):
    """1-bit Adam.

    Args:
      lead: steps by which its momentum is led.
    """

    def __init__(self, shape, *others, lead=0.0, **options):
        super().__init__(shape, *others, **options)
        self.lead, self.momentum, self.followed = lead, np.zeros(shape), 0
        self.squares = mean_squares(self.m)

    def update(self, gradients, params):
        self.step += 1
        frozen, mean = self.step > self.freeze, gradients.mean(axis=0)
        self.m = self.b1 * self.m + (1 - self.b1) * mean
        last, self.momentum = self.momentum, self.corrected(self.m, self.b1, self.step)
        if not frozen:
            self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        self.follow(mean, frozen)
        learnt, ahead = min(self.step, self.freeze), 0
        variance = self.corrected(self.v, self.b2, learnt)
        if frozen:
            ahead = self.lead * (self.momentum - last)
        if frozen and "growth" in self.parts:
            variance = variance * self.growth()
        update = (self.momentum + ahead) / (np.sqrt(variance) + self.eps)
        if self.step == self.freeze:
            self.frozen = self.corrected(self.squares, self.b2, self.freeze)
            self.floor()
        update = self.bounded(update) if frozen else update
        return update + self.weight_decay * params

    def follow(self, mean, frozen):
        """Every mean gradient, and once none knows it, sums of one in a period."""
        if frozen and self.step % PERIOD:
            return
        steps = PERIOD if frozen else 1
        of = estimated(mean, self.place, self.step) if frozen else mean_squares(mean)
        decay = self.b2**steps
        self.squares = decay * self.squares + (1 - decay) * of
        self.followed += steps

    def growth(self):
        """Of each value, by its row, its column and the whole."""
        p, r, c = self.corrected(self.squares, self.b2, self.followed)
        p0, r0, c0 = self.frozen
        r0, c0 = (np.where(x < LOW * p0, p0, x) for x in (r0, c0))
        return np.maximum(r / r0 * (c / c0) * (p0 / p), LEAST * p / p0)


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


class OnebitLamb(Leaf):
    """1-bit LAMB. What layers tell each other changes nothing in an exact exchange.

    Args:
      ratio_limits: of the ratio of norms.
      ratio_decay: of the mean ratio.
      factor_limits: of the factor on the frozen ratio.
      factor_change: of that factor in a step.
    """

    def __init__(
        self,
        *others,
        ratio_limits=(0.01, 10.0),
        ratio_decay=0.9,
        factor_limits=(0.5, 4.0),
        factor_change=0.1,
        **options,
    ):
        super().__init__(*others, **options)
        self.ratio_limits, self.ratio_decay = ratio_limits, ratio_decay
        self.factor_limits, self.factor_change = factor_limits, factor_change
        self.fresh, self.ratios, self.factor = self.v, [], 1.0

    def update(self, gradients, params):
        self.step += 1
        last, mean = self.m, gradients.mean(axis=0)
        self.m = self.b1 * last + (1 - self.b1) * mean
        momentum = self.corrected(self.m, self.b1, self.step)
        if self.step > self.freeze:
            return self.compressed(momentum, last, params)
        self.v = self.b2 * self.v + (1 - self.b2) * mean**2
        update = momentum / self.root(self.v, self.step) + self.weight_decay * params
        self.ratios.append(self.ratio_of(params, update))
        if self.step == self.freeze:
            self.floor()
            self.fresh = self.v
        return self.ratios[-1] * update

    def compressed(self, momentum, last, params):
        gradient = (self.m - self.b1 * last) / (1 - self.b1)
        self.fresh = self.b2 * self.fresh + (1 - self.b2) * gradient**2
        root, fresh = self.root(self.v, self.freeze), self.root(self.fresh, self.step)
        direction = self.bounded(momentum / root)
        update = direction + self.weight_decay * params
        norm = np.linalg.norm(update)
        share = min(1.0, np.linalg.norm(direction) / norm) if norm else 1.0
        factor = share * np.max(root / fresh) + (1 - share)
        factor = self.clipped("factor", factor, *self.factor_limits)
        less, more = (self.factor * (1 + x * self.factor_change) for x in (-1, 1))
        self.factor = self.clipped("change", factor, less, more)
        return self.frozen_ratio() * self.factor * update

    def ratio_of(self, params, update):
        of_params, of_update = np.linalg.norm(params), np.linalg.norm(update)
        if of_params == 0 or of_update == 0:
            return 1.0
        return self.clipped("ratio", of_params / of_update, *self.ratio_limits)

    def frozen_ratio(self):
        """The weighted mean of all ratios that were not 1; 1 without any."""
        counted = [ratio for ratio in self.ratios if ratio != 1]
        weights = self.ratio_decay ** np.arange(len(counted))[::-1]
        if not self.bias_correction:
            return np.dot(weights, counted) * (1 - self.ratio_decay)
        return np.average(counted, weights=weights) if counted else 1.0

    def root(self, variance, steps):
        return np.sqrt(self.corrected(variance, self.b2, steps)) + self.eps


class ZeroOneAdam(Leaf):
    """0/1 Adam, in learning rates of one.

    Args:
      refreshes: numbers of the steps that refresh the variance until the freeze.
      syncs: numbers, counted from the freeze, of those that synchronise after it.
    """

    def __init__(self, shape, *others, refreshes, syncs, **options):
        super().__init__(shape, *others, **options)
        self.refreshes, self.syncs = refreshes, syncs
        self.own_m, self.moved = np.zeros((1, *shape)), np.zeros((1, *shape))
        self.refreshed, self.rates = 0, 0.0

    def update(self, gradients, params):
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
        self.moved = self.moved - rate * self.bounded(self.own_m / root, times)
        self.rates += rate
        update = self.weight_decay * params
        if agrees:
            mean = (self.moved * root).mean(axis=0) / -self.rates
            update = update + self.rates * self.bounded(mean / root)
            self.own_m, self.moved = (
                np.broadcast_to(x, gradients.shape) for x in (mean, 0 * mean)
            )
            self.rates = 0.0
        if self.step == self.freeze:
            self.floor()
        return update


class LocalAdam(Leaf):
    """Each worker's own AdamW, and the mean of how far they have gone at intervals.

    Args:
      rate: the learning rate, in which parameters are measured.
      interval: steps from one synchronisation to the next.
    """

    def __init__(self, shape, *others, rate, interval, **options):
        super().__init__(shape, *others, **options)
        self.rate, self.interval = rate, interval
        self.own_m, self.own_v, self.moved = (np.zeros((1, *shape)) for _ in range(3))

    def update(self, gradients, params):
        self.step += 1
        self.own_m = self.b1 * self.own_m + (1 - self.b1) * gradients
        self.own_v = self.b2 * self.own_v + (1 - self.b2) * gradients**2
        momentum = self.corrected(self.own_m, self.b1, self.step)
        root = np.sqrt(self.corrected(self.own_v, self.b2, self.step)) + self.eps
        own = params + self.rate * self.moved
        self.moved = self.moved - momentum / root - self.weight_decay * own
        if self.step % self.interval:
            return np.zeros_like(params)
        update, self.moved = -self.moved.mean(axis=0), np.zeros_like(self.moved)
        return update


def due_steps(double_after, steps, longest=2**30):
    """Numbers, from 1, of the steps that are due at growing intervals."""
    due, number, interval = [], 1, 1
    while number <= steps:
        due.append(number)
        if len(due) % double_after == 0:
            interval = min(2 * interval, longest)
        number += interval
    return due


def exact_mean(sent):
    return sent.mean(axis=0)


def mean_vote(sent):
    return np.where(sent >= 0, 1, -1).mean(axis=0)


def majority(sent):
    """The sign of the sum of signs; zeros and ties are 1."""
    return np.where(mean_vote(sent) >= 0, 1.0, -1.0)


class Binsgdm(Leaf):
    """BinSGDM, its running means each worker's own.

    Args:
      decay: of both running means.
      agree: what the exchange makes of the workers' ratios.
    """

    def __init__(self, *others, decay, agree=exact_mean, **options):
        super().__init__(*others, **options)
        self.decay, self.agree = decay, agree
        self.m = self.b = np.float64(0)

    def update(self, gradients, params):
        self.m = self.decay * self.m + (1 - self.decay) * gradients
        self.b = self.decay * self.b + (1 - self.decay) * np.abs(gradients)
        agreed = self.agree(self.m / (self.b + self.eps))
        return agreed + self.weight_decay * params


class DistributedLion(Leaf):
    """Distributed Lion, its momenta each worker's own.

    Args:
      agree: what the exchange makes of what the workers send.
    """

    def __init__(self, shape, *others, agree, **options):
        super().__init__(shape, *others, **options)
        self.agree, self.m = agree, np.float64(0)
        self.index = sum(np.indices(shape), start=np.zeros(shape, int))

    def update(self, gradients, params):
        sent = self.b1 * self.m + (1 - self.b1) * gradients
        self.m = self.b2 * self.m + (1 - self.b2) * gradients
        turn = np.where((self.index + self.step) % 2 == 1, -1, 1)
        # Those without gradients abstain: half of them vote for it, half against.
        workers = len(sent)
        places = (np.arange(workers) + self.step // 2) % workers
        abstentions = np.where(places % 2 == 1, -1.0, 1.0)
        abstentions = abstentions.reshape(-1, *np.ones(sent.ndim - 1, int))
        sent = np.where(sent == 0, abstentions, turn * sent)
        self.step += 1
        return turn * self.agree(sent) + self.weight_decay * params
