"""The exchange that a mesh and the flags ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import onebit_jax
from train.core.mesh import DEVICE, HOST

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from train.core.mesh import Topology

Wire = Literal["signs", "counts"]


def make_exchange(
    mesh: Mesh | AbstractMesh, wire: Wire = "signs", topology: Topology = "auto"
) -> onebit_jax.Exchange:
    """The exchange of 1-bit Adam's compressed stage.

    Args:
      mesh: The workers, from `train.core.mesh.make_mesh`.
      wire: What is sent: signs there and back, or counts of them in one all-reduce.
      topology: Who compresses: 'flat', each device; else, on a mesh of hosts, each
        host for its devices together.

    Returns:
      An exchange over all axes of the mesh.

    Example:
      >>> from train.core.exchange import make_exchange
      >>> from train.core.mesh import make_mesh
      >>> make_exchange(make_mesh(1)).axes
      ('data',)
    """
    exchange = {"signs": onebit_jax.sign_mean, "counts": onebit_jax.count_mean}[wire]
    if HOST in mesh.axis_names and topology != "flat":
        return onebit_jax.hierarchical(exchange(HOST), within=DEVICE)
    return exchange(mesh.axis_names)
