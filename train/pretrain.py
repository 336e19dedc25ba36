"""`python -m train.pretrain`: pre-trains a BERT with 1-bit Adam.

`--help` lists the flags. A run leaves in its folder `config.json` (what was asked
for), `vocab.txt`, `checkpoints`, `metrics.jsonl` and `training.png`; with `--compare`
plain Adam's own are in the folder `adam` inside it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import tyro
from jax.sharding import AxisType

from train import picture, record, run_folder
from train.checkpoint import latest_step
from train.config import PretrainConfig, check, check_resumable
from train.data import keep_vocabulary, load
from train.errors import InputError
from train.loop import is_main_process, say, train
from train.optimizer import AXIS
from train.run_folder import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh

VIRTUAL_WORKERS = 8
"""Workers where there is only a CPU and nothing else is asked for."""


def parse(arguments: Sequence[str]) -> PretrainConfig:
    """Reads the flags; a run that goes on has its own for those not given."""
    config = tyro.cli(PretrainConfig, args=arguments, prog="python -m train.pretrain")
    if not config.resume:
        return config
    stored = run_folder.read(config.out).config
    config = tyro.cli(
        PretrainConfig,
        args=arguments,
        default=replace(stored, out=config.out, resume=True),
        prog="python -m train.pretrain",
    )
    check_resumable(stored, config)
    return config


def make_mesh(config: PretrainConfig) -> Mesh:
    """A mesh of the workers.

    Args:
      config: The flags.

    Returns:
      A mesh with the one axis that the optimizers exchange over.

    Raises:
      InputError: There are fewer devices than workers, or the batch cannot be shared
        equally.
    """
    devices = jax.devices()
    workers = config.workers or len(devices)
    if workers > len(devices):
        raise InputError(
            f"--workers {workers} is more than the {len(devices)} devices here "
            f"({devices[0].platform}); give fewer."
        )
    if config.batch % workers:
        raise InputError(
            f"--batch {config.batch} cannot be shared equally by {workers} workers; "
            "make it a multiple, or give --workers."
        )
    return jax.make_mesh(
        (workers,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:workers]
    )


def pretrain(config: PretrainConfig) -> None:
    """Trains what the flags ask for and draws the picture.

    Args:
      config: The flags.

    Raises:
      InputError: The flags, or what they name, cannot be used.
    """
    check(config)
    folder = config.out
    mesh = make_mesh(config)
    if config.resume:
        run = run_folder.read(folder)
        # It may have been moved since it was written.
        run = replace(run, config=replace(run.config, out=folder))
        for arm in _arms(run.config):
            run_folder.check_own(replace(run, config=arm))
        run = replace(run, until=_next_goal(run, config))
        data = load(run.config, folder, run.corpus)
    else:
        for arm in _arms(config):
            run_folder.check_free(arm.out)
        data = load(config, folder)
        run = Run(config, data.corpus, config.steps)
        if is_main_process():
            with run_folder.writable(folder):
                folder.mkdir(parents=True, exist_ok=True)
                keep_vocabulary(data, folder)
    say(
        f"{folder}: BERT {config.model}, {len(data.vocabulary):,} word pieces, "
        f"{mesh.size} workers ({mesh.devices.flat[0].platform}), to step {run.until:,}"
    )
    # The run's own number of steps is what its schedules were made for.
    arms = _arms(replace(config, steps=run.config.steps))
    for arm, stored in zip(arms, _arms(run.config), strict=True):
        if latest_step(arm.out) < run.until:
            remember = partial(_remember, replace(run, config=stored))
            # A folder with a checkpoint in it must say whose it is.
            if not run_folder.exists(arm.out):
                remember()
            train(arm, data, mesh, run.until, begin=remember)
    if is_main_process():
        lines = {arm.optimizer: record.read(arm.out) for arm in arms}
        picture.draw(folder / picture.FILE, lines)
        say(f"{folder / picture.FILE}: loss and bytes sent")


def _arms(config: PretrainConfig) -> list[PretrainConfig]:
    """The flags of each optimizer's training, its folder among them."""
    if not config.compare:
        return [config]
    adam = replace(
        config,
        optimizer="adam",
        freeze_step=None,
        compare=False,
        out=config.out / "adam",
    )
    return [config, adam]


def _remember(run: Run) -> None:
    if is_main_process():
        run_folder.write(run)


def _next_goal(run: Run, config: PretrainConfig) -> int:
    """The steps to go on to: those asked for, or as many again after a finished run."""
    own = run.config.steps
    if config.steps > run.until:
        return config.steps
    if config.steps != own and config.steps < run.until:
        raise InputError(
            f"the run in {config.out} goes to step {run.until}; leave out --steps "
            f"{config.steps} to go on, or give more."
        )
    if min(latest_step(arm.out) for arm in _arms(config)) < run.until:
        return run.until
    say(
        f"{config.out}: all {run.until:,} steps are done; going on for {own:,} more at "
        "the last learning rate"
    )
    return run.until + own


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    try:
        config = parse(sys.argv[1:])
        # Before anything looks at the devices. Where there are real ones it changes
        # nothing.
        jax.config.update("jax_num_cpu_devices", config.workers or VIRTUAL_WORKERS)
        pretrain(config)
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        print("\nstopped; --resume goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
