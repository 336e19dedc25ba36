"""The operations that `benchmarks.kernels` times, all in place."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import onebit_jax
import pallas_kernels
from benchmarks.kernels.inputs import ADAM, DEFAULT, STEP, Inputs
from benchmarks.one_of_many import one_of_many
from benchmarks.whole_step import repeated, traced
from train.core.mesh import AXIS, make_mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from jax import Array

    Call = Callable[[], Any]

DECAY = 0.9
EPS = 1e-8
LEARNING_RATE = 1e-3


class Operation(NamedTuple):
    """An operation by one implementation.

    Attributes:
      name: Its name.
      implementation: Name of its implementation.
      prepare: A function that makes its buffers and returns the call to be timed.
      baseline: A function that does the same for Adam's step, beside a whole step.
    """

    name: str
    implementation: str
    prepare: Callable[[], Call]
    baseline: Callable[[], Call] | None = None


@dataclasses.dataclass
class Repeated:
    """A call whose donated arguments are the results of the call before.

    Attributes:
      function: The compiled function, which donates them.
      arguments: Those of the first call, which copies the donated ones.
      carried: From the index of each donated argument to that of the result that
        replaces it in the next call.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    carried: Mapping[int, int]

    @functools.cached_property
    def _current(self) -> list[Any]:
        return [
            jax.tree.map(jnp.copy, x) if i in self.carried else x
            for i, x in enumerate(self.arguments)
        ]

    def __call__(self) -> Any:
        """Starts it."""
        results = self.function(*self._current)
        for argument, result in self.carried.items():
            self._current[argument] = results[result]
        return results


def compiled(
    function: Callable[..., Any], arguments: Sequence[Any], carried: Mapping[int, int]
) -> Repeated:
    """A repeated call of the function compiled with these arguments donated."""
    # An argument may be there for its buffer alone.
    donating = jax.jit(function, donate_argnums=tuple(carried), keep_unused=True)
    return Repeated(donating, arguments, carried)


def copy(x: Array) -> Repeated:
    """The copy that bandwidth is measured with, to a buffer that is there."""
    return compiled(lambda x, _: (jnp.copy(x),), (x, x), {1: 0})


def operations(
    inputs: Inputs, block_size: int, implementation: str
) -> Iterator[Operation]:
    """Every operation on one size by an implementation; by 'optax' Adam's step."""
    adam = functools.partial(_adam, inputs)
    if implementation == "optax":
        yield Operation(ADAM, implementation, adam)
        return
    for name, function, arguments, carried in compression(
        inputs, block_size, implementation
    ):
        prepare = functools.partial(compiled, function, arguments, carried)
        yield Operation(name, implementation, prepare)
    steps = {STEP: _step}
    if inputs.value.size % block_size == 0:
        steps[DEFAULT] = _whole_step
    for name, make in steps.items():
        prepare = functools.partial(make, inputs, block_size, implementation)
        yield Operation(name, implementation, prepare, adam)


def compression(
    inputs: Inputs, block_size: int, implementation: Any
) -> list[tuple[str, Callable[..., Any], tuple[Array, ...], dict[int, int]]]:
    """The operations of compression.

    Args:
      inputs: The buffers of a worker.
      block_size: Values a scale.
      implementation: Name of what computes.

    Returns:
      Of each operation its name, its function, its arguments, and from those that are
      updated in place the result that replaces them.
    """
    size = inputs.value.size

    def compress(value: Array, error: Array, momentum: Array | None = None) -> Any:
        return pallas_kernels.compress(
            value,
            error,
            block_size=block_size,
            momentum=momentum,
            decay=None if momentum is None else DECAY,
            implementation=implementation,
        )

    def average(*arguments: Array) -> Any:
        return pallas_kernels.average_and_recompress(
            *arguments, implementation=implementation
        )

    def decompress(words: Array, scales: Array, into: Array) -> tuple[Array]:
        value = pallas_kernels.decompress(
            words, scales, size, into=into, implementation=implementation
        )
        return (value,)

    def apply(words: Array, scales: Array, nu: Array, old_mu: Array) -> Any:
        (mu,) = decompress(words, scales, old_mu)
        return mu, mu / (jnp.sqrt(nu) + EPS)

    packed = inputs.words, inputs.scales
    sent = inputs.value, inputs.error
    return [
        ("compress", compress, sent, {1: 2}),
        ("compress with momentum", compress, (*sent, inputs.momentum), {1: 2}),
        ("average and recompress", average, inputs[3:7], {2: 2}),
        ("decompress", decompress, (*packed, inputs.momentum), {2: 0}),
        ("decompress and apply", apply, (*packed, inputs.nu, inputs.momentum), {3: 0}),
    ]


def _step(inputs: Inputs, block_size: int, implementation: str) -> Call:
    """The three operations one after another, and the update of the parameters."""
    parts = {
        name: function
        for name, function, *_ in compression(inputs, block_size, implementation)
    }

    def step(*arguments: Array) -> tuple[Array, ...]:
        x = Inputs(*arguments)
        sent = parts["compress with momentum"](x.value, x.error, x.momentum)
        # As by a collective, what comes depends on what was sent.
        received_scales = x.received_scales + 0 * sent[1][0]
        served = parts["average and recompress"](
            x.received, received_scales, x.server_error, x.counts
        )
        scales = x.scales + 0 * served[1][0]
        mu, update = parts["decompress and apply"](x.words, scales, x.nu, x.momentum)
        return *sent, *served, mu, x.params - LEARNING_RATE * update

    # Worker error, momentum, server error and parameters.
    return compiled(step, inputs, {1: 2, 2: 6, 5: 5, 10: 7})


def _whole_step(inputs: Inputs, block_size: int, implementation: Any) -> Call:
    """The step of `onebit_adam` on one matrix, whose rows are blocks."""
    mesh = make_mesh(1)
    exchange = one_of_many(AXIS, block_size=block_size, implementation=implementation)
    tx = onebit_jax.onebit_adam(LEARNING_RATE, exchange, onebit_jax.freeze_at(1))
    params = jnp.copy(inputs.params).reshape(-1, block_size)
    step = traced(tx, mesh, params, compressed=True).lower().compile()
    return repeated(step, tx, mesh, params, inputs.value.reshape(params.shape))


def _adam(inputs: Inputs) -> Call:
    tx = optax.adam(LEARNING_RATE)

    def step(state: Any, params: Array, gradient: Array) -> tuple[Any, Any]:
        updates, state = tx.update(gradient, state)
        return state, optax.apply_updates(params, updates)

    arguments = tx.init(inputs.value), inputs.params, inputs.value
    return compiled(step, arguments, {0: 0, 1: 1})
