"""Planted bugs of exchanges: words, errors, layouts, counted bytes."""

from planted.bug import Bug

EXCHANGES = "tests/exchanges/test_exchanges.py::test_"


def dense(*rows):
    return tuple(f"{EXCHANGES}equals_its_dense_simulation[{row}]" for row in rows)


def cost(*rows):
    return tuple(f"{EXCHANGES}counted_bytes_are_its_wire_cost[{row}]" for row in rows)


def resized(*rows):
    test = f"{EXCHANGES}another_number_of_workers_keeps_the_residual"
    return tuple(f"{test}[{row}]" for row in rows)


SIGN, COUNT, SHARD = dense("sign-3"), dense("count-3"), dense("per-shard-sign-2")
SIMULATED = (
    "tests/workers/test_simulated.py::test_simulated_workers_learn_as_those_of_a_mesh",
)
HIERARCHICAL = dense("hierarchical-sign-3x2")

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
    "a server has errors of padding": Bug(
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
    # Levels.
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
        "pallas_kernels/_reference.py",
        "(1 - decay) * value + decay",
        "value + decay",
        (f"{EXCHANGES}a_momentum_is_exchanged_as_its_sum[quantized-2-3]",),
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
        "onebit_jax/workers/arithmetic.py",
        "unravel(lax.pmean(flat, axes))",
        "unravel(lax.psum(flat, axes))",
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
    "XLA folds what orders collectives": Bug(
        "onebit_jax/workers/arithmetic.py",
        "return odd * (1 - odd)",
        "return odd * 0",
        ("tests/workers/test_arithmetic.py::test_xla_computes_it_from_the_values",),
    ),
    "what is gathered is not known to be the same": Bug(
        "onebit_jax/workers/arithmetic.py",
        'options["to"] = "invarying"',
        'options["to"] = "varying"',
        SIGN,
    ),
    "what is gathered has a type where none has": Bug(
        "onebit_jax/workers/arithmetic.py",
        "if is_recorded(axes):",
        "if True:",
        SIMULATED,
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
        "inside, axis=1, tiled=True",
        "inside, axis=0, tiled=True",
        HIERARCHICAL,
    ),
    "a host gathers any exchange's shares in the wrong order": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        "flat = gather(mean, self.inside, tiled=True)",
        "flat = gather(mean, self.inside)[::-1].reshape(-1)",
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
        "return *exact, *among.block_transfers(blocks, axis_sizes)",
        "return among.block_transfers(blocks, axis_sizes)",
        cost("sign-3"),
    ),
    "a host tells of digits for all of its devices": Bug(
        "onebit_jax/exchanges/hierarchical.py",
        "packed = 4 * exchange.words(hosts) * blocks",
        "packed = 4 * exchange.words(hosts * devices) * blocks",
        cost("hierarchical-count-3x2"),
    ),
}
