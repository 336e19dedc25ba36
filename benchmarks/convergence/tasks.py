"""The trainings of the product that a study repeats, each from its own flags."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from train.bert import config as bert_config
from train.bert import data as bert_data
from train.bert import pretrain as bert_command
from train.bert import task as bert_task
from train.core.mesh import make_mesh
from train.core.processes.session import VIRTUAL_WORKERS
from train.images import command as images_command
from train.images import config as images_config
from train.images import task as images_task
from train.lm import command as lm_command
from train.lm import config as lm_config
from train.lm import data as lm_data
from train.lm import task as lm_task

if TYPE_CHECKING:
    from pathlib import Path

    from jax.sharding import Mesh

    from benchmarks.convergence.plan import TaskPlan
    from train.core.task import Task

Flags = Any
"""The flags of any task: a dataclass of `train.core.flags.TrainingFlags`."""


class Module(NamedTuple):
    """A task's command line, its check of the flags, and what makes the training."""

    parse: Callable[..., Any]
    check: Callable[[Any], None]
    open: Callable[[Any, Mesh], Task]


@functools.lru_cache(maxsize=8)
def _lm_data(flags: lm_config.LmConfig) -> lm_data.Data:
    return lm_data.load(flags)[1]


def _lm(flags: lm_config.LmConfig, mesh: Mesh) -> Task:
    # Reading the corpus takes a fifth of a short run.
    data = _lm_data(replace(flags, out=flags.tokens, learning_rate=1.0, freeze_step=1))
    return lm_task.make_task(flags, data, mesh, flags.total_steps)


def _bert(flags: bert_config.PretrainConfig, mesh: Mesh) -> Task:
    _, data = bert_data.load(flags)
    return bert_task.make_task(flags, data, mesh, flags.total_steps)


def _images(flags: images_config.ImagesConfig, mesh: Mesh) -> Task:
    data = images_task.read(flags)
    return images_task.make_task(flags, data, mesh, flags.total_steps)


MODULES = {
    "train.lm": Module(lm_command.parse, lm_config.check, _lm),
    "train.pretrain": Module(bert_command.parse, bert_config.check, _bert),
    "train.images": Module(images_command.parse, images_config.check, _images),
}
"""The modules of a plan, by name."""


def read_flags(task: TaskPlan, **changes: Any) -> Flags:
    """The flags of a task, as its own command line reads them, with changes of a run's.

    Raises:
      SystemExit: There is no such module, or it refuses the flags.
      InputError: They cannot be trained with.
    """
    if task.module not in MODULES:
        raise SystemExit(
            f"The task {task.name!r} is of {task.module!r}: choose of "
            f"{', '.join(MODULES)}."
        )
    module = MODULES[task.module]
    given = module.parse(task.flags).training
    workers = {"workers": given.workers or VIRTUAL_WORKERS}
    flags = replace(given, **(workers | changes))
    module.check(flags)
    if getattr(flags, "long_seq", None):
        raise SystemExit(
            f"The task {task.name!r} has a second phase: a study trains one phase."
        )
    return flags


def open_task(task: TaskPlan, flags: Flags, tokens: Path) -> tuple[Task, Mesh]:
    """The training that a run's flags ask for, and the device that simulates it."""
    if getattr(flags, "tokens", tokens) is None:
        flags = replace(flags, tokens=tokens)
    mesh = make_mesh(1, "flat")
    return MODULES[task.module].open(flags, mesh), mesh
