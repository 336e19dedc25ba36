"""Dense simulations of exchanges: all workers' arrays in one place.

Written from the papers with NumPy in float64, sharing no code with the library. A
leaf is flat here; `blocks` has for each value the number of its block, so that padding
is what it is: nothing.
"""

from typing import NamedTuple

import numpy as np


class Result(NamedTuple):
    """One exchange of one leaf.

    Attributes:
      agreed: (size,) what all workers get.
      errors: (workers, size) what each has not sent.
      server_error: (size,) what servers have not sent back, all shares together.
      undecided: (size,) whether rounding of float32 may have chosen a sign.
    """

    agreed: np.ndarray
    errors: np.ndarray
    server_error: np.ndarray
    undecided: np.ndarray


def scales_of(x, blocks, kind):
    """For each value the scale of its block."""
    powers = np.square(x) if kind == "rms" else np.abs(x)
    means = np.bincount(blocks, powers) / np.maximum(np.bincount(blocks), 1)
    return (np.sqrt(means) if kind == "rms" else means)[blocks]


def signs(x, blocks, kind):
    """x by one bit a value and a scale a block; zero is positive."""
    return np.where(x >= 0, 1, -1) * scales_of(x, blocks, kind)


def near_zero(x, size, blocks=None):
    # Exact zeros are decided: they are positive.
    return (np.abs(x) < 1e-5 * size) & (x != 0)


def exact_mean(values, errors, server_error):
    undecided = np.zeros(values.shape[1], bool)
    return Result(values.mean(axis=0), 0 * errors, 0 * server_error, undecided)


def two_phases(values, errors, server_error, codec, blocks, near=near_zero):
    """Workers encode, servers average and encode again; both keep errors.

    Args:
      values: (workers, size).
      errors: (workers, size).
      server_error: (size,).
      codec: from values and their blocks to what is decoded from their code.
      blocks: (size,).
      near: from values, their size and blocks to whether rounding may decide them.
    """
    x = values + errors
    sent = np.stack([codec(row, blocks) for row in x])
    y = sent.mean(axis=0) + server_error
    agreed = codec(y, blocks)
    undecided = near(y, np.abs(sent).max(axis=0) + np.abs(server_error), blocks)
    undecided |= np.stack([near(row, np.abs(x).max(), blocks) for row in x]).any(axis=0)
    return Result(agreed, x - sent, y - agreed, undecided)


def shared_scale(scales):
    """The mean of the patterns of float32 scales, in Python's whole numbers."""
    used = [int(np.float32(s).view(np.uint32)) for s in scales if s > 0]
    if not used:
        return 0.0
    dropped = (len(scales) - 1).bit_length()
    mean = (sum(p >> dropped for p in used) << dropped) // len(used)
    return float(np.uint32(mean).view(np.float32))


def counted(values, errors, server_error, kind, blocks):
    """Workers' signs have one scale, and are counted."""
    x = values + errors
    own = np.stack([scales_of(row, blocks, kind) for row in x])
    scale = np.array([shared_scale(column) for column in own.T])
    sign = np.where(x >= 0, 1, -1)
    undecided = near_zero(x, np.abs(x).max()).any(axis=0)
    return Result(scale * sign.mean(axis=0), x - scale * sign, 0 * scale, undecided)
