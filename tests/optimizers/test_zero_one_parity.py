"""0/1 Adam against trajectories that DeepSpeed 0.19.6's `ZeroOneAdam` computed.

Tolerances are those of test_deepspeed_parity.py, for the same reasons: sums of larger
terms are allowed two units in the last place of those, for each call since the numbers
were equal, and leaves in which a value lies within rounding of zero, so that its sign
is undecided, may differ in that call and go on from DeepSpeed's numbers.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from optimizers.test_deepspeed_parity import (
    ATOL,
    ERRORS,
    RTOL,
    ULP,
    scale_of,
    undecided_signs,
)
from virtual_workers import mesh_of

import onebit_jax

LOCAL = {"mu": "own_mu", "momentum_accumulator": "moved"}


def optimizer(config):
    options = config["options"]
    return onebit_jax.zero_one_adam(
        options["lr"],
        onebit_jax.deepspeed_sign_mean("data"),
        onebit_jax.freeze_at(options["var_freeze_step"] + 1),
        *options["betas"],
        options["eps"],
        options["weight_decay"],
        variance=onebit_jax.growing_intervals(
            options["var_update_scaler"], aligned=True
        ),
        sync=onebit_jax.growing_intervals(
            options["local_step_scaler"],
            longest=options["local_step_clipper"],
            counting="steps",
            aligned=True,
        ),
        **onebit_jax.AS_DEEPSPEED,
    )


class Trajectory:
    """This library's own run of a golden file's configuration."""

    def __init__(self, golden, config):
        self.golden, self.config = golden, config
        self.leaves = range(len(config["shapes"]))
        mesh, tx = mesh_of(config["workers"]), optimizer(config)

        def local_step(params, state, gradients):
            own = jax.tree.map(lambda g: g[0], gradients)
            updates, state = tx.update(own, state, params)
            return optax.apply_updates(params, updates), state

        self.params = {str(i): golden[f"param0_{i}"] for i in self.leaves}
        state = onebit_jax.init(tx, self.params, mesh)
        specs = onebit_jax.state_specs(state)
        # DeepSpeed's first call is counted, and does nothing else.
        self.state = state._replace(count=state.count + 1)
        self.local_step = jax.jit(
            jax.shard_map(
                local_step,
                mesh=mesh,
                in_specs=(PartitionSpec(), specs, PartitionSpec("data")),
                out_specs=(PartitionSpec(), specs),
            )
        )

    def step(self, t):
        gradients = {str(i): self.gradient(t, i) for i in self.leaves}
        self.params, self.state = self.local_step(self.params, self.state, gradients)

    def gradient(self, t, i):
        if self.config["workers"] == 1 and self.stage(t) == "gradient":
            # One worker keeps its momentum, which it does if that is its gradient.
            return self.golden[f"mu_{t - 1}_{i}"]
        return self.golden[f"grad_{t}_{i}"]

    def stage(self, t):
        if self.golden[f"exact_{t}"]:
            return "variance"
        if t <= self.config["options"]["var_freeze_step"]:
            return "gradient"
        interval = self.golden[f"local_step_interval_{t - 1}_0"]
        return "local" if (t + 1) % interval else "compressed"

    def numbers(self, t, i):
        state, name = self.state, str(i)
        frozen = bool(state.frozen_at)
        numbers = {
            "nu": state.nu[name],
            "momentum_accumulator": state.moved.value[name],
        }
        numbers["param"] = np.asarray(self.params[name]) + np.asarray(
            state.moved.value[name]
        )
        numbers["mu"] = state.own_mu.value[name] if frozen else state.mu[name]
        numbers |= {e: getattr(state.exchange, e).value[name] for e in ERRORS}
        return {name: np.asarray(x) for name, x in numbers.items()}

    def sums(self, t, i):
        """Terms of sums that may be far smaller than they, in float64."""
        golden, options = self.golden, self.config["options"]
        b1 = options["betas"][0]
        names = "param", "mu", "nu", "momentum_accumulator", *ERRORS
        # Before the second call there are no errors.
        before = {
            name: np.asarray(
                golden.get(f"{name}_{t - 1}_{i}", 0 * golden[f"{name}_{t}_{i}"]), float
            )
            for name in names
        }
        gradient = (1 - b1) * np.asarray(self.gradient(t, i), float)
        momentum = b1 * before["mu"] + gradient
        root = np.sqrt(before["nu"]) + options["eps"]
        step = momentum / root + options["weight_decay"] * before["param"]
        moved = before["momentum_accumulator"] - options["lr"] * step
        sums = before | {"mu": gradient, "momentum_accumulator": moved}
        stage = self.stage(t)
        if stage not in ("gradient", "compressed"):
            return sums, 0
        x = golden[f"grad_{t}_{i}"] if stage == "gradient" else moved * root
        n = self.config["workers"]
        x = np.asarray(x, float).reshape(n, -1)
        padding = before["worker_error"].shape[1] - x.shape[1]
        x = np.pad(x, ((0, 0), (0, padding))) + before["worker_error"]
        sent = np.where(x >= 0, scale_of(x), -scale_of(x)).mean(0)
        y = sent.reshape(n, -1) + before["server_error"]
        return sums | dict(zip(ERRORS, (x, y), strict=True)), undecided_signs(
            x
        ) + undecided_signs(y)

    def go_on_from_deepspeed(self, t, i):
        state, name = self.state, str(i)

        def replaced(node, key):
            value = node.value | {name: jnp.asarray(self.golden[f"{key}_{t}_{i}"])}
            return onebit_jax.WorkerLocal(value, node.axes, node.resizing)

        accumulated = self.golden[f"momentum_accumulator_{t}_{i}"]
        agreed = jnp.asarray((self.golden[f"param_{t}_{i}"] - accumulated)[0])
        momentum = jnp.asarray(self.golden[f"mu_{t}_{i}"][0])
        self.params = self.params | {name: agreed}
        self.state = state._replace(
            mu=state.mu | {name: momentum},
            nu=state.nu | {name: jnp.asarray(self.golden[f"nu_{t}_{i}"][0])},
            own_mu=replaced(state.own_mu, "mu"),
            moved=replaced(state.moved, "momentum_accumulator"),
            exchange=state.exchange._replace(
                **{e: replaced(getattr(state.exchange, e), e) for e in ERRORS}
            ),
        )


@pytest.mark.parametrize("free", [False, True], ids=["call by call", "in one go"])
def test_every_trajectory_is_deepspeeds(zero_one_file, free):
    golden = dict(np.load(zero_one_file))
    config = json.loads(str(golden["config"]))
    run = Trajectory(golden, config)
    roundings = dict.fromkeys(run.leaves, 0)
    for t in range(1, config["steps"]):
        taken = onebit_jax.steps_by_stage(run.state)
        run.step(t)
        assert int(onebit_jax.steps_by_stage(run.state)[run.stage(t)]) == 1 + int(
            taken[run.stage(t)]
        )
        intervals = run.state.variance.interval, run.state.sync.interval
        told = [golden[f"{n}_interval_{t}_0"] for n in ("var", "local_step")]
        assert list(map(int, intervals)) == list(map(int, told))
        for i in run.leaves:
            roundings[i] += 1
            sums, undecided = run.sums(t, i)
            if undecided:
                print(f"call {t}, leaf {i}: {undecided} signs lie on zero")
            else:
                for name, value in run.numbers(t, i).items():
                    allowed = np.abs(sums.get(name, 0)).max(initial=0)
                    expected = golden[f"{name}_{t}_{i}"]
                    np.testing.assert_allclose(
                        np.broadcast_to(value, expected.shape),
                        expected,
                        rtol=RTOL,
                        atol=ATOL + 2 * ULP * roundings[i] * allowed,
                        err_msg=f"{name} of leaf {i} after call {t}",
                    )
            if undecided or not free:
                run.go_on_from_deepspeed(t, i)
                roundings[i] = 0
