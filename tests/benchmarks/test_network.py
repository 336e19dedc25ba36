"""The testbed counts what leaves a host, and takes down all that it has set up."""

import dataclasses
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
from runs import PROMOTION

import onebit_jax
from benchmarks.convergence.runs import Case, Run
from benchmarks.network import hosts as network_hosts
from benchmarks.network import processes as network_processes
from benchmarks.network.config import Config, host_counts, workloads
from benchmarks.network.measure import auto_rate
from benchmarks.network.results import (
    Measurement,
    Results,
    read_results,
    speed_up,
    tables,
)
from benchmarks.network.traffic import collectives_alone, host_bytes, host_loads
from benchmarks.network.whole_run import text, whole_runs

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "benchmarks.network"]
MISSING = network_hosts.missing()
needs_hosts = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# 50 MB are 400 Mbit, four seconds at 100 Mbit/s.
ADAM = Measurement(
    hosts=4,
    devices=1,
    rate="100mbit",
    kind="step",
    name="adam",
    stage=None,
    seconds=[8.0, 4.0, 5.0, 6.0, 2.0],
    unlimited_seconds=1.25,
    computation_seconds=1.0,
    sent_bytes=50_000_000,
    tx_bytes=51e6,
    packet_bytes=52e6,
)
changed = dataclasses.replace


def test_what_follows_from_a_measurement():
    assert (ADAM.wire_seconds, ADAM.bound_seconds) == (4, 5)
    assert (ADAM.median, ADAM.quartiles) == (5, (4, 6))
    assert (ADAM.attained, ADAM.network_share) == (1, 0.8)
    assert (ADAM.overhead, ADAM.packet_overhead) == (1.02, 1.04)


def test_speed_up_is_over_the_same_hosts_rate_and_kind():
    elsewhere = {"hosts": 2}, {"rate": "1gbit"}, {"kind": "exchange", "name": "pmean"}
    others = [changed(ADAM, seconds=[100.0], **where) for where in elsewhere]
    others.append(changed(ADAM, seconds=[5.0]))
    fast = changed(ADAM, name="onebit_adam", stage="compressed", seconds=[0.5])
    assert speed_up(fast, others) == 10
    faster = changed(fast, computation_seconds=0.25)
    assert speed_up(faster, others, equal_computation=True) == (5 - 0.75) / 0.5
    slower = changed(fast, computation_seconds=1.5)
    assert speed_up(slower, others, equal_computation=True) == 10
    assert speed_up(changed(fast, hosts=8), others) is None


def test_rates():
    bits = network_hosts.bits_per_second
    assert [bits("100mbit"), bits("2.5gbit"), bits("7bit")] == [1e8, 2.5e9, 7]
    for wrong in ("100", "0mbit", "1mb", "auto"):
        with pytest.raises(ValueError, match="or unlimited, not"):
            bits(wrong)
    sent, computation = 66_000_000, 0.25
    wire = 8 * sent / bits(auto_rate(sent, computation))
    assert 0.95 <= wire / (wire + computation) < 0.96


def test_baselines_are_measured_first():
    flags = {"exchanges": "sign_mean,pmean", "onebit_exchanges": "sign_mean,count_mean"}
    assert [(each.name, each.stage) for each in workloads(Config(**flags))] == [
        ("adam", None),
        ("pmean", None),
        ("onebit_adam", "warmup"),
        ("onebit_adam", "compressed"),
        ("onebit_adam, count_mean", "compressed"),
        ("sign_mean", None),
    ]


STUDY = """
title = "A study"
rule = "None."
tasks.text = { module = "train.lm", flags = [], learning_rate = [1e-3] }
arms.Baseline = { optimizer = "adam" }
arms."own steps" = { optimizer = "zero_one_adam" }
arms.votes = { optimizer = "binsgdm" }
"""


def test_a_studys_arms_are_measured_in_each_of_their_stages(tmp_path):
    (tmp_path / "study.toml").write_text(STUDY)
    config = Config(plan=tmp_path / "study.toml", exchanges="")
    with PROMOTION:
        chosen = workloads(config)
    assert [(each.name, each.stage) for each in chosen] == [
        ("adam", None),
        ("own steps", "variance"),
        ("own steps", "compressed"),
        ("own steps", "local"),
        ("votes", None),
    ]
    with pytest.raises(SystemExit, match="hosts of one device"):
        host_counts(changed(config, devices=2))


