"""Today's formulas of what exchanges send, until every exchange has its `wire_cost`.

To be deleted then; `train.plan.transfers` alone imports it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from train.core.mesh import DEVICE, HOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import jax

    from train.plan.config import ExchangeName

    Leaves = Sequence[jax.ShapeDtypeStruct]

BLOCK = 1024
"""Values a scale."""
BUCKET = 2**27
"""Values that a collective carries at most."""
EXACT_BELOW = BLOCK // 32 + 2
"""Values under which a leaf is exchanged exactly."""
LEAST_LINES, LINES_PERIOD = 16, 32
"""The shortest side of a matrix whose rows and columns have a power of their own, and
the steps in which each of them is exchanged once after the freeze."""


class Transfer(NamedTuple):
    """A collective, or several alike.

    Attributes:
      op: Its name in HLO: all-reduce, all-gather, all-to-all or reduce-scatter.
      bytes: Payload of all times together: a worker's operands, of an all-gather the
        result.
      axes: The mesh axes it works over.
      times: Collectives that share the payload.
    """

    op: str
    bytes: float
    axes: tuple[str, ...]
    times: int = 1


def exact(leaves: Leaves, axes: tuple[str, ...]) -> tuple[Transfer, ...]:
    """The exact mean, in the leaves' own dtype."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    times = max(1, -(-sum(leaf.size for leaf in leaves) // BUCKET))
    return (Transfer("all-reduce", size, axes, times),)


def compressed(
    exchange: ExchangeName,
    leaves: Leaves,
    axis_sizes: Mapping[str, int],
    *,
    hierarchical: bool,
) -> tuple[Transfer, ...]:
    """Blocks of signs or counts, flat or between hosts, and small leaves exactly."""
    blocks, times = _divide(leaves, math.prod(axis_sizes.values()))
    small = sum(leaf.size for leaf in leaves if leaf.size < EXACT_BELOW)
    axes = (HOST,) if hierarchical else tuple(axis_sizes)
    workers = math.prod(axis_sizes[axis] for axis in axes)
    packed = blocks * _block_bytes(exchange, workers)
    size = packed / axis_sizes[DEVICE] if hierarchical else packed
    transfers = []
    if hierarchical:
        values = 4 * BLOCK * blocks
        transfers.append(Transfer("reduce-scatter", values, (DEVICE,), times))
    if small:
        transfers.append(Transfer("all-reduce", 4 * small, tuple(axis_sizes)))
    if exchange == "count_mean":
        transfers.append(Transfer("all-reduce", size, axes, times))
    else:
        ops = "all-to-all", "all-gather"
        transfers += [Transfer(op, size, axes, times) for op in ops]
    if hierarchical:
        transfers.append(Transfer("all-gather", packed, (DEVICE,), times))
    return tuple(transfers)


def power(leaves: Leaves, axes: tuple[str, ...], *, share: float) -> Transfer:
    """The loss and the power of the gradients: of leaves, and of rows and columns."""
    lines = sum(map(line_count, leaves))
    values = len(leaves) + math.ceil(share * lines) + 1
    return Transfer("all-reduce", 4 * values, axes)


def line_count(leaf: jax.ShapeDtypeStruct) -> int:
    """The rows and columns of a leaf whose power is exchanged."""
    shape = leaf.shape
    if len(shape) < 2 or min(shape[-2:]) < LEAST_LINES:
        return 0
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def _divide(leaves: Leaves, workers: int) -> tuple[int, int]:
    """Blocks, as many of each worker, and the collectives that share them."""
    large = [leaf.size for leaf in leaves if leaf.size >= EXACT_BELOW]
    blocks = sum(-(-size // BLOCK) for size in large)
    blocks = -(-blocks // workers) * workers
    return blocks, -(-blocks * BLOCK // BUCKET)


def _block_bytes(exchange: ExchangeName, workers: int) -> int:
    """A block: 32 signs a word and a scale, or digits a word and two words of scale."""
    if exchange == "sign_mean":
        return 4 * (BLOCK // 32 + 1)
    digits = 1
    while (workers + 1) ** (digits + 1) <= 2**32:
        digits += 1
    return 4 * (-(-BLOCK // digits) + 2)
