"""Batches of examples: each process's part of them, in order and on its devices."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grain
    from grain.sources import RandomAccessDataSource

Batch = TypeVar("Batch")


def element(elements: grain.MapDataset[Batch], index: int) -> Batch:
    """An element of a data set from which nothing was filtered out."""
    value = elements[index]
    assert value is not None, "filtered out"
    return value


def endless(
    source: Sequence[Batch] | RandomAccessDataSource[Batch], seed: int
) -> grain.MapDataset[Any]:
    """An endless sequence of examples, each epoch shuffled anew.

    The seed decides the order, and what a `random_map` behind it draws: element i is a
    function of the seed and i.
    """
    import grain  # losses and evaluations, which need this module, do without

    return grain.MapDataset.source(source).seed(seed).shuffle().repeat()


@dataclass(frozen=True)
class _Rows(Generic[Batch]):
    """Rows `first` to `last` of every batch, as one sequence of examples."""

    examples: grain.MapDataset[Batch]
    batch: int
    first: int
    last: int

    def __len__(self) -> int:
        return sys.maxsize // self.batch

    def __getitem__(self, index: int) -> Batch:
        step, row = divmod(index, self.last - self.first)
        return element(self.examples, step * self.batch + self.first + row)


def batches(
    examples: grain.MapDataset[Batch],
    batch: int,
    *,
    process: int | None = None,
    num_processes: int | None = None,
) -> grain.MapDataset[Batch]:
    """One process's part of each whole batch of an endless sequence of examples.

    Element t is that of step t. The parts are end to end the whole batch, however many
    processes there are; by default they are those that there are.
    """
    import grain

    if process is None or num_processes is None:
        process, num_processes = jax.process_index(), jax.process_count()
    part = batch // num_processes
    rows = _Rows(examples, batch, process * part, (process + 1) * part)
    return grain.MapDataset.source(rows).batch(part)


def stream(batches: grain.MapDataset[Batch]) -> grain.DatasetIterator[Batch]:
    """Iterates over batches and prepares the next few beside the training.

    A checkpoint keeps its `get_state()` for `set_state()`.
    """
    import grain

    # One thread: examples are made in Python, which runs one at a time.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(batches.to_iter_dataset(options))


def place(batch: Batch, mesh: Mesh) -> Batch:
    """A process's part of a batch, on its devices as a part of the whole batch."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), batch
    )
