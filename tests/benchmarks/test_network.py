import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import onebit_jax
from benchmarks.network import hosts as network_hosts
from benchmarks.network import processes as network_processes
from benchmarks.network.command import Config, auto_rate, cases, checked
from benchmarks.network.report import read_rows, tables, write_json
from benchmarks.network.rows import Results, Row, speed_up
from benchmarks.network.traffic import collectives_alone, host_bytes
from benchmarks.page import fill

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.network"]
MISSING = network_hosts.missing()
needs_hosts = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def row(**changes):
    given = {
        "hosts": 4,
        "devices": 1,
        "rate": "100mbit",
        "kind": "step",
        "name": "adam",
        "stage": None,
        "seconds": [8.0, 4.0, 5.0, 6.0, 2.0],
        "unlimited_seconds": 1.25,
        "computation_seconds": 1.0,
        "sent_bytes": 50_000_000,
        "tx_bytes": 51e6,
        "packet_bytes": 52e6,
    }
    return Row(**given | changes)


def test_what_follows_from_a_row():
    # 50 MB are 400 Mbit, four seconds at 100 Mbit/s.
    measured = row()
    assert measured.wire_seconds == 4
    assert measured.bound_seconds == 5
    assert measured.median == 5
    assert measured.quartiles == (4, 6)
    assert measured.attained == 1
    assert measured.network_share == 0.8
    assert measured.overhead == 1.02
    assert measured.packet_overhead == 1.04


def test_speed_up_is_over_the_same_hosts_rate_and_kind():
    rows = [
        row(seconds=[100.0], hosts=2),
        row(seconds=[200.0], rate="1gbit"),
        row(seconds=[300.0], kind="exchange", name="pmean"),
        row(seconds=[5.0]),
    ]
    fast = row(name="onebit_adam", stage="compressed", seconds=[0.5])
    assert speed_up(fast, rows) == 10
    faster = dataclasses.replace(fast, computation_seconds=0.25)
    assert speed_up(faster, rows, equal_computation=True) == (5 - 0.75) / 0.5
    slower = dataclasses.replace(fast, computation_seconds=1.5)
    assert speed_up(slower, rows, equal_computation=True) == 10
    assert speed_up(dataclasses.replace(fast, hosts=8), rows) is None


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("9kbit", 9e3), ("7bit", 7.0)],
)
def test_rates(rate, bits):
    assert network_hosts.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["100", "0mbit", "1mb", "-1mbit", "auto", "1 gbit"])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match="or unlimited, not"):
        network_hosts.bits_per_second(rate)


def test_auto_rate_gives_the_network_95_percent():
    sent, computation = 66_000_000, 0.25
    bits = network_hosts.bits_per_second(auto_rate(sent, computation))
    share = 8 * sent / bits / (8 * sent / bits + computation)
    assert 0.95 <= share < 0.96


def test_baselines_are_measured_first():
    names = [name for name, _, _ in cases(Config(exchanges="sign_mean,pmean"))]
    assert names == ["adam", "pmean", "onebit_adam", "onebit_adam", "sign_mean"]
    wires = Config(wires="signs,counts", optimizers="onebit_adam", exchanges="")
    assert [(name, stage) for name, stage, _ in cases(wires)] == [
        ("onebit_adam", "warmup"),
        ("onebit_adam", "compressed"),
        ("onebit_adam, counts", "compressed"),
    ]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (Config(optimizers="sgd"), "--optimizers takes adam, onebit_adam, not 'sgd'"),
        (Config(exchanges="sum"), "--exchanges takes .*, not 'sum'"),
        (Config(wires="bytes"), "--wires takes signs, counts, not 'bytes'"),
        (Config(rates="auto", exchange_only=True), "from Adam's step"),
        (Config(rates="100mb"), "a rate is given as 100mbit"),
        (Config(hosts="2,1"), "--hosts takes numbers from 2 on"),
        (Config(size=float("nan")), "--size must be at least 1"),
        (Config(longest=float("nan")), "--longest and --timeout must be positive"),
        (Config(json=Path("/nowhere/x.json")), "there is no folder /nowhere"),
        (Config(page=Path("/nowhere")), "there is no such file"),
    ],
)
def test_what_cannot_be_measured_is_refused(config, what):
    with pytest.raises(SystemExit, match=what):
        checked(config)


