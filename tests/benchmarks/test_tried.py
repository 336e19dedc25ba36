"""Exchanges of studies alone: largest values, momenta, errors at the end."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from runs import PROMOTION

import onebit_jax
from benchmarks.convergence.arms import make_arm, stage_bytes
from benchmarks.convergence.last_errors import with_last_errors
from benchmarks.convergence.momenta import averaged_momenta, muon_of_momenta
from benchmarks.convergence.top_k import KEPT, TopK
from train.core.optimizer import INNER, decays

# Arms of one study: test-all runs them.
pytestmark = pytest.mark.slow

WORKERS = 4


@pytest.fixture(autouse=True)
def optax_dtypes():
    """Optax's own steps mix dtypes."""
    with PROMOTION:
        yield


PARAMS = {"kernel": jnp.zeros((32, 32)), "head": {"kernel": jnp.zeros((32, 32))}}
RATE = optax.schedules.constant_schedule(1e-2)


def linear(params, x):
    """A loss whose gradients are the batch, whatever the parameters are."""
    return sum(jnp.sum(p * x.mean(0)) for p in jax.tree.leaves(params))


def batch(step):
    return jax.random.normal(jax.random.key(step), (WORKERS, 32, 32))


def trained(tx, steps):
    """Parameters and state after each step of simulated workers."""
    run = onebit_jax.simulated(linear, tx, WORKERS, axis="data")
    params, state = run.init(PARAMS)
    for step in range(steps):
        params, state, _ = run.step(params, state, batch(step))
        yield jax.device_get((params, state))


def test_the_largest_values_of_a_block_are_sent_by_four_levels():
    x = np.random.default_rng(0).normal(size=(3, 1024)).astype(np.float32)
    x[2, 7:] = 0  # a block cut short
    words = TopK().encode(jnp.asarray(x), jnp.array([1024, 1024, 7]))
    assert words.shape == (3, TopK().words)
    decoded = np.asarray(TopK().decode(words[None])[0])
    for block, sent in zip(x[:2], decoded[:2], strict=True):
        order = np.argsort(-np.abs(block))
        assert set(np.flatnonzero(sent)) == set(order[:KEPT])
        for half in (order[: KEPT // 2], order[KEPT // 2 : KEPT]):
            expected = np.sign(block[half]) * np.abs(block[half]).mean()
            np.testing.assert_allclose(sent[half], expected, rtol=1e-6)
    assert np.isfinite(decoded).all()
    nan = jnp.asarray(x[:1]).at[0, 5].set(jnp.nan)
    assert not np.isfinite(TopK().decode(TopK().encode(nan, jnp.array([1024])))).all()


def test_momenta_agree_after_a_synchronisation_and_are_the_workers_own_before():
    exact = onebit_jax.exact_mean("data")
    own = optax.adam(RATE, b1=0.9)
    local = onebit_jax.local_steps(own, exact, onebit_jax.every(2))
    alone = trained(onebit_jax.local_steps(own, exact, onebit_jax.every(2)), 2)
    agreed = trained(averaged_momenta(local, exact), 2)
    for step, ((_, base), (_, state)) in enumerate(zip(alone, agreed, strict=True)):
        expected, found = (
            jax.tree.map(lambda node: node.value, s.inner.inner[0], is_leaf=is_own)
            for s in (base, state.steps)
        )
        means = jax.tree.map(lambda m: np.broadcast_to(m.mean(0), m.shape), expected.mu)
        mu = means if step else expected.mu
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            (found.mu, found.nu),
            (mu, expected.nu),
        )


def is_own(node):
    return isinstance(node, onebit_jax.WorkerLocal)


def test_what_the_last_message_lacks_is_sent_after_it():
    steps = 6
    exchange = onebit_jax.sign_mean("data")
    sync = onebit_jax.every(2).ending_at(steps)
    local = onebit_jax.local_steps(optax.sgd(1e-2), exchange, sync)
    whole = -1e-2 * sum(batch(step).mean(0) for step in range(steps))
    last = onebit_jax.quantized_mean("data", 8, exact_below=34)

    def missed(tx):
        *_, (params, state) = trained(tx, steps)
        return np.abs(params["kernel"] - whole).max(), state

    lacking, _ = missed(local)
    complete, state = missed(with_last_errors(local, last, steps))
    assert complete < lacking / 20
    taken = onebit_jax.steps_by_stage(state)
    assert {stage: int(n) for stage, n in taken.items()} == {
        "local": 2,
        "sync": 3,
        "errors": 1,
    }


def test_muon_of_exact_momenta_is_muon():
    exact = onebit_jax.exact_mean("data")
    decay = {"weight_decay": 0.1, "mask": decays}

    def moved(tx):
        run = onebit_jax.simulated(linear, tx, WORKERS, axis="data")
        params, state = run.init(PARAMS)
        for _ in range(3):
            # The same each time: a momentum's direction is then its bias-corrected's.
            params, state, _ = run.step(params, state, batch(0))
        return params

    of_momenta = moved(muon_of_momenta(RATE, exact, **decay))
    muon = moved(optax.chain(exact, INNER["muon"](RATE, **decay)))
    matrix = of_momenta["kernel"], muon["kernel"]
    np.testing.assert_allclose(*matrix, atol=1e-4)
    head = of_momenta["head"]["kernel"], muon["head"]["kernel"]
    # Gradients near zero by 8 bits have no sign that Adam could keep.
    assert np.mean(np.abs(head[0] - head[1]) < 1e-3) > 0.95


LOCAL = {"optimizer": "local", "inner": "muon", "exchange": "sign_mean, mean_abs"}
SHARES = 2 * (WORKERS - 1) / WORKERS


@pytest.mark.parametrize(
    ("options", "stage", "bits"),
    [
        ({**LOCAL, "exchange": "top_k_mean"}, "sync", 2 * 13 * 32),
        ({**LOCAL, "momentum_bits": 4}, "sync", 2 * (33 + 129) * 32),
        ({**LOCAL, "momentum_bits": 1}, "sync", 2 * (33 + 33) * 32),
        ({**LOCAL, "last_bits": 8}, "errors", 2 * 257 * 32),
        (
            {"optimizer": "muon", "send": "momentum", "exchange": "quantized_mean"},
            "every",
            (129 + 257) * 32,
        ),
    ],
)
def test_what_is_sent_besides_is_counted(options, stage, bits):
    params = {
        "a": {"kernel": jnp.zeros((64, 64))},
        "head": {"kernel": jnp.zeros((64, 64))},
    }
    blocks = 4
    expected = SHARES * blocks * bits / 8
    assert stage_bytes(options, params, WORKERS, "data")[stage] == expected


def test_intervals_grow_as_the_rate_falls():
    schedule = optax.schedules.linear_schedule(1e-2, 1e-3, 16)
    by_rate = {"coefficient": 1e-2, "shortest": 1, "longest": 8, "warmup_steps": 0}
    options = {**LOCAL, "inner": "adamw", "sync_by_rate": by_rate}
    arm = make_arm(
        options, schedule, onebit_jax.freeze_at(1), 0.9,
        weight_decay=0.0, clip=0.0, axes="data", steps=16,
    )  # fmt: skip
    counts = [
        int(onebit_jax.steps_by_stage(state)["sync"]) for _, state in trained(arm, 16)
    ]
    due = [n + 1 for n in range(16) if counts[n] > ([0, *counts])[n]]
    gaps = np.diff(due)
    assert due[0] == 1
    assert gaps[0] == 1
    assert gaps.max() > 2
    assert due[-1] == 16, "the last step of the run synchronises"
