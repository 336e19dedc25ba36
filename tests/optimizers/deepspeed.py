"""This library's runs on the gradients of a file that DeepSpeed 0.19.6 computed.

Every number must agree within 1e-5 relative plus 1e-7 absolute, but for two effects
of float32 that neither side can be blamed for:

- A parameter, a momentum (of gradients that cancel), and an error x - s sign(x) are
  sums that may be far smaller than their terms. They are allowed two units in the last
  place of the leaf's largest term, for each call since the numbers were equal, because
  a sum carries every rounding on.
- Where x lies within rounding of zero, its sign is undecided, and a scale and an error
  follow it. Such calls are found by recomputing x in float64; only what is exchanged
  together with one may differ in it, and goes on from DeepSpeed's numbers.

A file has for parameter tensor i and call t the arrays NAME_t_i, and its `config`. Call
0 drops its gradients.
"""

import dataclasses
import inspect
import json

import from_deepspeed
import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import onebit_jax

RTOL, ATOL = 1e-5, 1e-7
ULP = np.finfo(np.float32).eps
ERRORS = ("worker_error", "server_error")


def scale_of(x):
    squares = np.sum(np.square(x), axis=-1, keepdims=True)
    return np.sqrt(squares / max(x.shape[-1], 1))


class Replay:
    """A run beside a file, the leaves in a list.

    Args:
      file: the file.

    Attributes:
      groups: leaves that are exchanged together, each on its own or all.
    """

    fused = False

    def __init__(self, file):
        self.golden = dict(np.load(file))
        self.config = json.loads(str(self.golden["config"]))
        self.shapes, self.workers = self.config["shapes"], self.config["workers"]
        self.leaves = range(len(self.shapes))
        self.groups = [list(self.leaves)] if self.fused else [[i] for i in self.leaves]
        make = getattr(from_deepspeed, self.make)
        parameters = inspect.signature(make).parameters.values()
        known = {p.name: p.default for p in parameters if p.kind != p.VAR_KEYWORD}
        given = self.config.get("options", self.config)
        given = {k: v for k, v in given.items() if k in known}
        self.options = known | {"lr": 1e-3} | given
        self.tx = make(**self.options)
        self.b1, self.b2 = self.options["betas"]
        # A file may compress from its first update on.
        self.static = "compressed" if self.stage(1) == "compressed" else None
        shape = (self.workers,)
        mesh = jax.make_mesh(shape, ("data",), axis_types=(AxisType.Auto,))
        self.params = [self.golden[f"param0_{i}"] for i in self.leaves]
        self.state = onebit_jax.init(self.tx, self.params, mesh)
        self.first = self.params, self.state
        # What stands where a step leaves it is given to the program of all steps.
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.shardings = jax.tree.map(lambda x: x.sharding, self.state)
        specs = onebit_jax.state_specs(self.state)
        self.compiled = jax.jit(
            jax.shard_map(
                self.local_step,
                mesh=mesh,
                in_specs=(PartitionSpec(), specs, PartitionSpec("data")),
                out_specs=(PartitionSpec(), specs),
            )
        )

    def local_step(self, params, state, gradients):
        own = jax.tree.map(lambda g: g[0], gradients)
        updates, state = self.tx.update(own, state, params, stage=self.static)
        return optax.apply_updates(params, updates), state

    def begin(self):
        """Stands before the first call, whatever has been run."""
        self.params, self.state = self.first

    def step(self, t):
        gradients = [np.float32(self.gradient(t, i)) for i in self.leaves]
        params = jax.device_put(self.params, self.whole)
        state = jax.device_put(self.state, self.shardings)
        self.params, self.state = self.compiled(params, state, gradients)

    def of(self, name, t, i):
        """DeepSpeed's in float64, (workers, *shape), or (1, *shape) of one rank."""
        x = np.asarray(self.golden[f"{name}_{t}_{i}"], float)
        return x if x.ndim > len(self.shapes[i]) else x[None]

    def gradient(self, t, i):
        return self.of("grad", t, i)

    def inner(self):
        state = self.state
        return state if hasattr(state, "_fields") else state[0]

    def put(self, i=None, **fields):
        """Puts fields into the optimizer's state, or into leaf i of these."""
        old = self.inner()
        if i is not None:
            fields = {k: replaced(getattr(old, k), i, x) for k, x in fields.items()}
        new = old._replace(**fields)
        self.state = new if old is self.state else (new, *self.state[1:])

    def numbers(self, i):
        """Of leaf i, by DeepSpeed's names."""
        state = self.inner()
        return {"param": self.params[i], "mu": state.mu[i], "nu": state.nu[i]}

    def allowed(self, t, i, roundings):
        """By how much sums may differ that may be far smaller than their terms."""
        momentum = (1 - self.b1) * self.gradient(t, i)
        terms = {"param": self.of("param", t - 1, i), "mu": momentum}
        return {name: units(x, roundings) for name, x in terms.items()}

    def errors(self, t, group):
        """DeepSpeed's after call t, by name; none before it has any."""
        suffix = "" if self.fused else f"_{group[0]}"
        keys = {name: f"{name}_{t}{suffix}" for name in ERRORS}
        return {k: self.golden[key] for k, key in keys.items() if key in self.golden}

    def signed(self, t, group):
        """Values that signs were taken of, in float64; an empty dict if of none."""
        if self.stage(t) not in ("compressed", "gradient") or self.workers == 1:
            return {}
        after = self.errors(t, group)
        zeros = {name: np.zeros_like(x) for name, x in after.items()}
        worker, server = (zeros | self.errors(t - 1, group)).values()
        values = [self.sent(t, i).reshape(self.workers, -1) for i in group]
        padding = self.padding(t, worker.shape[1] - sum(x.shape[1] for x in values))
        x = np.concatenate([*values, padding], axis=1) + worker
        y = np.where(x >= 0, scale_of(x), -scale_of(x)).mean(axis=0)
        return dict(zip(ERRORS, (x, y.reshape(len(x), -1) + server), strict=True))

    def padding(self, t, size):
        return np.zeros((self.workers, size))

    def undecided(self, t, group, roundings):
        """The number of signs that so many calls' roundings may have decided."""
        near = max(8, 2 * roundings) * ULP
        return sum(
            # The padding's zeros are exact and count as positive on both sides.
            int(np.sum((np.abs(x) < near * scale_of(x)) & (x != 0)))
            for x in self.signed(t, group).values()
        )

    def check(self, t, group, roundings):
        """Asserts that the numbers after call t are DeepSpeed's.

        Args:
          t: the call.
          group: the leaves that it is of.
          roundings: calls since the numbers were equal.
        """
        for i in group:
            allowed = self.allowed(t, i, roundings)
            for name, found in self.numbers(i).items():
                if f"{name}_{t}_{i}" in self.golden:
                    what = f"{name} of leaf {i} after call {t}"
                    expected = self.golden[f"{name}_{t}_{i}"]
                    near(found, expected, what, allowed.get(name, 0.0))
        errors = self.errors(t, group)
        terms = errors | self.signed(t, group)
        for name, expected in errors.items():
            found = getattr(self.inner().exchange, name).value[self.groups.index(group)]
            allowed = units(terms[name], roundings)
            near(found, expected, f"{name} after call {t}", allowed)

    def adopt(self, t, group):
        """Goes on from DeepSpeed's numbers after call t."""
        for i in group:
            self.params = replaced(self.params, i, self.of("param", t, i)[0])
            self.put(i, mu=self.of("mu", t, i)[0], nu=self.of("nu", t, i)[0])
        for name, error in self.errors(t, group).items():
            self.put_exchange(name, self.groups.index(group), error)

    def put_exchange(self, name, place, value):
        exchange = self.inner().exchange
        node = getattr(exchange, name)
        node = dataclasses.replace(node, value=replaced(node.value, place, value))
        self.put(exchange=exchange._replace(**{name: node}))


