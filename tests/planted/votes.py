"""Planted bugs of votes and of the optimizers that vote."""

from planted.bug import Bug
from planted.exchanges import cost, dense

RANDOM = "onebit_jax/exchanges/random_vote_mean"
OPTIMIZERS = "onebit_jax/optimizers"


def random(test):
    return (f"tests/exchanges/test_random_vote_mean.py::test_{test}",)


def optimizer(test):
    return (f"tests/optimizers/test_voting_optimizers.py::test_{test}",)


BUGS = {
    "a tied vote is against": Bug(
        "onebit_jax/exchanges/ballots.py",
        "return (2 * ayes - workers) / workers",
        "return (2 * ayes - workers - 0.5) / workers",
        dense("vote-2"),
    ),
    "leaves of votes are the first one's": Bug(
        "onebit_jax/exchanges/ballots.py",
        "first += x.size",
        "first += 0",
        dense("vote-3"),
    ),
    "counts of votes are digits of a smaller base": Bug(
        "onebit_jax/exchanges/ballots.py",
        "unpack_digits(digits, workers, ayes.size)",
        "unpack_digits(digits, workers - 1, ayes.size)",
        dense("vote-means-3"),
    ),
    "an exchange tells of votes where counts go back": Bug(
        "onebit_jax/exchanges/ballots.py",
        "if means else served",
        "if not means else served",
        cost("vote-means-3"),
    ),
    "a random vote is for 1 with probability u": Bug(
        f"{RANDOM}.py",
        "(2 * levels + 1 - _LEVELS).astype(jnp.float32) / _LEVELS",
        "(2 * levels + 1).astype(jnp.float32) / (2 * _LEVELS)",
        random("the_expectation_is_the_mean_of_the_values"),
    ),
    "all workers vote by the same numbers": Bug(
        f"{RANDOM}.py",
        "shift = _share(place.astype(jnp.uint32), workers)",
        "shift = 0 * place.astype(jnp.uint32)",
        random("equal_values_have_one_of_the_two_nearest_means"),
    ),
    "workers keep their places": Bug(
        f"{RANDOM}.py",
        "jax.random.permutation(permuted, workers)[worker_index(self.axes)]",
        "worker_index(self.axes)",
        random("is_its_formula"),
    ),
    "an odd share of the levels is a level too few": Bug(
        f"{RANDOM}.py",
        "place * jnp.uint32(whole) + place * jnp.uint32(rest) // jnp.uint32(workers)",
        "place * jnp.uint32(whole)",
        random("zeros_of_an_even_number_of_workers_are_zero"),
    ),
    "two values have one random number": Bug(
        f"{RANDOM}.py",
        "[pairs % _LEVELS, pairs // _LEVELS]",
        "[pairs % _LEVELS, pairs % _LEVELS]",
        random("is_its_formula"),
    ),
    "calls are not counted": Bug(
        f"{RANDOM}.py",
        "count=state.count + 1",
        "count=state.count",
        random("each_call_draws_anew_and_again_from_the_same_state"),
    ),
    "servers vote by the same numbers": Bug(
        f"{RANDOM}.py",
        "jax.random.fold_in(served, worker_index(self.axes))",
        "jax.random.fold_in(served, 0 * worker_index(self.axes))",
        random("servers_draw_their_own"),
    ),
    "devices of a host vote by the same numbers": Bug(
        f"{RANDOM}.py",
        "jax.random.fold_in(key, lax.axis_index(further))",
        "jax.random.fold_in(key, 0 * lax.axis_index(further))",
        random("devices_of_a_host_and_shards_draw_their_own"),
    ),
    # BinSGDM and Distributed Lion.
    "a magnitude keeps its sign": Bug(
        f"{OPTIMIZERS}/binsgdm.py",
        "magnitudes = jax.tree.map(jnp.abs, gradients)",
        "magnitudes = gradients",
        optimizer("is_its_formula[BinSGDM]"),
    ),
    "a ratio of nothing is not finite": Bug(
        f"{OPTIMIZERS}/binsgdm.py",
        "m / (b + least)",
        "m / b",
        optimizer("is_its_formula[BinSGDM]"),
    ),
    "a ratio is the same of gradients that have stopped": Bug(
        f"{OPTIMIZERS}/binsgdm.py",
        "m / (b + least)",
        "m / (b + 1e-30)",
        optimizer("where_gradients_have_stopped_binsgdm_soon_stays"),
    ),
    "Lion sends its new momentum": Bug(
        f"{OPTIMIZERS}/distributed_lion.py",
        "sent = optax.tree.update_moment(gradients, mu, share, 1)",
        "sent = optax.tree.update_moment(gradients, mu, decay, 1)",
        optimizer("is_its_formula[Distributed Lion, majority]"),
    ),
    "ties go up in every step": Bug(
        f"{OPTIMIZERS}/distributed_lion.py",
        "jnp.where(count % 2 == 1, -x, x)",
        "jnp.where(count % 2 == 3, -x, x)",
        optimizer("what_has_no_majority_does_not_drift[majority]"),
    ),
    "ties of a row go the same way": Bug(
        f"{OPTIMIZERS}/distributed_lion.py",
        "lax.broadcasted_iota(jnp.int32, x.shape, dimension)",
        "lax.broadcasted_iota(jnp.int32, x.shape, 0)",
        optimizer("what_has_no_majority_does_not_drift[majority]"),
    ),
    "workers have each other's running means": Bug(
        f"{OPTIMIZERS}/parts/own_moments.py",
        "lambda mean: mean[None], means)",
        "lambda mean: jax.lax.ppermute(mean, axes, [(0, 1), (1, 0)])[None], means)",
        optimizer("is_its_formula[BinSGDM]"),
    ),
    "averaged gradients become a worker's own": Bug(
        f"{OPTIMIZERS}/parts/own_moments.py",
        "    check_local(gradients, axes, who)\n",
        "",
        optimizer("averaged_gradients_are_refused[BinSGDM]"),
    ),
    "running means of other leaves are taken": Bug(
        f"{OPTIMIZERS}/parts/own_moments.py",
        "check_workers(fits, who, workers, axes)",
        "check_workers(True, who, workers, axes)",
        optimizer("a_state_of_other_leaves_is_refused[BinSGDM]"),
    ),
    "an exchange with errors is turned": Bug(
        f"{OPTIMIZERS}/distributed_lion.py",
        "if exchange.keeps_scale:",
        "if False:",
        optimizer("distributed_lion_refuses_what_does_not_vote_by_signs"),
    ),
}
