"""Options that make no sense are refused where they are given."""

import jax
import jax.numpy as jnp
import optax
import pytest

import onebit_jax
from onebit_jax import (
    accumulate,
    clip_by_worker_norm,
    exact_mean,
    freeze_at,
    onebit_adam,
    sign_mean,
)


def test_an_axis_without_a_name():
    for axis in ((), None, ("data", 3)):
        with pytest.raises((ValueError, TypeError), match=r"axis|iterable"):
            sign_mean(axis)


class Halves(onebit_jax.Codec):
    """A codec that sends values as they are, in 16 bits."""

    block_size = 64
    words = 32

    def encode(self, blocks, counts):
        return jax.lax.bitcast_convert_type(
            blocks.astype(jnp.bfloat16).reshape(-1, 32, 2), jnp.uint32
        )

    def decode(self, words):
        values = jax.lax.bitcast_convert_type(words, jnp.bfloat16)
        return values.reshape(*words.shape[:-1], 64).astype(jnp.float32)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"block_size": 0}, "positive integers, got 0 and 32"),
        ({"words": lambda self: 32}, "positive integers, got 64 and <bound method"),
        ({"words": 0, "encode": lambda self, x, n: x[:, :0]}, "integers, got 64 and 0"),
        ({"words": 33}, r"uint32 words of shape \(2, 33\), not as uint32 of \(2, 32\)"),
        ({"encode": lambda self, x, n: x[:, ::2]}, "not as float32"),
        ({"decode": lambda self, words: words}, r"not to uint32 of \(2, 32\)"),
    ],
)
def test_a_codec_that_gives_other_words_or_values(wrong, match):
    onebit_jax.two_phase("data", Halves())
    codec = type("Wrong", (Halves,), wrong)()
    with pytest.raises(ValueError, match=match):
        onebit_jax.two_phase("data", codec, name="wrong")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: onebit_jax.quantized_mean("data", 3), "bits must be 2, 4 or 8, got 3"),
        (lambda: onebit_jax.quantized_mean("data", 4.0), "'float' object cannot be"),
        (lambda: sign_mean(("data", "data")), "tuple of different names, got"),
        (lambda: sign_mean(None), "tuple of different names, got None"),
        (lambda: sign_mean(5), "tuple of different names, got 5"),
        (
            lambda: onebit_jax.two_phase("data", 7),
            "needs an onebit_jax.Codec, got 7",
        ),
        (lambda: adam(bound=0), "bound must be more than 0, or None for none, got 0"),
        (lambda: adam(bound=float("nan")), "bound must be more than 0"),
        (lambda: adam(lead=-1.0), "lead must be a finite number of steps from 0 on"),
        (lambda: adam(lead=float("nan")), "lead must be a finite .* None, got nan"),
        (lambda: adam(lead=float("inf")), "lead must be a finite .* None, got inf"),
        (lambda: adam(growth=False), "growth must be a GrowthByMeanSquares or None"),
        (lambda: adam(floor=1e-6), "floor must be a FloorAtMean or None, got 1e-06"),
        (lambda: onebit_jax.GrowthByMeanSquares(0), "period must be from 1 step"),
        (lambda: onebit_jax.GrowthByMeanSquares(2**31), "period must be from 1 step"),
        (lambda: onebit_jax.GrowthByMeanSquares(least=0), "least must be at least 1"),
        (
            lambda: onebit_jax.random_vote_mean("data", seed=2**63),
            "seed must be an integer of 64 bits, got 9223372036854775808",
        ),
        (lambda: onebit_jax.GrowthByMeanSquares(1.5), "'float' object cannot be"),
        (lambda: onebit_jax.FloorAtMean(-1.0), "negligible must be a share from 0"),
        (
            lambda: onebit_jax.sent_bytes(
                [onebit_jax.Transfer("all-reduce", 8, ("x",))], {"y": 2}
            ),
            "axis_sizes has no axis 'x' of .* such as mesh.shape",
        ),
        (
            lambda: onebit_jax.sent_bytes({"warmup": (), "compressed": ()}, {"x": 2}),
            r"of one stage: give those of one of .* costs\['compressed'\]",
        ),
    ],
)
def test_options_that_make_no_sense(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def adam(**parts):
    compressed = onebit_jax.Compressed(**parts)
    return onebit_adam(0.1, sign_mean("data"), freeze_at(2), compressed=compressed)


@pytest.mark.parametrize("block_size", [0, 16, 31, 48, 1000, -32])
def test_block_sizes_that_are_no_power_of_two(block_size):
    with pytest.raises(ValueError, match=r"power of two of at least 32"):
        sign_mean("data", block_size=block_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "max"}, "'rms' or 'mean_abs'"),
        ({"error_dtype": jnp.float16}, "float32 or bfloat16"),
        ({"error_dtype": jnp.int8}, "float32 or bfloat16"),
        ({"bucket_size": 0}, "bucket_size must be positive, got 0"),
    ],
)
def test_options_of_sign_mean(options, message):
    with pytest.raises(ValueError, match=message):
        sign_mean("data", **options)


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_norm_that_nothing_can_have(norm):
    with pytest.raises(ValueError, match="max_norm must be more than 0"):
        clip_by_worker_norm(norm, "data")


@pytest.mark.parametrize(("steps", "said"), [(0, "least 1"), (2**31, "most 2[*][*]31")])
def test_accumulating_nothing_or_without_end(steps, said):
    with pytest.raises(ValueError, match=f"steps must be at {said}"):
        accumulate(optax.identity(), steps, "data")


def test_what_is_not_a_whole_number():
    with pytest.raises(TypeError, match="integer"):
        accumulate(exact_mean("data"), 2.5, "data")
    with pytest.raises(TypeError, match="integer"):
        sign_mean("data", block_size=1024.0)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (onebit_adam, "warmup_exchange"),
        (onebit_jax.zero_one_adam, "variance_exchange"),
    ],
)
def test_a_variance_of_votes(make, name):
    votes = {name: onebit_jax.vote_mean("data")}
    with pytest.raises(TypeError, match=f"from what {name} returns, and votes have no"):
        make(0.1, sign_mean("data"), freeze_at(1), **votes)
