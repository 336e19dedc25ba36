"""Checkpoints that hold everything that going on exactly takes.

Orbax writes a checkpoint beside the others and renames it when it is whole, so that a
process killed while it writes leaves the one before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import onebit_jax
from train.core.errors import InputError, causes, first_line, is_out_of_memory
from train.core.processes.distributed import loss_in
from train.core.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import optax

FOLDER = "checkpoints"
_KEPT = 2
_TENSORSTORE_CODE = re.compile(r"os_error_code='(\d+)'")


class Checkpoint(NamedTuple):
    """The content of a checkpoint.

    Attributes:
      params: The parameters, those that all workers agree on.
      state: The optimizer's state, the workers' errors whole.
      totals: Steps run, and the bytes that a worker has sent in them.
      data: State of the iterator over batches.
    """

    params: Any
    state: Any
    totals: Totals
    data: dict[str, Any]


def latest_step(folder: Path) -> int:
    """The steps of the newest checkpoint in a run's folder; 0 if there is none."""
    return max(_steps(folder), default=0)


def exist(folder: Path) -> bool:
    """True if there is a checkpoint in a run's folder."""
    return bool(_steps(folder))


def _steps(folder: Path) -> list[int]:
    paths = (folder / FOLDER).glob("[0-9]*")
    return [int(path.name) for path in paths if path.name.isdigit()]


def saved_model(folder: Path, step: int) -> dict[str, Any]:
    """The names and values that `Checkpoints` was made with as it saved a checkpoint.

    Raises:
      InputError: The checkpoint is damaged, or cannot be read.
    """
    path = folder.resolve() / FOLDER / str(step)
    with (
        _reading(path),
        ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer,
    ):
        return checkpointer.restore(path / "about")["model"]


def saved_params(folder: Path, step: int, abstract: Any) -> Any:
    """A checkpoint's parameters as NumPy arrays, whatever devices they were saved on.

    Raises:
      InputError: The checkpoint is damaged, or cannot be read.
    """
    path = folder.resolve() / FOLDER / str(step)
    how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), abstract)
    wanted = ocp.args.PyTreeRestore(
        item={"params": abstract}, restore_args={"params": how}, partial_restore=True
    )
    with _reading(path), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path / "arrays", args=wanted)["params"]


class Checkpoints:
    """The checkpoints of one run, of which the last two are kept.

    Args:
      folder: The run's folder.
      model: Names and values, of JSON, that a checkpoint must have been saved with to
        be restored: the model's sizes, the optimizer.
    """

    def __init__(self, folder: Path, model: Mapping[str, Any]):
        self._folder = folder.resolve() / FOLDER
        self._model = dict(model)
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=_KEPT,
                # A killed process leaves half of a checkpoint.
                cleanup_tmp_directories=True,
                # The step donates its arguments: write before they are gone.
                enable_async_checkpointing=False,
            ),
        )

    def close(self) -> None:
        """Closes Orbax's manager and its threads."""
        self._manager.close()

    def save(self, checkpoint: Checkpoint, mesh: Mesh) -> None:
        """Writes a checkpoint, which is placed on a mesh, under its number of steps.

        Raises:
          InputError: It cannot be written; the ones before are as they were.
        """
        about = {
            "model": self._model,
            "mesh": dict(mesh.shape),
            "totals": asdict(checkpoint.totals),
            "data": checkpoint.data,
        }
        arrays = {"params": checkpoint.params, "state": checkpoint.state}
        step, before = checkpoint.totals.steps, self._manager.latest_step()
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    about=ocp.args.JsonSave(about),
                    arrays=ocp.args.StandardSave(arrays),
                ),
            )
        except Exception as error:
            code = None if loss_in(error) else _system_error_in(error)
            if code is None:
                raise
            newest = "the start" if before is None else f"that of step {before}"
            raise InputError(
                f"the checkpoint of step {step} cannot be written to {self._folder} "
                f"({os.strerror(code)}); mend that (there must be room for "
                f"{_KEPT + 1} of them), and go on from {newest} by --resume."
            ) from error

    def restore(
        self, tx: optax.GradientTransformation, params: Any, mesh: Mesh
    ) -> tuple[Checkpoint, int]:
        """Reads the newest checkpoint, and the number of workers that it was saved by.

        Args:
          tx: The optimizer.
          params: Shapes and dtypes of the parameters.
          mesh: What to place it on; the errors of another number of workers are
            converted, and the residual is preserved.

        Raises:
          InputError: There is none, or it is damaged, or of another model or version.
        """
        step = self._manager.latest_step()
        if step is None:
            raise InputError(
                f"there is no checkpoint in {self._folder}; delete the run's folder "
                "and start it again without --resume."
            )
        folder = self._folder / str(step)
        with _reading(folder):
            composite = ocp.args.Composite(about=ocp.args.JsonRestore())
            about = self._manager.restore(step, args=composite)["about"]
            model, shape = about["model"], about["mesh"]
            totals, data = Totals(**about["totals"]), about["data"]
        differing = ", ".join(
            f"{name} {model.get(name)} there and {value} here"
            for name, value in self._model.items()
            if model.get(name) != value
        )
        if differing:
            raise InputError(
                f"the checkpoint {folder} is of another model ({differing}); give the "
                "--out of a run of this model."
            )
        # Its devices need not exist: it is for shapes alone.
        old_mesh = AbstractMesh(tuple(shape.values()), tuple(shape), mesh.axis_types)
        state = onebit_jax.abstract_state(tx, params, mesh, saved_on=old_mesh)
        replicated = NamedSharding(mesh, PartitionSpec())
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated),
            params,
        )
        wanted = ocp.args.StandardRestore({"params": placed, "state": state})
        with _reading(folder):
            composite = ocp.args.Composite(arrays=wanted)
            arrays = self._manager.restore(step, args=composite)["arrays"]
        params, state = arrays["params"], arrays["state"]
        if old_mesh.shape != mesh.shape:
            state = _resized(state, tx, params, old_mesh, mesh)
        return Checkpoint(params, state, totals, data), old_mesh.size


def _resized(
    state: Any,
    tx: optax.GradientTransformation,
    params: Any,
    old_mesh: AbstractMesh,
    mesh: Mesh,
) -> Any:
    """The state of the workers of one mesh as one of those of another."""
    target = onebit_jax.abstract_state(tx, params, mesh)
    resize = jax.jit(
        lambda state: onebit_jax.resize(state, tx, params, old_mesh, mesh),
        out_shardings=jax.tree.map(lambda x: x.sharding, target),
    )
    return resize(state)


def _system_error_in(error: BaseException) -> int | None:
    """The operating system's error number, where that is the cause of an exception."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        if code := _TENSORSTORE_CODE.search(str(cause)):
            return int(code[1])
    return None


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    # What Orbax raises at a file that is cut short, gone or of another version differs
    # from file to file.
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or (jax.process_count() > 1 and loss_in(error)):
            raise
        code = _system_error_in(error)
        if code not in (None, errno.ENOENT, errno.ENOTDIR):
            raise InputError(
                f"the checkpoint {folder} cannot be read ({os.strerror(code)}); "
                "mend that and start again, a training with --resume."
            ) from error
        raise InputError(
            f"the checkpoint {folder} is damaged, or of another version of the program "
            f"({first_line(error)}); move that folder away to go on from the one "
            "before, or go on with the version that wrote it."
        ) from error
