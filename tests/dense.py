"""A dense simulation of the 1-bit exchange: all workers' arrays in one place.

Written from the paper's Algorithm 1 with NumPy in float64, sharing no code with the
library.
"""

import numpy as np


def blocks_of(x, block_size):
    """Cuts a flat array into lists of values, a list a block."""
    return [x[i : i + block_size] for i in range(0, x.size, block_size)]


def scale_of(block, kind):
    if kind == "rms":
        return np.sqrt(np.mean(np.square(block)))
    return np.mean(np.abs(block))


def compress(x, block_size, kind):
    """What signs and scales say of x, and what of x they leave unsaid."""
    sent = np.concatenate(
        [
            np.where(block >= 0, 1, -1) * scale_of(block, kind)
            for block in blocks_of(x, block_size)
        ]
        or [x]
    )
    return sent, x - sent


def exchange(values, worker_errors, server_error, block_size, kind):
    """One exchange of one leaf.

    Args:
      values: (n, size) each worker's values.
      worker_errors: (n, size).
      server_error: (size,), all servers' shares together.
      block_size: values a scale.
      kind: 'rms' or 'mean_abs'.

    Returns:
      The agreed mean, the new errors, and where the server's sign is undecided,
      because its value is within float32 rounding of zero.
    """
    # The sum that signs are taken of is the library's own, to the last bit.
    x = (values.astype(np.float32) + worker_errors.astype(np.float32)).astype(float)
    sent, new_errors = zip(*(compress(row, block_size, kind) for row in x), strict=True)
    y = np.mean(sent, axis=0) + server_error.astype(float)
    agreed, new_server_error = compress(y, block_size, kind)
    size = np.abs(sent).max(axis=0) + np.abs(server_error)
    undecided = (np.abs(y) < 1e-5 * size) & (y != 0)
    return agreed, np.stack(new_errors), new_server_error, undecided