def flat_mesh(hosts, devices):
    return jax.make_mesh(
        (hosts, devices), ("host", "device"), axis_types=(AxisType.Auto,) * 2
    )


def compiled(mesh, function, count):
    split = PartitionSpec(mesh.axis_names)
    program = jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
        )
    )
    argument = jax.ShapeDtypeStruct((mesh.size * count,), jnp.float32)
    found = program.lower(argument).compile()
    return onebit_jax.traffic(found, mesh).collectives


def exchanges(x):
    both = ("host", "device")
    x = lax.psum(x, both) + lax.psum(x, "device") + lax.psum(x, "host")
    x += lax.all_to_all(x, both, 0, 0, tiled=True)
    x += lax.all_gather(x, "host", tiled=True)[: x.size]
    return x + jnp.tile(lax.psum_scatter(x, "host", tiled=True), 4)


def test_bytes_that_leave_a_host():
    hosts, devices, count = 4, 2, 1024
    found = compiled(flat_mesh(hosts, devices), exchanges, count)
    size, n = 4 * count, hosts * devices
    # A ring over all: one edge leaves the host. Every pair of an all-to-all whose
    # ends are on two hosts. A host's devices each for themselves, elsewhere.
    expected = 2 * size * (n - 1) // n
    expected += devices * (n - devices) * size // n
    expected += devices * 2 * size * (hosts - 1) // hosts
    expected += devices * size * (hosts - 1)
    expected += devices * size * (hosts - 1) // hosts
    assert host_bytes(found, hosts, devices) == expected
    assert host_bytes(found, 1, hosts * devices) == 0


def test_collectives_alone_are_those_of_the_program():
    mesh = flat_mesh(4, 2)
    found = compiled(mesh, exchanges, 1024)
    program, buffers = collectives_alone(found, mesh)
    again = onebit_jax.traffic(program.lower(buffers).compile(), mesh).collectives
    assert sorted(each[:5] for each in again) == sorted(each[:5] for each in found)


def results(*rows):
    return Results({"model": "tiny"}, {"cores": 2}, "a CPU", "0.0", list(rows))


def test_rows_are_kept_and_measured_again(tmp_path):
    file = tmp_path / "network.json"
    write_json(file, results(row(), row(rate="1gbit")))
    stored = json.loads(file.read_text("utf-8"))
    assert stored["rows"][0]["attained"] == 1
    assert stored["rows"][1]["bound_seconds"] == 1.4
    held = results()
    held.rows += read_rows(file, held)
    assert held.rows == [row(), row(rate="1gbit")]
    held.add(row(seconds=[1.0]))
    assert [each.median for each in held.rows] == [1.0, 5.0]
    held.add(row(hosts=2))
    assert [each.hosts for each in held.rows] == [2, 4, 4]


def test_rows_of_other_settings_are_refused(tmp_path):
    file = tmp_path / "network.json"
    write_json(file, results(row()))
    with pytest.raises(SystemExit, match="remove it, or choose another --json"):
        read_rows(file, dataclasses.replace(results(), settings={"model": "mini"}))


def test_tables():
    fast = row(name="onebit_adam", stage="compressed", seconds=[0.5])
    lines = tables(
        results(row(), fast, row(kind="exchange", name="pmean"))
    ).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len(cells) == 4 + 1 + 3
    assert {len(line) for line in cells[:4]} == {14}
    steps = dict(zip(cells[0], cells[3], strict=True))
    assert steps["faster than adam"] == "10.0"
    assert steps["seconds (quartiles)"] == "0.500 (0.500, 0.500)"
    exchanged = dict(zip(cells[5], cells[7], strict=True))
    assert exchanged["exchange"] == "pmean"
    assert exchanged["of the bound"] == "1.00"


def test_a_page_keeps_all_but_its_tables():
    page = "a\n<!-- measured -->\nold\n<!-- end of measured -->\nb\n"
    filled = "a\n<!-- measured -->\n\nnew\n\n<!-- end of measured -->\nb\n"
    assert fill(page, "measured", "new") == filled
    assert fill(filled, "measured", "new") == filled
    with pytest.raises(SystemExit, match="must have the lines"):
        fill("a\n<!-- measured -->\n", "measured", "new")


