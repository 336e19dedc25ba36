"""Processes find each other, or are alone; and know when they have lost one."""

import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import onebit_jax
from onebit_launch.environment import environments, free_port
from onebit_launch.errors import LOST_EXIT
from train.core.errors import InputError
from train.core.exchange import EXCHANGES, make_exchange
from train.core.mesh import kept_topology, make_mesh
from train.core.processes import distributed
from train.core.processes.distributed import (
    Cluster,
    check_agreed,
    check_shared,
    initialize,
    loss_in,
)

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
LAUNCHED = environments(4, 1, "127.0.0.1:1234")[3]


@pytest.fixture
def initialized(monkeypatch):
    """The arguments of the calls of `jax.distributed.initialize`."""
    calls = []

    def initialize(*arguments, **options):
        calls.append((arguments, options))

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in [*SLURM, *OPEN_MPI, *KUBERNETES, *LAUNCHED]:
        monkeypatch.delenv(name, raising=False)
    before = jax.config.jax_enable_preemption_service
    yield calls
    jax.config.update("jax_enable_preemption_service", before)


def set_all(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # A script of a Slurm job that does not call srun, and a step of one task.
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        environments(1, 1, "127.0.0.1:1234")[0],
        {"JAX_NUM_PROCESSES": "1"},
    ],
)
def test_a_process_that_is_alone_starts_nothing(initialized, monkeypatch, environment):
    set_all(monkeypatch, environment)
    assert initialize(Cluster()) == 1
    assert not initialized


@pytest.mark.parametrize(
    ("environment", "cluster", "arguments", "options"),
    [
        (
            LAUNCHED,
            Cluster(),
            ("127.0.0.1:1234", 4, 3),
            {"cluster_detection_method": "deactivate", "local_device_ids": None},
        ),
        (
            SLURM,
            Cluster("host:1", 2, 1),
            ("host:1", 2, 1),
            {"cluster_detection_method": "deactivate"},
        ),
        # One process for all GPUs of a node; JAX would give it the first alone.
        (
            SLURM,
            Cluster(),
            (None, None, None),
            {"cluster_detection_method": None, "local_device_ids": []},
        ),
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "2"},
            Cluster(),
            (None, None, None),
            {"local_device_ids": None},
        ),
        (OPEN_MPI, Cluster(), (None, None, None), {"local_device_ids": None}),
        # Open MPI 5 does not tell an address, but the rest.
        (OPEN_MPI, Cluster("host:1"), ("host:1", 4, 3), {}),
        (KUBERNETES, Cluster(), (None, None, None), {}),
        # The flags and the environment complete each other.
        (
            {"JAX_COORDINATOR_ADDRESS": "host:1"},
            Cluster(processes=2, process=1),
            ("host:1", 2, 1),
            {},
        ),
        (
            {},
            Cluster("host:61001", 2, 0, start_timeout=5, heartbeat_timeout=7),
            ("host:61001", 2, 0),
            {"heartbeat_timeout_seconds": 7},
        ),
    ],
)
def test_jax_is_told_what_is_known_and_no_more(
    initialized, monkeypatch, environment, cluster, arguments, options
):
    set_all(monkeypatch, environment)
    initialize(cluster)
    ((given, given_options),) = initialized
    assert given == arguments
    assert given_options.items() >= options.items()
    # A SIGTERM ends the process.
    assert not jax.config.jax_enable_preemption_service


@pytest.mark.parametrize(
    ("environment", "cluster", "message"),
    [
        ({}, Cluster(processes=2), r"--processes .+ and --process .+ belong together"),
        ({}, Cluster(processes=2, process=0), r"\) needs --coordinator HOST:PORT"),
        ({}, Cluster("host:1", 2, 2), "--process 2 must be from 0 to 1"),
        ({}, Cluster("host", 2, 1), "--coordinator host is not an address"),
        ({}, Cluster(":80", 2, 1), "--coordinator :80 is not an address"),
        ({}, Cluster("host:65536", 2, 1), "--coordinator host:65536 is not an address"),
        ({}, Cluster("host:1"), "--coordinator host:1 alone does not say which"),
        ({}, Cluster(timeout=0), "--timeout must be at least 1, not 0"),
        (
            {"JAX_NUM_PROCESSES": "4"},
            Cluster(),
            r"JAX_NUM_PROCESSES.*belong together; give both",
        ),
    ],
)
def test_what_contradicts_itself_or_says_half_is_refused(
    initialized, monkeypatch, environment, cluster, message
):
    set_all(monkeypatch, environment)
    with pytest.raises(InputError, match=message):
        initialize(cluster)
    assert not initialized


