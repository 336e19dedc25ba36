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
        "            rates=jnp.zeros([], jnp.float32),\n            exchange=exchange,",
        "            exchange=exchange,",
        OWN,
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
        "        _, state = self.refreshed(gradients, state)\n"
        "        return self.synchronise(gradients, state, params)",
        "        _, new = self.refreshed(gradients, state)\n"
        "        updates, state = self.synchronise(gradients, state, params)\n"
        "        return updates, state._replace(\n"
        "            nu=new.nu, refreshed=new.refreshed,\n"
        "            variance_exchange=new.variance_exchange)",
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
    "an interval's steps are not counted": Bug(
        "onebit_jax/optimizers/intervals.py",
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
