"""The errors in the states of all exchanges, by leaf.

What depends on the form of an exchange's state stands here alone.
"""

import math

import numpy as np
from exchanges.cases import BLOCK, SHAPES, SMALL, SPECS


def errors_of(case, state):
    """For each leaf the errors of workers, or hosts, and those of all servers together.

    (teams, size) and (size,) in float64; zeros where an exchange has none.
    Asserts that errors are zero where there is no value.
    """
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    teams = math.prod(case.mesh[a] for a in case.axes if a not in case.inside)
    found = {n: (np.zeros((teams, s)), np.zeros(s)) for n, s in sizes.items()}
    if hasattr(state, "groups"):
        by_axes = {}
        for name in SHAPES:
            by_axes.setdefault(tuple(a for a in SPECS[name] if a), []).append(name)
        for names, group in zip(by_axes.values(), state.groups, strict=True):
            if hasattr(group, "worker_error"):
                worker = dict(zip(names, group.worker_error.value, strict=True))
                number = len(case.shards_of(names[0]))
                fill(case, found, names, worker, group, shards=range(number))
    elif hasattr(state, "worker_error"):
        fill(case, found, SHAPES, state.worker_error.value, state)
    return found


def fill(case, found, names, worker, state, shards=(None,)):
    """Puts the errors of an exchange of blocks, shard by shard, where they belong."""
    blocked = [name for name in names if not case.is_exact(name)]
    small = [n for n in blocked if case.shards_of(n)[0].size < SMALL]
    large = [n for n in blocked if n not in small]
    for number in shards:

        def here(x, number=number):
            return flat(x if number is None else np.asarray(x, float)[:, number])

        if isinstance(worker, dict):
            assert all(worker[n] is None for n in names if n not in large)
            own = {n: here(worker[n]) for n in large}
            if small:
                own |= in_order(case, here(state.small_error.value), small)
        else:
            own = in_order(case, here(worker), [*large, *small])
        served = {}
        if state.server_error.value is not None:
            row = here(state.server_error.value).reshape(1, -1)
            served = in_order(case, row, [*large, *small])
        for name in blocked:
            places = case.shards_of(name)[number or 0]
            found[name][0][:, places] = own[name]
            if served:
                found[name][1][places] = served[name][0]


def flat(x):
    x = np.asarray(x, float)
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def in_order(case, rows, names):
    """Leaves' values out of rows of blocks."""
    found, start = {}, 0
    for name in names:
        size = case.shards_of(name)[0].size
        end = start + -(-size // BLOCK) * BLOCK
        found[name] = rows[:, start : start + size]
        assert not rows[:, start + size : end].any(), "padding has no error"
        start = end
    assert not rows[:, start:].any(), "padding has no error"
    return found
