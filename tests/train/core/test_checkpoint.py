"""Checkpoints give back what they were given, or say what is wrong with them."""

import contextlib
import dataclasses
import errno
import gc
import json
import resource
import shutil
import time
from contextlib import closing
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from train.core import checkpoint
from train.core.checkpoint import (
    Checkpoint,
    Checkpoints,
    latest_step,
    saved_model,
)
from train.core.errors import InputError
from train.core.mesh import make_mesh
from train.core.optimizer import freeze_rule, learning_rate_schedule, make_optimizer
from train.core.totals import Totals

MODEL = {"size": 128, "dropout": 0.1, "layers": 2, "optimizer": "onebit_adam"}
TOTALS = Totals(3, "compressed", {"warmup": 1, "compressed": 2}, {}, 1, 77)

# At an error Orbax closes the event loop that its other reads and writes answer to.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(autouse=True)
def _garbage_of_its_own():
    """Futures that Orbax has not awaited are found in the test that left them."""
    gc.freeze()  # what is older is not looked at, which would take a second
    yield
    gc.collect()
    gc.unfreeze()


def make_params():
    return {"layers": {0: {"kernel": jnp.arange(1500.0) / 7}}, "bias": jnp.ones(3)}


@pytest.fixture(scope="module")
def tx():
    return make_optimizer(
        "onebit_adam",
        learning_rate_schedule(1e-3, 1, 10),
        freeze_rule(1, 1, 10),
        onebit_jax.sign_mean("data"),
        weight_decay=0.01,
        clip=1.0,
    )


@pytest.fixture(scope="module")
def trained(tx):
    """A checkpoint with errors that differ from worker to worker."""

    def loss_fn(params, batch):
        products = [jnp.sum(p) * jnp.mean(batch) for p in jax.tree.leaves(params)]
        return jnp.square(sum(products)) * 1e-6

    run = onebit_jax.data_parallel(loss_fn, tx, make_mesh(4))
    params, state = run.init(make_params())
    for step in range(3):
        batch = jax.random.normal(jax.random.key(step), (8,))
        params, state, _ = run.step(params, state, batch)
    return Checkpoint(params, state, TOTALS, {"next_index": 3})


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with closing(Checkpoints(folder, MODEL)) as checkpoints:
        for steps in (2, 3):
            totals = dataclasses.replace(TOTALS, steps=steps)
            checkpoints.save(trained._replace(totals=totals), make_mesh(4))
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(saved, tmp_path / "run")


def restore(folder, tx, workers=4, model=MODEL):
    with closing(Checkpoints(folder, model)) as checkpoints:
        return checkpoints.restore(tx, make_params(), make_mesh(workers))


def test_everything_comes_back_in_its_place(saved, tx, trained):
    restored, workers = restore(saved, tx)
    assert workers == 4
    assert (restored.totals, restored.data) == (trained.totals, trained.data)
    chex.assert_trees_all_equal(restored.params, trained.params)
    chex.assert_trees_all_equal(restored.state, trained.state)
    assert any(np.any(x) for x in jax.tree.leaves(trained.state))
    for ours, theirs in zip(
        jax.tree.leaves(restored), jax.tree.leaves(trained), strict=True
    ):
        if isinstance(theirs, jax.Array):
            assert ours.sharding.is_equivalent_to(theirs.sharding, theirs.ndim)
            assert ours.dtype == theirs.dtype


def halve(files):
    for file in filter(Path.is_file, files):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def remove(files):
    for file in filter(Path.is_file, files):
        file.unlink()


