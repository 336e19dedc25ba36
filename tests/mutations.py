"""Planted bugs, each of which the tests must find.

`python tests/mutations.py [names]` copies the tree to a temporary folder, plants one
bug after another there, runs the tests that should find it, and prints which did.
`--tests PATHS` runs other tests instead. The exit status is 0 if all bugs were found.
`--check` runs no test: it looks whether each bug can still be planted, its text being
in its file once.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs", ".*_cache")
SECONDS = 120  # a bug may let workers wait for each other

EXCHANGES = "tests/exchanges/test_exchanges.py::test_"
OPTIMIZERS = "tests/optimizers/test_optimizers.py::test_"
RULES = "tests/optimizers/test_onebit_adam.py::test_"
GROWTH = "tests/optimizers/test_growth.py::test_"
TRANSFORMS = "tests/transforms/test_wrappers.py::test_"
BAD_INPUT = "tests/workers/test_bad_input.py::test_"
TRAFFIC = "tests/inspect/test_traffic.py::test_"
METRICS = "tests/inspect/test_metrics.py::test_"


def dense(*rows):
    return tuple(f"{EXCHANGES}equals_its_dense_simulation[{row}]" for row in rows)


def cost(*rows):
    return tuple(f"{EXCHANGES}counted_bytes_are_its_wire_cost[{row}]" for row in rows)


def resized(*rows):
    test = f"{EXCHANGES}another_number_of_workers_keeps_what_is_owed"
    return tuple(f"{test}[{row}]" for row in rows)


SIGN, COUNT, SHARD = dense("sign-3"), dense("count-3"), dense("per-shard-sign-2")
HIERARCHICAL = dense("hierarchical-sign-3x2")
FORMULA = (f"{OPTIMIZERS}is_its_formula[1-bit Adam]",)
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
LINES = (f"{GROWTH}every_line_is_exchanged_once_a_period",)
ACCUMULATED = (f"{TRANSFORMS}accumulating_is_one_step_on_the_mean",)
OF_THE_STATE = (f"{METRICS}metrics_are_of_the_state[AxisType.Auto]",)


class Bug(NamedTuple):
    """A planted bug: in one file one text for another, and the tests to find it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BUGS = {
    # What is said of a value, and what is left unsaid.
    "zero is negative on the wire": Bug(
        "pallas_kernels/_packing.py",
        "jnp.where(x[..., row, :] >= 0, bit",
        "jnp.where(x[..., row, :] > 0, bit",
        SIGN,
    ),
    "zero is negative in the error": Bug(
        "pallas_kernels/_reference.py",
        "x - jnp.where(x >= 0, magnitude",
        "x - jnp.where(x > 0, magnitude",
        SIGN,
    ),
    "a scale over the padding": Bug(
        "pallas_kernels/_reference.py",
        "_sum_last(sums) / jnp.maximum(counts, 1).astype(jnp.float32)",
        "_sum_last(sums) / jnp.float32(x.shape[1] * x.shape[2])",
        SIGN,
    ),
    "a server's mean without division": Bug(
        "pallas_kernels/_reference.py", "y = total / n +", "y = total +", SIGN
    ),
    "a server owes padding": Bug(
        "pallas_kernels/_reference.py",
        "new_error = jnp.where(is_value, new_error, jnp.float32(0))",
        "new_error = new_error",
        dense("sign-3", "sign-2", "sign-8"),
    ),
    "a worker's error is forgotten": Bug(
        "onebit_jax/exchanges/block_exchange.py",
        "errors[i] = error.reshape(errors[i].shape)",
        "errors[i] = error.reshape(errors[i].shape) * 0",
        SIGN,
    ),
    "a server's error is forgotten": Bug(
        "onebit_jax/exchanges/two_phase.py",
        "server_errors.append(error.reshape(-1, self.block_size))",
        "server_errors.append(error.reshape(-1, self.block_size) * 0)",
        SIGN,
    ),
    "the dtype of the result is lost": Bug(
        "onebit_jax/exchanges/block_exchange.py",
        "x.dtype if m is None else m.dtype",
        "jnp.dtype(jnp.float32)",
        (f"{EXCHANGES}dtypes_stay[sign-3]",),
    ),
    # Levels and votes.
    "a level is missing": Bug(
        "onebit_jax/exchanges/quantized_mean.py",
        "return 2 ** (self.bits - 1) - 1",
        "return 2 ** (self.bits - 1) - 2",
        dense("quantized-4-2"),
    ),
    "a step of two bits is over the padding": Bug(
        "onebit_jax/exchanges/quantized_mean.py",
        "sizes = jnp.maximum(counts, 1).astype(jnp.float32)",
        "sizes = jnp.float32(self.block_size)",
        dense("quantized-2-3"),
    ),
    "a codec's server gives the sum": Bug(
        "onebit_jax/exchanges/codec.py",
        "jnp.mean(self.decode(words), axis=0)",
        "jnp.sum(self.decode(words), axis=0)",
        dense("quantized-4-2"),
    ),
    "a codec's momentum is not weighed": Bug(
        "onebit_jax/exchanges/codec.py",
        "x = (1 - decay) * x + decay * momentum",
        "x = x + decay * momentum",
        (
            "tests/exchanges/test_delay.py::"
            "test_only_what_is_new_in_the_momentum_is_sent",
            *dense("quantized-4-2"),
        ),
    ),
    "a tied vote is against": Bug(
        "onebit_jax/exchanges/vote_mean.py",
        "2 * ayes >= workers",
        "2 * ayes > workers",
        dense("vote-2"),
    ),
    "leaves of votes are the first one's": Bug(
        "onebit_jax/exchanges/vote_mean.py",
        "first += x.size",
        "first += 0",
        dense("vote-3"),
    ),
    # Blocks, buckets, servers.
    "all servers count the first one's values": Bug(
        "onebit_jax/exchanges/two_phase.py",
        "counts, worker_index(self.axes) * served, served",
        "counts, worker_index(self.axes) * 0, served",
        SIGN,
    ),
    "all buckets count the first one's values": Bug(
        "onebit_jax/exchanges/two_phase.py",
        "counts[rows],",
        "counts[: rows.stop - rows.start],",
        dense("sign-buckets"),
    ),
    "a bucket is a row too large": Bug(
        "onebit_jax/exchanges/block_exchange.py",
        "self.bucket_size // values)",
        "self.bucket_size // values + 1)",
        ("tests/exchanges/test_sign_mean.py::test_a_bucket_is_as_large_as_it_may_be",),
    ),
    "two workers swap the wrong halves": Bug(
        "onebit_jax/exchanges/two_phase.py",
        "lax.dynamic_index_in_dim(message, 1 - here, keepdims=False), axes",
        "lax.dynamic_index_in_dim(message, here, keepdims=False), axes",
        dense("sign-2"),
    ),
    "workers are numbered against the axes' order": Bug(
        "onebit_jax/workers/axes.py",
        "lax.axis_index(axes)",
        "lax.axis_index(axes[::-1])",
        dense("sign-two-axes"),
    ),
    "exact leaves are summed": Bug(
        "onebit_jax/exchanges/blocks.py",
        "lax.pmean(jnp.concatenate",
        "lax.psum(jnp.concatenate",
        SIGN,
    ),
    "a leaf of the limit goes exactly": Bug(
        "onebit_jax/exchanges/blocks.py",
        "sizes[i] < max(1, exact_below)",
        "sizes[i] <= max(1, exact_below)",
        SIGN,
    ),
    "vectors go compressed for all that": Bug(
        "onebit_jax/exchanges/blocks.py",
        "(exact_1d and len(shape) < 2)",
        "(exact_1d and len(shape) < 1)",
        dense("quantized-1d-3"),
    ),
    "the exact mean is a sum": Bug(
        "onebit_jax/workers/arithmetic.py",
        "return lax.pmean(x, axes)\n",
        "return lax.psum(x, axes)\n",
        dense("exact"),
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
        "        _check_stage(state, stage)\n",
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
        "        _check_batch(batch, workers, self.axes)\n",
        "",
        (f"{BAD_INPUT}a_batch_that_cannot_be_shared_equally",),
    ),
    # Counts.
    "a count is off by one": Bug(
        "onebit_jax/exchanges/count_mean.py",
        "(2 * positive - workers)",
        "(2 * positive - workers + 1)",
        COUNT,
    ),
    "digits of one bit too many": Bug(
        "pallas_kernels/_digits.py",
        "<= WORD:",
        "<= 2 * WORD:",
        ("tests/exchanges/test_count_mean.py::test_sums_of_digits_are_exact",),
    ),
    "all leaves have the first one's scales": Bug(
        "onebit_jax/exchanges/count_mean.py", "first = last\n", "first = 0\n", COUNT
    ),
    "an error is rounded twice": Bug(
        "onebit_jax/exchanges/count_mean.py",
        "error = error + change[: error.size]",
        "error = error.astype(self.error_dtype).astype(jnp.float32)\n"
        "            error = error + change[: error.size]",
        dense("count-16-bits"),
    ),
    "a bad value of the upper half is dropped": Bug(
        "onebit_jax/exchanges/count_mean.py",
        "flags >> 16 > 0",
        "flags >> 17 > 0",
        (
            f"{EXCHANGES}a_value_that_is_not_finite_spoils_its_block_everywhere"
            "[count-3-nan]",
        ),
    ),
    # Two levels, shards, DeepSpeed's layout.
    "a host gathers in the wrong order": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        "axis=1,\n                tiled=True,\n                to=",
        "axis=0,\n                tiled=True,\n                to=",
        HIERARCHICAL,
    ),
    "a host gathers any exchange's shares in the wrong order": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        'flat = lax.all_gather(mean, self.inside, tiled=True, to="invarying")',
        'flat = lax.all_gather(mean, self.inside, to="invarying")\n'
        "            flat = flat[::-1].reshape(-1)",
        dense("hierarchical-exact-2x4"),
    ),
    "a host's mean is a sum": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        "(share / devices).reshape(-1)",
        "share.reshape(-1)",
        HIERARCHICAL,
    ),
    "a host's mean for any exchange is a sum": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        "return total / devices",
        "return total",
        dense("hierarchical-exact-2x4"),
    ),
    "a host's devices count the first one's values": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        "counts, worker_index(inside), 1",
        "counts, worker_index(inside) * 0, 1",
        HIERARCHICAL,
    ),
    "a host's scale is over the padding": Bug(
        "onebit_jax/exchanges/sign_mean.py",
        'larger = scales / (jnp.sqrt(share) if self.scale == "rms" else share)',
        "larger = scales",
        HIERARCHICAL,
    ),
    "a host's error is rounded twice": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        "error.reshape(-1).astype(jnp.float32)",
        "error.reshape(-1)",
        dense("hierarchical-sign-16-bits"),
    ),
    "a shard's error is forgotten": Bug(
        "onebit_jax/exchanges/shards.py",
        "lambda x: x[:, None], new.value",
        "lambda x: 0 * x[:, None], new.value",
        SHARD,
    ),
    "shards have each other's errors": Bug(
        "onebit_jax/exchanges/per_shard.py",
        "run(values, state.groups)",
        "run(values, jax.tree.map(lambda x: x[:, ::-1], state.groups))",
        SHARD,
    ),
    "a shard's state is on all of its worker's devices": Bug(
        "onebit_jax/exchanges/shards.py",
        "spec = PartitionSpec(first, names or None)",
        "spec = PartitionSpec(first)",
        (
            "tests/exchanges/test_per_shard.py::"
            "test_nothing_is_gathered_inside_a_worker_for_the_exchange",
        ),
    ),
    "accumulated gradients are on all of their worker's devices": Bug(
        "onebit_jax/workers/placement.py",
        "spec = PartitionSpec(*spec, *own_spec(below, x.shape[1:]))",
        "spec = PartitionSpec(*spec)",
        (
            "tests/exchanges/test_per_shard.py::"
            "test_accumulated_gradients_of_16_bits_stay_sharded",
        ),
    ),
    "DeepSpeed's server forgets its error": Bug(
        "onebit_jax/exchanges/deepspeed_sign_mean.py",
        "error[None], new_error[None]",
        "error[None], 0 * new_error[None]",
        dense("deepspeed-2"),
    ),
    # Bytes.
    "an exchange tells of a block too many": Bug(
        "onebit_jax/exchanges/block_exchange.py",
        "blocks = division.layout.total_blocks",
        "blocks = division.layout.total_blocks + 1",
        cost("sign-3"),
    ),
    "an exchange does not tell of its exact leaves": Bug(
        "onebit_jax/exchanges/block_exchange.py",
        "return *exact, *self.block_transfers(blocks, axis_sizes)",
        "return self.block_transfers(blocks, axis_sizes)",
        cost("sign-3"),
    ),
    "a host tells of digits for all of its devices": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        "packed = 4 * exchange.words(hosts) * blocks",
        "packed = 4 * exchange.words(hosts * devices) * blocks",
        cost("hierarchical-count-3x2"),
    ),
    "the growth tells of all lines": Bug(
        "onebit_jax/optimizers/growth.py",
        "lines = -(-lines // (1 if all_lines else self.period))",
        "lines = -(-lines // 1)",
        (f"{GROWTH}lines_add_little_to_what_is_sent",),
    ),
    # 1-bit Adam.
    "the variance's correction goes on after the freeze": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "self.ratio(direction, nu, frozen_at)",
        "self.ratio(direction, nu, count)",
        PUBLISHED,
    ),
    "a late warm-up thaws the variance": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "nu = optax.tree.where(frozen, state.nu, nu)",
        "nu = nu",
        WRONG_STAGE,
    ),
    "the freeze comes a step late": Bug(
        "onebit_jax/optimizers/freeze.py",
        "return count >= step",
        "return count > step",
        ("tests/optimizers/test_freeze.py::test_freeze_at_fires_from_its_step_on",),
    ),
    "the rule sees an uncorrected norm": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "norm = self.corrected(optax.tree.sum(nu), self.b2, steps)",
        "norm = optax.tree.sum(nu)",
        STABLE,
    ),
    "the floor is not applied": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "nu=optax.tree.where(now, raised, nu)",
        "nu=nu",
        FORMULA,
    ),
    "the growth is not applied": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "nu = self.grown(state.nu, growth, count, frozen_at)",
        "nu = state.nu",
        FORMULA,
    ),
    "the growth is corrected by the steps of the freeze": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "weight_now=weight(self.b2, count)",
        "weight_now=weight(self.b2, frozen_at)",
        FORMULA,
    ),
    "the growth has no floor": Bug(
        "onebit_jax/optimizers/growth.py",
        "jnp.maximum(whole(rows) * whole(columns), _LEAST_GROWTH)",
        "whole(rows) * whole(columns)",
        (f"{GROWTH}a_line_that_falls_silent_keeps_a_quarter_of_its_variance",),
    ),
    "all matrices have the first one's rows": Bug(
        "onebit_jax/optimizers/growth.py", "first = last\n", "first = 0\n", FORMULA
    ),
    "the bound is on the momentum": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "bound = jnp.asarray(self.bound, jnp.float32)\n"
        "            new_updates = optax.tree.clip(new_updates, -bound, bound)",
        "bound = jnp.asarray(self.bound, jnp.float32)\n"
        "            direction = optax.tree.clip(direction, -bound, bound)\n"
        "            new_updates = self.ratio(direction, nu, frozen_at)",
        FORMULA,
    ),
    "the warm-up is bounded": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "bound = jnp.where(frozen, jnp.asarray(self.bound, jnp.float32), jnp.inf)",
        "bound = jnp.float32(self.bound)",
        WARMUP,
    ),
    "the lead has the wrong sign": Bug(
        "onebit_jax/optimizers/moments.py",
        "m + steps * (m - before)",
        "m - steps * (m - before)",
        FORMULA,
    ),
    "the lead is of uncorrected momenta": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "last = self.corrected(state.mu, self.b1, jnp.maximum(state.count, 1))",
        "last = state.mu",
        FORMULA,
    ),
    "two phases are as late as one": Bug(
        "onebit_jax/exchanges/two_phase.py",
        "return 2 * self.codec.delay",
        "return self.codec.delay",
        (
            "tests/exchanges/test_delay.py::"
            "test_what_an_exchange_returns_is_behind_by_its_delay[sign]",
        ),
    ),
    "the warm-up's collective is left in": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "mean, exchanged = self.exchange.update(gradients, state.exchange)",
        "exact = exact_mean(self.exchange.axes)\n"
        "            too, _ = exact.update(gradients, exact.init(gradients))\n"
        "            gradients = jax.tree.map(\n"
        "                lambda g, m: g + 1e-30 * m, gradients, too)\n"
        "            mean, exchanged = self.exchange.update(\n"
        "                gradients, state.exchange)",
        STATIC,
    ),
    "a static stage sends the other's too": Bug(
        "onebit_jax/workers/stages.py",
        "    if stage is not None:\n        return",
        "    if stage is not None and len(stages) > 2:\n        return",
        STATIC,
    ),
    "stages are run in the other order": Bug(
        "onebit_jax/workers/stages.py",
        "lax.cond(current > 0, branches[1], branches[0])",
        "lax.cond(current > 0, branches[0], branches[1])",
        OF_THE_STATE,
    ),
    "stages are without names": Bug(
        "onebit_jax/workers/stages.py",
        'with jax.named_scope(f"stage:{name}"):',
        'with jax.named_scope("stage"):',
        STATIC,
    ),
    "rows are exchanged in every step": Bug(
        "onebit_jax/optimizers/growth.py",
        "length = -(-new.size // (1 if all_lines else self.period))",
        "length = -(-new.size // 1)",
        LINES,
    ),
    "shares of rows are written in the wrong place": Bug(
        "onebit_jax/optimizers/growth.py",
        "lax.dynamic_update_slice_in_dim(state.now.shares, shares, first, 0)",
        "lax.dynamic_update_slice_in_dim(state.now.shares, shares, 0, 0)",
        LINES,
    ),
    "weights decay with the wrong sign": Bug(
        "onebit_jax/optimizers/onebit_adam_alias.py",
        "optax.add_decayed_weights(weight_decay, mask)",
        "optax.add_decayed_weights(-weight_decay, mask)",
        WARMUP,
    ),
    # Around an optimizer.
    "a stage is not told to the optimizer": Bug(
        "onebit_jax/step/data_parallel.py",
        '{} if stage is None else {"stage": stage}',
        "{}",
        (f"{METRICS}a_static_stage_reaches_the_optimizer",),
    ),
    "the loss is one worker's times their number": Bug(
        "onebit_jax/step/data_parallel.py",
        "jax.tree.map(lambda x: mean(x, self.axes), value)",
        "jax.tree.map(lambda x: 4 * mean(x, self.axes), value)",
        (f"{TRANSFORMS}data_parallel_is_one_big_batch",),
    ),
    "a worker's loss does not see its own parameters": Bug(
        "onebit_jax/step/data_parallel.py",
        "local_params(params, state), batch",
        "params, batch",
        (f"{TRANSFORMS}data_parallel_is_one_big_batch",),
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
        "g[None].astype(jnp.float32) / steps",
        "g[None].astype(jnp.float32)",
        ACCUMULATED,
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
    # Other numbers of workers, and resuming.
    "resizing gives each worker the sum": Bug(
        "onebit_jax/workers/resize.py",
        "jnp.mean(rows.astype(jnp.float32), axis=1",
        "jnp.sum(rows.astype(jnp.float32), axis=1",
        resized("sign-3-{'data': 8}"),
    ),
    "resizing drops what servers owe": Bug(
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
    "replicas of the last leaf are not compared": Bug(
        "onebit_jax/inspect/replicas.py",
        "enumerate(zip(paths, specs, strict=True)):",
        "enumerate(zip(paths[:-1], specs[:-1], strict=True)):",
        ("tests/inspect/test_replicas.py::test_zeros_and_nans_differ_by_their_bits",),
    ),
    "the norm of errors is of all workers together": Bug(
        "onebit_jax/optimizers/onebit_adam.py",
        "squared_norm(x) / x.shape[0]",
        "squared_norm(x)",
        OF_THE_STATE,
    ),
}


def run_tests(folder, tests, cache, limit=SECONDS):
    """The exit status of the tests, None where they do not end, and seconds."""
    environment = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # Of a bug's programs most are those of the code without it.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Names of stages are no part of a program otherwise.
        "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",
    }
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    start = time.monotonic()
    try:
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder, env=environment, timeout=limit,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, time.monotonic() - start
    if status.returncode not in (0, 1):
        print(status.stdout.decode()[-2000:])
    return status.returncode, time.monotonic() - start


