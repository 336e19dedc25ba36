"""A link between hosts that is cut: for some seconds, and for good."""

import re
import time

import pytest
from drills.cluster import OWN_STEPS, Cluster
from launching import SMALL_PRETRAIN
from runs import steps_of

from train.core.checkpoint import latest_step

CUT_AT, SYNC = 20, 8


def pretraining(hosts, drill, folder, *flags):
    command = [SMALL_PRETRAIN, *drill.flags(folder / "run"), *flags]
    return Cluster(hosts, folder, command, drill.environment)


@pytest.mark.parametrize("form", ["flat", "local"])
def test_a_link_that_comes_back_loses_nothing(drills, hosts, tmp_path, form):
    """The trainer means its loss in every step, those of workers' own too."""
    drill, out = drills(form), tmp_path / "run"
    with pretraining(hosts, drill, tmp_path) as run:
        run.until(lambda: len(steps_of(out)) >= CUT_AT)
        run.link(up=False)
        time.sleep(1)
        reached = len(steps_of(out))
        time.sleep(4)
        assert len(steps_of(out)) == reached < 40  # it was cut
        run.link(up=True)
        assert run.end() == [0, 0], run.said()
    drill.assert_nothing_was_lost(out)


NAMED = (
    r"error: .* did not end within 60 s: another process hangs or a link is down",
    r"error: another process was lost, or the link to it, in ",
    r"F\d{4} .*service detected fatal errors",
)


def assert_named(lines):
    assert any(re.match(pattern, x) for x in lines for pattern in NAMED), lines


@pytest.mark.parametrize("limits", [("--timeout", "60"), ("--heartbeat-timeout", "10")])
def test_a_link_that_stays_cut_ends_all_in_bounded_time(drill, hosts, tmp_path, limits):
    out = tmp_path / "run"
    with pretraining(hosts, drill, tmp_path, *limits) as run:
        run.until(lambda: len(steps_of(out)) >= CUT_AT)
        run.link(up=False)
        cut = time.monotonic()
        statuses = run.end()
        assert time.monotonic() - cut < 90
    assert all(statuses)
    for lines in run.said():
        assert_named(lines)
    drill.assert_goes_on(out)


def test_a_host_that_dies_in_an_interval(drills, hosts, tmp_path):
    """Its process is killed and its link cut at once, so that nothing tells of it."""
    drill, out = drills("local"), tmp_path / "run"
    with pretraining(hosts, drill, tmp_path, "--heartbeat-timeout", 10) as run:
        run.until(lambda: len(steps_of(out)) > CUT_AT)
        run.link(up=False)
        run.processes[1].kill()
        killed = time.monotonic()
        assert all(run.end())
        assert time.monotonic() - killed < 60
    assert_named(run.said()[0])
    assert latest_step(out) % SYNC
    drill.assert_goes_on(out)


INTERVAL = 40


def own_steps(hosts, folder, *flags):
    return Cluster(hosts, folder, [OWN_STEPS, "--interval", INTERVAL, *flags])


def steps_told(run):
    """The newest step that each process has told of."""
    told = [[x for x in lines if x.startswith("step ")] for lines in run.said()]
    return [int(lines[-1].split()[1]) if lines else 0 for lines in told]


def test_workers_take_their_own_steps_while_the_link_is_cut(hosts, tmp_path):
    """A program of each stage: they wait at the synchronisation, and lose nothing."""
    ends = {}
    for name, is_cut in (("whole", False), ("cut", True)):
        folder = tmp_path / name
        folder.mkdir()
        with own_steps(hosts, folder) as run:
            if is_cut:
                run.until(lambda: min(steps_told(run)) >= INTERVAL + 3)
                run.link(up=False)
                before = max(steps_told(run))
                time.sleep(0.1 * INTERVAL + 2)  # longer than an interval
                assert before < INTERVAL + 20
                assert steps_told(run) == [2 * INTERVAL - 1] * 2
                run.link(up=True)
            assert run.end() == [0, 0], run.said()
        ends[name] = [lines[-1] for lines in run.said()]
    assert "ended with" in ends["cut"][0]
    assert ends["cut"] == ends["whole"] == [ends["cut"][0]] * 2


def test_heartbeats_that_are_missing_end_workers_in_their_own_steps(hosts, tmp_path):
    """Steps need no link, but JAX's coordination service does."""
    with own_steps(hosts, tmp_path, "--heartbeat", 10, "--pause", 1) as run:
        run.until(lambda: min(steps_told(run)) >= 3)
        run.link(up=False)
        assert all(run.end())
    assert 3 < min(steps_told(run)) < INTERVAL - 1
