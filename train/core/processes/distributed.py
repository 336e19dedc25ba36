"""The start of `jax.distributed`, where several processes train together."""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from onebit_launch.environment import why_taken
from train.core.errors import InputError, causes, first_line
from train.core.flags import Count, check_ranges
from train.core.processes.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ADDRESS, PROCESSES, PROCESS = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)
"""Variables that `train.launch` sets for each process; a cluster's script may too."""

DEVICES = "JAX_LOCAL_DEVICE_IDS"
"""The GPUs of a process, by their numbers on its host; set by `train.launch`."""

SEEN_WITHIN = 60.0
"""Seconds in which what one host has written can be seen by others, as over NFS."""

# Messages of a lost peer: gloo's and NCCL's in exceptions of several types, the
# coordination service's in XLA's.
_PEER_LOST = re.compile(r"Gloo [\w-]+ failed|NCCL|nccl")
_SERVICE_LOST = re.compile(r"(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED): ")


@dataclass(frozen=True)
class Cluster:
    """The processes that train together; found by itself under Slurm and Open MPI."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 can be reached by the others."""
    processes: int | None = None
    """Number of processes; needed with --coordinator outside of a cluster."""
    process: int | None = None
    """Number of this process, from 0; needed with --coordinator outside of one."""
    start_timeout: Count = 300
    """Seconds to wait for all processes to come."""
    heartbeat_timeout: Count = 100
    """Seconds after which a process that gives no sign of life counts as lost."""
    timeout: Count = 600
    """Seconds after which a step, evaluation, checkpoint or batch of answers counts as
    hanging."""


class Detected(NamedTuple):
    """A cluster by its environment, before `jax.distributed` is asked.

    Attributes:
      name: The cluster's, for messages.
      processes: Their number, where the environment has it.
      process: This one's number, likewise.
      one_a_host: Whether no other process shares this host's GPUs.
    """

    name: str
    processes: int | None
    process: int | None
    one_a_host: bool


def initialize(cluster: Cluster) -> int | None:
    """Joins the other processes; does nothing for one that is alone.

    What the flags leave out is taken from the environment that `train.launch` sets,
    else from Slurm's, Open MPI's or Kubernetes'.

    Returns:
      The number of processes; None where only the devices will tell it.

    Raises:
      InputError: The flags contradict each other, or the others cannot be reached.
    """
    check_ranges(cluster)
    coordinator = cluster.coordinator or os.environ.get(ADDRESS)
    processes = _first(cluster.processes, _number(PROCESSES))
    process = _first(cluster.process, _number(PROCESS))
    _check(coordinator, processes, process)
    detected = detect(os.environ)
    processes = _first(processes, detected.processes)
    process = _first(process, detected.process)
    if processes == 1 or (coordinator is None and not detected.name):
        if devices := os.environ.get(DEVICES):
            jax.config.update("jax_cuda_visible_devices", devices)
        return 1
    is_told = coordinator is not None and None not in (processes, process)
    if coordinator is not None:
        if not is_told and detected.name != "Kubernetes":
            raise InputError(
                f"--coordinator {coordinator} alone does not say which process this "
                "is; give --processes and --process as well."
            )
        port = int(coordinator.rpartition(":")[2])
        if is_told and process == 0 and (reason := why_taken(port)):
            raise InputError(
                f"process 0 cannot listen on port {port} ({reason}); give another in "
                "--coordinator."
            )
    # A SIGTERM shall end the process, not only be noted.
    jax.config.update("jax_enable_preemption_service", False)
    where = f"at {coordinator}" if coordinator else f"that {detected.name} names"
    who = f"the {processes} processes" if processes else "the processes"
    advice = (
        "see that all are started and reach that port, or give --coordinator, "
        "--processes and --process"
    )
    with Watchdog(cluster.start_timeout, advice) as watchdog:
        watchdog.expect(f"the meeting of {who} {where}")
        try:
            # It finds by itself what it is not told.
            jax.distributed.initialize(
                coordinator,
                *((processes, process) if is_told else (None, None)),
                # JAX gives a process under Slurm or Open MPI the one GPU of its
                # number; no number stands for all that are visible.
                local_device_ids=[] if detected.one_a_host and not is_told else None,
                cluster_detection_method="deactivate" if is_told else None,
                # Where it cannot connect it aborts the process, without a sentence.
                initialization_timeout=2 * cluster.start_timeout + 10,
                heartbeat_timeout_seconds=cluster.heartbeat_timeout,
            )
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"{who} did not meet {where} ({first_line(error)}); {advice}."
            ) from error
    return processes


