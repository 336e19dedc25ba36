"""`onebit-launch`: processes that find each other, and what cannot be used."""

import re
import signal
import socket
import subprocess
import sys

import pytest
from launching import ROOT

from onebit_launch.command import Launch, check, make_parser, parse
from onebit_launch.environment import environments, free_port, why_unfound
from onebit_launch.errors import USAGE_EXIT, UsageError
from onebit_launch.lookout import Lookout

LAUNCHER = [sys.executable, "-m", "onebit_launch"]


def start(*arguments, before=()):
    return subprocess.Popen(
        [*before, *LAUNCHER, *map(str, arguments)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said_by(launcher):
    said, _ = launcher.communicate(timeout=240)
    assert launcher.returncode == 0, said
    return said


def test_launchers_of_several_hosts_start_one_cluster(tmp_path):
    script = tmp_path / "places.py"
    script.write_text(
        "import jax\n"
        "jax.distributed.initialize()\n"
        "print(jax.process_index(), jax.process_count(), jax.device_count())\n"
    )
    coordinator = f"127.0.0.1:{free_port()}"
    flags = ("--processes", 1, "--devices-per-process", 2, "--hosts", 2)
    launchers = [
        start(*flags, "--host", i, "--coordinator", coordinator, "--", script)
        for i in range(2)
    ]
    assert [said_by(x).splitlines() for x in launchers] == [
        [
            f"[launch] host {i} of hosts 0 to 1 starts its 1 of all 2 processes, "
            f"which wait in silence for the others at {coordinator}.",
            f"[{i}] {i} 2 4",
        ]
        for i in range(2)
    ]


@pytest.mark.parametrize(
    ("name", "patience", "told"),
    [
        (
            "127.0.0.1",
            0.0,
            r"nothing answers at 127.0.0.1:\d+ yet \(Connection refused",
        ),
        ("no-such-host.invalid", 60.0, r"no-such-host.invalid is not known here \("),
    ],
)
def test_a_coordinator_that_does_not_answer_is_told_of(
    name, patience, told, capfdbinary
):
    lookout = Lookout(f"{name}:{free_port()}", patience=patience)
    lookout.start()
    lookout.join(30)
    said = capfdbinary.readouterr().err.decode()
    assert re.search(told, said), said


# Brackets are for IPv6, which not every machine has.
@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]"])
def test_a_coordinator_that_comes_late_is_not_told_of(host, capfdbinary):
    port = free_port()
    lookout = Lookout(f"{host}:{port}", patience=0.5)
    lookout.start()
    with socket.create_server(("127.0.0.1", port)):
        lookout.join(30)
    assert capfdbinary.readouterr().err == b""


def test_a_signal_that_is_ignored_from_the_start_ends_nothing(tmp_path):
    """As after `nohup`, or after `&` in a shell's script."""
    go, script = tmp_path / "go", tmp_path / "waits.py"
    script.write_text(
        "import pathlib, time\n"
        "print('started')\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
    )
    ignoring = ("/bin/sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")
    launcher = start("--processes", 1, "--", script, before=ignoring)
    assert launcher.stdout.readline() == "[0] started\n"
    launcher.send_signal(signal.SIGHUP)
    launcher.send_signal(signal.SIGINT)
    go.touch()
    assert said_by(launcher) == ""


@pytest.mark.parametrize(
    ("found", "coordinator", "told"),
    [
        (["127.0.1.1"], "10.0.0.1:1", "node, resolves to 127.0.1.1, where it is alone"),
        ([], "a:1", "node, does not resolve"),
        (["::1", "10.0.0.2"], "a:1", None),
        (["127.0.1.1"], "[::1]:1", None),
        ([], "localhost:1", None),
    ],
)
def test_a_host_that_others_cannot_find_is_told_of(
    found, coordinator, told, monkeypatch
):
    def resolve(name, port):
        if not found:
            raise socket.gaierror(-3, "Temporary failure in name resolution")
        return [(None, None, None, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    reason = why_unfound(coordinator)
    assert reason == (told and f"this host's own name, {told}")


def test_the_launcher_needs_python_alone():
    code = (
        "import sys, onebit_launch.command\n"
        "assert not {'jax', 'numpy', 'onebit_jax'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_only_processes_of_other_hosts_reach_the_coordinator_from_outside():
    alone = environments(2, 1, "127.0.0.1:1")
    assert {e["JAX_COORDINATOR_BIND_ADDRESS"] for e in alone} == {"127.0.0.1:1"}
    shared = environments(2, 1, "a:1", hosts=2, host=1)
    assert "JAX_COORDINATOR_BIND_ADDRESS" not in shared[0]
    assert [e["OMPI_COMM_WORLD_RANK"] for e in shared] == ["2", "3"]
    assert [e["OMPI_COMM_WORLD_LOCAL_RANK"] for e in shared] == ["0", "1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--processes 0 -- x.py", "--hosts must be at least 1"),
        ("--processes 1 --devices-per-process 0 -- x.py", "must be at least 1"),
        (
            "--processes 1 --hosts 2 --host 1 -- x.py",
            "--hosts needs --coordinator HOST:PORT",
        ),
        ("--processes 1 --hosts 2 --host 2 -- x.py", "--host 2 must be from 0 to 1"),
        (
            "--processes 1 --hosts 1 --coordinator here -- x.py",
            "here is not an address; give HOST:PORT",
        ),
        ("--processes 1 --hosts 1 --coordinator h:0 -- x.py", "h:0 is not an address"),
        (
            "--processes 1 --coordinator h:1 -- x.py",
            "--coordinator and --host need --hosts, or this host would train alone",
        ),
        ("--processes 1 --host 0 -- x.py", "--coordinator and --host need --hosts"),
        ("--processes 1 --hosts 0 -- x.py", "--hosts must be at least 1"),
        ("--processes 1 --grace nan -- x.py", "--grace must not be negative"),
        ("--processes 1", "there is no command; give one after --"),
        (
            "--processes 2 train.py --lr 3",
            "^train.py is no flag of the launcher; write the command and its flags "
            r"after --, as in onebit-launch --processes 2 -- train.py\.$",
        ),
        ("--processes 2 -m train.lm", "^-m is no flag of the launcher"),
        ("--processes 2 --device 4 -- x.py", "^--device is no flag of the launcher"),
        ("--processes 2 -- python x.py --a", "leave out python and write -- x.py --a$"),
        ("--processes 2 -- /bin/python3.11 x.py", r"leave out /bin/python3\.11 and"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(flags, message):
    with pytest.raises(UsageError, match=message):
        check_all(*flags.split())


def check_all(*arguments):
    given, rest = parse(make_parser("onebit-launch"), arguments)
    check(Launch(**given), rest)


def test_a_failure_is_that_of_one_host_of_several():
    code = (
        "from onebit_launch import command\n"
        "command.why_unfound = lambda coordinator: 'nobody finds it'\n"
        "command.main()"
    )
    hosts = ("--hosts", "2", "--host", "1", "--coordinator", "127.0.0.1:1")
    fails = ("--processes", "1", *hosts, "--", "-c", "raise SystemExit(3)")
    done = subprocess.run(
        [sys.executable, "-c", code, *fails], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 3
    reason = "process 1 failed first, with exit status 3 (on this host;"
    assert done.stderr.splitlines()[-1].startswith(f"[launch] {reason}")
    assert done.stderr.count("nobody finds it: give that name its address") == 2


def test_a_mistake_has_the_exit_status_of_a_wrong_command():
    launcher = start("--processes", 1, "--host", 0, "--", "x.py")
    said, _ = launcher.communicate(timeout=60)
    assert said.startswith("error: --coordinator and --host need --hosts")
    assert launcher.returncode == USAGE_EXIT == 2


def test_a_second_launcher_of_the_first_host_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        flags = ("--processes", "1", "--hosts", "2", "--coordinator", f"a:{port}")
        message = rf"--host 0 cannot listen on port {port} here \(Address already in"
        with pytest.raises(UsageError, match=message):
            check_all(*flags, "--host", "0", "--", "x.py")
        check_all(*flags, "--host", "1", "--", "x.py")
    check_all(*flags, "--host", "0", "--", "x.py")
