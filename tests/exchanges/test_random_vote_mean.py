"""Random votes: their numbers, their expectation, and what is shared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges.replayed_votes import LEVELS, replayed
from scipy import stats
from virtual_workers import Workers, mesh_of, mesh_over

import onebit_jax
from onebit_jax import hierarchical, per_shard, random_vote_mean, vote_mean

BACK = ("mean", "vote")
each_back = pytest.mark.parametrize("back", BACK)


@functools.cache
def program(size, workers=4, back="mean", seed=0):
    """A compiled update of values of one leaf, and its first state."""
    tx = random_vote_mean("data", back=back, seed=seed)
    run = Workers(tx, jnp.zeros(size), mesh_of(workers))
    return run, run.state


def answers(values, steps=1, first=0, **options):
    """(steps, size): what is agreed on from the so-manieth call on."""
    run, state = program(values.shape[1], len(values), **options)
    run.state = state._replace(count=state.count + first)
    values = jnp.asarray(values, jnp.float32)
    return np.stack([np.asarray(run.update(values), float) for _ in range(steps)])


@each_back
# The last is a program of other tests as well.
@pytest.mark.parametrize(
    ("workers", "size", "seed"), [(1, 300, 2), (3, 300, 2), (4, 500, 0)]
)
def test_is_its_formula(back, workers, size, seed):
    """For each value, worker, server and call; float32 decides no vote."""
    values = np.random.default_rng(workers).normal(0, 0.6, size=(workers, size))
    values = values.astype(np.float32)
    found = answers(values, 3, 5, back=back, seed=seed)
    expected = [replayed(values, count, back, seed=seed) for count in (5, 6, 7)]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


FALSE_ALARM = 1e-6


@each_back
def test_the_expectation_is_the_mean_of_the_values(back):
    """A false alarm, of all values together, once in a million seeds."""
    workers, kinds, each, steps = 4, 48, 4096, 4
    rng = np.random.default_rng(0)
    values = rng.uniform(-1, 1, size=(workers, kinds))
    values[:, :4] = 0, 1, -1, 0.37
    values[:, 4:16] = rng.uniform(-1, 1, 12)
    values = np.clip(values.astype(np.float32), -1, 1)
    found = answers(np.repeat(values, each, axis=1), steps, back=back)
    samples = found.reshape(steps, kinds, each).swapaxes(0, 1).reshape(kinds, -1)
    off = np.abs(samples.mean(axis=1) - values.mean(axis=0, dtype=float))
    limit = stats.norm.isf(FALSE_ALARM / kinds / 2)
    # What does not vary must be right; numbers of 16 bits may be half a level off.
    assert np.all(
        off <= limit * samples.std(axis=1) / np.sqrt(steps * each) + 1 / LEVELS
    )
    assert limit * samples.std(axis=1).max() / np.sqrt(steps * each) < 0.05, "too few"


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_equal_values_have_one_of_the_two_nearest_means(workers):
    """Independent votes would be anything, and votes by the same numbers -1 or 1."""
    values = np.linspace(-1, 1, 960, dtype=np.float32)
    found = answers(np.stack([values] * workers), 4)
    assert np.abs(found - values).max() < 2 / workers
    assert np.ptp(found, axis=0).max() > 1 / workers, "at random"


@pytest.mark.parametrize("workers", [2, 6])
def test_zeros_of_an_even_number_of_workers_are_zero(workers):
    # Many calls: a level too few is one of 65,536.
    assert not answers(np.zeros((workers, 960)), 84).any()


@each_back
def test_ends_are_certain_and_what_is_beyond_counts_as_they_do(back):
    values = np.array([1, -1, 1.5, -1e30, np.inf, -np.inf, np.nan] * 100)
    found = answers(np.stack([values] * 3), 3, back=back)
    expected = np.array([1, -1, 1, -1, 1, -1, -1] * 100)
    np.testing.assert_array_equal(found, [expected] * 3)


def test_devices_of_a_host_and_shards_draw_their_own():
    """Halves of a leaf, which devices, or shards, exchange each by itself."""
    half = np.full((4, 256), 0.3, np.float32)
    both = jnp.asarray(np.concatenate([half, half], axis=1))
    hosts = Workers(
        hierarchical(random_vote_mean("host"), "device"),
        both[0],
        mesh_over({"host": 2, "device": 2}),
    )
    spec = jax.P("model")
    shards = Workers(
        per_shard(random_vote_mean("data"), spec),
        both[0],
        mesh_over({"data": 2, "model": 2}),
        axes=("data",),
        specs=spec,
    )
    for run, own in ((hosts, both), (shards, both[:2])):
        found = np.asarray(run.update(own))
        assert set(np.unique(found)) <= {-1.0, 0.0, 1.0}
        assert (found[:256] != found[256:]).any()


def test_the_count_of_calls_moves_to_other_workers():
    run, first = program(40, 4)
    tx = random_vote_mean("data")
    state = first._replace(count=first.count + 7)
    moved = onebit_jax.resize(state, tx, jnp.zeros(40), run.mesh, mesh_of(2))
    assert int(moved.count) == 7


def test_arguments_that_make_no_sense_are_refused():
    for exchange in (random_vote_mean, vote_mean):
        with pytest.raises(ValueError, match=r"back must be '.*' or '.*', got 'sum'"):
            exchange("data", back="sum")
    with pytest.raises(TypeError):
        random_vote_mean("data", seed=0.5)


def test_with_64_bits_it_draws_the_same_numbers():
    values = np.random.default_rng(0).uniform(-1, 1, size=(4, 100))
    expected = answers(values)
    with jax.enable_x64(True):
        run = Workers(random_vote_mean("data"), jnp.zeros(100, "f4"), mesh_of(4))
        found = run.update(jnp.asarray(values, jnp.float32))
    np.testing.assert_array_equal(found, expected[0])
