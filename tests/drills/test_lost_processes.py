"""Processes that are killed or hang, wherever and whenever."""

import os
import signal
import time

import pytest
from runs import steps_of

from train.core.checkpoint import latest_step

STEPS, FREEZE, EVERY, SYNC = 40, 12, 5, 8
WARMUP, COMPRESSED = FREEZE - 5, FREEZE + 9
"""Steps at which the fault comes."""


def restarted(drill, out, launched, seconds):
    """The launcher starts all again in time, and the run ends as if nothing was."""
    since = time.monotonic()
    launched.until(lambda: "restart 1 of 1" in launched.said, 120)
    assert time.monotonic() - since < seconds
    reached = len(steps_of(out)), latest_step(out)
    assert launched.end(300) == 0, launched.said
    drill.assert_nothing_was_lost(out)
    return reached


@pytest.mark.parametrize(
    ("form", "process", "moment"),
    [
        ("flat", 1, WARMUP),
        ("flat", 1, COMPRESSED),
        ("flat", 0, COMPRESSED),  # the coordinator
        ("counts", 1, COMPRESSED),
        ("hierarchical", 1, COMPRESSED),
        ("local", 1, COMPRESSED),
    ],
)
def test_a_killed_process(drills, tmp_path, form, process, moment):
    drill, out = drills(form), tmp_path / "run"
    with drill.until(out, moment, launcher=("--restarts", 1)) as launched:
        os.kill(launched.workers[process], signal.SIGKILL)
        reached, saved = restarted(drill, out, launched, 10)
    assert reached < STEPS
    assert (reached <= FREEZE) == (moment == WARMUP)
    # Not more is trained again than since the last checkpoint.
    assert reached - saved <= EVERY
    assert saved % SYNC  # of local steps: in the middle of an interval
    killed = f"[launch] process {process} failed first, killed by SIGKILL"
    assert killed in launched.said


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
    with drill.until(out, COMPRESSED, *limits, launcher=("--restarts", 1)) as launched:
        os.kill(launched.workers[process], signal.SIGSTOP)
        restarted(drill, out, launched, 90)
    (line,) = (line for line in launched.lines if "lost or hangs" in line)
    assert f"[launch] process {1 - process} ended, as another was" in line
    assert f"still running then: process {process}." in line
    assert sentence in launched.said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_ended(drill, tmp_path, number):
    out = tmp_path / "run"
    with drill.until(out, COMPRESSED) as launched:
        launched.process.send_signal(number)
        launched.end(20)
    assert len(steps_of(out)) < STEPS
    drill.assert_goes_on(out)
