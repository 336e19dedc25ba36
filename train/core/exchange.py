"""The exchange that a mesh and the flags ask for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import onebit_jax
from train.core.mesh import DEVICE, HOST

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import AbstractMesh, Mesh

    from train.core.mesh import Topology

EXCHANGES: dict[str, Callable[..., onebit_jax.Exchange]] = {
    "sign_mean": onebit_jax.sign_mean,
    "count_mean": onebit_jax.count_mean,
}
"""The exchanges of `--exchange`, by name: functions of mesh axes."""

VOTES: dict[str, Callable[..., onebit_jax.Exchange]] = {
    "vote_mean": onebit_jax.vote_mean,
    "random_vote_mean": onebit_jax.random_vote_mean,
}
"""The exchanges of optimizers whose workers vote, likewise."""

if TYPE_CHECKING:
    ExchangeName = str
else:
    ExchangeName = Literal[*EXCHANGES]


def make_exchange(
    mesh: Mesh | AbstractMesh, name: str = "sign_mean", topology: Topology = "auto"
) -> onebit_jax.Exchange:
    """The exchange, over all axes of the mesh, of an optimizer that compresses.

    Args:
      mesh: The workers, from `train.core.mesh.make_mesh`.
      name: One of `EXCHANGES` or `VOTES`.
      topology: Who compresses: 'flat', each device; else, on a mesh of hosts, each
        host for its devices together.

    Example:
      >>> from train.core.exchange import make_exchange
      >>> from train.core.mesh import make_mesh
      >>> make_exchange(make_mesh(1)).axes
      ('data',)
    """
    return _over(mesh, (EXCHANGES | VOTES)[name], topology)


def make_warmup_exchange(
    mesh: Mesh | AbstractMesh,
    bits: Literal[2, 4, 8] | None,
    topology: Topology = "auto",
) -> onebit_jax.Exchange | None:
    """The exchange of gradients of a warm-up that is compressed to some bits a value.

    Without bits it is None, for the exact mean; mesh and topology are those of
    `make_exchange`.
    """
    if bits is None:
        return None
    by_bits = functools.partial(onebit_jax.quantized_mean, bits=bits)
    return _over(mesh, by_bits, topology)


def _over(
    mesh: Mesh | AbstractMesh,
    exchange: Callable[..., onebit_jax.Exchange],
    topology: Topology,
) -> onebit_jax.Exchange:
    if HOST in mesh.axis_names and topology != "flat":
        return onebit_jax.hierarchical(exchange(HOST), within=DEVICE)
    return exchange(mesh.axis_names)
