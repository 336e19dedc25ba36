"""The stages, measures and refusals that states tell of themselves."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

import onebit_jax
from onebit_jax.workers.states import declared


def test_a_name_that_nobody_reads_is_refused():
    with pytest.raises(TypeError, match=r"State.metric is nothing .* metrics"):

        @onebit_jax.optimizer_state
        class State(NamedTuple):
            value: Any

            def metric(self):
                return {}


def test_what_is_not_declared_tells_nothing():
    class Model(NamedTuple):
        value: Any

        def metrics(self):
            return {"value": self.value}

    assert declared(Model(1)) == []
    assert onebit_jax.metrics((Model(jnp.ones(2)),)) == {}


def test_parts_of_one_name_are_told_by_their_paths():
    @onebit_jax.optimizer_state
    class Staged(NamedTuple):
        value: Any

        def steps_by_stage(self):
            return {"every": self.value}

    state = {"a": (Staged(3), Staged(4))}
    assert onebit_jax.steps_by_stage(state) == {"a.0:every": 3, "a.1:every": 4}
    assert onebit_jax.metrics(state) == {}
