"""Joining other processes, and ending with them."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

import jax

from onebit_launch.errors import LOST_EXIT
from train.core.errors import InputError, LostError, first_line, is_out_of_memory
from train.core.processes.distributed import Cluster, initialize, loss_in
from train.core.processes.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator

VIRTUAL_WORKERS = 8
"""Workers where there is only a CPU and nothing else is asked for."""


def join(cluster: Cluster, workers: int | None) -> None:
    """Joins the other processes, and makes a CPU's virtual devices, so many workers.

    To be called before anything looks at the devices.
    """
    processes = initialize(cluster)
    # Real devices are as many as they are.
    if workers and processes:
        jax.config.update("jax_num_cpu_devices", max(1, workers // processes))
    elif processes == 1 and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", VIRTUAL_WORKERS)


@contextlib.contextmanager
def watched(timeout: float) -> Iterator[Watchdog]:
    """Bounds by some seconds what needs the other processes; names the loss of one.

    Yields:
      The watchdog, to be told of each wait.

    Raises:
      LostError: Another process is gone.
    """
    watchdog = Watchdog(timeout)
    if jax.process_count() == 1:  # it has nobody to wait for
        yield watchdog
        return
    with watchdog:
        try:
            yield watchdog
        except Exception as error:
            reason = loss_in(error)
            if reason is None:
                raise
            raise LostError(
                "another process was lost, or the link to it, in "
                f"{watchdog.expected or 'the compilation'} ({reason}); start again, "
                "a training with --resume to go on from the newest checkpoint."
            ) from error


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Prints what a user can mend as one sentence, and ends the process."""
    try:
        yield
    except InputError as error:
        _leave(f"error: {error}", 1)
    except LostError as error:
        _leave(f"error: {error}", LOST_EXIT)
    except KeyboardInterrupt as error:
        # At once: what XLA still compiles in threads may crash an orderly end.
        _leave(f"\n{str(error) or 'stopped'}", 130, at_once=True)
    except Exception as error:
        if is_out_of_memory(error):
            _leave(
                f"error: there is too little memory ({first_line(error)}); go on by "
                "--resume --remat layer, or start a new run with a smaller --batch or, "
                "where the command has it, with --accumulate.",
                1,
            )
        if not jax.distributed.is_initialized():
            raise
        _leave(traceback.format_exc().rstrip(), 1)


def _leave(message: str, status: int, *, at_once: bool = False) -> NoReturn:
    of_several = jax.distributed.is_initialized()
    # Threads that write a checkpoint may be in the middle of a line of a traceback, and
    # a launcher looks for this one by its beginning.
    sys.stderr.write(f"\n{message}\n" if of_several else f"{message}\n")
    sys.stderr.flush()
    if at_once or of_several:
        # An orderly end waits for the other processes, which wait for this one.
        sys.stdout.flush()
        os._exit(status)
    raise SystemExit(status)
