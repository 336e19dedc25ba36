"""The workers as a mesh: one axis, or hosts by their devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from train.core.errors import InputError
from train.core.output import say

if TYPE_CHECKING:
    from pathlib import Path

AXIS = "data"
"""The axis of a mesh of workers that are all alike."""

HOST, DEVICE = "host", "device"
"""The axes of a mesh of several processes that have several devices each."""

Topology = Literal["auto", "flat", "hierarchical"]


def make_mesh(workers: int | None = None, topology: Topology = "auto") -> Mesh:
    """A mesh of the workers, a process's devices side by side, all axes theirs.

    Args:
      workers: Devices to train on, of all processes together, the same number of
        each; None for all.
      topology: 'flat' for the one axis `data`, 'hierarchical' for the axes `host`
        (the processes) and `device`, 'auto' for these where several processes have
        several devices each.

    Raises:
      InputError: There are fewer devices, or the processes cannot share them equally.

    Example:
      >>> from train.core.mesh import make_mesh
      >>> make_mesh(1).axis_names
      ('data',)
    """
    processes = jax.process_count()
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if workers is None:
        workers = len(devices)
    # Unequal shares have no device each on a CPU: their number is not the matter.
    if workers > len(devices) and workers % processes == 0:
        raise InputError(
            f"--workers {workers} is more than the {len(devices)} devices here "
            f"({devices[0].platform}); give fewer."
        )
    each = workers // processes
    chosen = [
        device
        for process in range(processes)
        for device in [d for d in devices if d.process_index == process][:each]
    ]
    if not each * processes == workers == len(chosen):
        raise InputError(
            f"{workers} workers cannot be shared equally by {processes} processes of "
            f"{jax.local_device_count()} devices; give --workers a multiple of "
            f"{processes}."
        )
    if topology == "auto":
        several = processes > 1 and each > 1
        topology = "hierarchical" if several else "flat"
    if topology == "flat":
        return Mesh(np.array(chosen), (AXIS,), axis_types=(AxisType.Auto,))
    hosts = np.array(chosen).reshape(processes, each)
    return Mesh(hosts, (HOST, DEVICE), axis_types=(AxisType.Auto,) * 2)


def kept_topology(mesh: Mesh, folder: Path, *, goes_on: bool) -> Topology:
    """The topology of a mesh, which the run in a folder keeps.

    A new run that would compress between hosts is refused where there is one; one that
    goes on is told.
    """
    if HOST not in mesh.axis_names:
        return "flat"
    if mesh.shape[HOST] == 1:
        if not goes_on:
            raise InputError(
                "--topology hierarchical compresses between hosts, and there is one "
                "process; start one on each of several hosts, or leave --topology out."
            )
        say(
            f"{folder} compresses between hosts, and there is one: nothing is "
            "compressed, and a warm-up does not end, until there are several."
        )
    return "hierarchical"


def check_divisible(
    batch: int, mesh: Mesh, accumulate: int = 1, prefix: str = "--"
) -> None:
    """Refuses a batch that the workers cannot share equally, in so many parts each.

    The flags of both begin with the prefix.
    """
    share, left = divmod(batch, mesh.size)
    if left:
        raise InputError(
            f"{prefix}batch {batch} cannot be shared equally by {mesh.size} workers; "
            "give --workers, or start a new run with a multiple."
        )
    if share % accumulate:
        raise InputError(
            f"{prefix}accumulate {accumulate} cannot divide the {share} examples of "
            f"each of {mesh.size} workers; give a divisor."
        )


def check_attention(attention: str, mesh: Mesh) -> None:
    """Refuses cuDNN's attention where the workers are no GPUs."""
    platform = mesh.devices.flat[0].platform
    if attention == "cudnn" and platform != "gpu":
        raise InputError(
            f"--attention cudnn needs NVIDIA GPUs, and the workers are on {platform}; "
            "give --attention xla."
        )
