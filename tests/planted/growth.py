"""Planted bugs of the growth of a frozen variance."""

from planted.bug import Bug
from planted.optimizers import FORMULA, RULES, WRONG_STAGE

GROWTH = "tests/optimizers/test_growth.py::test_"
SUMS = (f"{GROWTH}random_sums_say_the_mean_squares_of_the_mean_in_the_mean",)
EVEN = (f"{GROWTH}what_grows_evenly_stays_even[one a line-True]",)
SENT = (f"{GROWTH}a_step_that_measures_sends_its_sums_beside_what_others_send[3]",)


def after(scene):
    name = "the_variance_grows_with_its_row_its_column_and_the_whole"
    return (f"{GROWTH}{name}[{scene}]",)


BUGS = {
    "the growth is not applied": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "return self.ratio(direction, self.grown(state), self.learnt_in(state))",
        "return self.ratio(direction, state.nu, frozen_at)",
        FORMULA,
    ),
    "the growth is corrected by the steps of the freeze": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "(until + state.late + measured, until)",
        "(state.frozen_at, state.frozen_at)",
        FORMULA,
    ),
    "the growth is corrected by steps that it has not seen": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "measured = self.growth.period * state.growth.measured",
        "measured = state.count + 1 - state.frozen_at - state.late",
        EVEN,
    ),
    "the growth is corrected without warm-up steps after the freeze": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "late=state.late + 1",
        "late=state.late",
        (f"{RULES}warm_up_steps_after_the_freeze_are_followed_and_counted",),
    ),
    "a measured step counts for itself alone": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "optax.tree.update_moment(squares, state.now, decay**self.period, 1)",
        "optax.tree.update_moment(squares, state.now, decay, 1)",
        FORMULA,
    ),
    "all steps measure": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "count % self.period == 0",
        "count % self.period >= 0",
        SENT,
    ),
    "no step measures": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "count % self.period == 0",
        "count % self.period < 0",
        SENT,
    ),
    "the measuring step is not counted": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "measured=state.measured + 1",
        "measured=state.measured",
        SENT,
    ),
    "values have no random signs": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "x = x * jnp.expand_dims(parts, range(2, x.ndim))",
        "x = x * jnp.expand_dims(jnp.abs(parts), range(2, x.ndim))",
        SUMS,
    ),
    "heads have no random signs of their own": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "x = x * jnp.expand_dims(each.reshape(_SUMS, -1), away)",
        "pass",
        SUMS,
    ),
    "columns have no random signs": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        'einsum("...kl,l->...k", x, columns)',
        'einsum("...kl,l->...k", x, jnp.ones_like(columns))',
        SUMS,
    ),
    "rows have no random signs": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        'einsum("...kl,k->...l", x, rows)',
        'einsum("...kl,k->...l", x, jnp.ones_like(rows))',
        SUMS,
    ),
    "random signs are those of the first step": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "jax.random.fold_in(jax.random.key(0), count)",
        "jax.random.key(0)",
        SUMS,
    ),
    "random signs are the same in all leaves": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "map(self._sums, leaves, _cut(signs, sizes))",
        "map(self._sums, leaves, (signs[:n] for n in sizes))",
        FORMULA,
    ),
    "eight random sums are one": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "return jnp.sum(x, axis=(0, *range(2, x.ndim)))",
        "return jnp.full(_SUMS, jnp.sum(x) / _SUMS**0.5)",
        SUMS,
    ),
    "a row's sum is divided by the number of rows": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "rows = jnp.square(sums.rows) / float(x.shape[-1])",
        "rows = jnp.square(sums.rows) / float(x.shape[-2])",
        SUMS,
    ),
    "the growth is of the workers' squares": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "map(_of_sums, means(sums, axes), leaves)",
        "map(_of_sums, jax.tree.map(jnp.sqrt, means(jax.tree.map("
        "jnp.square, sums), axes)), leaves)",
        (f"{GROWTH}noise_of_the_workers_that_is_gone_in_their_mean_hides_no_growth",),
    ),
    "the mean square before the freeze is a sum": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "MeanSquares(jnp.sum(squares) / float(max(squares.size, 1)))",
        "MeanSquares(jnp.sum(squares))",
        after("a silent vector"),
    ),
    "the matrices of a leaf grow as one": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "MeanSquares(jnp.mean(rows, axis=-2, keepdims=True), rows, columns)",
        "MeanSquares(jnp.mean(rows, keepdims=True), rows, columns)",
        after("a silent matrix wakes"),
    ),
    "columns do not grow": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "product = rows * columns * _ratio(jnp.ones_like(of_whole), of_whole)",
        "product = rows * jnp.ones_like(columns)",
        after("a column"),
    ),
    "the whole is counted twice": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "product = rows * columns * _ratio(jnp.ones_like(of_whole), of_whole)",
        "product = rows * columns",
        after("evenly"),
    ),
    "a row that falls silent has no variance": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "return jnp.maximum(product, _LEAST_GROWTH * of_whole)",
        "return product",
        after("a row falls silent"),
    ),
    "a row that wakes grows by infinity": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "jnp.where(known, frozen_, frozen.whole)",
        "frozen_",
        after("a silent row wakes"),
    ),
    "the mean squares begin again at the freeze": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "return state._replace(now=now, frozen=jax.tree.map(replicated, now))",
        "none = optax.tree.zeros_like(now)\n"
        "        return state._replace(now=none, frozen=now)",
        EVEN,
    ),
    "devices inside a worker draw shares of the signs": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "return map(replicated, jnp.split(signs, ends[:-1]))",
        "return iter(jnp.split(signs, ends[:-1]))",
        (
            "tests/exchanges/test_per_shard.py::"
            "test_devices_of_a_worker_pass_no_signs_around",
        ),
    ),
    "a late warm-up moves the growth's beginning": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "growth = self.growth.follow_mean(mean, growth, self.b2)",
        "growth = growth._replace(now=self.growth.freeze(state.nu, growth).now)",
        WRONG_STAGE,
    ),
    "an early compressed step has nothing to grow from": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "lambda: rule.freeze(state.nu, growth),",
        "lambda: growth,",
        WRONG_STAGE,
    ),
    "a variance of Adam's grows from nothing": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "rule.freeze(state.nu, growth)",
        "growth._replace(frozen=growth.now)",
        (
            "tests/optimizers/test_onebit_adam.py::"
            "test_a_compressed_step_may_follow_adams[None]",
        ),
    ),
    "an overflow is a growth": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "(y > 0) & jnp.isfinite(x) & jnp.isfinite(y)",
        "y > 0",
        after("an overflow"),
    ),
    "what was silent before the freeze has no variance": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "jnp.where(frozen.whole > 0, v * growth, mean.whole)",
        "v * growth",
        after("a silent matrix wakes"),
    ),
    "the growth tells of one matrix of a leaf": Bug(
        "onebit_jax/optimizers/parts/growth.py",
        "size = sum(x.size for x in jax.tree.leaves(sums))",
        "size = sum(max(x.shape) for x in jax.tree.leaves(sums))",
        SENT,
    ),
}
