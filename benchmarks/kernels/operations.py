"""The operations that `benchmarks.kernels` measures, and their baselines."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import pallas_kernels
from benchmarks.kernels.default_step import default_step
from benchmarks.kernels.inputs import (
    ADAM,
    DEFAULT,
    WITH_PARAMETERS,
    Inputs,
    block_counts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from jax import Array

    Call = Callable[[], Any]

DECAY = 0.9
EPS = 1e-8
LEARNING_RATE = 1e-3


class Operation(NamedTuple):
    """An operation by one implementation, with its baseline.

    Attributes:
      name: Its name.
      buffers: 'fresh' or 'donated'.
      implementation: Name of its implementation.
      prepare: A function that makes its buffers and returns the call to be timed.
      baseline: A function that does the same for its baseline.
      wait: A function that waits for a call's result.
    """

    name: str
    buffers: str
    implementation: str
    prepare: Callable[[], Call]
    baseline: Callable[[], Call] | None = None
    wait: Callable[[Any], Any] = jax.block_until_ready


@dataclasses.dataclass
class Repeated:
    """A call whose donated arguments are the results of the call before.

    Attributes:
      function: The function.
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


def _jit(function: Callable[..., Any], carried: Iterable[int]) -> Callable[..., Any]:
    # An argument may be there for its buffer alone.
    return jax.jit(function, donate_argnums=tuple(carried), keep_unused=True)


def compiled(
    function: Callable[..., Any], arguments: Sequence[Any], carried: Mapping[int, int]
) -> Repeated:
    """A repeated call of the function compiled with these arguments donated."""
    return Repeated(_jit(function, carried), arguments, carried)


def copy(x: Array, donated: bool) -> Repeated:
    """The copy that bandwidth is measured with."""
    if donated:
        return compiled(lambda x, _: (jnp.copy(x),), (x, x), {1: 0})
    return compiled(lambda x: (jnp.copy(x),), (x,), {})


def operations(
    inputs: Inputs, block_size: int, implementations: Sequence[str]
) -> Iterator[Operation]:
    """Every operation on one size, with its baseline."""
    for buffers in ("fresh", "donated"):
        yield from _with_buffers(buffers, inputs, block_size, implementations)
    yield from _in_place(inputs, block_size, implementations)


def _with_buffers(
    buffers: str, inputs: Inputs, block_size: int, implementations: Sequence[str]
) -> Iterator[Operation]:
    """Adam's update, the operations and the steps with fresh or donated buffers."""
    donated = buffers == "donated"
    adam = functools.partial(_adam, inputs, donated)
    arguments = inputs.momentum, inputs.nu, inputs.value
    plain = functools.partial(
        compiled, _add_one, arguments, {0: 0, 1: 1} if donated else {}
    )
    yield Operation(ADAM, buffers, "optax", adam, plain)
    for implementation in implementations:
        for operation, function, arguments, carried in compression(
            inputs, block_size, implementation
        ):
            kept = carried if donated else {}
            plain = elementwise(operation, inputs.value.size, block_size)
            yield Operation(
                operation,
                buffers,
                implementation,
                functools.partial(compiled, function, arguments, kept),
                functools.partial(compiled, plain, arguments, kept),
            )
        for form in ("three jits", "one jit"):
            step = functools.partial(
                _step, inputs, block_size, implementation, donated, form
            )
            yield Operation(f"step, {form}", buffers, implementation, step, adam)


def _in_place(
    inputs: Inputs, block_size: int, implementations: Sequence[str]
) -> Iterator[Operation]:
    """Steps all in place: nothing hides behind the pages of an update's new buffer."""
    adam = functools.partial(_adam_with_parameters, inputs)
    steps = {WITH_PARAMETERS: _step_with_parameters}
    if inputs.value.size % block_size == 0:
        steps[DEFAULT] = default_step
    for implementation in implementations:
        for name, make in steps.items():
            step = functools.partial(make, inputs, block_size, implementation)
            yield Operation(name, "donated", implementation, step, adam)