def test_without_root_it_says_so():
    done = subprocess.run(
        ["setpriv", "--reuid", "65534", *COMMAND] if os.geteuid() == 0 else COMMAND,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("run it as root.")


def namespaces(pid):
    listed = Path("/run/netns").glob(f"onebit{pid}-*")
    return [*listed, *Path("/etc/netns").glob(f"onebit{pid}-*")]


def processes(pid):
    found = []
    for name in {path.name for path in namespaces(pid)}:
        argv = ["ip", "netns", "pids", name]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        found += map(int, done.stdout.split())
    return found


@pytest.fixture
def running():
    flags = ["--hosts", "3", "--rates", "1kbit", "--exchange-only"]
    process = subprocess.Popen(
        [*COMMAND, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 60
    while len(namespaces(process.pid)) < 7 and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()
    subprocess.run([*COMMAND, "--clean"], cwd=ROOT, check=True)


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_hosts_are_taken_down_when_it_is_stopped(running, number):
    while not (there := processes(running.pid)):
        time.sleep(0.05)
    running.send_signal(number)
    running.communicate(timeout=30)
    assert running.returncode in (-number, 128 + number)
    assert not namespaces(running.pid)
    # A process that is killed is there until whoever has it has been told.
    deadline = time.monotonic() + 10
    while left := [pid for pid in there if Path("/proc", str(pid)).exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@needs_hosts
def test_a_host_that_cannot_be_taken_down_does_not_keep_the_others(monkeypatch):
    run = network_hosts._run

    def run_but_for_one(*argv):
        if argv[:3] == ("ip", "netns", "pids") and argv[3].endswith("h0"):
            raise OSError("no answer")
        return run(*argv)

    with (
        pytest.raises(OSError, match="no answer"),
        network_hosts.joined(2) as hosts,
    ):
        monkeypatch.setattr(network_hosts, "_run", run_but_for_one)
    assert Path("/run/netns", hosts[0].name).exists()
    assert not Path("/run/netns", hosts[1].name).exists()
    monkeypatch.undo()
    network_hosts._remove([hosts[0].name])
    assert not namespaces(os.getpid())


@needs_hosts
def test_what_a_killed_run_leaves_is_taken_down_by_the_next(running):
    running.kill()
    running.communicate(timeout=30)
    assert namespaces(running.pid)
    with network_hosts.joined(1) as others:
        removed = network_hosts.remove_leftovers()
        assert Path("/run/netns", others[0].name).exists()
    assert f"onebit{running.pid}-h2" in removed
    assert not namespaces(running.pid)


@needs_hosts
@pytest.mark.parametrize(
    ("worker", "what"),
    [
        ("time.sleep(60)", r"did not reply within 1 s; .*\nstuck"),
        ("sys.exit(3)", r"ended; .*\nstuck"),
    ],
)
def test_a_process_that_fails_ends_the_run(tmp_path, worker, what):
    code = f"import sys, time; sys.stderr.write('stuck'); sys.stderr.flush(); {worker}"
    with (
        network_hosts.joined(1) as hosts,
        network_processes.started(hosts, ["-c", code], tmp_path) as started,
    ):
        time.sleep(0.5)
        with pytest.raises(RuntimeError, match=re.compile(what, re.DOTALL)):
            started.ask({}, 1)
    assert started.running[0].returncode is not None
    assert not namespaces(os.getpid())


@needs_hosts
def test_real_hosts(tmp_path):
    file, picture = tmp_path / "network.json", tmp_path / "network.png"
    flags = "--hosts 2 --rates 1gbit --model tiny --optimizers adam --size 1e6"
    written = ["--json", str(file), "--picture", str(picture), "--repeats", "3"]
    done = subprocess.run(
        [*COMMAND, *flags.split(), *written],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(file, Results(**json.loads(file.read_text("utf-8"))))
    assert [each.name for each in rows] == ["adam", "pmean", "sign_mean"]
    for each in rows:
        # What left the interface is what was counted, and headers.
        assert 1 <= each.overhead < 1.1
        assert 1.03 < each.packet_overhead < 1.1
        # The limit holds, but for what an idle link sends at once.
        burst = 8 * 70 * 1024 / 1e9
        assert each.median > each.wire_seconds - 4 * burst
    pmean, signs = rows[1:]
    assert pmean.sent_bytes == 4_000_000
    assert 30 < pmean.sent_bytes / signs.sent_bytes < 32
    assert picture.stat().st_size > 1000
