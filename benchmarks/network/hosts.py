"""Hosts on one machine: network namespaces, joined by a bridge of limited links.

A host is a namespace with a name and an address of its own. All hosts of a run are
joined by a bridge in one more namespace, so nothing is left in the machine's own
network, and runs at the same time do not meet. A host's `eth0` sends through a token
bucket at the link's rate; what it receives is limited by the senders.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAME = re.compile(r"onebit(\d+)-(h\d+|switch)")
"""Namespaces of a run carry the number of its process."""
NETNS_FILES = Path("/etc/netns")
UNLIMITED = "unlimited"
"""The rate of links without a token bucket."""
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
# Congestion control that neither paces nor probes fills a link whose queue drops
# nothing (a namespace may not choose cubic, which is the same without losses); and no
# new slow start after each step's computation, as hosts of a cluster are set.
SYSCTLS = {
    "net.ipv4.tcp_congestion_control": "reno",
    "net.ipv4.tcp_slow_start_after_idle": "0",
}
# The least that lets the kernel's largest segments (64 KiB) pass whole: what an idle
# link may send at once.
BURST = "70kb"
# A host's own queue does not drop what it is to send.
LIMIT = "16mb"


class Host(NamedTuple):
    """One host: the name of its namespace and itself, and its IPv4 address."""

    name: str
    address: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """A command as run on the host, which ends with the process that starts it."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.name]
        inside = ["ip", "netns", "exec", self.name, *named]
        return ["setpriv", "--pdeathsig", "KILL", *inside, *argv]


def bits_per_second(rate: str) -> float:
    """Bits a second of a number with a unit of bit, kbit, mbit, gbit, or 'unlimited'.

    Raises:
      ValueError: If it is none of these.

    Example:
      >>> bits_per_second('2.5gbit')
      2500000000.0
    """
    if rate == UNLIMITED:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate)
    if match is None or not float(match[1]):
        raise ValueError(
            f"a rate is given as 100mbit, 2.5gbit or unlimited, not {rate}"
        )
    return float(match[1]) * UNITS[match[2]]


def missing() -> str | None:
    """The sentence on why this machine cannot have hosts; None where it can."""
    if os.geteuid():
        return "Network namespaces are made by root: run it as root."
    programs = {"ip": "iproute2", "tc": "iproute2"}
    programs |= dict.fromkeys(("unshare", "setpriv", "taskset"), "util-linux")
    programs |= {"sysctl": "procps", "hostname": "hostname"}
    for program, package in programs.items():
        if shutil.which(program) is None:
            return f"The program {program} is missing: install {package}."
    try:
        with joined(1) as hosts:
            limit(hosts, "1gbit")
    except OSError as error:
        return (
            "The kernel must have namespaces, bridges, veth pairs and tbf queues, and "
            f"a container the capabilities NET_ADMIN and SYS_ADMIN ({error})."
        )
    return None


@contextlib.contextmanager
def joined(count: int) -> Iterator[tuple[Host, ...]]:
    """Some hosts on a bridge, their links not limited yet; taken down at the end."""
    prefix = f"onebit{os.getpid()}-"
    hosts = tuple(
        Host(f"{prefix}h{i}", f"10.77.{i // 250}.{i % 250 + 1}") for i in range(count)
    )
    switch = f"{prefix}switch"
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        names = "".join(f"{host.address} {host.name}\n" for host in hosts)
        for i, host in enumerate(hosts):
            files = NETNS_FILES / host.name
            files.mkdir(parents=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{names}", "utf-8")
            _run("ip", "netns", "add", host.name)
            port = ("netns", switch, "name", f"port{i}")
            eth0 = ("netns", host.name, "name", "eth0")
            _run("ip", "link", "add", *eth0, "type", "veth", "peer", *port)
            inside = ("ip", "-n", host.name)
            _run(*inside, "address", "add", f"{host.address}/16", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run(*inside, "link", "set", device, "up")
            port = ("link", "set", f"port{i}", "master", "bridge", "up")
            _run("ip", "-n", switch, *port)
            settings = [f"{key}={value}" for key, value in SYSCTLS.items()]
            _run("ip", "netns", "exec", host.name, "sysctl", "-qw", *settings)
        yield hosts
    finally:
        _remove([switch, *(host.name for host in hosts)])


def limit(hosts: Sequence[Host], rate: str) -> None:
    """Sets the rate at which each host sends, one for `bits_per_second`."""
    bits = bits_per_second(rate)
    for host in hosts:
        where = ("-n", host.name, "qdisc")
        if rate == UNLIMITED:
            _run("tc", *where, "replace", "dev", "eth0", "root", "pfifo")
            continue
        bucket = ("rate", f"{bits:.0f}bit", "burst", BURST, "limit", LIMIT)
        _run("tc", *where, "replace", "dev", "eth0", "root", "tbf", *bucket)


def sent(hosts: Sequence[Host]) -> list[tuple[int, int]]:
    """The bytes that each host has sent since its link was limited.

    Of each the interface's `tx_bytes`, which counts the headers of a large segment
    once, and the bytes of the packets that it is cut into, from the queue. Only
    differences mean something.
    """
    counted = []
    for host in hosts:
        link = json.loads(
            _run("ip", "-n", host.name, "-s", "-j", "link", "show", "eth0")
        )
        queue = json.loads(_run("tc", "-n", host.name, "-s", "-j", "qdisc", "show"))
        packets = next(
            each for each in queue if each.get("root") and each["dev"] == "eth0"
        )
        counted.append((link[0]["stats64"]["tx"]["bytes"], packets["bytes"]))
    return counted


def described() -> dict[str, Any]:
    """The settings of hosts and links."""
    return {
        "queue": f"tbf, burst {BURST}, limit {LIMIT}",
        "settings": SYSCTLS,
        "cores": len(os.sched_getaffinity(0)),
    }


def remove_leftovers() -> list[str]:
    """Takes down the hosts of runs that were killed, and gives their names."""
    names = {path.name for path in Path("/run/netns").glob("onebit*")}
    names |= {path.name for path in NETNS_FILES.glob("onebit*")}
    dead = []
    for name in sorted(names):
        match = NAME.fullmatch(name)
        if match and not Path("/proc", match[1]).exists():
            dead.append(name)
    _remove(dead)
    return dead


def _remove(names: Sequence[str]) -> None:
    failures = []
    for name in names:
        try:
            _take_down(name)
        except OSError as error:  # the others shall not stay for that
            failures.append(error)
    if failures:
        raise failures[0]


def _take_down(name: str) -> None:
    if Path("/run/netns", name).exists():
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name)
    shutil.rmtree(NETNS_FILES / name, ignore_errors=True)


def _run(*argv: str) -> str:
    command = " ".join(argv)
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, timeout=30
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{command} did not end within 30 s") from error
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
    return done.stdout
