"""A network learns images as one worker or several would, and is judged exactly."""

from pathlib import Path

import chex
import grain
import jax
import numpy as np
import optax
import pytest
from launching import Launched
from runs import PROMOTION, without_speed

import onebit_jax
from models.convolutional import ConvolutionalConfig, pooled_statistics
from models.losses import cross_entropy
from train.core import metrics_log
from train.core.batches import batches, element
from train.core.errors import InputError
from train.core.mesh import make_mesh
from train.images import command
from train.images.config import ImagesConfig, check
from train.images.data import GREY, Arrays, Dataset, Labelled, augmented, examples
from train.images.task import (
    Network,
    evaluation,
    init_params,
    make_task,
    training_loss,
)

CONFIG = ConvolutionalConfig(num_classes=4, channels=1)


def random_images(count, side=8):
    rng = np.random.default_rng(0)
    labels = np.arange(count) % CONFIG.num_classes
    shape = (count, side, side, CONFIG.channels)
    # Classes differ in brightness.
    images = rng.integers(0, 100, shape) + 50 * labels[:, None, None, None]
    return Arrays(images.astype(np.uint8), labels)


@pytest.fixture(scope="module")
def network():
    return Network(CONFIG)


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 0)


def test_each_worker_normalises_by_its_own_share(network, params):
    images = random_images(8)
    batch = element(batches(examples(images, 0, augment=False), 8), 0)
    loss = jax.jit(training_loss(network))

    def mean_loss(*shares):
        parts = [Labelled(*(x[rows] for x in batch)) for rows in shares]
        return np.mean([loss(params, part, 0).item() for part in parts])

    tx = optax.chain(onebit_jax.exact_mean("data"), optax.sgd(0.0))
    run = onebit_jax.data_parallel(training_loss(network), tx, make_mesh(2, "flat"))
    *_, stepped = run.step(*run.init(params), batch, np.uint32(0))
    np.testing.assert_allclose(stepped, mean_loss(slice(4), slice(4, 8)), rtol=1e-6)
    assert abs(stepped - mean_loss(slice(8))) > 1e-4


@pytest.mark.slow
def test_each_part_of_a_share_is_normalised_by_itself(network, params):
    images, labels = element(
        batches(examples(random_images(8), 0, augment=False), 8), 0
    )
    whole, parted = training_loss(network), training_loss(network, 2)
    halves = [Labelled(images[i : i + 4], labels[i : i + 4]) for i in (0, 4)]
    expected = [jax.value_and_grad(whole)(params, half, 0) for half in halves]
    mean = jax.tree.map(lambda one, other: (one + other) / 2, *expected)
    found = jax.value_and_grad(parted)(params, Labelled(images, labels), 0)
    # Sums of gradients of up to 0.1 round at some 1e-6.
    chex.assert_trees_all_close(found, mean, rtol=1e-4, atol=1e-5)


def test_an_evaluation_is_of_each_image_by_itself(network, params):
    """By the pooled statistics of the first training batches, whatever the batch."""
    # The network is one that errs in about half of them.
    rng = np.random.default_rng(1)
    moved = jax.tree.map(lambda x: x + np.float32(rng.normal(size=x.shape)), params)
    training = batches(examples(random_images(16), 0, augment=True), 8)
    images = random_images(11)
    train, evaluate = jax.jit(network.train), jax.jit(network.evaluate)
    statistics = pooled_statistics(
        [jax.device_get(train(moved, element(training, i).images)[1]) for i in range(2)]
    )
    single = [evaluate(moved, statistics, x.images[None])[0] for x in images]
    expected = {
        "loss": np.mean(cross_entropy(np.stack(single), images.labels)),
        "accuracy": np.mean(np.argmax(single, axis=1) == images.labels),
    }
    assert 0 < expected["accuracy"] < 1
    reverse = Arrays(images.images[::-1], images.labels[::-1])
    for held_out, batch, workers in ((images, 4, 1), (reverse, 8, 2)):
        mesh = make_mesh(workers, "flat")
        source = grain.MapDataset.source(held_out)
        compiled = evaluation(network, training, 2, source, batch, mesh)(moved)
        chex.assert_trees_all_close(compiled(moved), expected, rtol=1e-4)


def test_an_augmented_image_is_a_window_of_the_padded_one_or_of_its_mirror():
    example = random_images(1, side=16)[0]
    padded = np.pad(example.images, ((2, 2), (2, 2), (0, 0)), constant_values=GREY)
    windows = {
        part[:, ::step].tobytes()
        for part in (padded[i : i + 16, j : j + 16] for i in range(5) for j in range(5))
        for step in (1, -1)
    }
    rng = np.random.default_rng(0)
    many = {augmented(example, rng).images.tobytes() for _ in range(500)}
    assert len(windows) == 50
    assert many == windows


@pytest.mark.slow
def test_two_processes_train_and_evaluate_as_one_does(tmp_path):
    flags = "--batch 16 --steps 4 --freeze-step 2 --warmup-steps 1 --eval-every 2"
    flags += " --statistics-images 32 --log-every 1 --workers 2"
    lines = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        arguments = ["-m", "train.images", *flags.split(), "--out", out]
        with Launched(command=arguments, processes=processes) as launched:
            assert launched.end() == 0, launched.said
        lines.append(without_speed(metrics_log.read(out)))
    assert sum("eval_accuracy" in line for line in lines[0]) == 2
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_digits_are_learnt(tmp_path):
    config = ImagesConfig(out=tmp_path / "run", workers=8)
    with PROMOTION:
        command.train_images(config)
    last = metrics_log.read(config.out)[-1]
    assert last["eval_accuracy"] > 0.95


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"data": "folder"}, "--data folder is on the disk; give --path FOLDER"),
        ({"path": Path("x")}, "--path is of images on the disk, and --data is digits"),
        ({"size": 8}, "--size is of a folder's images, and --data is digits"),
    ],
)
def test_flags_that_cannot_be_trained_with_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        check(ImagesConfig(**flags))


@pytest.mark.parametrize(
    ("flags", "augments"),
    [
        ({"data": "mnist-5k"}, False),
        ({"data": "cifar-10"}, True),
        ({"data": "digits", "augment": True}, True),
        ({"data": "folder", "augment": False}, False),
    ],
)
def test_all_but_digits_are_augmented_unless_asked_for(flags, augments):
    images = random_images(8)
    data = Dataset(training=images, held_out=images, num_classes=4, contents="")
    config = ImagesConfig(batch=16, **flags)
    task = make_task(config, data, make_mesh(2, "flat"), config.steps)
    seen = {x.tobytes() for x in element(task.phases[0].batches, 0).images}
    assert bool(seen - {x.tobytes() for x in images.images}) == augments
