"""Random votes by their formula, with the library's random numbers."""

import jax
import numpy as np

LEVELS = 2**16


def levels(key, shape):
    """From 0 on; the upper half of a block's rows has the words' upper bits."""
    *servers, _, width = shape
    bits = np.asarray(jax.random.bits(key, (*servers, 16, width)), np.int64)
    return np.concatenate([bits & 0xFFFF, bits >> 16], axis=-2)


def replayed(values, count, back="mean", seed=0):
    """The agreement on flat values, (workers, size), in the so-manieth call."""
    workers, size = values.shape
    width = -(-size // (32 * workers))
    shape = (workers, 32, width)
    shared, permuted, served = jax.random.split(
        jax.random.fold_in(jax.random.key(seed), count), 3
    )
    places = np.asarray(jax.random.permutation(permuted, workers))
    numbers = levels(shared, shape).reshape(-1)[:size]
    votes = []
    for own, place in zip(np.asarray(values, float), places, strict=True):
        turned = (numbers + int(place) * LEVELS // workers) % LEVELS
        votes.append(np.where((turned + 0.5) / LEVELS < (1 + own) / 2, 1, -1))
    mean = np.mean(votes, axis=0)
    if back == "mean":
        return mean
    keys = [jax.random.fold_in(served, server) for server in range(workers)]
    numbers = np.stack([levels(key, shape[1:]) for key in keys]).reshape(-1)[:size]
    return np.where((numbers + 0.5) / LEVELS < (1 + mean) / 2, 1, -1)
