"""The variables by which processes find each other, and what may stand in the way."""

from __future__ import annotations

import ipaddress
import socket
import time

from onebit_launch.output import say

_PATIENCE = 20.0
"""Seconds in which a coordinator may be silent before it is told of."""


def environments(
    processes: int,
    devices: int,
    coordinator: str,
    *,
    hosts: int = 1,
    host: int = 0,
) -> list[dict[str, str]]:
    """Variables of each process of a host, beside the launcher's own.

    `jax.distributed.initialize()` reads address and devices from variables of JAX's
    own, and has none for the number and the place of a process: these it finds as it
    does where `mpirun` of Open MPI 4 has set them. `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID` are for scripts that pass them on.

    Args:
      processes: their number on each host.
      devices: devices of each.
      coordinator: HOST:PORT at which process 0 is to listen.
      hosts: number of hosts.
      host: number of this one, from 0.

    Example:
      >>> two = environments(2, 4, '10.0.0.1:29500', hosts=2, host=1)
      >>> [e['JAX_PROCESS_ID'] for e in two], two[1]['JAX_LOCAL_DEVICE_IDS']
      (['2', '3'], '4,5,6,7')
    """
    everyones = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(hosts * processes),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "OMPI_MCA_orte_hnp_uri": "onebit-launch",
        "OMPI_COMM_WORLD_SIZE": str(hosts * processes),
    }
    if hosts == 1:  # nobody else is to reach it
        everyones["JAX_COORDINATOR_BIND_ADDRESS"] = coordinator
    return [
        {
            **everyones,
            "JAX_PROCESS_ID": str(host * processes + local),
            "OMPI_COMM_WORLD_RANK": str(host * processes + local),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
            "JAX_LOCAL_DEVICE_IDS": ",".join(
                str(local * devices + device) for device in range(devices)
            ),
        }
        for local in range(processes)
    ]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def why_taken(port: int) -> str | None:
    """Why nothing more can listen on a port; None where something can.

    To be asked before `jax.distributed.initialize()`, which shares a port with whoever
    listens on it.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return error.strerror
    return None


def why_unfound(coordinator: str) -> str | None:
    """Why other hosts do not find this one by its own name; None if they may.

    Gloo, by which processes on CPUs exchange, tells others the address of that name.

    Args:
      coordinator: HOST:PORT; where it is this machine's own, there are no others.
    """
    name = socket.gethostname()
    if _is_loopback(coordinator.rpartition(":")[0].strip("[]")):
        return None
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(name, None)}
    except OSError:
        addresses, found = set(), "does not resolve"
    else:
        found = f"resolves to {', '.join(sorted(addresses))}, where it is alone"
    if not all(map(_is_loopback, addresses)):
        return None
    return (
        f"this host's own name, {name}, {found}: give that name its address in "
        "/etc/hosts here, as processes on CPUs look it up to find each other."
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def tell_of_silence(coordinator: str, patience: float = _PATIENCE) -> None:
    """Says, once, that a coordinator does not answer; JAX waits for it in silence.

    Args:
      coordinator: its HOST:PORT.
      patience: seconds before it is said.
    """
    name, _, port = coordinator.rpartition(":")
    address = name.strip("[]"), int(port)
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(address, timeout=5.0).close()
            return
        except socket.gaierror as error:
            say(
                f"{address[0]} is not known here ({error.strerror}); if it is not to "
                "be known soon, give all hosts an address or a name that all of them "
                "know."
            )
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                say(
                    f"nothing answers at {coordinator} yet ({error.strerror or error}),"
                    " as while the script there still imports; if that goes on, see "
                    "that it is an address of --host 0, that the launcher runs there, "
                    "and that its script calls jax.distributed.initialize()."
                )
                return
        time.sleep(min(1.0, patience))
