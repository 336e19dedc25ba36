"""The whole compressed step of `onebit_adam`, of one worker, as users run it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import onebit_jax
import pallas_kernels
from benchmarks.kernels.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

AXIS = "data"
LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class PreparedMessages(onebit_jax.Exchange):
    """One worker's work in `sign_mean`; what others send is in its state."""

    received: Inputs
    block_size: int
    implementation: Any
    axes: tuple[str, ...] = (AXIS,)

    def init(self, params: Any) -> Any:
        """The messages and both errors."""
        del params
        state = self.received._replace(
            **dict.fromkeys(("value", "momentum", "nu", "params"), None)
        )
        copies = jax.tree.map(lambda x: jnp.copy(x)[None], state)
        return onebit_jax.WorkerLocal(copies, self.axes, "drop")

    def update(self, updates: Any, state: Any, params: Any = None) -> Any:
        """Momenta alone are exchanged."""
        raise NotImplementedError

    def wire_cost(
        self, params: Any, axis_sizes: Mapping[str, int]
    ) -> tuple[onebit_jax.Transfer, ...]:
        """Nothing is sent."""
        del params, axis_sizes
        return ()

    def exchange_momentum(
        self, gradients: Any, momentum: Any, decay: Any, state: Any
    ) -> tuple[Array, Any]:
        """The three operations, one after another."""
        x = jax.tree.map(lambda y: y[0], state.value)
        how = {"implementation": self.implementation}
        words, scales, error = pallas_kernels.compress(
            gradients.reshape(-1),
            x.error,
            block_size=self.block_size,
            momentum=momentum.reshape(-1),
            decay=decay,
            **how,
        )
        # As by a collective, what comes depends on what was sent.
        _, served, server_error = pallas_kernels.average_and_recompress(
            x.received,
            x.received_scales + 0 * scales[0],
            x.server_error,
            x.counts,
            **how,
        )
        agreed = pallas_kernels.decompress(
            x.words,
            x.scales + 0 * served[0] + 0 * words[0, 0].astype(jnp.float32),
            gradients.size,
            into=momentum.reshape(-1),
            **how,
        )
        x = x._replace(error=error, server_error=server_error)
        value = jax.tree.map(lambda y: y[None], x)
        return agreed.reshape(gradients.shape), dataclasses.replace(state, value=value)


def default_step(
    inputs: Inputs, block_size: int, implementation: str
) -> Callable[[], Any]:
    """The call that is timed: state and parameters are updated in place.

    The parameters are one matrix, whose rows are blocks.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), AXIS)
    exchange = PreparedMessages(inputs, block_size, implementation)
    tx = onebit_jax.onebit_adam(LEARNING_RATE, exchange, onebit_jax.freeze_at(1))
    params = jnp.copy(inputs.params).reshape(-1, block_size)
    state = onebit_jax.init(tx, params, mesh)
    adam = state[0]._replace(
        count=jnp.int32(1),
        frozen_at=jnp.int32(1),
        nu=jnp.copy(inputs.nu).reshape(params.shape),
        mu=jnp.copy(inputs.momentum).reshape(params.shape),
    )
    gradient = inputs.value.reshape(params.shape)
    specs, everywhere = onebit_jax.state_specs(state), PartitionSpec()

    def step(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        update, state = tx.update(gradient, state, params, stage="compressed")
        return optax.apply_updates(params, update), state

    compiled = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(everywhere, specs, everywhere),
            out_specs=(everywhere, specs),
            check_vma=False,  # What others send is agreed, and comes from a worker.
        ),
        donate_argnums=(0, 1),
    )
    carried = params, (adam, *state[1:])

    def call() -> Any:
        nonlocal carried
        carried = compiled(*carried, gradient)
        return carried

    return call
