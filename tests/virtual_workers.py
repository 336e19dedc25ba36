"""Running a transformation on virtual workers."""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

import onebit_jax


def mesh_of(workers, axis_type=AxisType.Auto):
    devices = np.array(jax.devices()[:workers])
    return Mesh(devices, ("data",), axis_types=(axis_type,))


class Workers:
    """A transformation's state and its compiled update, on a mesh.

    Updates are given as a tree of arrays with a leading worker axis.
    """

    def __init__(self, tx, params, mesh, *, check_vma=True, **update_args):
        self.tx, self.mesh = tx, mesh
        self.state = onebit_jax.init(tx, params, mesh)
        specs = onebit_jax.state_specs(self.state)
        split = PartitionSpec(mesh.axis_names)

        def local_update(updates, state, params):
            own = jax.tree.map(lambda u: u[0], updates)
            return tx.update(own, state, params, **update_args)

        self.compiled = jax.jit(
            jax.shard_map(
                local_update,
                mesh=mesh,
                in_specs=(split, specs, PartitionSpec()),
                out_specs=(PartitionSpec(), specs),
                check_vma=check_vma,
            )
        )

    def update(self, updates, params=None):
        sharding = jax.NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        updates = jax.device_put(updates, sharding)
        result = self.compiled(updates, self.state, params)
        # With more virtual devices than threads, two steps in flight can wait for
        # each other for ever.
        updates, self.state = jax.block_until_ready(result)
        return updates