@pytest.mark.parametrize(
    ("files", "damage"),
    [
        ("about/**/*", halve),
        ("arrays/**/d/*", halve),
        ("arrays/_METADATA", halve),
        ("arrays/manifest.ocdbt", remove),
        ("arrays/**/*", remove),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_good(
    folder, tx, files, damage
):
    newest = folder / "checkpoints" / "3"
    damage(newest.glob(files))
    message = rf"the checkpoint {newest} is damaged.*; move that folder away to go on"
    with pytest.raises(InputError, match=message):
        restore(folder, tx)
    shutil.rmtree(newest)
    assert restore(folder, tx)[0].totals.steps == 2


@pytest.mark.parametrize(
    ("cause", "expected", "message"),
    [
        (OSError(errno.EIO, "I/O"), InputError, r"cannot be read \(Input/output error"),
        (MemoryError("none left"), MemoryError, "none left"),
        (RuntimeError("RESOURCE_EXHAUSTED: memory"), RuntimeError, "RESOURCE"),
    ],
)
def test_what_is_not_the_checkpoints_fault_is_not_called_damage(
    folder, tx, monkeypatch, cause, expected, message
):
    def fail(*_, **__):
        raise cause

    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "restore", fail)
    with pytest.raises(expected, match=message):
        restore(folder, tx)


@pytest.mark.parametrize("what", ["totals", "state"])
def test_a_checkpoint_of_another_version_is_refused(folder, tx, what):
    if what == "totals":
        about = folder / "checkpoints" / "3" / "about" / "metadata"
        values = json.loads(about.read_text())
        values["totals"]["skipped_in_all"] = values["totals"].pop("skipped")
        about.write_text(json.dumps(values))
    else:
        more = {"more": jnp.zeros(3)}
        tx = optax.chain(tx, optax.GradientTransformation(lambda _: more, None))
    with pytest.raises(InputError, match="or go on with the version that wrote it"):
        restore(folder, tx)


def test_a_missing_checkpoint_is_said_to_be(tmp_path, tx):
    assert latest_step(tmp_path / "nowhere") == 0
    with pytest.raises(InputError, match="there is no checkpoint in"):
        restore(tmp_path, tx)


def test_a_checkpoint_of_another_model_is_refused_by_what_differs(saved, tx):
    other = MODEL | {"size": 256, "dropout": 0.2, "optimizer": "adam"}
    with pytest.raises(InputError) as caught:
        restore(saved, tx, model=other)
    message = str(caught.value)
    assert "is of another model (size 128 there and 256 here, dropout 0.1 there" in (
        message
    )
    assert "optimizer onebit_adam there and adam here" in message
    assert "layers" not in message
    assert saved_model(saved, 3) == MODEL


@contextlib.contextmanager
def full_disk():
    """No file can be longer than a few kilobytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_without_room_is_said_and_the_one_before_is_whole(tmp_path):
    tx, mesh = optax.identity(), make_mesh(2)
    everywhere = jax.NamedSharding(mesh, jax.P())
    params = jax.device_put({"w": jnp.arange(1 << 16)}, everywhere)
    first = Checkpoint(params, onebit_jax.init(tx, params, mesh), Totals(1), {})
    with closing(Checkpoints(tmp_path, MODEL)) as checkpoints:
        checkpoints.save(first, mesh)
        with full_disk(), pytest.raises(InputError) as caught:
            checkpoints.save(first._replace(totals=Totals(2)), mesh)
    assert str(caught.value) == (
        f"the checkpoint of step 2 cannot be written to {tmp_path / 'checkpoints'} "
        "(File too large); mend that (there must be room for 3 of them), and go on "
        "from that of step 1 by --resume."
    )
    # In this process, which goes on, the other writes come to their ends meanwhile.
    time.sleep(1)
    with closing(Checkpoints(tmp_path, MODEL)) as checkpoints:
        restored, _ = checkpoints.restore(tx, params, mesh)
    assert restored.totals == Totals(1)
    chex.assert_trees_all_equal(restored.params, params)
    # What was half written is cleared away in a thread of Orbax's own.
    deadline = time.monotonic() + 20
    while [path.name for path in (tmp_path / "checkpoints").iterdir()] != ["1"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_error_of_ones_own_is_not_taken_for_a_full_disk(tmp_path, trained):
    wrong = trained._replace(data={"next": object()})
    refused = pytest.raises(TypeError, match="object")
    with closing(Checkpoints(tmp_path, MODEL)) as checkpoints, refused:
        checkpoints.save(wrong, make_mesh(4))
