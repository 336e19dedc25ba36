"""Values that must be the same in all processes, compared before training."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from onebit_jax.workers.worker_local import is_worker_local


def processes_of(mesh: Mesh) -> int:
    """The number of processes whose devices a mesh has."""
    return len({device.process_index for device in mesh.devices.flat})


def check_same(trees: Mapping[str, Any], processes: int) -> None:
    """Refuses what processes hold differently.

    Each process takes checksums of its own copy, of which one digest is compared; all
    of them must call it. Of an array that is divided among processes the parts are
    compared that several have.

    Args:
      trees: by its name, what is to be the same; nodes of worker-local arrays in it
        are not looked at.
      processes: how many train together; nothing is compared unless they are all.

    Raises:
      ValueError: naming a leaf that another process holds with another type or with
        other values.
    """
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(dict(trees)))
    if is_traced or not 1 < processes == jax.process_count():
        return
    own = json.dumps(list(_told(trees))).encode()
    digest = np.frombuffer(hashlib.sha256(own).digest(), np.uint32)
    digests = multihost_utils.process_allgather(digest)
    if (digests == digests[0]).all():
        return
    told = [json.loads(each) for each in _gathered(own)]
    types = [{name: kind for name, kind, _, _ in parts} for parts in told]
    first: dict[tuple[str, str], tuple[int, int]] = {}
    for process, (here, parts) in enumerate(zip(types, told, strict=True)):
        for name in (*types[0], *here):
            if here.get(name) != types[0].get(name):
                raise ValueError(
                    f"{name} is {here.get(name, 'missing')} in process {process} and "
                    f"{types[0].get(name, 'missing')} in process 0: give all processes "
                    "the same model and dtypes."
                )
        for name, _, place, checksum in parts:
            known, other = first.setdefault((name, place), (checksum, process))
            if checksum != known:
                raise ValueError(
                    f"{name} has other values in process {process} than in process "
                    f"{other}: make it from the same seed and settings, or restore it "
                    "from the same checkpoint, in all processes."
                )


def _told(trees: Mapping[str, Any]) -> Iterator[tuple[str, str, str, int]]:
    """Of each part of a leaf the leaf's name and type, its place, and a checksum."""
    for name, tree in trees.items():
        for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_worker_local):
            if is_worker_local(leaf):
                continue
            called = name + jax.tree_util.keystr(path)
            for place, part in _parts(leaf).items():
                checksum = zlib.crc32(np.asarray(part).tobytes())
                yield called, str(jax.typeof(leaf)), place, checksum


def _parts(leaf: Any) -> dict[str, Any]:
    """The parts of a leaf that this process has, each once."""
    if jnp.issubdtype(jax.typeof(leaf).dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return {"": leaf}
    return {str(shard.index): shard.data for shard in leaf.addressable_shards}


def _gathered(own: bytes) -> list[bytes]:
    """The message of each process, in their order."""
    sizes = multihost_utils.process_allgather(np.int32(len(own)))
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
