"""Drills: faults in real runs of several processes; minutes long, by `make drills`."""

import contextlib

import pytest
from launching import SMALL_PRETRAIN, Launched, arrays_of
from runs import steps_of, without_speed, write_corpus

from benchmarks.network import hosts as network_hosts
from train.core import metrics_log

STEPS, FREEZE, EVERY, SYNC = 40, 12, 5, 8

# Their losses are held to those of one worker, which exchanges nothing; counts have the
# default's warm-up of 8 bits.
EXACT = "--warmup-bits", 32
FORMS = {
    "flat": (1, "--freeze-step", FREEZE, *EXACT),
    "counts": (1, "--freeze-step", FREEZE, "--exchange", "count_mean"),
    "hierarchical": (2, "--freeze-step", FREEZE, *EXACT),
    "local": (1, "--optimizer", "local", "--inner", "muon", "--sync", SYNC),
}
"""Devices of each of two processes, and flags."""


def pytest_collection_modifyitems(items):
    for item in items:
        if "drills" in item.path.parts:
            item.add_marker(pytest.mark.slow)


class Drill:
    """Runs of one form, in folders of their own, and the one that had no fault."""

    def __init__(self, base, form="flat"):
        self.base = base
        self.devices, *self.form = FORMS[form]
        self.environment = {"JAX_COMPILATION_CACHE_DIR": str(base.parent / "compiled")}
        self.whole = base / "whole"
        self.corpus = base / "corpus"
        self.corpus.mkdir()
        write_corpus(self.corpus)

    def flags(self, out):
        settings = {
            "--corpus": self.corpus,
            "--vocab-size": 100,
            "--steps": STEPS,
            "--batch": 8,
            "--seq": 16,
            "--warmup-steps": 2,
            "--checkpoint-every": EVERY,
            "--eval-every": STEPS,
            "--eval-sequences": 8,
            "--log-every": 1,
            "--out": out,
        }
        return [*self.form, *(text for item in settings.items() for text in item)]

    def launch(self, *flags, launcher=(), processes=2):
        return Launched(
            *("--devices-per-process", self.devices, "--grace", 3, *launcher),
            command=[SMALL_PRETRAIN, *flags],
            processes=processes,
            env=self.environment,
        )

    @contextlib.contextmanager
    def until(self, out, steps, *flags, launcher=()):
        """A run that has come to a step; nothing of it may be left in the end."""
        with self.launch(*self.flags(out), *flags, launcher=launcher) as launched:
            launched.pids()
            launched.until(lambda: len(steps_of(out)) >= steps)
            yield launched
            launched.assert_nothing_is_left()

    def finish(self, *flags, processes=2):
        with self.launch(*flags, processes=processes) as launched:
            assert launched.end(300) == 0, launched.said
        return launched.said

    def assert_goes_on(self, out):
        self.finish("--resume", "--out", out)
        self.assert_nothing_was_lost(out)

    def assert_nothing_was_lost(self, out):
        """The run ended as if nothing had happened, to the last bit."""
        ours, theirs = (arrays_of(folder, STEPS) for folder in (out, self.whole))
        assert ours.keys() == theirs.keys()
        differing = [k for k in ours if ours[k].tobytes() != theirs[k].tobytes()]
        assert not differing
        errors = [k for k in ours if "_error" in k and "warmup" not in k]
        assert any(ours[k].any() for k in errors), "there are errors to be kept"
        lines = (
            without_speed(metrics_log.read(folder)) for folder in (out, self.whole)
        )
        assert next(lines) == next(lines)
        names = {path.name for path in (out / "checkpoints").iterdir()}
        assert names == {str(STEPS - EVERY), str(STEPS)}


@pytest.fixture(scope="session")
def drills(tmp_path_factory):
    """The drill of each form; its run without a fault is made when first asked for."""
    made = {}

    def of(form):
        if form not in made:
            drill = made[form] = Drill(tmp_path_factory.mktemp(form), form)
            drill.finish(*drill.flags(drill.whole))
        return made[form]

    return of


@pytest.fixture
def drill(drills):
    return drills("flat")


@pytest.fixture
def hosts():
    lacking = network_hosts.missing()
    if lacking:
        pytest.skip(lacking)
    with network_hosts.joined(2) as hosts:
        yield hosts
