"""Collectives, and the bytes that each worker sends for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Transfer(NamedTuple):
    """One collective of a step, or several that share a payload.

    Attributes:
      op: its name in HLO.
      bytes: the payload: the size of one worker's operands, or of an all-gather the
        size of its result.
      axes: the mesh axes that it works over.
      times: how many collectives share the payload.
    """

    op: str
    bytes: int
    axes: tuple[str, ...]
    times: int = 1


def ring_bytes(op: str, payload: int, n: int) -> int:
    r"""Bytes that each of n workers sends, by the algorithms that send least (rings).

    .. math::
      2 b \tfrac{n - 1}{n} \text{ for an all-reduce}, \quad
      b \tfrac{n - 1}{n} \text{ for a reduce-scatter, an all-to-all, an all-gather}

    and b for a broadcast or a permutation, rounded up to whole bytes.

    Args:
      op: name of the collective in HLO.
      payload: b, as in `Transfer`.
      n: workers of a group.

    Returns:
      A number of bytes.

    Example:
      >>> ring_bytes('all-reduce', 1000, 4)
      1500

    References:
      Patarasuk and Yuan, `Bandwidth optimal all-reduce algorithms for clusters of
      workstations <https://doi.org/10.1016/j.jpdc.2008.09.002>`_, 2009
    """
    if op in ("collective-broadcast", "collective-permute"):
        return payload if n > 1 else 0
    rounds = 2 if op == "all-reduce" else 1
    return -(-rounds * (n - 1) * payload // n)


def sent_bytes(transfers: Iterable[Transfer], axis_sizes: Mapping[str, int]) -> int:
    """Bytes that each device sends for some collectives, by rings.

    A worker of several devices, sharded inside, sends as much from each of them.

    Args:
      transfers: the collectives, such as those of a stage in `stage_costs`.
      axis_sizes: sizes of the mesh axes, such as `mesh.shape`.

    Returns:
      A number of bytes.

    Raises:
      ValueError: if the sizes lack an axis of a collective.
      TypeError: if they are the costs of all stages.

    Example:
      >>> sent_bytes([Transfer('all-gather', 1000, ('data',))], {'data': 4})
      750
    """
    if isinstance(transfers, Mapping):
        raise TypeError(
            "sent_bytes takes the transfers of one stage: give those of one of "
            f"{sorted(transfers)}, such as costs[{min(transfers)!r}]."
        )
    return sum(
        ring_bytes(t.op, t.bytes, workers_of(t.axes, axis_sizes)) for t in transfers
    )


def workers_of(axes: tuple[str, ...], axis_sizes: Mapping[str, int]) -> int:
    """The number of workers along some axes of a mesh.

    Args:
      axes: the worker axes.
      axis_sizes: sizes of the mesh axes, such as `mesh.shape`.

    Returns:
      The product of the axes' sizes.

    Raises:
      ValueError: if the sizes lack an axis.
    """
    missing = [axis for axis in axes if axis not in axis_sizes]
    if missing:
        raise ValueError(
            f"axis_sizes has no axis {missing[0]!r} of the workers: give the sizes "
            f"of {axes}, such as mesh.shape, got {axis_sizes!r}."
        )
    return math.prod(axis_sizes[axis] for axis in axes)
