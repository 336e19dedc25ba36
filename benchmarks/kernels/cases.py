"""The operations that `benchmarks.kernels` measures, and their baselines."""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import pallas_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from jax import Array

    Call = Callable[[], Any]

WORKERS = 8
DECAY = 0.9
EPS = 1e-8
LEARNING_RATE = 1e-3
ADAM = "Adam's update"
WITH_PARAMETERS = "step and parameters, one jit"


class Case(NamedTuple):
    """One row of the table.

    Attributes:
      operation: what is done.
      buffers: 'fresh' or 'donated'.
      implementation: what does it.
      prepare: makes its buffers, and returns what does it once.
      baseline: the same of what it is measured beside.
      wait: returns when a result is there.
    """

    operation: str
    buffers: str
    implementation: str
    prepare: Callable[[], Call]
    baseline: Callable[[], Call] | None = None
    wait: Callable[[Any], Any] = jax.block_until_ready


class Inputs(NamedTuple):
    """What a worker holds in a compressed step.

    Attributes:
      value: its gradient, float32.
      error: what it owes.
      momentum: of the step before.
      received: the signs of all workers on the share that it serves.
      received_scales: their scales.
      server_error: what the share owes.
      counts: values in each block of the share.
      words: the agreed signs.
      scales: their scales.
      nu: the frozen variance.
      params: the parameters.
    """

    value: Array
    error: Array
    momentum: Array
    received: Array
    received_scales: Array
    server_error: Array
    counts: Array
    words: Array
    scales: Array
    nu: Array
    params: Array


