"""Processes that are killed or hang, wherever and whenever."""

import os
import signal
import time

import pytest
from runs import steps_of

from train.core.checkpoint import latest_step

STEPS, FREEZE, EVERY = 40, 12, 5
MOMENTS = {"warm-up": FREEZE - 5, "compressed": FREEZE + 9}


@pytest.mark.parametrize(
    ("form", "process", "moment"),
    [
        ("flat", 1, "warm-up"),
        ("flat", 1, "compressed"),
        ("flat", 0, "compressed"),  # the coordinator
        ("counts", 1, "compressed"),
        ("hierarchical", 1, "compressed"),
    ],
)
def test_a_killed_process(drills, tmp_path, form, process, moment):
    drill, out = drills(form), tmp_path / "run"
    with drill.run(out, launcher=("--restarts", 1)) as launched:
        victim = launched.pids()[process]
        launched.until(lambda: len(steps_of(out)) >= MOMENTS[moment])
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        launched.until(lambda: "restart 1 of 1" in launched.said, 30)
        assert time.monotonic() - killed < 10
        reached = len(steps_of(out))
        assert reached < STEPS
        assert (reached <= FREEZE) == (moment == "warm-up")
        # Not more is trained again than since the last checkpoint.
        assert reached - latest_step(out) <= EVERY
        assert launched.end(300) == 0, launched.said
        launched.assert_nothing_is_left()
    assert f"[launch] process {process} failed first, killed by SIGKILL" in (
        launched.said
    )
    drill.assert_nothing_was_lost(out)


# Missing heartbeats are noticed after a half to the whole of their limit.
TIMEOUT = ("--timeout", 60, "--heartbeat-timeout", 300)


@pytest.mark.parametrize(
    ("process", "limits", "sentence"),
    [
        (1, TIMEOUT, "did not end within 60 s: another process hangs"),
        (0, TIMEOUT, "did not end within 60 s: another process hangs"),
        (1, ("--heartbeat-timeout", 15), "stopped sending heartbeats"),
        (0, ("--heartbeat-timeout", 15), "DEADLINE_EXCEEDED"),
    ],
)
def test_a_process_that_hangs(drill, tmp_path, process, limits, sentence):
    out = tmp_path / "run"
    with drill.run(out, *limits, launcher=("--restarts", 1)) as launched:
        victim = launched.pids()[process]
        launched.until(lambda: len(steps_of(out)) >= MOMENTS["compressed"])
        os.kill(victim, signal.SIGSTOP)
        stopped = time.monotonic()
        launched.until(lambda: "restart 1 of 1" in launched.said, 120)
        assert time.monotonic() - stopped < 90
        assert launched.end(300) == 0, launched.said
        launched.assert_nothing_is_left()
    (line,) = (line for line in launched.lines if "lost or hangs" in line)
    assert f"[launch] process {1 - process} ended, as another was" in line
    assert f"still running then: process {process}." in line
    assert sentence in launched.said
    drill.assert_nothing_was_lost(out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended(drill, tmp_path, number):
    out = tmp_path / "run"
    with drill.run(out) as launched:
        launched.pids()
        launched.until(lambda: len(steps_of(out)) >= MOMENTS["compressed"])
        launched.process.send_signal(number)
        launched.end(20)
        launched.assert_nothing_is_left()
    assert len(steps_of(out)) < STEPS
    drill.finish(drill.resume(out))
    drill.assert_nothing_was_lost(out)
