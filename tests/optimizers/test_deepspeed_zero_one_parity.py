"""0/1 Adam against trajectories that DeepSpeed 0.19.6's `ZeroOneAdam` computed.

What may differ, and why, is said in deepspeed.py.
"""

import functools

import from_deepspeed
import jax.numpy as jnp
import numpy as np
import pytest
from optimizers import deepspeed
from optimizers.deepspeed import ERRORS, replaced

import onebit_jax

OPTIMIZER = "zero_one_adam"


class Trajectory(deepspeed.Trajectory):
    def __init__(self, file):
        golden, config = deepspeed.read(file)
        super().__init__(
            from_deepspeed.zero_one_adam(**config["options"]), golden, config
        )
        self.config = config

    def gradient(self, t, i):
        if self.config["workers"] == 1 and self.stage(t) == "gradient":
            # DeepSpeed's only worker keeps its momentum, as it does with this gradient.
            return self.golden[f"mu_{t - 1}_{i}"]
        return self.golden[f"grad_{t}_{i}"]

    def stage(self, t):
        if self.golden[f"exact_{t}"]:
            return "variance"
        if t <= self.config["options"]["var_freeze_step"]:
            return "gradient"
        interval = self.golden[f"local_step_interval_{t - 1}_0"]
        return "local" if (t + 1) % interval else "compressed"

    def numbers(self, i):
        state = self.state
        moved = np.asarray(state.moved.value[i])
        mu = state.own_mu.value if state.frozen_at else state.mu
        numbers = {
            "param": np.asarray(self.params[i]) + moved,
            "mu": mu[i],
            "nu": state.nu[i],
            "momentum_accumulator": moved,
        }
        return numbers | {e: getattr(state.exchange, e).value[i] for e in ERRORS}

    def terms(self, t, i):
        """Of sums that may be far smaller than they, and what had its signs taken."""
        golden, options = self.golden, self.config["options"]
        b1, suffix = options["betas"][0], f"_{i}"
        names = "param", "mu", "nu", "momentum_accumulator"
        terms = {name: golden[f"{name}_{t - 1}_{i}"].astype(float) for name in names}
        errors = deepspeed.errors_before(golden, t, suffix)
        gradient = (1 - b1) * self.gradient(t, i).astype(float)
        root = np.sqrt(terms["nu"]) + options["eps"]
        step = (b1 * terms["mu"] + gradient) / root
        step = step + options["weight_decay"] * terms["param"]
        moved = terms["momentum_accumulator"] - options["lr"] * step
        terms |= {"mu": gradient, "momentum_accumulator": moved}
        if self.stage(t) not in ("gradient", "compressed"):
            return terms | dict(zip(ERRORS, errors, strict=True)), ()
        sent = golden[f"grad_{t}_{i}"] if self.stage(t) == "gradient" else moved * root
        sent = sent.reshape(self.config["workers"], -1)
        signed = deepspeed.signed_values(sent, *errors)
        return terms | dict(zip(ERRORS, signed, strict=True)), signed

    def go_on_from_deepspeed(self, t, i):
        golden, state = self.golden, self.state

        def local(node, name):
            value = replaced(node.value, i, jnp.asarray(golden[f"{name}_{t}_{i}"]))
            return onebit_jax.WorkerLocal(value, node.axes, node.resizing)

        own = golden[f"param_{t}_{i}"] - golden[f"momentum_accumulator_{t}_{i}"]
        self.params = replaced(self.params, i, jnp.asarray(own[0]))
        self.state = state._replace(
            mu=replaced(state.mu, i, jnp.asarray(golden[f"mu_{t}_{i}"][0])),
            nu=replaced(state.nu, i, jnp.asarray(golden[f"nu_{t}_{i}"][0])),
            own_mu=local(state.own_mu, "mu"),
            moved=local(state.moved, "momentum_accumulator"),
            exchange=state.exchange._replace(
                **{e: local(getattr(state.exchange, e), e) for e in ERRORS}
            ),
        )


trajectory = functools.cache(Trajectory)


@pytest.mark.parametrize("free", [False, True], ids=["call by call", "in one go"])
def test_every_trajectory_is_deepspeeds(deepspeed_file, free):
    golden, config = deepspeed.read(deepspeed_file)
    run = trajectory(deepspeed_file)
    run.begin()
    roundings = dict.fromkeys(run.leaves, 0)
    for t in range(1, config["steps"]):
        taken = onebit_jax.steps_by_stage(run.state)[run.stage(t)]
        run.step(t)
        assert onebit_jax.steps_by_stage(run.state)[run.stage(t)] == taken + 1
        intervals = run.state.refresh.interval, run.state.sync.interval
        told = [golden[f"{name}_interval_{t}_0"] for name in ("var", "local_step")]
        assert list(map(int, intervals)) == list(map(int, told))
        for i in run.leaves:
            roundings[i] += 1
            terms, signed = run.terms(t, i)
            undecided = sum(deepspeed.undecided_signs(x, roundings[i]) for x in signed)
            if undecided:
                print(f"call {t}, leaf {i}: {undecided} signs lie on zero")
            else:
                for name, value in run.numbers(i).items():
                    expected = golden[f"{name}_{t}_{i}"]
                    deepspeed.assert_near(
                        np.broadcast_to(value, expected.shape),
                        expected,
                        f"{name} of leaf {i} after call {t}",
                        terms[name],
                        roundings[i],
                    )
            if undecided or not free:
                run.go_on_from_deepspeed(t, i)
                roundings[i] = 0
