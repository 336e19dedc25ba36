"""1-bit LAMB in DeepSpeed's layout, against trajectories of DeepSpeed's own.

Call 0 of DeepSpeed drops its gradients. All leaves are exchanged as one, so that a
sign that is undecided changes them all. The fresh variance is in no file: it follows
from the momenta that are.
"""

import dataclasses
import functools

import from_deepspeed
import numpy as np
import pytest
from optimizers import deepspeed
from optimizers.deepspeed import ERRORS, ULP

OPTIMIZER = "onebit_lamb"
DEFAULTS = {
    "lr": 1e-3,
    "freeze_step": 100_000,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "coeff_beta": 0.9,
    "factor_max": 4.0,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
}
NUMBERS = {
    "lamb_coeff_freeze": "ratio",
    "last_factor": "factor",
    "scaling_coeff": "magnitude",
}
# The other is set in the first call that needs it.
IN_THE_WARMUP = ("lamb_coeff_freeze", "last_factor")


class Calls:
    """DeepSpeed's calls as its own numbers tell them, in float64."""

    def __init__(self, golden, config, options):
        self.golden, self.workers = golden, config["workers"]
        self.b1, self.b2 = options["betas"]
        self.eps, self.freeze_step = options["eps"], options["freeze_step"]
        self.leaves = range(len(config["shapes"]))
        self.fresh = [np.zeros(shape) for shape in config["shapes"]]

    def of(self, name, t):
        """Every leaf's numbers after call t, the same on all workers."""
        arrays = [self.golden[f"{name}_{t}_{i}"] for i in self.leaves]
        for x in arrays:
            np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape))
        return [x[0] for x in arrays]

    def numbers(self, name, t):
        return np.array([float(self.golden[f"{name}_{t}_{i}"]) for i in self.leaves])

    def follow(self, t, compressed):
        """The fresh variance after call t: that of the freeze, and what restores it.

        With a freeze step of 1 DeepSpeed never takes over the frozen one.
        """
        if not compressed:
            if self.freeze_step > 1:
                self.fresh = [nu.astype(float) for nu in self.of("nu", t)]
            return
        for i, (m, last) in enumerate(
            zip(self.of("mu", t), self.of("mu", t - 1), strict=True)
        ):
            gradient = (m - self.b1 * float64(last)) / (1 - self.b1)
            self.fresh[i] = self.b2 * self.fresh[i] + (1 - self.b2) * gradient**2

    def signed_values(self, t):
        """Values that workers and servers took signs of at call t."""
        scales = self.numbers("scaling_coeff", t)
        values = []
        for i, mu in enumerate(self.of("mu", t - 1)):
            gradients = float64(self.golden[f"grad_{t}_{i}"])
            sums = scales[i] * (self.b1 * mu + (1 - self.b1) * gradients)
            values.append(sums.reshape(self.workers, -1))
        before = deepspeed.errors_before(self.golden, t)
        return deepspeed.signed_values(np.concatenate(values, axis=1), *before)

    def factor_error(self, t):
        """The relative change of a factor by a rounding of the momenta.

        A restored gradient is a difference of momenta, g + δ: the root of a variance
        w moves by δ √(1 - b2) at most, whatever g is.
        """
        found = []
        for i, w in enumerate(self.fresh):
            pair = [self.golden[f"mu_{u}_{i}"] for u in (t - 1, t)]
            error = 2 * ULP * np.abs(pair).max(initial=0) / (1 - self.b1)
            root = np.sqrt(w).min(initial=np.inf) + self.eps
            found.append(error * np.sqrt(1 - self.b2) / root)
        return np.array(found)


@functools.cache
def trajectory(file):
    golden, config = deepspeed.read(file)
    tx = from_deepspeed.onebit_lamb(**DEFAULTS | config["options"])
    return deepspeed.Trajectory(tx, golden, config)


def float64(x):
    return np.asarray(x, float)