def _check(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Refuses what the flags and their variables, together, leave open."""
    if None in (processes, process) and processes not in (process, 1):
        raise InputError(
            f"--processes (or {PROCESSES}) and --process (or {PROCESS}) belong "
            "together; give both."
        )
    if coordinator is None and processes not in (None, 1):
        raise InputError(
            f"--processes (or {PROCESSES}) needs --coordinator HOST:PORT (or "
            f"{ADDRESS}), an address of process 0; on one machine python -m "
            "train.launch sets them."
        )
    if process is not None and not 0 <= process < (processes or 1):
        raise InputError(
            f"--process {process} must be from 0 to {(processes or 1) - 1}, one less "
            "than --processes."
        )
    host, _, port = (coordinator or "host:1").rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise InputError(
            f"--coordinator {coordinator} is not an address; give HOST:PORT, the port "
            "from 1 to 65535."
        )


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    return int(text) if text else None


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def detect(environment: Mapping[str, str]) -> Detected:
    """The cluster that the environment tells of.

    It has no name where there is none, or this is a task of its own in one: a Slurm
    allocation without `srun`, a pod without an index.

    Example:
      >>> from train.core.processes.distributed import detect
      >>> detect({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"}).process
      2
    """
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    if all(name in environment for name in slurm):
        tasks = int(
            environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"]
        )
        hosts = int(environment.get("SLURM_STEP_NUM_NODES", 1))
        process = int(environment["SLURM_PROCID"])
        return Detected("Slurm", tasks, process, tasks == hosts)
    if "OMPI_COMM_WORLD_SIZE" in environment:
        size, rank, here = (
            environment.get(f"OMPI_COMM_WORLD_{name}", "0")
            for name in ("SIZE", "RANK", "LOCAL_SIZE")
        )
        return Detected("Open MPI", int(size), int(rank), here == "1")
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return Detected("Kubernetes", None, None, one_a_host=True)
    return Detected("", None, None, one_a_host=True)


def check_agreed(what: dict[str, str]) -> None:
    """Waits for all processes and refuses what is not the same on all, by its name."""
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(value.encode()).digest() for value in what.values()]
    everyones = multihost_utils.process_allgather(
        np.stack([np.frombuffer(digest, np.uint32) for digest in digests])
    )
    for name, theirs in zip(what, np.moveaxis(everyones, 1, 0), strict=True):
        differing = np.flatnonzero((theirs != theirs[0]).any(axis=-1))
        if differing.size:
            raise InputError(
                f"process {differing[0]} has another {name} than process 0; start "
                "all processes with the same flags, files and versions."
            )


def meet() -> None:
    """Waits for all processes, for as long as it takes."""
    if jax.process_count() > 1:
        multihost_utils.process_allgather(np.zeros(()))


def check_shared(file: Path) -> None:
    """Waits for all processes, each of which must see a file of process 0's."""
    if jax.process_count() == 1:
        return
    meet()  # it is written by now
    deadline = time.monotonic() + SEEN_WITHIN
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = multihost_utils.process_allgather(np.array(file.exists()))
    if not seen.all():
        raise InputError(
            f"process {np.flatnonzero(~seen)[0]} does not see {file}, which process 0 "
            "has written; give an --out that all hosts share."
        )


def loss_in(error: BaseException) -> str | None:
    """The line of an exception that tells of another process's loss, if it does."""
    for cause in causes(error):
        text = str(cause)
        is_xlas = isinstance(cause, jax.errors.JaxRuntimeError)
        if _PEER_LOST.search(text) or (is_xlas and _SERVICE_LOST.match(text)):
            return first_line(cause)
    return None
