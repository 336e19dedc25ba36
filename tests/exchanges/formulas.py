"""The exchanges' formulas for one leaf, in dense float64 NumPy."""

import functools

import dense
import numpy as np


def by_signs(values, errors, server_error, blocks, kind="mean_abs"):
    codec = functools.partial(dense.signs, kind=kind)
    return dense.two_phases(values, errors, server_error, codec, blocks)


def by_counts(values, errors, server_error, blocks, kind="mean_abs"):
    return dense.counted(values, errors, server_error, kind, blocks)


def paid_in_full(values, errors, server_error):
    """One worker's own values plus all errors."""
    paid = values + errors + server_error
    return dense.exact_mean(paid, errors, server_error)


def by_votes(values, errors, server_error, blocks, back="majority"):
    del blocks
    votes = np.where(values >= 0, 1, -1).mean(axis=0)
    if back == "majority":
        votes = np.where(votes >= 0, 1.0, -1.0)
    undecided = dense.near_zero(values, 1e-2).any(axis=0)
    return dense.Result(votes, 0 * errors, 0 * server_error, undecided)


def by_random_votes(values, errors, server_error, blocks, back="mean"):
    """Chance decides values below 1, and answers that not all have voted for."""
    result = by_votes(values, errors, server_error, blocks, "mean")
    chance = np.abs(values).min(axis=0) < 1
    if back == "vote":
        chance |= np.abs(result.agreed) < 1
    return result._replace(undecided=chance)


def steps_of(x, blocks, bits):
    """For each value the step of its block; 1 for a block of zeros."""
    largest = 2 ** (bits - 1) - 1
    if bits == 2:
        steps = 1.224 * dense.scales_of(x, blocks, "rms")
    else:
        steps = np.zeros(blocks.max(initial=0) + 1)
        np.maximum.at(steps, blocks, np.abs(x) / largest)
        steps = steps[blocks]
    return np.where(steps > 0, steps, 1)


def levels(x, blocks, bits):
    largest, steps = 2 ** (bits - 1) - 1, steps_of(x, blocks, bits)
    return steps * np.clip(np.round(x / steps), -largest, largest)


def between_levels(x, size, blocks, bits):
    del size
    part = np.abs(x / steps_of(x, blocks, bits)) % 1
    return np.abs(part - 0.5) < 1e-4


def by_levels(values, errors, server_error, blocks, bits):
    codec, near = (functools.partial(f, bits=bits) for f in (levels, between_levels))
    return dense.two_phases(values, errors, server_error, codec, blocks, near=near)


rms_signs = functools.partial(by_signs, kind="rms")
rms_counts = functools.partial(by_counts, kind="rms")
votes_for_means = functools.partial(by_votes, back="mean")
votes_twice = functools.partial(by_random_votes, back="vote")
