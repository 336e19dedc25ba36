"""Planted bugs of optimizers, wrappers, input checks, resuming and reports."""

from planted.bug import Bug
from planted.exchanges import EXCHANGES, SIMULATED, resized

OPTIMIZERS = "tests/optimizers/test_optimizers.py::test_"
RULES = "tests/optimizers/test_onebit_adam.py::test_"
TRANSFORMS = "tests/transforms/test_wrappers.py::test_"
BAD_INPUT = "tests/workers/test_bad_input.py::test_"
TRAFFIC = "tests/inspect/test_traffic.py::test_"
REPLICAS = "tests/inspect/test_replicas.py::test_"
METRICS = "tests/inspect/test_metrics.py::test_"
FORMULA = (f"{OPTIMIZERS}is_its_formula[1-bit Adam]",)
SIGNS_MOVED = f"{RULES}what_signs_have_moved_before_it_had_a_gradient_stays_bounded"
REFRESHED = (f"{OPTIMIZERS}is_its_formula[1-bit Adam refreshed at intervals]",)
PUBLISHED = (f"{OPTIMIZERS}is_its_formula[1-bit Adam as published]",)
WARMUP = (f"{OPTIMIZERS}before_the_freeze_it_is_optaxs_on_the_mean[1-bit Adam]",)
STATIC = (f"{OPTIMIZERS}static_stages_are_the_same_with_types_unchecked[1-bit Adam]",)
NOT_FINITE = tuple(
    f"{OPTIMIZERS}a_step_that_is_not_finite_changes_nothing[{step}-nan-1-bit Adam]"
    for step in (0, 3)
)
STABLE = (f"{RULES}it_freezes_when_its_own_variance_is_stable",)
WRONG_STAGE = (f"{RULES}a_static_stage_in_the_wrong_place_still_makes_sense",)
NO_STAGE = (f"{BAD_INPUT}a_stage_that_does_not_exist",)
ACCUMULATED = (f"{TRANSFORMS}accumulating_is_one_step_on_the_mean",)
OF_THE_STATE = (f"{METRICS}metrics_are_of_the_state[AxisType.Auto]",)