def compression(
    inputs: Inputs, block_size: int, implementation: Any
) -> list[tuple[str, Callable[..., Any], tuple[Array, ...], dict[int, int]]]:
    """The operations of compression.

    Args:
      inputs: The buffers of a worker.
      block_size: Values a scale.
      implementation: Name of what computes.

    Returns:
      Of each operation its name, its function, its arguments, and from those that may
      be updated in place the result that replaces them.
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


def _step(
    inputs: Inputs, block_size: int, implementation: str, donated: bool, form: str
) -> Call:
    """The work of a step without the collectives between its operations."""
    one_jit = form == "one jit"
    parts = {
        name: function if one_jit else _jit(function, carried if donated else ())
        for name, function, _, carried in compression(
            inputs, block_size, implementation
        )
    }
    step = _in_order(parts, _depending if one_jit else lambda scales, _: scales)
    # Worker error, server error and momentum.
    carried = {1: 2, 5: 5, 2: 6} if donated else {}
    return (compiled if one_jit else Repeated)(step, inputs, carried)


def _step_with_parameters(inputs: Inputs, block_size: int, implementation: str) -> Call:
    """A step's work, the parameters updated too, all of it in place."""
    parts = {
        name: function
        for name, function, _, _ in compression(inputs, block_size, implementation)
    }
    in_order = _in_order(parts, _depending)

    def step(*arguments: Array) -> tuple[Array, ...]:
        *results, update = in_order(*arguments)
        return *results, Inputs(*arguments).params - LEARNING_RATE * update

    return compiled(step, inputs, {1: 2, 2: 6, 5: 5, 10: 7})


def _depending(scales: Array, sent_scales: Array) -> Array:
    # As by a collective, what comes depends on what was sent.
    return scales + 0 * sent_scales[0]


def _in_order(
    parts: Mapping[str, Callable[..., Any]], received: Callable[[Array, Array], Array]
) -> Callable[..., tuple[Array, ...]]:
    """The operations of a step, one after another.

    Args:
      parts: The operations by name.
      received: From scales that come by a collective and those that it was given, to
        the former.

    Returns:
      A function from the fields of `Inputs` to all results.
    """

    def step(*arguments: Array) -> tuple[Array, ...]:
        x = Inputs(*arguments)
        sent = parts["compress with momentum"](x.value, x.error, x.momentum)
        scales = received(x.received_scales, sent[1])
        served = parts["average and recompress"](
            x.received, scales, x.server_error, x.counts
        )
        scales = received(x.scales, served[1])
        applied = parts["decompress and apply"](x.words, scales, x.nu, x.momentum)
        return *sent, *served, *applied

    return step


def _adam_with_parameters(inputs: Inputs) -> Call:
    tx = optax.adam(LEARNING_RATE)

    def step(state: Any, params: Array, gradient: Array) -> tuple[Any, Any]:
        updates, state = tx.update(gradient, state)
        return state, optax.apply_updates(params, updates)

    arguments = tx.init(inputs.value), inputs.params, inputs.value
    return compiled(step, arguments, {0: 0, 1: 1})


def _adam(inputs: Inputs, donated: bool) -> Call:
    tx = optax.adam(LEARNING_RATE)

    def update(state: Any, gradient: Array) -> Any:
        # Donated buffers go to results of their shape in order: the state's first.
        return tx.update(gradient, state)[::-1]

    arguments = tx.init(inputs.value), inputs.value
    return compiled(update, arguments, {0: 0} if donated else {})


def elementwise(operation: str, size: int, block_size: int) -> Callable[..., Any]:
    """The baseline of an operation: as many bytes by elementwise arithmetic.

    Args:
      operation: Its name.
      size: Values of the buffer.
      block_size: Values a scale.

    Returns:
      A function from the operation's arguments to results of the same sizes.
    """
    blocks, _ = block_counts(size, block_size)
    shape = blocks, 32, block_size // 32

    def compress(*buffers: Array) -> tuple[Array, ...]:
        # The words and scales are written, and nothing of their size is read.
        words, scales = (jnp.full(s, buffers[0][0]) for s in (shape[::2], blocks))
        return words, scales, functools.reduce(operator.add, buffers)

    def average(
        received: Array, received_scales: Array, error: Array, counts: Array
    ) -> tuple[Array, ...]:
        words = functools.reduce(operator.add, list(received))
        scales = functools.reduce(operator.add, list(received_scales))
        return words, scales + counts.astype(jnp.float32), error + 1

    def decompress(words: Array, scales: Array, old: Array) -> tuple[Array, ...]:
        # No elementwise operation writes more than it reads, so that the result is
        # filled and the words, a thirtieth of the bytes, are not read.
        del old, words
        return (jnp.full(size, scales[0]),)

    def apply(words: Array, scales: Array, nu: Array, old: Array) -> tuple[Array, ...]:
        return nu + 1, *decompress(words, scales, old)

    return {
        "compress": compress,
        "compress with momentum": compress,
        "average and recompress": average,
        "decompress": decompress,
        "decompress and apply": apply,
    }[operation]


def _add_one(*buffers: Array) -> tuple[Array, ...]:
    return tuple(x + 1 for x in buffers)
