"""An exchange of your own: ternary values, twenty digits a word of 32 bits."""

import dataclasses

import jax
import jax.numpy as jnp

import onebit_jax
from pallas_kernels import digits_of_word, pack_digits, unpack_digits


@dataclasses.dataclass(frozen=True)
class TernaryCodec(onebit_jax.Codec):
    """The nearest of -s, 0 and s, with s 1.5 times the mean magnitude of the block."""

    block_size: int = 1024

    @property
    def words(self):
        """Words of 32 bits of a block."""
        # Digits up to 2, and the scale.
        return -(-self.block_size // digits_of_word(2)) + 1

    def encode(self, blocks, counts):
        """(b, block_size) float32 and (b,) int32 to (b, words) uint32."""
        sizes = jnp.maximum(counts, 1).astype(jnp.float32)
        scales = 1.5 * jnp.sum(jnp.abs(blocks), axis=1) / sizes
        large = jnp.abs(blocks) > scales[:, None] / 2
        levels = jnp.where(large, jnp.sign(blocks), 0.0)
        digits = pack_digits((levels + 1).astype(jnp.uint32), 2)
        bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
        return jnp.concatenate([digits, bits[:, None]], axis=1)

    def decode(self, words):
        """(*n, words) uint32 to (*n, block_size) float32."""
        rows = words.reshape(-1, self.words)
        levels = unpack_digits(rows[:, :-1], 2, self.block_size) - 1
        scales = jax.lax.bitcast_convert_type(rows[:, -1:], jnp.float32)
        return (levels * scales).reshape(*words.shape[:-1], self.block_size)


def ternary_mean(axis, *, block_size=1024, **options):
    """The mean of the workers' values by ternary digits, with error feedback."""
    return onebit_jax.two_phase(
        axis, TernaryCodec(block_size), name="ternary_mean", **options
    )


jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
params = {"w": jnp.zeros((256, 256))}
exchange = ternary_mean("data")
cost = onebit_jax.stage_costs(exchange, params, mesh.shape)["every"]
bytes_sent = onebit_jax.sent_bytes(cost, mesh.shape)
print(f"{2 * 7 / 8 * 4 * 256**2 / bytes_sent:.1f} times fewer bytes")
