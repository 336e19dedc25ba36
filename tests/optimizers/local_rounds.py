"""Local steps by one bit in NumPy: workers' own steps, and the round that ends them."""

import functools

import dense
import jax.numpy as jnp
import numpy as np
import optax

from onebit_jax import sign_mean

SHAPE, BLOCK, RATE = (16, 20), 32, 0.05
BLOCKS = np.arange(np.prod(SHAPE)) // BLOCK
ONE_BIT = sign_mean("host", block_size=BLOCK, exact_below=0, scale="mean_abs")


def loss_fn(p, target):
    return 0.5 * jnp.sum((p - jnp.mean(target, axis=0)) ** 2)


def targets(step, workers):
    rng = np.random.default_rng(step)
    means = np.random.default_rng(99).normal(size=(workers, *SHAPE))
    return jnp.asarray(means + rng.normal(size=means.shape), jnp.float32)


class Adam:
    def __init__(self, b1=0.9, b2=0.999, eps=1e-8):
        self.b1, self.b2, self.eps, self.m, self.v, self.t = b1, b2, eps, 0, 0, 0

    def __call__(self, g):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        root = np.sqrt(self.v / (1 - self.b2**self.t))
        return self.m / (1 - self.b1**self.t) / (root + self.eps)


class Muon:
    """Five Newton-Schulz steps of a Nesterov momentum, with Optax's bias correction."""

    def __init__(self, beta=0.95):
        self.beta, self.m, self.t = beta, 0, 0

    def __call__(self, g):
        self.t += 1
        beta = self.beta
        self.m = beta * self.m + (1 - beta) * g
        ahead = beta * self.m / (1 - beta ** (self.t + 1))
        ahead = ahead + (1 - beta) * g / (1 - beta**self.t)
        return np.stack([orthogonal(x) for x in ahead]) * max(1, 20 / 16) ** 0.5


def orthogonal(x):
    x = x / (np.linalg.norm(x) + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


INNER = {
    "adam": (optax.adam(RATE), Adam),
    "muon": (optax.contrib.muon(RATE), Muon),
}


def errors_of(state):
    """Of workers and of all servers, one after another."""
    size = np.prod(SHAPE)
    worker = np.asarray(state.small_error.value, float)
    worker = worker.reshape(worker.shape[0], -1)[:, :size]
    return worker, np.asarray(state.server_error.value, float).reshape(-1)[:size]


def means_of_teams(step, workers, devices):
    each = np.asarray(targets(step, workers * devices), float)
    return each.reshape(workers, devices, *SHAPE).mean(axis=1)


class Rounds:
    """In float64; the agreed parameters and errors are begun anew in each round.

    Rounding decides signs next to zero, so that no trajectory of signs is another's.
    """

    def __init__(self, transcribed, state, workers, devices, interval):
        self.own, self.interval = transcribed(), interval
        self.workers, self.devices = workers, devices
        self.p, self.moved = np.zeros(SHAPE), np.zeros((workers, *SHAPE))
        self.errors = errors_of(state.exchange)

    def check(self, step, params, state):
        """Takes the step, and compares with it what it has led to."""
        team = means_of_teams(step, self.workers, self.devices)
        self.moved = self.moved - RATE * self.own(self.p + self.moved - team)
        if step % self.interval:
            np.testing.assert_allclose(params, self.p, atol=1e-6)
            np.testing.assert_allclose(state.moved.value, self.moved, atol=2e-4)
            return
        self.check_round(params, state)
        self.p, self.moved = np.asarray(params, float), np.zeros_like(self.moved)
        self.errors = errors_of(state.exchange)

    def check_round(self, params, state):
        flat = self.moved.reshape(self.workers, -1)
        codec = functools.partial(dense.signs, kind="mean_abs")
        sent = dense.two_phases(flat, *self.errors, codec, BLOCKS)
        away = np.abs(flat + self.errors[0]).min(axis=0) > 5e-4
        decided = ~sent.undecided & away
        assert decided.mean() > 0.8
        first, *others = (shard.data for shard in params.addressable_shards)
        for other in others:
            np.testing.assert_array_equal(first, other)
        change = (np.asarray(params, float) - self.p).reshape(-1)
        near = np.abs(change - sent.agreed) < 5e-4
        # Of what workers send alike the server may still be undecided.
        assert near[decided].mean() > 0.97
        assert not np.any(state.moved.value)
        errors = errors_of(state.exchange)
        for found, expected in zip(errors, sent[1:3], strict=True):
            near = np.abs(found - expected)[..., decided] < 1e-3
            assert near.mean() > 0.97
        assert all(np.abs(x).max() > 0.01 for x in errors)
