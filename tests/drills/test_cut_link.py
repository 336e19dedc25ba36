"""A link between hosts that is cut: for some seconds, and for good."""

import os
import re
import subprocess
import sys
import time

import pytest
from launching import ROOT, SMALL_PRETRAIN
from runs import steps_of

from benchmarks.network import hosts as network_hosts

CUT_AT = 20


@pytest.fixture
def hosts():
    lacking = network_hosts.missing()
    if lacking:
        pytest.skip(lacking)
    with network_hosts.joined(2) as hosts:
        yield hosts


class Cluster:
    """A run whose two processes are on a host each, found by an explicit address."""

    def __init__(self, hosts, drill, folder, *flags):
        self.hosts, self.out = hosts, folder / "run"
        self.outputs = [folder / f"{i}.txt" for i in range(2)]
        command = [sys.executable, SMALL_PRETRAIN, *drill.flags(self.out), *flags]
        command += ["--coordinator", f"{hosts[0].address}:29500", "--processes", 2]
        self.processes = []
        for i, (host, output) in enumerate(zip(hosts, self.outputs, strict=True)):
            with output.open("wb") as file:
                started = subprocess.Popen(
                    host.command([*map(str, command), "--process", str(i)]),
                    cwd=ROOT,
                    env=os.environ | drill.environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(started)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait(10)

    def until(self, steps):
        while len(steps_of(self.out)) < steps:
            assert all(p.poll() is None for p in self.processes), self.said()
            time.sleep(0.01)

    def link(self, up):
        switch = re.sub(r"-h\d+$", "-switch", self.hosts[1].name)
        how = ("master", "bridge") if up else ("nomaster",)
        command = ("ip", "-n", switch, "link", "set", "port1", *how)
        subprocess.run(command, check=True)

    def said(self):
        return [re.split(r"[\r\n]+", o.read_text().strip()) for o in self.outputs]


def test_a_link_that_comes_back_loses_nothing(drill, hosts, tmp_path):
    with Cluster(hosts, drill, tmp_path) as run:
        run.until(CUT_AT)
        run.link(up=False)
        time.sleep(1)
        reached = len(steps_of(run.out))
        time.sleep(4)
        assert len(steps_of(run.out)) == reached < 40  # it was cut
        run.link(up=True)
        assert [process.wait(120) for process in run.processes] == [0, 0], run.said()
    drill.assert_nothing_was_lost(run.out)


@pytest.mark.parametrize("limits", [("--timeout", "60"), ("--heartbeat-timeout", "10")])
def test_a_link_that_stays_cut_ends_all_in_bounded_time(drill, hosts, tmp_path, limits):
    with Cluster(hosts, drill, tmp_path, *limits) as run:
        run.until(CUT_AT)
        run.link(up=False)
        cut = time.monotonic()
        statuses = [process.wait(120) for process in run.processes]
        assert time.monotonic() - cut < 90
    assert all(statuses)
    named = (
        r"error: .* did not end within 60 s: another process hangs or a link is down",
        r"error: another process was lost, or the link to it, in ",
        r"F\d{4} .*service detected fatal errors",
    )
    for lines in run.said():
        assert any(re.match(pattern, x) for x in lines for pattern in named), lines
    drill.assert_goes_on(run.out)
