"""Planted bugs, each of which the tests must find.

`python tests/mutations.py [names]` copies the tree to a temporary folder, plants one
bug after another there, runs the tests that should find it, and prints which did.
`--tests PATHS` runs other tests instead. The exit status is 0 if all bugs were found.
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
SECONDS = 300  # a bug may let workers wait for each other

SUITE = "tests/exchanges/test_exchanges.py"
SIGN = (SUITE, "-k", "sign and not hierarchical and not shard")
COUNT = (SUITE, "-k", "count and not hierarchical and not shard")
HIERARCHICAL = (SUITE, "-k", "hierarchical")
SHARD = (SUITE, "-k", "shard")
REFUSED = (SUITE, "-k", "refused")
RESIZED = (SUITE, "-k", "another_number")
ADAM = ("tests/optimizers/test_optimizers.py",)
RULES = ("tests/optimizers/test_onebit_adam.py",)
DELAY = ("tests/exchanges/test_delay.py",)
TRANSFORMS = ("tests/transforms/test_wrappers.py",)


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
        SIGN,
    ),
    "a worker's error is forgotten": Bug(
        "onebit_jax/_compressed.py",
        "errors[i] = error.reshape(errors[i].shape)",
        "errors[i] = error.reshape(errors[i].shape) * 0",
        SIGN,
    ),
    "a server's error is forgotten": Bug(
        "onebit_jax/_sign_mean.py",
        "owed.append(error.reshape(-1, self.block_size))",
        "owed.append(error.reshape(-1, self.block_size) * 0)",
        SIGN,
    ),
    "the dtype of the result is lost": Bug(
        "onebit_jax/_compressed.py",
        "x.dtype if own is None else own.dtype",
        "jnp.dtype(jnp.float32)",
        SIGN,
    ),
    # Blocks, buckets, servers.
    "all servers count the first one's values": Bug(
        "onebit_jax/_sign_mean.py",
        "_axes.worker_index(self.axes) * served, served",
        "_axes.worker_index(self.axes) * 0, served",
        SIGN,
    ),
    "all buckets count the first one's values": Bug(
        "onebit_jax/_sign_mean.py",
        "counts[rows],",
        "counts[: rows.stop - rows.start],",
        SIGN,
    ),
    "a bucket is a row too large": Bug(
        "onebit_jax/_wire.py",
        "self.bucket_size // values)",
        "self.bucket_size // values + 1)",
        ("tests/exchanges/test_sign_mean.py",),
    ),
    "two workers swap the wrong halves": Bug(
        "onebit_jax/_sign_mean.py",
        "lax.dynamic_index_in_dim(message, 1 - own, keepdims=False), axes",
        "lax.dynamic_index_in_dim(message, own, keepdims=False), axes",
        SIGN,
    ),
    "workers are numbered against the axes' order": Bug(
        "onebit_jax/_axes.py",
        "lax.axis_index(axes)",
        "lax.axis_index(axes[::-1])",
        SIGN,
    ),
    "exact leaves are summed": Bug(
        "onebit_jax/_exact_leaves.py",
        "lax.pmean(jnp.concatenate",
        "lax.psum(jnp.concatenate",
        SIGN,
    ),
    "a leaf of the limit goes exactly": Bug(
        "onebit_jax/_compressed.py",
        "math.prod(s) < least)",
        "math.prod(s) <= least)",
        SIGN,
    ),
    "the exact mean is a sum": Bug(
        "onebit_jax/_axes.py",
        "return lax.pmean(x, axes)\n",
        "return lax.psum(x, axes)\n",
        (SUITE, "-k", "exact"),
    ),
    # What is refused.
    "averaged gradients are taken": Bug(
        "onebit_jax/_axes.py", "if is_agreed(leaf, axes):", "if False:", REFUSED
    ),
    "integers are taken": Bug(
        "onebit_jax/_axes.py",
        "if not jnp.issubdtype(leaf.dtype, jnp.floating):",
        "if False:",
        REFUSED,
    ),
    "a state of other workers is taken": Bug(
        "onebit_jax/_axes.py", "if not fits:", "if False:", REFUSED
    ),
    # Counts.
    "a count is off by one": Bug(
        "onebit_jax/_count_mean.py",
        "(2 * positive - workers)",
        "(2 * positive - workers + 1)",
        COUNT,
    ),
    "digits of one bit too many": Bug(
        "pallas_kernels/_digits.py",
        "<= WORD:",
        "<= 2 * WORD:",
        ("tests/exchanges/test_count_mean.py",),
    ),
    "all leaves have the first one's scales": Bug(
        "onebit_jax/_count_mean.py", "start = stop\n", "start = 0\n", COUNT
    ),
    "an error is rounded twice": Bug(
        "onebit_jax/_count_mean.py",
        "[part._replace(error=part.error.astype(jnp.float32)) for part in parts]",
        "list(parts)",
        COUNT,
    ),
    "a bad value of the upper half is dropped": Bug(
        "onebit_jax/_count_mean.py", "flags >> 16 > 0", "flags >> 17 > 0", COUNT
    ),
    # Two levels, shards, DeepSpeed's layout.
    "a host gathers in the wrong order": Bug(
        "onebit_jax/_hierarchical.py",
        "axis=1,\n                tiled=True,\n                to=",
        "axis=0,\n                tiled=True,\n                to=",
        HIERARCHICAL,
    ),
    "a host's mean is a sum": Bug(
        "onebit_jax/_hierarchical.py",
        "(share / devices).reshape(-1)",
        "share.reshape(-1)",
        HIERARCHICAL,
    ),
    "a host's devices count the first one's values": Bug(
        "onebit_jax/_hierarchical.py",
        "lax.dynamic_index_in_dim(counts, own, 1",
        "lax.dynamic_index_in_dim(counts, own * 0, 1",
        HIERARCHICAL,
    ),
    "a host's scale is over the padding": Bug(
        "onebit_jax/_wire.py",
        'larger = own / (jnp.sqrt(share) if self.scale == "rms" else share)',
        "larger = own",
        HIERARCHICAL,
    ),
    "a host's error is rounded twice": Bug(
        "onebit_jax/_hierarchical.py",
        "error.reshape(-1).astype(jnp.float32),",
        "error.reshape(-1),",
        HIERARCHICAL,
    ),
    "a shard's error is forgotten": Bug(
        "onebit_jax/_per_shard.py",
        "means[i], errors[i] = mean, error",
        "means[i], errors[i] = mean, error * 0",
        SHARD,
    ),
    "a spec is dropped": Bug(
        "onebit_jax/_per_shard.py",
        "PartitionSpec(first, *spec) for spec",
        "PartitionSpec(first) for spec",
        ("tests/exchanges/test_per_shard.py",),
    ),
    "DeepSpeed's server forgets its error": Bug(
        "onebit_jax/_deepspeed.py",
        "error[None], new_error[None]",
        "error[None], 0 * new_error[None]",
        (SUITE, "-k", "deepspeed"),
    ),
    # 1-bit Adam.
    "the variance's correction goes on after the freeze": Bug(
        "onebit_jax/_onebit_adam.py",
        "ratio(ahead, nu, frozen_at)",
        "ratio(ahead, nu, count)",
        ADAM,
    ),
    "as published, its correction goes on after the freeze": Bug(
        "onebit_jax/_onebit_adam.py",
        "corrected(mu, decay1, count), state.nu, frozen_at",
        "corrected(mu, decay1, count), state.nu, count",
        ADAM,
    ),
    "a late warm-up thaws the variance": Bug(
        "onebit_jax/_onebit_adam.py",
        "nu = optax.tree.where(frozen, state.nu, nu)",
        "nu = nu",
        RULES,
    ),
    "the freeze comes a step late": Bug(
        "onebit_jax/_freeze.py", "return count >= step", "return count > step", ADAM
    ),
    "the rule sees an uncorrected norm": Bug(
        "onebit_jax/_onebit_adam.py",
        "norm = corrected(optax.tree.sum(nu), decay2, steps)",
        "norm = optax.tree.sum(nu)",
        RULES,
    ),
    "the floor is not applied": Bug(
        "onebit_jax/_onebit_adam.py",
        "nu=optax.tree.where(now, raised, nu)",
        "nu=nu",
        ADAM,
    ),
    "the growth is not applied": Bug(
        "onebit_jax/_onebit_adam.py",
        "nu = grown_since_freeze(power, frozen_power, frozen_at)",
        "nu = state.nu",
        ADAM,
    ),
    "the growth has no floor": Bug(
        "onebit_jax/_power.py",
        "jnp.maximum(growth, _LEAST_GROWTH)",
        "growth",
        ADAM,
    ),
    "all matrices have the first one's rows": Bug(
        "onebit_jax/_power.py",
        "start = end\n",
        "start = 0\n",
        ADAM,
    ),
    "the bound is on the momentum": Bug(
        "onebit_jax/_onebit_adam.py",
        "ratio(ahead, nu, frozen_at), -MAX_UPDATE, MAX_UPDATE",
        "ahead, -MAX_UPDATE, MAX_UPDATE",
        ADAM,
    ),
    "the warm-up is bounded": Bug(
        "onebit_jax/_onebit_adam.py",
        "jnp.where(frozen & (not as_published)",
        "jnp.where(jnp.bool_(not as_published)",
        ADAM,
    ),
    "the lead has the wrong sign": Bug(
        "onebit_jax/_onebit_adam.py",
        "m + delay * (m - before)",
        "m - delay * (m - before)",
        ADAM,
    ),
    "the lead is of uncorrected momenta": Bug(
        "onebit_jax/_onebit_adam.py",
        "last = corrected(state.mu, decay1, jnp.maximum(state.count, 1))",
        "last = state.mu",
        ADAM,
    ),
    "two phases are as late as one": Bug(
        "onebit_jax/_wire.py", "(2 if self.has_server else 1)", "1", DELAY
    ),
    "the warm-up's collective is left in": Bug(
        "onebit_jax/_onebit_adam.py",
        "agreed, exchange_state = exchange.update(gradients, state.exchange)",
        "exact_too, _ = exact.update(gradients, exact.init(updates))\n"
        "                    gradients = jax.tree.map(\n"
        "                        lambda g, m: g + 1e-30 * m, gradients, exact_too)\n"
        "                    agreed, exchange_state = exchange.update(\n"
        "                        gradients, state.exchange)",
        (*ADAM, "-k", "static"),
    ),
    "a static stage sends the other's too": Bug(
        "onebit_jax/_onebit_adam.py",
        'warmup() if stage == "warmup" else compressed()',
        "lax.cond(state.frozen_at > 0, compressed, warmup)",
        (*ADAM, "-k", "static"),
    ),
    "rows are exchanged in every step": Bug(
        "onebit_jax/_onebit_adam.py",
        "running_power(PERIOD)",
        "running_power(1)",
        ADAM,
    ),
    "shares of rows are written in the wrong place": Bug(
        "onebit_jax/_power.py",
        "lax.dynamic_update_slice_in_dim(power.lines, shares, start, 0)",
        "lax.dynamic_update_slice_in_dim(power.lines, shares, 0, 0)",
        ADAM,
    ),
    "weights decay with the wrong sign": Bug(
        "onebit_jax/_alias.py",
        "optax.add_decayed_weights(weight_decay, mask)",
        "optax.add_decayed_weights(-weight_decay, mask)",
        ADAM,
    ),
    # Around an optimizer.
    "a skipped step keeps its state": Bug(
        "onebit_jax/_skip.py",
        "return no_update(take), state.inner",
        "return no_update(take), take()[1]",
        (*ADAM, "-k", "not_finite"),
    ),
    "each worker decides for itself what is finite": Bug(
        "onebit_jax/_skip.py",
        "jnp.isfinite(lax.psum(squared_norm(updates), axes))",
        "jnp.isfinite(squared_norm(updates))",
        (*ADAM, "-k", "not_finite"),
    ),
    "a skipped step adds a positive zero": Bug(
        "onebit_jax/_branch.py",
        "jnp.full(aval.shape, -0.0",
        "jnp.full(aval.shape, 0.0",
        (*ADAM, "-k", "not_finite"),
    ),
    "accumulated gradients are not divided": Bug(
        "onebit_jax/_accumulate.py",
        "g[None].astype(jnp.float32) / steps",
        "g[None].astype(jnp.float32)",
        TRANSFORMS,
    ),
    "accumulated gradients are not forgotten": Bug(
        "onebit_jax/_accumulate.py",
        "jax.tree.map(jnp.zeros_like, gradient)",
        "gradient",
        TRANSFORMS,
    ),
    "each worker clips by its own norm": Bug(
        "onebit_jax/_clip.py",
        "jnp.sqrt(lax.pmean(squared_norm(updates), axes))",
        "jnp.sqrt(squared_norm(updates))",
        TRANSFORMS,
    ),
    # Other numbers of workers, and resuming.
    "resizing gives each worker the sum": Bug(
        "onebit_jax/_placement.py",
        "jnp.mean(old.astype(jnp.float32), axis=0",
        "jnp.sum(old.astype(jnp.float32), axis=0",
        RESIZED,
    ),
    "resizing drops what servers owe": Bug(
        "onebit_jax/_placement.py",
        "return jax.device_put(flat.reshape(new.shape), new.sharding)",
        "return jax.device_put(0 * flat.reshape(new.shape), new.sharding)",
        RESIZED,
    ),
    "resizing mixes what shards owe": Bug(
        "onebit_jax/_placement.py",
        "jnp.swapaxes(old, 0, 1).reshape(shards, -1)",
        "old.reshape(shards, -1)",
        RESIZED,
    ),
    "a resumption drops a leaf": Bug(
        "train/core/checkpoint.py",
        'state = arrays["state"]\n',
        'state = arrays["state"]\n'
        "        *kept, last = jax.tree.leaves(state)\n"
        "        state = jax.tree.structure(state).unflatten([*kept, 0 * last])\n",
        ("tests/train/core/test_checkpoint.py",),
    ),
    # What is told of a run.
    "an all-reduce counts half": Bug(
        "onebit_jax/_collectives.py",
        'rounds = 2 if op == "all-reduce" else 1',
        "rounds = 1",
        ("tests/inspect/test_traffic.py",),
    ),
    "an all-gather counts one worker's share": Bug(
        "onebit_jax/_collectives.py",
        'if op == "all-gather":',
        "if False:",
        ("tests/inspect/test_traffic.py",),
    ),
    "replicas of the last leaf are not compared": Bug(
        "onebit_jax/_replicas.py",
        "enumerate(zip(paths, specs, strict=True)):",
        "enumerate(zip(paths[:-1], specs[:-1], strict=True)):",
        ("tests/inspect/test_replicas.py",),
    ),
    "the norm of errors is of all workers together": Bug(
        "onebit_jax/_metrics.py",
        'leaf.shape[0] if error.role == "each" else 1',
        "1",
        ("tests/inspect/test_metrics.py",),
    ),
}


def run_tests(folder, tests, cache):
    """The exit status of the tests, None where they do not end, and seconds."""
    environment = os.environ | {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # Of a bug's programs most are those of the code without it.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    start = time.monotonic()
    try:
        status = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder, env=environment, timeout=SECONDS,
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
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.file} has {text.count(bug.old)} times: {bug.old}")
    file.write_text(text.replace(bug.old, bug.new))
    return file, text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of bugs; all without one")
    parser.add_argument("--tests", nargs="+", help="to run instead of its own")
    arguments = parser.parse_args()
    names = arguments.names or list(BUGS)
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = pathlib.Path(temporary, "tree"), pathlib.Path(temporary, "jax")
        shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        for name in names:
            plant(BUGS[name], folder)[0].write_text(
                (ROOT / BUGS[name].file).read_text()
            )
        wanted = [tuple(arguments.tests or BUGS[name].tests) for name in names]
        for tests in dict.fromkeys(wanted):
            status, seconds = run_tests(folder, tests, cache)
            print(f"without a bug, {seconds:.0f} s: {' '.join(tests)}", flush=True)
            if status != 0:
                raise SystemExit("these tests fail without a bug")
        rows = []
        for name, tests in zip(names, wanted, strict=True):
            file, text = plant(BUGS[name], folder)
            status, seconds = run_tests(folder, tests, cache)
            file.write_text(text)
            verdict = {0: "SURVIVED", 1: "killed", None: "killed, as it does not end"}
            rows.append((name, verdict.get(status, f"BROKEN ({status})"), seconds))
            print(f"{rows[-1][1]}, {seconds:.0f} s: {name}", flush=True)
    print()
    for name, verdict, seconds in rows:
        print(f"{name:<56} {verdict:<10} {seconds:4.0f} s")
    alive = sum(not verdict.startswith("killed") for _, verdict, _ in rows)
    print(f"{len(rows) - alive} of {len(rows)} bugs were found.")
    return alive > 0


if __name__ == "__main__":
    sys.exit(main())
