"""What each exchange puts on the wires of a cluster: bytes, by formula.

Of a payload of b bytes in a group of n GPUs a GPU sends what rings send, as
`onebit_jax.traffic` counts it: 2 b (n - 1) / n for an all-reduce, b (n - 1) / n for a
reduce-scatter, an all-to-all, and an all-gather of a result of b bytes. What of that
leaves a host depends on the form: a ring over all GPUs enters and leaves each host
once; of an all-to-all everything for other hosts leaves, from each GPU of the host.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

BLOCK = 1024
"""Values a scale."""
BUCKET = 2**27
"""Values a bucket: a collective carries no more."""
EXACT_BELOW = BLOCK // 32 + 2
"""Values under which a leaf goes exactly: no more than its block would have words."""

LEAST_LINES = 16
LINES_PERIOD = 32

Over = Literal["all", "host", "device"]


class Cluster(NamedTuple):
    """Hosts with GPUs.

    Attributes:
      hosts: How many.
      gpus: GPUs a host.
      rate: Bytes a second that all the network cards of a host send together.
      inside_rate: Bytes a second that a GPU sends to others of its host.
      latency: Seconds that a message between hosts takes beside its bytes.
    """

    hosts: int
    gpus: int
    rate: float
    inside_rate: float
    latency: float

    def size(self, over: Over) -> int:
        """The GPUs of a group over all, over the hosts, or over a host's GPUs."""
        return {
            "all": self.hosts * self.gpus,
            "host": self.hosts,
            "device": self.gpus,
        }[over]


class Phase(NamedTuple):
    """One collective, or several alike.

    Attributes:
      what: The collective and what it carries.
      over: Its groups: all GPUs, one GPU of every host, or the GPUs of a host.
      gpu_bytes: What a GPU sends.
      host_bytes: What a host sends to others.
      inside_bytes: What a GPU sends to others of its host.
      rounds: Messages between hosts that wait for one another.
    """

    what: str
    over: Over
    gpu_bytes: float
    host_bytes: float
    inside_bytes: float
    rounds: int

    def seconds(self, cluster: Cluster) -> float:
        r"""The time it takes.

        .. math:: \max\left(\frac{b_{host}}{rate}, \frac{b_{inside}}{rate_{inside}}
          \right) + rounds \cdot latency
        """
        wire = self.host_bytes / cluster.rate, self.inside_bytes / cluster.inside_rate
        return max(wire) + self.rounds * cluster.latency


def ring(
    what: str, size: float, cluster: Cluster, over: Over, *, passes: int, times: int = 1
) -> Phase:
    """An all-reduce (two passes), a reduce-scatter or an all-gather (one).

    Args:
      what: Its name.
      size: Payload of all times together, bytes.
      cluster: The cluster.
      over: Its groups.
      passes: How often the payload goes round.
      times: How many collectives share the payload.

    Returns:
      The phase. Its rounds are those of a tree, ⌈log2 n⌉ a pass: the fewest.
    """
    n = cluster.size(over)
    sent = passes * (n - 1) / n * size
    leaves = cluster.hosts > 1 and over != "device"
    host = sent * (cluster.gpus if over == "host" else 1) if leaves else 0.0
    inside = sent if cluster.gpus > 1 and over != "host" else 0.0
    rounds = times * passes * math.ceil(math.log2(n)) if leaves else 0
    return Phase(what, over, sent, host, inside, rounds)


def all_to_all(
    what: str, size: float, cluster: Cluster, over: Over, *, times: int = 1
) -> Phase:
    """An all-to-all: every GPU sends 1/n of its payload straight to each other one.

    Args:
      what: Its name.
      size: Payload of all times together, bytes.
      cluster: The cluster.
      over: Its groups.
      times: How many collectives share the payload.

    Returns:
      The phase. All messages go at once: one round.
    """
    n = cluster.size(over)
    same_host = {"all": cluster.gpus, "host": 1, "device": n}[over]
    host = cluster.gpus * (n - same_host) / n * size
    inside = (same_host - 1) / n * size
    rounds = times if host else 0
    return Phase(what, over, (n - 1) / n * size, host, inside, rounds)


Wire = Literal["signs", "counts"]


def digits_of_word(terms: int) -> int:
    """Digits of base terms + 1 in a word of 32 bits, of which `count_mean` is made."""
    digits = 1
    while (terms + 1) ** (digits + 1) <= 2**32:
        digits += 1
    return digits


