"""The exchange that a mesh and the flags ask for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, Literal

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

WarmupBits = Literal[2, 4, 8, 32]
"""Bits a value of a warm-up's exchange."""

WARMUP_BITS: Final = 8
"""Those of 1-bit Adam's by default."""

if TYPE_CHECKING:
    ExchangeName = str
else:
    ExchangeName = Literal[*EXCHANGES]


def make_exchange(
    mesh: Mesh | AbstractMesh, name: str = "sign_mean", topology: Topology = "auto"
) -> onebit_jax.Exchange:
    """The exchange of `EXCHANGES` or `VOTES` by its name, over all axes of the mesh.

    On a mesh of hosts each host compresses for its devices together, unless the
    topology is 'flat'.

    Example:
      >>> from train.core.exchange import make_exchange
      >>> from train.core.mesh import make_mesh
      >>> make_exchange(make_mesh(1)).axes
      ('data',)
    """
    return _over(mesh, (EXCHANGES | VOTES)[name], topology)


def make_warmup_exchange(
    mesh: Mesh | AbstractMesh,
    bits: WarmupBits,
    topology: Topology = "auto",
) -> onebit_jax.Exchange | None:
    """The exchange of a warm-up by some bits a value; of 32 bits None, the exact."""
    if bits == 32:
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
