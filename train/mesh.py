"""The workers as a mesh: one axis, or hosts by their devices."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from train.errors import InputError

AXIS = "data"
"""The axis of a mesh of workers that are all alike."""

HOST, DEVICE = "host", "device"
"""The axes of a mesh of several processes that have several devices each."""


def make_mesh(workers: int | None = None) -> Mesh:
    """A mesh of the workers, all axes of which are theirs.

    Args:
      workers: Devices to train on, of all processes together, the same number of
        each; None for all.

    Returns:
      A mesh of axes `host` and `device` where several processes have several devices
      each, else of the axis `data`; a process's devices stand side by side.

    Raises:
      InputError: There are fewer devices, or the processes cannot share them equally.

    Example:
      >>> from train.mesh import make_mesh
      >>> make_mesh(1).axis_names
      ('data',)
    """
    processes = jax.process_count()
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    if workers is None:
        workers = len(devices)
    if workers > len(devices):
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
    shape, names = (workers,), (AXIS,)
    if processes > 1 and each > 1:
        shape, names = (processes, each), (HOST, DEVICE)
    grid = np.array(chosen).reshape(shape)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(shape))
