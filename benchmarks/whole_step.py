"""An optimizer's whole step on one device, parameters and state in place.

The device is the one worker of a mesh. With an exchange of `one_of_many` it encodes as
one worker of several does, and averages all values, a worker of n a share of 1 / n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

import onebit_jax
from train.core.mesh import AXIS

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh


def traced(tx: Any, mesh: Mesh, shapes: Any, *, compressed: bool) -> Any:
    """The step, traced.

    Args:
      tx: The optimizer.
      mesh: The one device.
      shapes: Shapes of the parameters.
      compressed: Whether it has a compressed stage, which is the one that is taken.

    Returns:
      From parameters, state and gradients to new parameters and state; the old ones are
      donated. Gradients have an axis of workers before their own.
    """

    def placed(tree: Any, *axes: str, before: tuple[int, ...] = ()) -> Any:
        sharding = jax.NamedSharding(mesh, PartitionSpec(*axes))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (*before, *x.shape), x.dtype, sharding=sharding
            ),
            tree,
        )

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda g: g[0], gradients)
        stage = {"stage": "compressed"} if compressed else {}
        updates, state = tx.update(own, state, params, **stage)
        return optax.apply_updates(params, updates), state

    params = placed(shapes)
    state = onebit_jax.abstract_state(tx, params, mesh)
    if compressed:
        kept = PartitionSpec(), onebit_jax.state_specs(state)
        specs = {"in_specs": (*kept, PartitionSpec(AXIS)), "out_specs": kept}
        step = jax.shard_map(step, mesh=mesh, **specs)
    gradients = placed(shapes, AXIS, before=(1,))
    return jax.jit(step, donate_argnums=(0, 1)).trace(params, state, gradients)


def repeated(
    step: Any, tx: Any, mesh: Mesh, params: Any, gradients: Any
) -> Callable[[], Any]:
    """A call of the compiled step, from parameters and state to those of the next.

    A variance that is to be frozen is that of the gradients, as after a warm-up.
    """
    everywhere = jax.NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(params, everywhere, donate=True)
    state = onebit_jax.init(tx, params, mesh)
    if "frozen_at" in onebit_jax.metrics(state):
        learnt = jax.tree.map(jnp.square, gradients), jnp.int32(1)
        nu, frozen_at = jax.device_put(learnt, everywhere)
        state = optax.tree.set(state, nu=nu, frozen_at=frozen_at)
    carried = [params, state]
    del params, state
    split = jax.NamedSharding(mesh, PartitionSpec(AXIS))
    gradients = jax.device_put(jax.tree.map(lambda g: g[None], gradients), split)

    def call() -> Any:
        carried[:] = step(*carried, gradients)
        return carried

    return call
