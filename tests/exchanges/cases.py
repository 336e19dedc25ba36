"""The exchanges that the suite asks: a row each."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import dense
import jax.numpy as jnp
import numpy as np
from exchanges.formulas import (
    by_counts,
    by_levels,
    by_random_votes,
    by_signs,
    by_votes,
    paid_in_full,
    rms_counts,
    rms_signs,
    votes_for_means,
    votes_twice,
)
from jax.sharding import PartitionSpec as P

from onebit_jax import (
    count_mean,
    exact_mean,
    hierarchical,
    per_shard,
    quantized_mean,
    random_vote_mean,
    sign_mean,
    vote_mean,
)

BLOCK = 32
SMALL = 50
"""Leaves of fewer values are small to the exchanges below, so that others are large."""
# Cut short, whole, smaller than exact_below, at it, of 16 bits, and of nothing.
SHAPES = {
    "empty": (0, 3),
    "half": (40,),
    "limit": (3,),
    "long": (96,),
    "matrix": (6, 14),
    "scalar": (),
    "small": (2,),
}
DTYPES = dict.fromkeys(SHAPES, jnp.float32) | {"half": jnp.bfloat16}
SPECS = {name: P() for name in SHAPES} | {
    "long": P("model"),
    "matrix": P(None, "model"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """An exchange on a mesh, what it is to equal, and what it supports.

    Attributes:
      make: makes the exchange.
      mesh: the mesh's axes and their sizes.
      simulation: of a leaf that is not exchanged exactly.
      inside: axes inside of which the mean is exact, before all else.
      specs: how parameters are sharded over an axis that has no workers.
      spoils: how much is not finite where one value is not: its 'block', the 'value'
        alone, or 'nothing'.
      is_mean: whether the sum of what is returned is that of the means, but for errors.
      exact_below: leaves, or shards, of fewer values go exactly.
      exact_1d: whether leaves of fewer than two dimensions do too.
      squares: whether 1e30, whose square is not finite, is not finite.
      error_dtype: of the errors; None where there are none.
      beyond: how far from zero are the values that it is asked about.
      decided: the least share of a leaf's values that neither rounding nor chance
        decides.
      together: whether that is of all leaves' values together, as chance decides many.
      resized: the axis that a state is moved to other sizes of, and these.
    """

    make: Callable[[], Any]
    mesh: dict[str, int]
    simulation: Callable[..., dense.Result] | None = None
    inside: tuple[str, ...] = ()
    specs: Any = None
    spoils: str = "block"
    is_mean: bool = True
    exact_below: float = BLOCK // 32 + 2
    exact_1d: bool = False
    squares: bool = False
    error_dtype: Any = jnp.float32
    beyond: float = 0.0
    decided: float = 0.9
    together: bool = False
    resized: tuple[tuple[tuple[str, int], ...], ...] = ()

    @property
    def axes(self):
        """The axes of the workers."""
        return tuple(name for name in self.mesh if not self.specs or name != "model")

    @property
    def workers(self):
        return math.prod(self.mesh[name] for name in self.axes)

    def shards_of(self, name):
        """The values of each shard of a leaf, by their places in the flat leaf."""
        places = np.arange(math.prod(SHAPES[name])).reshape(SHAPES[name])
        spec = self.specs[name] if self.specs else P()
        for dimension, axis in enumerate(spec):
            if axis:
                parts = np.split(places, self.mesh[axis], axis=dimension)
                return [part.reshape(-1) for part in parts]
        return [places.reshape(-1)]

    def is_exact(self, name):
        few = self.shards_of(name)[0].size < max(1, self.exact_below)
        return few or (self.exact_1d and len(SHAPES[name]) < 2)

    def blocks_of(self, name):
        """For each value of a leaf the number of its block."""
        shards = self.shards_of(name)
        each = -(-shards[0].size // BLOCK)
        blocks = np.zeros(math.prod(SHAPES[name]), int)
        for number, places in enumerate(shards):
            blocks[places] = number * each + np.arange(places.size) // BLOCK
        return blocks

    def simulate(self, values, before):
        """A step of all leaves by the simulation, from the errors before it."""
        return {n: self.simulate_leaf(n, values[n], *before[n]) for n in SHAPES}

    def simulate_leaf(self, name, values, errors, server_error):
        """A step of a leaf by the simulation; values as workers have them.

        The mean of a host is in float32, as the library's.
        """
        teams = errors.shape[0]
        values = values.reshape(teams, len(values) // teams, -1 if values.size else 0)
        values = values.mean(axis=1)
        if self.simulation is None or self.is_exact(name):
            return dense.exact_mean(values, errors, server_error)
        if teams == 1 and self.error_dtype is not None:
            return paid_in_full(values, errors, server_error)
        return self.simulation(
            values, errors, server_error, blocks=self.blocks_of(name)
        )


VOTES = {
    "exact_below": 0,
    "spoils": "nothing",
    "is_mean": False,
    "error_dtype": None,
}
# The formula of what is left to chance stands in test_random_vote_mean.py.
RANDOM_VOTES = VOTES | {"beyond": 100.0}
BITS_16 = {"scale": "rms", "error_dtype": "bfloat16"}


def of_small_sizes(make):
    """Makes an exchange to which leaves of SHAPES are small and large ones."""

    def made(*args, **options):
        exchange = make(*args, block_size=BLOCK, **options)
        return dataclasses.replace(exchange, small_below=SMALL)

    return made


signs = functools.partial(of_small_sizes(sign_mean), scale="mean_abs")
counts = functools.partial(of_small_sizes(count_mean), scale="mean_abs")
quantized = of_small_sizes(quantized_mean)
low = {"squares": True, "error_dtype": jnp.bfloat16}


def data(workers):
    return {"data": workers}


def hosts(number, devices):
    return {"host": number, "device": devices}


def moved(*meshes):
    return tuple(tuple(mesh.items()) for mesh in meshes)


def two_levels(exchange, *sizes, simulation=None, **others):
    return Case(
        lambda: hierarchical(exchange(), "device"),
        hosts(*sizes),
        simulation,
        inside=("device",),
        **others,
    )


def in_shards(exchange, workers, simulation, **others):
    return Case(
        lambda: per_shard(exchange(), SPECS),
        {"data": workers, "model": 2},
        simulation,
        specs=SPECS,
        **others,
    )


CASES = {
    "exact": Case(
        lambda: exact_mean("data"), data(4), spoils="value", error_dtype=None
    ),
    "sign-1": Case(lambda: signs("data"), data(1), by_signs, spoils="value"),
    "sign-2": Case(lambda: signs("data"), data(2), by_signs),
    "sign-3": Case(
        lambda: signs("data"), data(3), by_signs, resized=moved(data(8), data(3))
    ),
    "sign-8": Case(
        lambda: signs("data"), data(8), by_signs, resized=moved(data(3), data(1))
    ),
    "sign-buckets": Case(lambda: signs("data", bucket_size=128), data(2), by_signs),
    "sign-16-bits": Case(lambda: signs("data", **BITS_16), data(4), rms_signs, **low),
    "sign-two-axes": Case(lambda: signs(("host", "device")), hosts(2, 4), by_signs),
    "count-1": Case(lambda: counts("data"), data(1), by_counts, spoils="value"),
    "count-3": Case(lambda: counts("data"), data(3), by_counts, resized=moved(data(8))),
    "count-8": Case(lambda: counts("data"), data(8), by_counts, resized=moved(data(1))),
    "count-buckets": Case(lambda: counts("data", bucket_size=64), data(2), by_counts),
    "count-16-bits": Case(
        lambda: counts("data", **BITS_16), data(4), rms_counts, **low
    ),
    "hierarchical-sign-3x2": two_levels(
        lambda: signs("host"),
        3,
        2,
        simulation=by_signs,
        resized=moved(hosts(2, 2), hosts(2, 4), hosts(8, 1), hosts(3, 1)),
    ),
    "hierarchical-sign-2x4": two_levels(
        lambda: signs("host"),
        2,
        4,
        simulation=by_signs,
        resized=moved(hosts(3, 2), hosts(1, 4)),
    ),
    "hierarchical-sign-1x4": two_levels(
        lambda: signs("host"), 1, 4, simulation=by_signs, spoils="value"
    ),
    "hierarchical-sign-16-bits": two_levels(
        lambda: signs("host", **BITS_16), 2, 2, simulation=rms_signs, **low
    ),
    "hierarchical-count-3x2": two_levels(
        lambda: counts("host"),
        3,
        2,
        simulation=by_counts,
        resized=moved(hosts(2, 4), hosts(1, 4)),
    ),
    "hierarchical-count-16-bits": two_levels(
        lambda: counts("host", **BITS_16), 2, 2, simulation=rms_counts, **low
    ),
    "hierarchical-exact-2x4": two_levels(
        lambda: exact_mean("host"), 2, 4, spoils="value", error_dtype=None
    ),
    "per-shard-exact-2": in_shards(
        lambda: exact_mean("data"), 2, None, spoils="value", error_dtype=None
    ),
    **{
        f"quantized-{bits}-{workers}": Case(
            functools.partial(quantized, "data", bits),
            data(workers),
            functools.partial(by_levels, bits=bits),
            exact_below=bits + 2,
            squares=bits == 2,
            resized=moved(data(8)),
        )
        for bits, workers in ((2, 3), (4, 2), (8, 4))
    },
    "quantized-1d-3": Case(
        lambda: quantized("data", exact_1d=True),
        data(3),
        functools.partial(by_levels, bits=4),
        exact_below=6,
        exact_1d=True,
    ),
    "hierarchical-quantized-2x4": two_levels(
        lambda: quantized("host"),
        2,
        4,
        simulation=functools.partial(by_levels, bits=4),
        exact_below=6,
    ),
    "per-shard-quantized-2": in_shards(
        lambda: quantized("data"),
        2,
        functools.partial(by_levels, bits=4),
        exact_below=6,
    ),
    **{
        f"vote-{workers}": Case(
            lambda: vote_mean("data"), data(workers), by_votes, **VOTES
        )
        for workers in (1, 2, 3, 8)
    },
    "hierarchical-vote-2x4": two_levels(
        lambda: vote_mean("host"), 2, 4, simulation=by_votes, **VOTES
    ),
    "per-shard-vote-2": in_shards(lambda: vote_mean("data"), 2, by_votes, **VOTES),
    **{
        f"vote-means-{workers}": Case(
            lambda: vote_mean("data", back="mean"),
            data(workers),
            votes_for_means,
            **VOTES,
        )
        for workers in (1, 3, 8)
    },
    "hierarchical-vote-means-2x4": two_levels(
        lambda: vote_mean("host", back="mean"),
        2,
        4,
        simulation=votes_for_means,
        **VOTES,
    ),
    **{
        f"random-vote-{workers}": Case(
            lambda: random_vote_mean("data"),
            data(workers),
            by_random_votes,
            **RANDOM_VOTES,
            resized=moved(data(2)),
        )
        for workers in (1, 3)
    },
    "random-vote-twice-2": Case(
        lambda: random_vote_mean("data", back="vote"),
        data(2),
        votes_twice,
        decided=0.4,
        together=True,
        **RANDOM_VOTES,
    ),
    "random-vote-two-axes": Case(
        lambda: random_vote_mean(("host", "device")),
        hosts(2, 2),
        by_random_votes,
        **RANDOM_VOTES,
    ),
    "hierarchical-random-vote-2x4": two_levels(
        lambda: random_vote_mean("host"),
        2,
        4,
        simulation=by_random_votes,
        decided=0.4,
        together=True,
        **RANDOM_VOTES,
    ),
    "per-shard-random-vote-2": in_shards(
        lambda: random_vote_mean("data"),
        2,
        by_random_votes,
        **RANDOM_VOTES,
        resized=moved({"data": 3, "model": 2}),
    ),
    "per-shard-sign-2": in_shards(
        lambda: signs("data"),
        2,
        by_signs,
        resized=moved({"data": 3, "model": 2}),
    ),
    "per-shard-sign-3": in_shards(
        lambda: signs("data"),
        3,
        by_signs,
        resized=moved({"data": 4, "model": 2}, {"data": 1, "model": 2}),
    ),
    "per-shard-count-2": in_shards(
        lambda: counts("data"),
        2,
        by_counts,
        resized=moved({"data": 3, "model": 2}),
    ),
}


def kind_of(exchange):
    """The classes that an exchange is made of."""
    inside = getattr(exchange, "exchange", None)
    codec = type(getattr(exchange, "codec", None))
    return type(exchange), codec, inside and kind_of(inside)


def first_of_each_kind():
    """For what does not depend on the number of workers, if there are several."""
    rows = [(name, case) for name, case in CASES.items() if case.workers > 1]
    return tuple({kind_of(case.make()): name for name, case in rows[::-1]}.values())


KINDS = first_of_each_kind()[::-1]