def arms_run(losses, rates, stages):
    case = Case("text", "", 1e-3, 0.9, 0)
    evaluations = {step: {"loss": loss} for step, loss in losses.items()}
    run = Run(case, {}, evaluations, 0, 0, 0, {}, rates, stages)
    return run._replace(sent_bytes=max(run.sent_by_step().values()))


def test_a_whole_run_is_the_sum_of_its_steps():
    rows = [
        changed(ADAM, seconds=[5.0]),
        changed(ADAM, name="signs", stage="warmup", seconds=[2.0]),
        changed(ADAM, name="signs", stage="compressed", seconds=[0.5]),
    ]
    rates = {"warmup": 100, "compressed": 10, "compressed/measuring": 12}
    stages = {
        10: {"warmup": 10, "compressed": 0, "compressed/measuring": 0},
        20: {"warmup": 12, "compressed": 7, "compressed/measuring": 1},
        30: {"warmup": 12, "compressed": 15, "compressed/measuring": 3},
    }
    adam = arms_run(
        {10: 3.0, 20: 2.0, 30: 2.0}, {"every": 800}, {n: {"every": n} for n in stages}
    )
    signs = arms_run({10: 4.0, 20: 2.0, 30: 1.9}, rates, stages)
    late = arms_run({10: None, 20: 2.6, 30: 2.1}, {"every": 80}, adam.stages)
    rows.append(changed(ADAM, name="late", seconds=[1.0]))
    found = whole_runs({"Adam": [adam], "signs": [signs], "late": [late]}, rows)
    assert found["signs"].seconds == {10: 20.0, 20: 24 + 8 * 0.5, 30: 24 + 18 * 0.5}
    assert [each.reached for each in found.values()] == [20, 20, None]
    assert signs.sent_bytes == 12 * 100 + 15 * 10 + 3 * 12
    _, _, adams, signs_row, lates = text(found).splitlines()
    assert adams.split(" | ")[3:] == ["0.04", "1.0", "20", "0.03", "1.0 |"]
    fewer = f"{30 * 800 / signs.sent_bytes:.1f}"
    cells = [fewer, "0.01", "4.5", "20", "0.01", "3.6 |"]
    assert signs_row.split(" | ")[2:] == cells
    assert lates.endswith("| 5.0 |  |  |  |")
    slow = [changed(row, rounds=4 if row.name == "adam" else 0) for row in rows]
    later = whole_runs({"Adam": [adam], "signs": [signs]}, slow, 0.05)
    assert later["Adam"].whole == pytest.approx(30 * (5 + 4 * 0.05))
    assert later["signs"].whole == found["signs"].whole


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (Config(optimizers="sgd"), "--optimizers takes adam, onebit_adam, not 'sgd'"),
        (Config(rates="auto", optimizers=""), "from Adam's step"),
        (Config(rates="100mb"), "a rate is given as 100mbit"),
        (Config(hosts="2,1"), "--hosts takes numbers from 2 on"),
        (Config(size=float("nan")), "--size must be at least 1"),
        (Config(json=Path("/nowhere/x.json")), "there is no folder /nowhere"),
    ],
)
def test_flags_that_cannot_be_measured_with_are_refused(config, what):
    with pytest.raises(SystemExit, match=what):
        host_counts(config)


HOSTS, DEVICES, COUNT = 4, 2, 1024
MESH_AXES = "host", "device"


@pytest.fixture(scope="module")
def program():
    """A mesh, and the collectives of a program on it."""
    auto = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((HOSTS, DEVICES), MESH_AXES, axis_types=auto)
    split = PartitionSpec(MESH_AXES)

    def exchanges(x):
        x = lax.psum(x, MESH_AXES) + lax.psum(x, "device") + lax.psum(x, "host")
        x += lax.all_to_all(x, MESH_AXES, 0, 0, tiled=True)
        x += lax.all_gather(x, "host", tiled=True)[: x.size]
        return x + jnp.tile(lax.psum_scatter(x, "host", tiled=True), 4)

    mapped = jax.shard_map(
        exchanges, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
    )
    argument = jax.ShapeDtypeStruct((mesh.size * COUNT,), jnp.float32)
    compiled = jax.jit(mapped).lower(argument).compile()
    return mesh, onebit_jax.traffic(compiled, mesh).collectives