def units(terms, roundings):
    """Two units in the last place of the largest term a rounding."""
    return 2 * ULP * roundings * np.abs(terms).max(initial=0)


def near(found, expected, what, allowed):
    found = np.broadcast_to(np.asarray(found), np.shape(expected))
    np.testing.assert_allclose(
        found, expected, rtol=RTOL, atol=ATOL + allowed, err_msg=what
    )


def replaced(leaves, i, value):
    """The list with another leaf at place i, in float32."""
    return [*leaves[:i], single(value), *leaves[i + 1 :]]


def single(x):
    return jax.tree.map(np.float32, x)


class OnebitAdam(Replay):
    make = "onebit_adam"

    def stage(self, t):
        return "compressed" if self.golden[f"compressed_{t}"] else "warmup"

    def sent(self, t, i):
        last = self.b1 * self.of("mu", t - 1, i)
        return last + (1 - self.b1) * self.gradient(t, i)


class OnebitLamb(Replay):
    """All leaves are one buffer, of which the padding is a part.

    The fresh variance and the padding are in no file: they follow from what is.
    """

    make = "onebit_lamb"
    fused = True

    def begin(self):
        super().begin()
        self.fresh = [np.zeros(shape) for shape in self.shapes]
        self.padded = 0.0
        self.factor_error = np.zeros(len(self.leaves))

    def step(self, t):
        super().step(t)
        (group,) = self.groups
        frozen = self.options["freeze_step"]
        self.padding_before = self.padded
        for i in self.leaves:
            if self.stage(t) == "compressed":
                self.restore(t, i)
            elif frozen > 1:  # else DeepSpeed never takes over the frozen one
                self.fresh[i] = self.of("nu", t, i)[0]
        if self.stage(t) == "compressed" and self.workers > 1:
            agreed = self.signed(t, group)["server_error"]
            agreed = agreed - self.errors(t, group)["server_error"]
            size = sum(x.size for x in self.fresh)
            self.padded = agreed.reshape(1, -1)[:, size:]
        if int(self.inner().frozen_at) == t:
            self.put(nu_fresh=single(self.fresh))

    def restore(self, t, i):
        """The fresh variance after call t, and what a rounding does to a factor.

        A restored gradient is a difference of momenta, g + δ: the root of a variance
        w moves by δ √(1 - b2) at most, whatever g is.
        """
        m, last = (self.of("mu", u, i)[0] for u in (t, t - 1))
        gradient = (m - self.b1 * last) / (1 - self.b1)
        w = self.b2 * self.fresh[i] + (1 - self.b2) * gradient**2
        self.fresh[i] = w
        error = 2 * ULP * np.abs([m, last]).max(initial=0) / (1 - self.b1)
        root = np.sqrt(w).min(initial=np.inf) + self.options["eps"]
        self.factor_error[i] += error * np.sqrt(1 - self.b2) / root

    def stage(self, t):
        return "warmup" if self.golden[f"exact_{t}"] else "compressed"

    def padding(self, t, size):
        return np.broadcast_to(self.padding_before, (self.workers, size))

    def sent(self, t, i):
        momentum = self.b1 * self.of("mu", t - 1, i)
        momentum = momentum + (1 - self.b1) * self.gradient(t, i)
        return self.golden[f"scaling_coeff_{t}_{i}"] * momentum

    def numbers(self, i):
        state = self.inner()
        return super().numbers(i) | {
            "lamb_coeff_freeze": state.ratio[i],
            "last_factor": state.factor[i],
            "scaling_coeff": state.magnitude[i],
        }

    def allowed(self, t, i, roundings):
        factor = self.factor_error[i] * float(self.golden[f"last_factor_{t}_{i}"])
        return super().allowed(t, i, roundings) | {"last_factor": factor}

    def adopt(self, t, group):
        super().adopt(t, group)
        state, numbers = self.inner(), {}
        names = {"lamb_coeff_freeze": "ratio", "last_factor": "factor"}
        for its, ours in (names | {"scaling_coeff": "magnitude"}).items():
            if f"{its}_{t}_0" in self.golden:
                numbers[ours] = single(
                    np.array([self.golden[f"{its}_{t}_{i}"] for i in self.leaves])
                )
        self.put(nu_fresh=single(self.fresh), **numbers)
        like = state.exchange.padding.value[0]
        self.put_exchange("padding", 0, np.broadcast_to(self.padded, like.shape))
        self.factor_error[:] = 0


