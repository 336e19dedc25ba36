"""Trajectories that DeepSpeed 0.19.6 computed, and what a run may differ from them.

Every number must agree within 1e-5 relative plus 1e-7 absolute, but for two effects
of float32 that neither side can be blamed for:

- A parameter, a momentum (of gradients that cancel), and an error x - s sign(x) are
  sums that may be far smaller than their terms. They are allowed two units in the last
  place of the leaf's largest term, for each call since the numbers were equal, because
  a sum carries every rounding on.
- Where x lies within rounding of zero, its sign is undecided, and a scale and an error
  follow it. Such calls are found by recomputing x in float64; only what is exchanged
  together with one may differ in it, and goes on from DeepSpeed's numbers.

A file has for parameter tensor i and call t the arrays NAME_t_i, and its `config`.
"""

import functools
import json

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax

RTOL, ATOL = 1e-5, 1e-7
ULP = np.finfo(np.float32).eps
ERRORS = ("worker_error", "server_error")


@functools.cache
def read(file):
    """The arrays of a file, and its configuration."""
    golden = dict(np.load(file))
    return golden, json.loads(str(golden["config"]))


def scale_of(x):
    squares = np.sum(np.square(x), axis=-1, keepdims=True)
    return np.sqrt(squares / max(x.shape[-1], 1))


def signed_values(values, errors, server_errors):
    """Values that workers and servers took signs of, in float64.

    Args:
      values: (workers, size) without padding.
      errors: (workers, padded) before the call.
      server_errors: (workers, padded / workers) before the call.
    """
    padding = errors.shape[1] - values.shape[1]
    x = np.pad(values.astype(float), ((0, 0), (0, padding))) + errors
    sent = np.where(x >= 0, scale_of(x), -scale_of(x))
    return x, sent.mean(0).reshape(len(x), -1) + server_errors


def errors_before(golden, t, suffix=""):
    """Both errors before call t, which are zero before the first that has any."""
    return [
        golden.get(f"{name}_{t - 1}{suffix}", 0 * golden[f"{name}_{t}{suffix}"])
        for name in ERRORS
    ]


def undecided_signs(x, roundings):
    """The number of values that are within so many calls' roundings of zero."""
    near = max(8, 2 * roundings) * ULP * scale_of(x)
    # The padding's zeros are exact and count as positive on both sides.
    return int(np.sum((np.abs(x) < near) & (x != 0)))


def assert_near(found, expected, what, terms=0.0, roundings=1):
    """Within the tolerances, and two units of the largest term a rounding.

    Args:
      found: this library's numbers.
      expected: DeepSpeed's.
      what: for the message.
      terms: those of the sum that the numbers are; zero of none.
      roundings: calls since the numbers were equal.
    """
    allowed = 2 * ULP * roundings * np.abs(terms).max(initial=0)
    np.testing.assert_allclose(
        found, expected, rtol=RTOL, atol=ATOL + allowed, err_msg=what
    )


class Trajectory:
    """This library's own run on a file's gradients, the leaves in a list.

    Args:
      tx: the optimizer.
      golden: the arrays of a file.
      config: its configuration.
      stage: the only stage of the compiled step; None for both.
    """

    def __init__(self, tx, golden, config, stage=None):
        self.golden, self.leaves = golden, range(len(config["shapes"]))
        shape = (config["workers"],)
        mesh = jax.make_mesh(shape, ("data",), axis_types=(AxisType.Auto,))

        def local_step(params, state, gradients):
            own = jax.tree.map(lambda g: g[0], gradients)
            updates, state = tx.update(own, state, params, stage=stage)
            return optax.apply_updates(params, updates), state

        # What stands where a step leaves it is given to the program of all steps.
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.params = [golden[f"param0_{i}"] for i in self.leaves]
        self.state = onebit_jax.init(tx, self.params, mesh)
        self.first = self.params, self.state
        self.shardings = jax.tree.map(lambda x: x.sharding, self.state)
        specs = onebit_jax.state_specs(self.state)
        self.local_step = jax.jit(
            jax.shard_map(
                local_step,
                mesh=mesh,
                in_specs=(PartitionSpec(), specs, PartitionSpec("data")),
                out_specs=(PartitionSpec(), specs),
            )
        )

    def begin(self):
        """Stands before the first call, whatever has been run."""
        self.params, self.state = self.first

    def gradient(self, t, i):
        return self.golden[f"grad_{t}_{i}"]

    def step(self, t):
        gradients = [self.gradient(t, i) for i in self.leaves]
        params = jax.device_put(self.params, self.whole)
        state = jax.device_put(self.state, self.shardings)
        self.params, self.state = self.local_step(params, state, gradients)


def replaced(leaves, i, value):
    """The list with another leaf at place i."""
    return [*leaves[:i], value, *leaves[i + 1 :]]
