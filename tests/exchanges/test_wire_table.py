"""The table of bits in docs/wire-formats.md is what the exchanges tell."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import onebit_jax
from pallas_kernels import digits_of_word

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "wire-formats.md"
ROWS = re.findall(
    r"^\| (\d+) " + r"\| ([\d.]+) " * 6 + r"\|$",
    PAGE.read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_there_is_a_table():
    assert [int(row[0]) for row in ROWS] == [2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bits_a_value(row):
    workers, size = int(row[0]), 2**22
    sizes = {"data": workers}
    params = jax.ShapeDtypeStruct((size,), jnp.float32)

    def bits(exchange):
        cost = onebit_jax.stage_costs(exchange, params, sizes)["every"]
        once = sum(transfer.bytes for transfer in cost)
        return 8 * onebit_jax.sent_bytes(cost, sizes) / size, 8 * once / size

    signs, _ = bits(onebit_jax.sign_mean("data"))
    ring, switch = bits(onebit_jax.count_mean("data"))
    votes, _ = bits(onebit_jax.vote_mean("data"))
    means, _ = bits(onebit_jax.random_vote_mean("data"))
    told = 32 / digits_of_word(workers), signs, ring, switch, votes, means
    for text, value in zip(row[1:], told, strict=True):
        places = len(text.partition(".")[2])
        assert float(text) == pytest.approx(value, abs=0.51 * 10**-places)