class ZeroOneAdam(Replay):
    make = "zero_one_adam"

    def stage(self, t):
        if self.golden[f"exact_{t}"]:
            return "variance"
        if t <= self.options["var_freeze_step"]:
            return "gradient"
        interval = self.golden[f"local_step_interval_{t - 1}_0"]
        return "local" if (t + 1) % interval else "compressed"

    def gradient(self, t, i):
        if self.workers == 1 and self.stage(t) == "gradient":
            # DeepSpeed's only worker keeps its momentum, as it does with this gradient.
            return self.of("mu", t - 1, i)
        return super().gradient(t, i)

    def numbers(self, i):
        state = self.inner()
        moved = np.asarray(state.moved[i].value)
        return {
            "param": np.asarray(self.params[i]) + moved,
            "mu": state.own_mu[i].value if state.frozen_at else state.mu[i],
            "nu": state.nu[i],
            "momentum_accumulator": moved,
            "var_interval": state.refresh.interval,
            "local_step_interval": state.sync.interval,
        }

    def root(self, t, i):
        return np.sqrt(self.of("nu", t - 1, i)) + self.options["eps"]

    def moved(self, t, i):
        momentum = self.b1 * self.of("mu", t - 1, i)
        step = momentum + (1 - self.b1) * self.gradient(t, i)
        step = step / self.root(t, i)
        step = step + self.options["weight_decay"] * self.of("param", t - 1, i)
        moved = self.of("momentum_accumulator", t - 1, i)
        return moved - self.options["lr"] * step

    def allowed(self, t, i, roundings):
        moved = units(self.moved(t, i), roundings)
        return super().allowed(t, i, roundings) | {"momentum_accumulator": moved}

    def sent(self, t, i):
        if self.stage(t) == "gradient":
            return self.gradient(t, i)
        return self.moved(t, i) * self.root(t, i)

    def adopt(self, t, group):
        super().adopt(t, group)
        state = self.inner()
        for i in group:
            moved = self.of("momentum_accumulator", t, i)
            agreed = (self.of("param", t, i) - moved)[0]
            self.params = replaced(self.params, i, agreed)
            own = {"moved": moved, "own_mu": self.of("mu", t, i)}
            self.put(
                i,
                **{
                    k: dataclasses.replace(getattr(state, k)[i], value=x)
                    for k, x in own.items()
                },
            )


KINDS = {kind.make: kind for kind in (OnebitAdam, OnebitLamb, ZeroOneAdam)}


def replay_of(file):
    """A run beside a file, of the optimizer that its name says."""
    (kind,) = (kind for make, kind in KINDS.items() if f"_{make}_" in file.name)
    return kind(file)
