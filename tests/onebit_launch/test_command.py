"""`onebit-launch`: hosts that find each other, and flags that cannot be used."""

import re
import socket
import subprocess
import sys
import threading

import pytest
from launching import ROOT

from onebit_launch.command import Parser
from onebit_launch.environment import free_port, tell_of_silence, why_unfound

LAUNCHER = [sys.executable, "-m", "onebit_launch"]
OF_TWO = ("--processes", "1", "--hosts", "2")


def test_launchers_of_several_hosts_start_one_cluster(tmp_path):
    script = tmp_path / "places.py"
    script.write_text(
        "import jax\n"
        "jax.distributed.initialize()\n"
        "print(jax.process_index(), jax.process_count(), jax.device_count())\n"
    )
    address = f"127.0.0.1:{free_port()}"
    flags = (*OF_TWO, "--devices-per-process", "2", "--coordinator", address)
    launchers = [
        subprocess.Popen(
            [*LAUNCHER, *flags, "--host", str(host), "--", script],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in range(2)
    ]
    for host, launcher in enumerate(launchers):
        said = launcher.communicate(timeout=240)[0]
        assert said.splitlines() == [
            f"[launch] host {host} of hosts 0 to 1 starts its 1 of all 2 processes, "
            f"which wait in silence for the others at {address}.",
            f"[{host}] {host} 2 4",
        ]
        assert launcher.returncode == 0


@pytest.mark.parametrize(
    ("name", "patience", "told"),
    [
        ("127.0.0.1", 0.0, r"nothing answers at 127.0.0.1:\d+ yet \(Connection ref"),
        ("no-such-host.invalid", 60.0, r"no-such-host.invalid is not known here \("),
    ],
)
def test_a_coordinator_that_does_not_answer_is_told_of(name, patience, told, capfd):
    tell_of_silence(f"{name}:{free_port()}", patience)
    assert re.search(told, capfd.readouterr().err)


# Brackets are for IPv6, which not every machine has.
@pytest.mark.parametrize("host", ["127.0.0.1", "[127.0.0.1]"])
def test_a_coordinator_that_comes_late_is_not_told_of(host, capfd):
    port = free_port()
    waiting = threading.Thread(target=tell_of_silence, args=(f"{host}:{port}", 0.5))
    waiting.start()
    with socket.create_server(("127.0.0.1", port)):
        waiting.join(30)
    assert capfd.readouterr().err == ""


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
    advice = why_unfound(coordinator)
    if told is None:
        assert advice is None
    else:
        own = f"this host's own name, {told}: give that name its address in /etc/hosts"
        assert advice.startswith(own)


def test_the_launcher_needs_python_alone():
    code = (
        "import sys, onebit_launch.command\n"
        "assert not {'jax', 'numpy', 'onebit_jax'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


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
        ("--processes 1", "there is no command; give one after --"),
        (
            "--processes 2 train.py --lr 3",
            "train.py is no flag of the launcher; write the command and its flags "
            r"after --, as in onebit-launch --processes 2 -- train.py\.",
        ),
        ("--processes 2 -m train.lm", "-m is no flag of the launcher"),
        ("--processes 2 --device 4 -- x.py", "--device is no flag of the launcher"),
        (
            "--processes 2 -- python x.py --a",
            "leave out python and write -- x.py --a",
        ),
        ("--processes 2 -- /bin/python3.11 x.py", r"leave out /bin/python3\.11 and"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(flags, message, capsys):
    refused(flags.split(), message, capsys)


def refused(arguments, message, capsys):
    """The refusal is one sentence, after which the exit status is that of a mistake."""
    with pytest.raises(SystemExit) as ended:
        Parser("onebit-launch").flags_and_command(arguments)
    assert ended.value.code == 2
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", capsys.readouterr().err)


def test_logs_that_cannot_be_kept_are_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    flags = ["--processes", "1", "--log-dir", str(tmp_path / "file"), "--", "x.py"]
    refused(flags, "--log-dir .*file cannot be written to", capsys)


def test_a_second_launcher_of_the_first_host_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        flags = [*OF_TWO, "--coordinator", f"a:{port}"]
        message = rf"--host 0 cannot listen on port {port} here \(Address already in"
        refused([*flags, "--host", "0", "--", "x.py"], message, capsys)
        Parser("x").flags_and_command([*flags, "--host", "1", "--", "x.py"])
    Parser("x").flags_and_command([*flags, "--host", "0", "--", "x.py"])


def test_a_failure_is_that_of_one_host_of_several():
    code = (
        "from onebit_launch import command\n"
        "command.why_unfound = lambda coordinator: 'nobody finds it'\n"
        "command.main()"
    )
    host = ("--host", "1", "--coordinator", "127.0.0.1:1")
    fails = (*OF_TWO, *host, "--", "-c", "raise SystemExit(3)")
    done = subprocess.run(
        [sys.executable, "-c", code, *fails], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 3
    reason = "process 1 failed first, with exit status 3 (on this host;"
    assert done.stderr.splitlines()[-1].startswith(f"[launch] {reason}")
    assert done.stderr.count("nobody finds it") == 2