def block_bytes(wire: Wire, workers: int) -> int:
    """Bytes of a block on the wire.

    Signs are 32 a word and a float32 scale; counts ⌊32 / log2(n + 1)⌋ a word and two
    words for the shared scale.
    """
    if wire == "signs":
        return 4 * (BLOCK // 32 + 1)
    return 4 * (-(-BLOCK // digits_of_word(workers)) + 2)


class Divided(NamedTuple):
    """How the leaves of a model go.

    Attributes:
      exact: Values of the leaves too small to be worth it.
      blocks: Blocks of all others; a leaf begins a block of its own.
      buckets: How many collectives share them.
    """

    exact: int
    blocks: int
    buckets: int


def divide(sizes: tuple[int, ...], parts: int) -> Divided:
    """What `sign_mean` and `count_mean` make of leaves.

    Args:
      sizes: Values of each leaf.
      parts: What the number of blocks is padded to a multiple of.

    Returns:
      Their division.
    """
    small = sum(size for size in sizes if size < EXACT_BELOW)
    blocks = sum(-(-size // BLOCK) for size in sizes if size >= EXACT_BELOW)
    blocks = -(-blocks // parts) * parts
    return Divided(small, blocks, -(-blocks * BLOCK // BUCKET))


def lines_of(shape: tuple[int, ...]) -> int:
    """The rows and columns of a leaf whose power 1-bit Adam exchanges."""
    if len(shape) < 2 or min(shape[-2:]) < LEAST_LINES:
        return 0
    return math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def powers(sizes: tuple[int, ...], lines: int, cluster: Cluster) -> Phase:
    """The loss and the power of gradients, by leaves and by rows and columns.

    Args:
      sizes: Values of each leaf.
      lines: Rows and columns: in the warm-up all, then a part in each step.
      cluster: The cluster.

    Returns:
      One phase.
    """
    size = 4 * (len(sizes) + lines + 1)
    return ring("all-reduce of powers", size, cluster, "all", passes=2)


def exact(sizes: tuple[int, ...], itemsize: int, cluster: Cluster) -> tuple[Phase, ...]:
    """The exact mean of the gradients: a ring all-reduce over all GPUs.

    Args:
      sizes: Values of each leaf.
      itemsize: Bytes a value: 4, or 2 for gradients in half precision.
      cluster: The cluster.

    Returns:
      One phase: 2 (n - 1) / n · itemsize · d bytes.
    """
    size, times = itemsize * sum(sizes), max(1, -(-sum(sizes) // BUCKET))
    return (ring("all-reduce", size, cluster, "all", passes=2, times=times),)


def flat(sizes: tuple[int, ...], wire: Wire, cluster: Cluster) -> tuple[Phase, ...]:
    """The compressed exchange with all GPUs as its workers.

    Args:
      sizes: Values of each leaf.
      wire: 'signs' for an all-to-all and an all-gather, 'counts' for an all-reduce.
      cluster: The cluster.

    Returns:
      Its phases.
    """
    return _compressed(sizes, wire, cluster, "all")


def hierarchical(
    sizes: tuple[int, ...], wire: Wire, cluster: Cluster
) -> tuple[Phase, ...]:
    """Exact inside the host, compressed between the hosts, each GPU its share.

    Args:
      sizes: Values of each leaf.
      wire: What goes between the hosts.
      cluster: The cluster.

    Returns:
      Its phases: a float32 reduce-scatter inside, the exchange of 1/gpus of the
      blocks between hosts, an all-gather of the packed result inside.
    """
    between = _compressed(sizes, wire, cluster, "host")
    _, blocks, inside = divide(sizes, cluster.hosts * cluster.gpus)
    packed = blocks * block_bytes(wire, cluster.hosts)
    values = 4 * BLOCK * blocks
    return (
        ring("reduce-scatter", values, cluster, "device", passes=1, times=inside),
        *between,
        ring("all-gather", packed, cluster, "device", passes=1, times=inside),
    )


def _compressed(
    sizes: tuple[int, ...], wire: Wire, cluster: Cluster, over: Over
) -> tuple[Phase, ...]:
    small, blocks, times = divide(sizes, cluster.hosts * cluster.gpus)
    size = blocks * block_bytes(wire, cluster.size(over))
    if over == "host":
        size /= cluster.gpus
    phases: list[Phase] = []
    if small:
        phases.append(
            ring("all-reduce of small leaves", 4 * small, cluster, "all", passes=2)
        )
    if wire == "counts":
        phases.append(ring("all-reduce", size, cluster, over, passes=2, times=times))
    else:
        phases += [
            all_to_all("all-to-all", size, cluster, over, times=times),
            ring("all-gather", size, cluster, over, passes=1, times=times),
        ]
    return tuple(phases)
