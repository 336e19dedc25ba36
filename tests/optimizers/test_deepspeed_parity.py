"""The DeepSpeed layout against trajectories that DeepSpeed 0.19.6 computed.

Every number must agree within 1e-5 relative plus 1e-7 absolute, but for two effects
of float32 that neither side can be blamed for:

- A parameter, a momentum (of gradients that cancel), and an error x - s sign(x) are
  sums that may be far smaller than their terms. They are allowed two units in the last
  place of the leaf's largest term, for each call since the numbers were equal, because
  a sum carries every rounding on.
- Where x lies within rounding of zero, its sign is undecided, and a scale and an error
  follow it. Such calls are found by recomputing x in float64; only leaves that have
  one may differ in it, and they go on from DeepSpeed's numbers.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec
from virtual_workers import Workers, mesh_of

import onebit_jax

RTOL, ATOL = 1e-5, 1e-7
ULP = np.finfo(np.float32).eps
ERRORS = ("worker_error", "server_error")


def scale_of(x):
    squares = np.sum(np.square(x), axis=-1, keepdims=True)
    return np.sqrt(squares / max(x.shape[-1], 1))


def compressed_values(golden, config, t, i):
    """Values that workers and servers took signs of at call t, in float64."""
    n, (b1, _) = config["workers"], config["betas"]
    gradient = golden[f"grad_{t}_{i}"].reshape(n, -1).astype(np.float64)
    mu = golden[f"mu_{t - 1}_{i}"].reshape(1, -1).astype(np.float64)
    padded = golden[f"worker_error_{t}_{i}"].shape[1]
    served = padded // n

    def before(name, width):
        return golden.get(f"{name}_{t - 1}_{i}", np.zeros((n, width)))

    x = np.pad(b1 * mu + (1 - b1) * gradient, ((0, 0), (0, padded - mu.size)))
    x = x + before("worker_error", padded)
    sent = np.where(x >= 0, scale_of(x), -scale_of(x))
    y = sent.mean(0).reshape(n, served) + before("server_error", served)
    return x, y


def undecided_signs(x):
    # The padding's zeros are exact and count as positive on both sides.
    return int(np.sum((np.abs(x) < 8 * ULP * scale_of(x)) & (x != 0)))


class Trajectory:
    """This library's own run of a golden file's configuration."""

    def __init__(self, golden, config):
        self.golden, self.config = golden, config
        self.leaves = range(len(config["shapes"]))
        (b1, b2), n = config["betas"], config["workers"]
        mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
        tx = onebit_jax.onebit_adamw(
            config["lr"],
            onebit_jax.deepspeed_sign_mean("data"),
            # DeepSpeed drops the gradient of its first call.
            onebit_jax.freeze_at(max(1, config["freeze_step"] - 1)),
            b1,
            b2,
            config["eps"],
            config["weight_decay"],
            bias_correction=False,
            **onebit_jax.AS_PUBLISHED,
        )

        def local_step(params, state, gradients):
            own = jax.tree.map(lambda g: g[0], gradients)
            # With a freeze step of 1 it compresses from its first update on.
            stage = "compressed" if config["freeze_step"] < 2 else None
            updates, state = tx.update(own, state, params, stage=stage)
            return optax.apply_updates(params, updates), state

        self.params = {str(i): golden[f"param0_{i}"] for i in self.leaves}
        self.state = onebit_jax.init(tx, self.params, mesh)
        specs = onebit_jax.state_specs(self.state)
        self.local_step = jax.jit(
            jax.shard_map(
                local_step,
                mesh=mesh,
                in_specs=(PartitionSpec(), specs, PartitionSpec("data")),
                out_specs=(PartitionSpec(), specs),
            )
        )

    def step(self, t):
        gradients = {str(i): self.golden[f"grad_{t}_{i}"] for i in self.leaves}
        self.params, self.state = self.local_step(self.params, self.state, gradients)

    def numbers(self, i, compressed):
        adam = self.state[0]
        numbers = {"param": self.params, "mu": adam.mu, "nu": adam.nu}
        if compressed:
            numbers |= {name: getattr(adam.exchange, name).value for name in ERRORS}
        return {name: np.asarray(tree[str(i)]) for name, tree in numbers.items()}

    def go_on_from_deepspeed(self, t, i):
        def replaced(tree, name):
            return {**tree, str(i): self.golden[f"{name}_{t}_{i}"]}

        adam, *rest = self.state
        errors = {
            name: onebit_jax.WorkerLocal(
                replaced(node.value, name), node.axes, node.resizing
            )
            for name, node in adam.exchange._asdict().items()
            if f"{name}_{t}_{i}" in self.golden
        }
        self.params = replaced(self.params, "param")
        self.state = (
            adam._replace(
                mu=replaced(adam.mu, "mu"),
                nu=replaced(adam.nu, "nu"),
                exchange=adam.exchange._replace(**errors),
            ),
            *rest,
        )


@pytest.mark.parametrize("free", [False, True], ids=["call by call", "in one go"])
def test_every_trajectory_is_deepspeeds(deepspeed_file, free):
    golden = dict(np.load(deepspeed_file))
    config = json.loads(str(golden["config"]))
    run = Trajectory(golden, config)
    roundings = dict.fromkeys(run.leaves, 0)
    for t in range(1, config["steps"]):
        run.step(t)
        compressed = bool(golden[f"compressed_{t}"])
        if t + 1 < config["steps"]:
            frozen = int(run.state[0].frozen_at) > 0
            assert frozen == bool(golden[f"compressed_{t + 1}"])
        for i in run.leaves:
            roundings[i] += 1
            terms = compressed_values(golden, config, t, i) if compressed else ()
            undecided = sum(map(undecided_signs, terms))
            if undecided:
                print(f"call {t}, leaf {i}: {undecided} signs lie on zero")
            else:
                gradient = (1 - config["betas"][0]) * golden[f"grad_{t}_{i}"]
                sums = {"param": golden[f"param_{t}_{i}"], "mu": gradient}
                sums |= dict(zip(ERRORS, terms, strict=False))
                allowed = {
                    name: 2 * ULP * roundings[i] * np.abs(x).max(initial=0)
                    for name, x in sums.items()
                }
                for name, value in run.numbers(i, compressed).items():
                    np.testing.assert_allclose(
                        value,
                        golden[f"{name}_{t}_{i}"],
                        rtol=RTOL,
                        atol=ATOL + allowed.get(name, 0),
                        err_msg=f"{name} of leaf {i} after call {t}",
                    )
            if undecided or not free:
                run.go_on_from_deepspeed(t, i)
                roundings[i] = 0


def test_one_worker_sends_nothing_and_compresses_nothing():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)), jnp.float32)
    run = Workers(onebit_jax.deepspeed_sign_mean("data"), jnp.zeros(50), mesh_of(1))
    np.testing.assert_array_equal(run.update(x), x[0])


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_padding_is_deepspeeds(workers, size):
    quantum = workers * math.lcm(workers, 8)
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(AxisType.Auto,))
    state = onebit_jax.abstract_state(
        onebit_jax.deepspeed_sign_mean("data"), np.zeros(size, np.float32), mesh
    )
    padded = math.ceil(size / quantum) * quantum
    assert state.worker_error.value.shape == (workers, padded)
    assert state.server_error.value.shape == (workers, padded // workers)