def test_bytes_that_leave_a_host(program):
    size, n = 4 * COUNT, HOSTS * DEVICES
    # A ring over all: one edge leaves the host. Every pair of an all-to-all whose
    # ends are on two hosts. A host's devices each for themselves, elsewhere.
    expected = 2 * size * (n - 1) // n
    expected += DEVICES * (n - DEVICES) * size // n
    expected += DEVICES * 2 * size * (HOSTS - 1) // HOSTS
    expected += DEVICES * size * (HOSTS - 1)
    expected += DEVICES * size * (HOSTS - 1) // HOSTS
    _, collectives = program
    assert host_bytes(collectives, HOSTS, DEVICES) == expected
    # Of messages that wait for one another two go up and down a tree of 8 or of 4.
    rounds = sum(load.rounds for load in host_loads(collectives, HOSTS, DEVICES))
    assert rounds == 2 * 3 + 2 * 2 + 1 + 2 + 2
    assert host_bytes(collectives, 1, HOSTS * DEVICES) == 0
    assert host_bytes([collectives[0]._replace(axes=("data",))], 2, 1) == size


def test_collectives_alone_are_those_of_the_program(program):
    mesh, collectives = program
    alone, buffers = collectives_alone(collectives, mesh)
    again = onebit_jax.traffic(alone.lower(buffers).compile(), mesh).collectives
    assert sorted(c[:5] for c in again) == sorted(c[:5] for c in collectives)


def test_of_a_step_that_sends_nothing_nothing_runs_alone(program):
    alone, buffers = collectives_alone([], program[0])
    assert alone(buffers)[0] == []
    row = changed(ADAM, name="own steps", stage="local", sent_bytes=0)
    cells = tables(Results({}, {}, "", "", [row])).splitlines()[-1].split(" | ")
    assert cells[-3:] == ["0.00", "", " |"]


def test_measurements_are_kept_and_taken_again(tmp_path):
    file = tmp_path / "network.json"
    results = Results({"model": "tiny"}, {"cores": 2}, "a CPU", "0.0", [ADAM])
    results.add(changed(ADAM, rate="1gbit"))
    results.write(file)
    earlier = read_results(file)
    assert earlier == results
    again = changed(results, rows=[])
    again.go_on(file)
    assert again == results
    earlier.add(changed(ADAM, seconds=[1.0]))
    assert [each.median for each in earlier.rows] == [1.0, 5.0]
    earlier.add(changed(ADAM, hosts=2))
    assert [each.hosts for each in earlier.rows] == [2, 4, 4]
    with pytest.raises(SystemExit, match="remove it, or choose another --json"):
        changed(results, settings={"model": "mini"}).go_on(file)


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert str(network_hosts.missing()).endswith("run it as root.")


def namespaces(pid):
    listed = Path("/run/netns").glob(f"onebit{pid}-*")
    return [*listed, *Path("/etc/netns").glob(f"onebit{pid}-*")]


def processes(pid):
    running = []
    for name in {path.name for path in namespaces(pid)}:
        argv = ["ip", "netns", "pids", name]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        running += map(int, done.stdout.split())
    return running


@pytest.fixture
def running():
    flags = ["--hosts", "3", "--rates", "1kbit", "--optimizers", ""]
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
    network_hosts.remove_leftovers()


@needs_hosts
def test_hosts_are_taken_down_when_it_is_stopped(running):
    while not (there := processes(running.pid)):
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=30)
    assert running.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert not namespaces(running.pid)
    # A process that is killed is there until whoever has it has been told.
    deadline = time.monotonic() + 10
    while left := [pid for pid in there if Path("/proc", str(pid)).exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


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


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--optimizers=", ["pmean", "sign_mean"]),
        (
            "--optimizers=adam,onebit_adam",
            ["adam", "pmean", "onebit_adam", "onebit_adam", "sign_mean"],
        ),
    ],
)
def test_real_hosts(tmp_path, flags, names):
    file = tmp_path / "network.json"
    flags += " --hosts 2 --rates 1gbit --model tiny --size 1e6 --repeats 3"
    done = subprocess.run(
        [*COMMAND, *flags.split(), "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = read_results(file).rows
    assert [each.name for each in rows] == names
    for each in rows:
        # What left the interface is what was counted, and headers.
        assert 1 <= each.overhead < 1.1
        # Acknowledgements are more of a message of 0.3 MB than of one of 4.
        most = 1.2 if each.stage == "compressed" else 1.1
        assert 1.03 < each.packet_overhead < most
        # The limit holds, but for what an idle link sends at once.
        burst = 8 * 70 * 1024 / 1e9
        assert each.median > each.wire_seconds - 4 * burst
    pmean, signs = (row for row in rows if row.kind == "exchange")
    assert pmean.sent_bytes == 4_000_000
    assert 30 < pmean.sent_bytes / signs.sent_bytes < 32
