"""Planted bugs of 0/1 Adam."""

from planted.bug import Bug

ADAM = "onebit_jax/optimizers/zero_one_adam.py"
RULES = "tests/optimizers/test_zero_one_adam.py::test_"
OWN = (f"{RULES}each_worker_computes_its_gradients_at_its_own_parameters",)
ZERO_RATE = (f"{RULES}a_learning_rate_that_begins_at_zero_keeps_the_momentum",)
GROWING = (f"{RULES}intervals_may_be_even_or_grow_by_steps_or_be_aligned",)
FORMULA = "tests/optimizers/test_optimizers.py::test_is_its_formula"
DEEPSPEED = (
    "tests/optimizers/test_deepspeed_zero_one_parity.py::"
    "test_every_trajectory_is_deepspeeds[deepspeed_zero_one_adam_w2-call by call]",
)
TOLD = (
    "tests/optimizers/test_optimizers.py::"
    "test_its_collectives_are_told_without_a_compilation[0/1 Adam]",
)

BUGS = {
    "workers compute their gradients at the agreed parameters": Bug(
        "onebit_jax/step/local_params.py",
        "params = node.local_params(params)",
        "node.local_params(params)",
        OWN,
    ),
    "what a worker has moved is kept when it is agreed": Bug(
        ADAM,
        "moved=self.own(optax.tree.zeros_like(mu)),",
        "",
        OWN,
    ),
    "the rates of a synchronisation are added to the next's": Bug(
        ADAM,
        "            rates=jnp.zeros([], jnp.float32),\n            # At",
        "            # At",
        OWN,
    ),
    "a rate of zero loses the errors": Bug(
        ADAM,
        "optax.tree.where(some, exchange, state.exchange)",
        "exchange",
        (
            "tests/optimizers/test_zero_one_adam.py::test_a_learning_rate_of_zero_keeps_the_errors",
        ),
    ),
    "a rate of zero divides": Bug(
        ADAM,
        "jnp.where(some, state.rates, 1)",
        "state.rates",
        ZERO_RATE,
    ),
    "a rate of zero forgets the momentum": Bug(
        ADAM,
        "optax.tree.where(some, self.own(mu), state.own_mu)",
        "self.own(mu)",
        ZERO_RATE,
    ),
    "the variance is refreshed after the exchange": Bug(
        ADAM,
        "        _, state = self.refresh_variance(gradients, state)\n"
        "        return self.synchronise(gradients, state, params)",
        "        _, new = self.refresh_variance(gradients, state)\n"
        "        updates, state = self.synchronise(gradients, state, params)\n"
        "        return updates, state._replace(\n"
        "            nu=new.nu, refreshed=new.refreshed,\n"
        "            variance_exchange=new.variance_exchange)",
        (f"{FORMULA}[0/1 Adam]",),
    ),
    "a worker's part of the mean is cut as the mean is": Bug(
        ADAM,
        "state, params, times_bound=workers)",
        "state, params)",
        (f"{FORMULA}[0/1 Adam]",),
    ),
    "intervals of synchronisation grow before the freeze": Bug(
        ADAM,
        "optax.tree.where(frozen, sync, state.sync)",
        "sync",
        (f"{FORMULA}[0/1 Adam to the letter]",),
    ),
    "errors of gradients stay at the freeze": Bug(
        ADAM,
        "lambda e: jnp.where(now, 0, e)",
        "lambda e: e",
        DEEPSPEED,
    ),
    "a frozen variance is refreshed": Bug(
        ADAM,
        "nu=optax.tree.where(frozen, state.nu, nu)",
        "nu=nu",
        (f"{RULES}a_static_stage_in_the_wrong_place_still_makes_sense",),
    ),
    "a schedule of weight decay stays at its beginning": Bug(
        ADAM,
        "state._replace(decay=decay)",
        "state",
        (f"{RULES}a_schedule_of_weight_decay_goes_on",),
    ),
    "a variance that was not refreshed is stable": Bug(
        ADAM,
        "now &= has_refreshed",
        "now &= True",
        (f"{RULES}it_freezes_when_its_refreshed_variance_is_stable",),
    ),
    "the freeze rule sees the variance's start from zero": Bug(
        ADAM,
        "optax.tree.sum(state.nu) / self.variance_weight(state)",
        "optax.tree.sum(state.nu)",
        (f"{RULES}it_freezes_when_its_refreshed_variance_is_stable",),
    ),
    "errors of the variance's exchange are forgotten": Bug(
        ADAM,
        "            variance_exchange=exchanged,\n",
        "",
        (f"{RULES}a_variance_has_an_exchange_with_errors_of_its_own",),
    ),
    "agreed parameters are evaluated": Bug(
        "train/core/loop.py",
        "program.evaluate(onebit_jax.local_params(params, state))",
        "program.evaluate(params)",
        (
            "tests/train/core/test_loop.py::"
            "test_parameters_of_local_steps_are_evaluated_and_handed_on",
        ),
    ),
    "an interval is doubled beyond int32": Bug(
        "onebit_jax/optimizers/parts/intervals.py",
        "jnp.where(interval > limit // 2, limit, 2 * interval)",
        "jnp.minimum(2 * interval, limit)",
        (f"{RULES}intervals_do_not_overflow",),
    ),
    "an interval's steps are not counted": Bug(
        "onebit_jax/optimizers/parts/intervals.py",
        'due if counting == "times" else jnp.bool(True)',
        "due",
        GROWING,
    ),
    "a stage's collectives are told once for several": Bug(
        "onebit_jax/inspect/stage_costs.py",
        "sums.get(transfer.axes, 0) + transfer.bytes",
        "transfer.bytes",
        TOLD,
    ),
}