def test_processes_that_do_not_meet_end_in_a_sentence():
    started = []
    for process in (0, 1):
        port = free_port()
        flags = f"--coordinator 127.0.0.1:{port} --processes 2 --process {process}"
        command = [sys.executable, "-m", "train.pretrain", *flags.split()]
        command += ["--start-timeout", "1"]
        started.append(
            (port, subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        )
    for port, process in started:
        said = process.communicate(timeout=60)[1]
        assert process.returncode == LOST_EXIT
        assert said.splitlines()[-1] == (
            f"error: the meeting of the 2 processes at 127.0.0.1:{port} did not end "
            "within 1 s: see that all are started and reach that port, or give "
            "--coordinator, --processes and --process."
        )


def test_a_port_that_is_in_use_is_refused(initialized):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on port {port} "):
            initialize(Cluster(f"127.0.0.1:{port}", 2, 0))
        assert not initialized
        initialize(Cluster(f"127.0.0.1:{port}", 2, 1))
    initialize(Cluster(f"127.0.0.1:{port}", 2, 0))
    assert len(initialized) == 2


def test_a_folder_that_hosts_do_not_share_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "vocab.txt"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        distributed.multihost_utils,
        "process_allgather",  # process 0 sees what it has written
        lambda own: np.stack([np.ones_like(own), own]),
    )
    monkeypatch.setattr(distributed, "SEEN_WITHIN", 0.3)
    with pytest.raises(InputError, match=r"process 1 does not see .*vocab\.txt"):
        check_shared(file)
    monkeypatch.setattr(distributed, "SEEN_WITHIN", 30.0)
    late = threading.Timer(0.2, file.touch)
    late.start()
    check_shared(file)
    late.join()


@pytest.mark.parametrize(
    ("workers", "topology", "shape"),
    [
        (None, "auto", {"data": 8}),
        (4, "auto", {"data": 4}),
        (4, "flat", {"data": 4}),
        (4, "hierarchical", {"host": 1, "device": 4}),
    ],
)
def test_the_mesh_of_one_process(workers, topology, shape):
    assert dict(make_mesh(workers, topology).shape) == shape


def test_hosts_that_are_one_compress_nothing_and_are_told_so(capsys):
    mesh, run = make_mesh(4, "hierarchical"), Path("run")
    with pytest.raises(InputError, match="between hosts, and there is one process"):
        kept_topology(mesh, run, goes_on=False)
    assert kept_topology(mesh, run, goes_on=True) == "hierarchical"
    assert "there is one: nothing is compressed" in capsys.readouterr().out
    assert kept_topology(make_mesh(4), run, goes_on=False) == "flat"


def test_workers_that_processes_cannot_share_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(InputError, match="8 workers cannot be shared equally by 3"):
        make_mesh()
    # Though there are 8 devices: on CPUs they are made for a number of workers.
    with pytest.raises(InputError, match="10 workers cannot be shared equally by 3"):
        make_mesh(10)


@pytest.mark.parametrize("name", EXCHANGES)
def test_hosts_compress_together_where_there_are_hosts(name):
    hosts = make_mesh(4, "hierarchical")
    assert make_exchange(hosts, name).axes == ("host", "device")
    flat = make_exchange(hosts, name, "flat")
    assert flat.axes == ("host", "device")
    assert make_exchange(make_mesh(4), name).axes == ("data",)
    # Hosts hold one error together, devices one each.
    params = {"w": jax.numpy.ones(1 << 16)}
    sizes = [
        onebit_jax.abstract_state(exchange, params, hosts).worker_error.value
        for exchange in (make_exchange(hosts, name), flat)
    ]
    together, each = (sum(x.size for x in jax.tree.leaves(s)) for s in sizes)
    assert (together, each) == (1 << 16, 4 << 16)


def test_what_differs_between_processes_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def gather(own):
        other = own.copy()
        other[1, 0] ^= 1
        return np.stack([own, other])

    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gather)
    with pytest.raises(InputError, match="process 1 has another vocabulary than"):
        check_agreed({"corpus": "a", "vocabulary": "b"})


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: reset.\nx"), 1),
        # As Orbax's barriers raise it.
        (ValueError("UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error"), 1),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: task 1 has crashed"), 1),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), 0),
        (ValueError("ABORTED: the generation has changed"), 0),
        (ValueError("Gloo"), 0),
    ],
)
def test_a_lost_process_is_told_from_an_error_of_ones_own(error, lost):
    expected = str(error).partition("\n")[0].rstrip(".") if lost else None
    assert loss_in(error) == expected
    outer = ValueError("cannot save")
    outer.__cause__ = error
    assert loss_in(outer) == expected