def block_counts(size: int, block_size: int) -> tuple[int, int]:
    """How many blocks a buffer has, and how many of them a worker serves."""
    blocks = -(-size // block_size)
    return blocks, -(-blocks // WORKERS)


def make_inputs(size: int, block_size: int) -> Inputs:
    """Random buffers of a size."""
    keys = iter(jax.random.split(jax.random.key(0), 7))
    blocks, share = block_counts(size, block_size)
    width = block_size // 32
    value = jax.random.normal(next(keys), (size,))
    first = jnp.arange(share, dtype=jnp.int32) * block_size
    return Inputs(
        value=value,
        error=0.5 * value[::-1],
        momentum=0.5 * jnp.roll(value, size // 2),
        received=jax.random.bits(next(keys), (WORKERS, share, width), jnp.uint32),
        received_scales=jax.random.uniform(next(keys), (WORKERS, share)),
        server_error=jax.random.normal(next(keys), (share * block_size,)),
        counts=jnp.clip(size - first, 0, block_size),
        words=jax.random.bits(next(keys), (blocks, width), jnp.uint32),
        scales=jax.random.uniform(next(keys), (blocks,)),
        nu=value**2,
        params=2 * value,
    )


def bytes_moved(size: int, block_size: int) -> dict[str, int]:
    """The bytes that each operation must read and write, from the module's table."""
    blocks, share = block_counts(size, block_size)
    packed = blocks * (block_size // 32 + 1)
    width = block_size // 32
    received = share * (WORKERS * (width + 1) + block_size + 1)
    numbers = {
        "compress": 3 * size + packed,
        "compress with momentum": 4 * size + packed,
        "average and recompress": received + share * (block_size + width + 1),
        "decompress": packed + size,
        "decompress and apply": packed + 3 * size,
        ADAM: 6 * size,
    }
    step = ("compress with momentum", "average and recompress", "decompress and apply")
    total = sum(numbers[part] for part in step)
    numbers |= dict.fromkeys(("step", "step, three jits", "step, one jit"), total)
    numbers[WITH_PARAMETERS] = total + size
    moved = {operation: 4 * count for operation, count in numbers.items()}
    packed_bytes = -(-size // 8)
    return moved | {
        "packbits(x >= 0)": 4 * size + packed_bytes,
        "unpackbits": packed_bytes + size,
    }


def repeated(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    carried: Mapping[int, int],
) -> Call:
    """A call whose donated arguments are the results of the call before.

    Args:
      function: what is called.
      arguments: of the first call; the donated ones are copied.
      carried: from the donated arguments to the results that replace them.

    Returns:
      The call.
    """
    held = [
        jax.tree.map(jnp.copy, x) if i in carried else x
        for i, x in enumerate(arguments)
    ]

    def call() -> Any:
        results = function(*held)
        for argument, result in carried.items():
            held[argument] = results[result]
        return results

    return call


def _jit(function: Callable[..., Any], carried: Iterable[int]) -> Callable[..., Any]:
    # An argument may be there for its buffer alone.
    return jax.jit(function, donate_argnums=tuple(carried), keep_unused=True)


def compiled(
    function: Callable[..., Any], arguments: Sequence[Any], carried: Mapping[int, int]
) -> Call:
    """`repeated`, of the function compiled with these arguments donated."""
    return repeated(_jit(function, carried), arguments, carried)


def copy(x: Array, donated: bool) -> Call:
    """The copy that bandwidth is measured with."""
    if donated:
        return compiled(lambda x, _: (jnp.copy(x),), (x, x), {1: 0})
    return compiled(lambda x: (jnp.copy(x),), (x,), {})


def cases(
    inputs: Inputs, block_size: int, implementations: Sequence[str]
) -> Iterator[Case]:
    """Every operation on one size, with its baseline."""
    for buffers in ("fresh", "donated"):
        donated = buffers == "donated"
        adam = functools.partial(_adam, inputs, donated)
        arguments = inputs.momentum, inputs.nu, inputs.value
        carried = {0: 0, 1: 1} if donated else {}
        plain = functools.partial(compiled, _add_one, arguments, carried)
        yield Case(ADAM, buffers, "optax", adam, plain)
        for implementation in implementations:
            for operation, function, arguments, carried in _operations(
                inputs, block_size, implementation
            ):
                kept = carried if donated else {}
                plain = _elementwise(operation, inputs.value.size, block_size)
                yield Case(
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
                yield Case(f"step, {form}", buffers, implementation, step, adam)
    # All in place: nothing hides behind the pages of an update's new buffer.
    for implementation in implementations:
        yield Case(
            WITH_PARAMETERS,
            "donated",
            implementation,
            functools.partial(
                _step_with_parameters, inputs, block_size, implementation
            ),
            functools.partial(_adam_with_parameters, inputs),
        )


def _operations(
    inputs: Inputs, block_size: int, implementation: Any
) -> list[tuple[str, Callable[..., Any], tuple[Array, ...], dict[int, int]]]:
    """Name, function, arguments, and which of them may be updated in place."""
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
    parts = {
        operation: _jit(function, carried if donated else ())
        if form == "three jits"
        else function
        for operation, function, _, carried in _operations(
            inputs, block_size, implementation
        )
    }

    def after(scales: Array, sent_scales: Array) -> Array:
        # As by a collective, what comes depends on what was sent.
        return scales + 0 * sent_scales[0] if form == "one jit" else scales

    def step(*arguments: Array) -> tuple[Array, ...]:
        held = Inputs(*arguments)
        sent = parts["compress with momentum"](held.value, held.error, held.momentum)
        scales = after(held.received_scales, sent[1])
        served = parts["average and recompress"](held.received, scales, *held[5:7])
        scales = after(held.scales, served[1])
        applied = parts["decompress and apply"](
            held.words, scales, held.nu, held.momentum
        )
        return *sent, *served, *applied

    # Worker error, server error and momentum.
    carried = {1: 2, 5: 5, 2: 6} if donated else {}
    if form == "three jits":
        return repeated(step, inputs, carried)
    return compiled(step, inputs, carried)


def _step_with_parameters(inputs: Inputs, block_size: int, implementation: str) -> Call:
    """A step's work, the parameters updated too, all of it in place."""
    parts = {
        name: function
        for name, function, _, _ in _operations(inputs, block_size, implementation)
    }

    def step(*arguments: Array) -> tuple[Array, ...]:
        held = Inputs(*arguments)
        sent = parts["compress with momentum"](held.value, held.error, held.momentum)
        scales = held.received_scales + 0 * sent[1][0]
        served = parts["average and recompress"](held.received, scales, *held[5:7])
        scales = held.scales + 0 * served[1][0]
        mu, update = parts["decompress and apply"](
            held.words, scales, held.nu, held.momentum
        )
        return *sent, *served, mu, held.params - LEARNING_RATE * update

    return compiled(step, inputs, {1: 2, 2: 6, 5: 5, 10: 7})


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


def _elementwise(operation: str, size: int, block_size: int) -> Callable[..., Any]:
    """Takes the arguments of an operation to results of the same sizes."""
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
        return words, scales + counts, error + 1

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