def go_on_from_deepspeed(run, calls, t):
    lamb, *rest = run.state
    errors = {
        name: dataclasses.replace(node, value=run.golden[f"{name}_{t}"])
        for name, node in lamb.exchange._asdict().items()
        if f"{name}_{t}" in run.golden
    }
    numbers = {
        ours: np.float32(calls.numbers(its, t))
        for its, ours in NUMBERS.items()
        if f"{its}_{t}_0" in run.golden
    }
    run.params = calls.of("param", t)
    lamb = lamb._replace(
        mu=calls.of("mu", t),
        nu=calls.of("nu", t),
        exchange=lamb.exchange._replace(**errors),
        **numbers,
    )
    run.state = (with_fresh(lamb, calls), *rest)


def with_fresh(lamb, calls):
    return lamb._replace(nu_fresh=[np.float32(w) for w in calls.fresh])


@pytest.mark.parametrize("free", [False, True], ids=["call by call", "in one go"])
def test_every_trajectory_is_deepspeeds(deepspeed_file, free):
    golden, config = deepspeed.read(deepspeed_file)
    options = DEFAULTS | config["options"]
    run = trajectory(deepspeed_file)
    run.begin()
    calls, roundings, error = Calls(golden, config, options), 0, 0.0
    for t in range(1, config["steps"]):
        run.step(t)
        roundings += 1
        compressed = not golden[f"exact_{t}"]
        calls.follow(t, compressed)
        lamb = run.state[0]
        if t + 1 < config["steps"]:
            assert (int(lamb.frozen_at) > 0) != golden[f"exact_{t + 1}"]
        signed = calls.signed_values(t) if compressed else ()
        undecided = sum(deepspeed.undecided_signs(x, roundings) for x in signed)
        if undecided:
            print(f"call {t}: {undecided} signs lie on zero")
        else:
            check_leaves(run, calls, t, roundings)
            if compressed:
                error = error + calls.factor_error(t)
                check_exchange(run, signed, t, roundings)
            check_numbers(run, calls, t, compressed, error)
        if undecided or not free:
            go_on_from_deepspeed(run, calls, t)
            roundings, error = 0, 0.0
        elif int(lamb.frozen_at) == t:
            run.state = (with_fresh(lamb, calls), *run.state[1:])


def check_leaves(run, calls, t, roundings):
    found = {"param": run.params, "mu": run.state[0].mu, "nu": run.state[0].nu}
    for name, leaves in found.items():
        for i, expected in enumerate(calls.of(name, t)):
            terms = {
                "param": expected,
                "mu": (1 - calls.b1) * run.golden[f"grad_{t}_{i}"],
                "nu": 0.0,
            }
            what = f"{name} of leaf {i} after call {t}"
            deepspeed.assert_near(leaves[i], expected, what, terms[name], roundings)


def check_exchange(run, signed, t, roundings):
    for name, terms in zip(ERRORS, signed, strict=True):
        found = getattr(run.state[0].exchange, name).value
        expected = run.golden[f"{name}_{t}"]
        what = f"{name} after call {t}"
        deepspeed.assert_near(found, expected, what, terms, roundings)


def check_numbers(run, calls, t, compressed, factor_error):
    lamb, errors = run.state[0], {"last_factor": factor_error}
    found = {its: getattr(lamb, ours) for its, ours in NUMBERS.items()}
    due = NUMBERS if compressed else IN_THE_WARMUP
    expected = {its: calls.numbers(its, t) for its in due}
    if compressed:
        found["lamb_coeffs"] = np.asarray(lamb.ratio) * np.asarray(lamb.factor)
        expected["lamb_coeffs"] = run.golden[f"lamb_coeffs_{t}"]
        errors["lamb_coeffs"] = factor_error
    for name, x in expected.items():
        allowed = (deepspeed.RTOL + errors.get(name, 0.0)) * x
        assert (np.abs(found[name] - x) <= allowed).all(), f"{name} after call {t}"