BUGS = {
    # 1-bit Adam.
    "the variance's correction goes on after the freeze": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "return self.ratio(direction, self.grown(state), self.learnt_in(state))",
        "return self.ratio(direction, self.grown(state), count)",
        PUBLISHED,
    ),
    "a refreshment counts for one step": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "decay = self.b2 ** (count - last).astype(jnp.float32)",
        "decay = self.b2",
        REFRESHED,
    ),
    "the variance between refreshments is corrected for all steps": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "taken = jnp.where(state.refresh.times == 0, taken, state.refresh.last)",
        "pass",
        REFRESHED,
    ),
    "a variance of Adam's has learnt nothing before its first refresh": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "jnp.where(state.refresh.times == 0, taken, state.refresh.last)",
        "state.refresh.last",
        (f"{RULES}a_compressed_step_may_follow_adams[refresh1]",),
    ),
    "a freeze between refreshes is counted as of the last": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "jnp.where(frozen, state.frozen_at, jnp.maximum(state.count, 1))",
        "jnp.where(frozen, state.frozen_at, self.learnt_in(state))",
        (f"{RULES}a_freeze_between_two_refreshes_is_counted_where_it_was",),
    ),
    "a refreshment has no floor": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "raised if signs else nu",
        "nu",
        (f"{SIGNS_MOVED}[bound]",),
    ),
    "the first refresh forgets Adam's variance": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "jnp.where(refresh.times == 0, count - 1, refresh.last)",
        "refresh.last",
        (f"{RULES}a_variance_of_adams_is_not_forgotten_by_the_first_refresh",),
    ),
    "a refreshment has no bound": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "cut(new_updates, self.bound if signs else None)",
        "new_updates",
        (f"{SIGNS_MOVED}[floor]",),
    ),
    "a late warm-up thaws the variance": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "            state.frozen_at > 0,\n            lambda: self.frozen_adam",
        "            state.frozen_at < 0,\n            lambda: self.frozen_adam",
        WRONG_STAGE,
    ),
    "the freeze comes a step late": Bug(
        "onebit_jax/optimizers/parts/freeze.py",
        "return count >= step",
        "return count > step",
        ("tests/optimizers/test_freeze.py::test_freeze_at_fires_from_its_step_on",),
    ),
    "the rule sees an uncorrected norm": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "norm = self.corrected(optax.tree.sum(nu), self.b2, count)",
        "norm = optax.tree.sum(nu)",
        STABLE,
    ),
    "the floor is not applied": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "nu=optax.tree.where(now, raised, nu)",
        "nu=nu",
        FORMULA,
    ),
    "the share at the bound is counted below it": Bug(
        "onebit_jax/optimizers/parts/bound.py",
        "jnp.sum(jnp.abs(u) > limit, dtype=jnp.float32)",
        "jnp.sum(jnp.abs(u) <= limit, dtype=jnp.float32)",
        FORMULA,
    ),
    "the share at the bound is the warm-up's": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "bounded=bounded,",
        "bounded=state.bounded,",
        FORMULA,
    ),
    "updates are not bounded": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "return cut(unbounded(), self.bound), state._replace(",
        "return unbounded(), state._replace(",
        FORMULA,
    ),
    "the warm-up is bounded": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "cut(new_updates, self.bound if signs else None)",
        "cut(new_updates, self.bound)",
        WARMUP,
    ),
    "the lead has the wrong sign": Bug(
        "onebit_jax/optimizers/parts/moments.py",
        "m + steps * (m - before)",
        "m - steps * (m - before)",
        FORMULA,
    ),
    "the lead is of uncorrected momenta": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "before = self.corrected(last, self.b1, jnp.maximum(count - 1, 1))",
        "before = last",
        FORMULA,
    ),
    "the first momentum is led": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "steps = jnp.where(count > 1, self.lead, 0.0)",
        "steps = self.lead",
        (f"{RULES}a_momentum_that_still_rises_from_zero_is_not_led",),
    ),
    "the momentum is sent for the gradient": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        'if self.send == "momentum":',
        "if True:",
        (f"{RULES}one_scale_a_block_is_that_of_what_is_sent[gradient]",),
    ),
    "gradients of low precision are agreed on in it": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        "        gradients = optax.tree.cast(gradients, jnp.float32)\n",
        "",
        (f"{RULES}what_is_agreed_of_low_precision_gradients_is_float32[gradient]",),
    ),
    "the warm-up's collective is left in": Bug(
        "onebit_jax/optimizers/onebit_adam_stages.py",
        'if self.send == "momentum":\n',
        'if self.send == "momentum":\n'
        "            exact = exact_mean(self.exchange.axes)\n"
        "            too, _ = exact.update(gradients, exact.init(gradients))\n"
        "            gradients = jax.tree.map(\n"
        "                lambda g, m: g + 1e-30 * m, gradients, too)\n",
        STATIC,
    ),
    "a static stage sends the other's too": Bug(
        "onebit_jax/workers/stages.py",
        "    if stage is not None:\n        return",
        "    if stage is not None and len(stages) > 3:\n        return",
        STATIC,
    ),
    "stages are run in the other order": Bug(
        "onebit_jax/workers/stages.py",
        "lax.cond(current > 0, branches[1], branches[0])",
        "lax.cond(current > 0, branches[0], branches[1])",
        PUBLISHED,
    ),
    "stages are without names": Bug(
        "onebit_jax/workers/stages.py",
        'with jax.named_scope(f"stage:{name}"):',
        'with jax.named_scope("stage"):',
        STATIC,
    ),
    "weights decay with the wrong sign": Bug(
        "onebit_jax/optimizers/onebit_adam_alias.py",
        "optax.add_decayed_weights(weight_decay, mask)",
        "optax.add_decayed_weights(-weight_decay, mask)",
        WARMUP,
    ),
    # What is refused.
    "averaged gradients are taken": Bug(
        "onebit_jax/workers/axes.py",
        "if is_agreed(leaf, axes):",
        "if False:",
        (f"{EXCHANGES}averaged_gradients_are_refused[sign-2]",),
    ),
    "integers are taken": Bug(
        "onebit_jax/workers/axes.py",
        "if not jnp.issubdtype(leaf.dtype, jnp.floating):",
        "if False:",
        (f"{EXCHANGES}leaves_that_are_no_real_numbers_are_refused[sign-2]",),
    ),
    "a state of other workers is taken": Bug(
        "onebit_jax/workers/axes.py",
        "if not fits:",
        "if False:",
        (f"{EXCHANGES}a_state_of_other_workers_is_refused[sign-2]",),
    ),
    "an axis that the mesh lacks is taken": Bug(
        "onebit_jax/workers/placement.py",
        "if not set(node.axes) <= set(mesh.axis_names):",
        "if False:",
        (
            f"{BAD_INPUT}an_axis_that_is_not_there",
            f"{BAD_INPUT}a_mesh_without_the_axis",
        ),
    ),
    "a stage of any name is taken": Bug(
        "onebit_jax/step/data_parallel.py",
        "        check_stage(state, stage)\n",
        "",
        NO_STAGE,
    ),
    "a stage of any name is run": Bug(
        "onebit_jax/workers/stages.py",
        "if stage is not None and stage not in stages:",
        "if False:",
        NO_STAGE,
    ),
    "batches that cannot be shared are taken": Bug(
        "onebit_jax/step/data_parallel.py",
        "        check_batch(batch, workers, self.axes)\n",
        "",
        (f"{BAD_INPUT}a_batch_that_cannot_be_shared_equally",),
    ),
    # Around an optimizer.
    "a stage is not told to the optimizer": Bug(
        "onebit_jax/step/data_parallel.py",
        'extra = {**extra, "stage": stage}',
        "extra = {**extra}",
        (f"{METRICS}a_static_stage_reaches_the_optimizer",),
    ),
    "the loss is one worker's times their number": Bug(
        "onebit_jax/step/data_parallel.py",
        "mean(x + last.astype(x.dtype), axes)",
        "4 * mean(x, axes)",
        (f"{TRANSFORMS}data_parallel_is_one_big_batch",),
    ),
    "a worker's loss does not see its own parameters": Bug(
        "onebit_jax/step/data_parallel.py",
        "local_params(params, state), batch",
        "params, batch",
        (f"{TRANSFORMS}a_worker_takes_gradients_at_its_own_parameters",),
    ),
    "a skipped step keeps its state": Bug(
        "onebit_jax/transforms/skip_nonfinite.py",
        "return no_update(take), state.inner",
        "return no_update(take), take()[1]",
        NOT_FINITE,
    ),
    "each worker decides for itself what is finite": Bug(
        "onebit_jax/transforms/skip_nonfinite.py",
        "jnp.isfinite(lax.psum(squared_norm(updates), axes))",
        "jnp.isfinite(squared_norm(updates))",
        NOT_FINITE,
    ),
    "a skipped step adds a positive zero": Bug(
        "onebit_jax/transforms/branch.py",
        "jnp.full(aval.shape, -0.0",
        "jnp.full(aval.shape, 0.0",
        NOT_FINITE,
    ),
    "accumulated gradients are not divided": Bug(
        "onebit_jax/transforms/accumulate.py",
        "sums[0] / micro_step.astype(jnp.float32)",
        "sums[0]",
        ACCUMULATED,
    ),
    "accumulated gradients are divided by the steps of another run": Bug(
        "onebit_jax/transforms/accumulate.py",
        "sums[0] / micro_step.astype(jnp.float32)",
        "sums[0] / jnp.float32(self.steps)",
        (f"{TRANSFORMS}an_accumulation_goes_on_in_another_number_of_steps",),
    ),
    "accumulated gradients are not forgotten": Bug(
        "onebit_jax/transforms/accumulate.py",
        "jax.tree.map(jnp.zeros_like, gradient)",
        "gradient",
        ACCUMULATED,
    ),
    "each worker clips by its own norm": Bug(
        "onebit_jax/transforms/clip_by_worker_norm.py",
        "jnp.sqrt(lax.pmean(squared_norm(updates), axes))",
        "jnp.sqrt(squared_norm(updates))",
        (f"{TRANSFORMS}clipping_is_by_the_root_mean_square_of_the_workers_norms",),
    ),
    "every step counts as clipped": Bug(
        "onebit_jax/transforms/clip_by_worker_norm.py",
        "jnp.where(factor < 1, optax.safe_increment(state.clipped), state.clipped)",
        "optax.safe_increment(state.clipped)",
        (f"{TRANSFORMS}clipped_steps_are_counted_but_for_skipped_ones",),
    ),
    "simulated workers take turns in a batch": Bug(
        "onebit_jax/step/simulated.py",
        "x.reshape(workers, x.shape[0] // workers, *x.shape[1:])",
        "jnp.moveaxis(x.reshape(-1, workers, *x.shape[1:]), 1, 0)",
        SIMULATED,
    ),
    "simulated workers are not told of the stage": Bug(
        "onebit_jax/step/simulated.py",
        "(axis,), has_aux, stage",
        "(axis,), has_aux, None",
        (
            "tests/workers/test_simulated.py::"
            "test_a_batch_or_a_stage_that_makes_no_sense_is_refused",
        ),
    ),
    # Other numbers of workers, and resuming.
    "resizing gives each worker the sum": Bug(
        "onebit_jax/workers/resize.py",
        "jnp.mean(rows.astype(jnp.float32), axis=1",
        "jnp.sum(rows.astype(jnp.float32), axis=1",
        resized("sign-3-{'data': 8}"),
    ),
    "resizing drops the servers' errors": Bug(
        "onebit_jax/workers/resize.py",
        "rows = _fit(rows.reshape(number, 1, -1), new.size // number)",
        "rows = 0 * _fit(rows.reshape(number, 1, -1), new.size // number)",
        resized("sign-3-{'data': 8}"),
    ),
    "resizing mixes what shards owe": Bug(
        "onebit_jax/workers/resize.py",
        "rows = jnp.moveaxis(old.reshape(old.shape[0], number, -1), 1, 0)",
        "rows = old.reshape(number, old.shape[0], -1)",
        resized("per-shard-sign-2-{'data': 3, 'model': 2}"),
    ),
    "a resumption drops a leaf": Bug(
        "train/core/checkpoint.py",
        'state = arrays["state"]\n',
        'state = arrays["state"]\n'
        "        *kept, last = jax.tree.leaves(state)\n"
        "        state = jax.tree.structure(state).unflatten([*kept, 0 * last])\n",
        (
            "tests/train/core/test_checkpoint.py::"
            "test_everything_comes_back_in_its_place",
        ),
    ),
    # What is told of a run.
    "an all-reduce counts half": Bug(
        "onebit_jax/workers/transfers.py",
        'rounds = 2 if op == "all-reduce" else 1',
        "rounds = 1",
        (f"{TRAFFIC}psum_over_one_axis_of_two",),
    ),
    "an all-gather counts one worker's share": Bug(
        "onebit_jax/inspect/collectives.py",
        'if op == "all-gather":',
        "if False:",
        (f"{TRAFFIC}all_to_all_and_all_gather_of_words",),
    ),
    "workers are numbered in the order of the mesh": Bug(
        "onebit_jax/inspect/replicas.py",
        ".any(axis=(-1, *others)).transpose(order)",
        ".any(axis=(-1, *others))",
        (f"{REPLICAS}workers_are_numbered_in_the_order_that_is_given",),
    ),
    "replicas of the last leaf are not compared": Bug(
        "onebit_jax/inspect/replicas.py",
        "enumerate(zip(paths, specs, strict=True)):",
        "enumerate(zip(paths[:-1], specs[:-1], strict=True)):",
        (f"{REPLICAS}zeros_and_nans_differ_by_their_bits",),
    ),
    "a line has the measures of the last checkpoint": Bug(
        "train/core/loop.py",
        "            if due.log or due.save:\n                self._measure",
        "            if due.save:\n                self._measure",
        ("tests/train/core/test_loop.py::test_a_line_a_step_with_bytes_by_stage",),
    ),
    "the norm of errors is of all workers together": Bug(
        "onebit_jax/optimizers/parts/error_norms.py",
        "squared_norm(x) / x.shape[0]",
        "squared_norm(x)",
        OF_THE_STATE,
    ),
}
