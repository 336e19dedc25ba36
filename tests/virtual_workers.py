"""Running a transformation on virtual workers."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax


def mesh_of(workers, axis_type=AxisType.Auto):
    return mesh_over({"data": workers}, axis_type)


def mesh_over(sizes, axis_type=AxisType.Auto):
    """A mesh of named axes of these sizes."""
    shape = tuple(sizes.values())
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=(axis_type,) * len(shape))


class Workers:
    """A transformation's state and its compiled update, on a mesh.

    Updates are given as a tree of arrays with a leading worker axis.

    Args:
      tx: the transformation.
      params: parameters, or their shapes and dtypes.
      mesh: the mesh.
      axes: the axes of the workers; all of the mesh's if left out.
      specs: a tree of how parameters are sharded over other axes.
      check_vma: as of `jax.shard_map`.
      **update_args: to be passed to each update.
    """

    def __init__(
        self, tx, params, mesh, *, axes=None, specs=None, check_vma=True, **update_args
    ):
        self.tx, self.mesh = tx, mesh
        self.state = onebit_jax.init(tx, params, mesh)
        own = onebit_jax.state_specs(self.state)
        self.split = P(axes or mesh.axis_names)
        specs = jax.tree.map(lambda _: P(), params) if specs is None else specs
        self.placed = jax.tree.map(
            lambda _, spec: NamedSharding(mesh, P(*self.split, *spec)), params, specs
        )
        self.whole = NamedSharding(mesh, P())

        def local_update(updates, state, params):
            one = jax.tree.map(lambda u: u[0], updates)
            return tx.update(one, state, params, **update_args)

        self.compiled = jax.jit(
            jax.shard_map(
                local_update,
                mesh=mesh,
                in_specs=(self.split, own, P()),
                out_specs=(P(), own),
                axis_names=set(axes or mesh.axis_names),
                check_vma=check_vma,
            )
        )

    def update(self, updates, params=None):
        # Parameters of no mesh would be another program than those after a step.
        params = jax.device_put(params, self.whole)
        updates = jax.device_put(updates, self.placed)
        result = self.compiled(updates, self.state, params)
        # With more virtual devices than threads, two steps in flight can wait for
        # each other for ever.
        updates, self.state = jax.block_until_ready(result)
        return updates

    def traffic(self, updates, params=None):
        """The traffic of an update, for updates or their shapes.

        Its program serves all updates after it.
        """
        updates = jax.tree.map(
            lambda x, own: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own),
            updates,
            self.placed,
        )
        params = jax.device_put(params, self.whole)
        self.compiled = self.compiled.lower(updates, self.state, params).compile()
        return onebit_jax.traffic(self.compiled, self.mesh)