def plant(bug, folder):
    """Puts a bug into a copy of the tree; gives the file and its text before."""
    file = folder / bug.file
    text = file.read_text()
    file.write_text(text.replace(bug.old, bug.new))
    return file, text


def stale(names):
    """Those of the bugs whose text is not in its file, or is there twice."""
    found = []
    for name in names:
        bug = BUGS[name]
        file = ROOT / bug.file
        times = file.read_text().count(bug.old) if file.exists() else 0
        if times != 1 or bug.old == bug.new:
            found.append(f"{name}: {bug.file} has {times} times: {bug.old}")
    return found


def run_bugs(names, instead):
    """For each bug a verdict and seconds; a row is printed as it is known."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = pathlib.Path(temporary, "tree"), pathlib.Path(temporary, "jax")
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        wanted = [tuple(instead or BUGS[name].tests) for name in names]
        # All together, as each is a few tests of few files.
        together = list(dict.fromkeys(instead or sum(wanted, ())))
        status, seconds = run_tests(folder, together, cache, 10 * SECONDS)
        print(f"without a bug, {seconds:.0f} s", flush=True)
        if status != 0:
            raise SystemExit("these tests fail without a bug")
        for name, tests in zip(names, wanted, strict=True):
            file, text = plant(BUGS[name], folder)
            status, seconds = run_tests(folder, tests, cache)
            file.write_text(text)
            verdict = {0: "SURVIVED", 1: "killed", None: "killed, as it does not end"}
            rows.append((name, verdict.get(status, f"BROKEN ({status})"), seconds))
            print(f"{rows[-1][1]}, {seconds:.0f} s: {name}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of bugs; all without one")
    parser.add_argument("--tests", nargs="+", help="to run instead of its own")
    parser.add_argument("--check", action="store_true", help="run no test")
    arguments = parser.parse_args()
    names = arguments.names or list(BUGS)
    wrong = stale(names)
    if wrong:
        raise SystemExit("\n".join(wrong))
    if arguments.check:
        print(f"{len(names)} bugs can be planted.")
        return 0
    rows = run_bugs(names, arguments.tests)
    print()
    for name, verdict, seconds in rows:
        print(f"{name:<56} {verdict:<10} {seconds:4.0f} s")
    alive = sum(not verdict.startswith("killed") for _, verdict, _ in rows)
    print(f"{len(rows) - alive} of {len(rows)} bugs were found.")
    return alive > 0


if __name__ == "__main__":
    sys.exit(main())
