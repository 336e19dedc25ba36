import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import onebit_jax
from benchmarks import network_hosts, network_processes
from benchmarks.network import Config, auto_rate, cases
from benchmarks.network_report import Results, Row, markdown, speed_up, table
from benchmarks.network_traffic import collectives_alone, host_bytes

ROOT = Path(__file__).parents[1]
MISSING = network_hosts.missing()
needs_hosts = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def row(**changes):
    given = {
        "hosts": 4,
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
    assert speed_up(dataclasses.replace(fast, hosts=8), rows) is None


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("9kbit", 9e3), ("7bit", 7.0)],
)
def test_rates(rate, bits):
    assert network_hosts.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["100", "0mbit", "1mb", "-1mbit", "auto", "1 gbit"])
def test_what_is_no_rate_is_refused(rate):
    with pytest.raises(ValueError, match="100mbit, 2.5gbit or unlimited"):
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


@pytest.mark.parametrize("config", [Config(optimizers="sgd"), Config(exchanges="sum")])
def test_unknown_names_are_refused(config):
    with pytest.raises(SystemExit, match="not"):
        cases(config)


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
