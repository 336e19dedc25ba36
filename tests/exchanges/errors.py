"""The errors in the states of all exchanges, by leaf.

What depends on the form of an exchange's state stands here alone.
"""

import math

import numpy as np
from exchanges.cases import BLOCK, SHAPES, SPECS


def errors_of(case, state):
    """For each leaf the errors of workers, or hosts, and those of all servers together.

    (teams, size) and (size,) in float64; zeros where an exchange has none.
    Asserts that errors are zero where there is no value.
    """
    sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
    teams = math.prod(case.mesh[a] for a in case.axes if a not in case.inside)
    none = {n: (np.zeros((teams, s)), np.zeros(s)) for n, s in sizes.items()}
    if hasattr(state, "groups") and hasattr(state.groups[0], "worker_error"):
        return errors_of_shards(case, state.groups)
    if not hasattr(state, "worker_error"):
        return none
    worker, servers = state.worker_error.value, [state.server_error.value]
    if case.fused:
        ends = np.cumsum(list(sizes.values()))[:-1]
        own = np.split(flat(worker), ends, axis=1)
        served = np.split(flat(servers[0]).reshape(-1), ends)
        return dict(zip(SHAPES, zip(own, served, strict=True), strict=True))
    if isinstance(servers[0], dict):
        return {n: (flat(worker[n]), flat(servers[0][n]).reshape(-1)) for n in SHAPES}
    own = (
        {n: flat(worker[n]) for n in SHAPES}
        if isinstance(worker, dict)
        else in_order(case, flat(worker), SHAPES)
    )
    served = {n: np.zeros((1, s)) for n, s in sizes.items()}
    if servers[0] is not None:
        served = in_order(case, flat(servers[0]).reshape(1, -1), SHAPES)
    return {n: (own[n], served[n].reshape(-1)) for n in SHAPES}


def errors_of_shards(case, groups):
    """The same of leaves that are sharded: a state for each set of axes."""
    by_axes, result = {}, {}
    for name in SHAPES:
        by_axes.setdefault(tuple(a for a in SPECS[name] if a), []).append(name)
    for names, state in zip(by_axes.values(), groups, strict=True):
        served = {n: np.zeros((1, math.prod(SHAPES[n]))) for n in names}
        if state.server_error.value is not None:
            buffer = np.asarray(state.server_error.value, float)
            shards = np.swapaxes(buffer, 0, 1)
            served = in_order(case, shards.reshape(len(shards), -1), names)
        for name, errors in zip(names, state.worker_error.value, strict=True):
            worker = np.zeros((case.workers, math.prod(SHAPES[name])))
            for number, places in enumerate(case.shards_of(name)):
                worker[:, places] = flat(errors[:, number])
            result[name] = worker, served[name].reshape(-1)
    return result


def flat(x):
    x = np.asarray(x, float)
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def in_order(case, rows, names):
    """Leaves' values out of buffers of blocks: a row a team, or a shard."""
    found, start = {}, 0
    for name in names:
        shards = case.shards_of(name)
        size, by_shard = shards[0].size, len(shards) > 1
        found[name] = np.zeros((1 if by_shard else len(rows), size * len(shards)))
        if case.is_exact(name):
            continue
        part = rows[:, start : start + size]
        if by_shard:
            for places, row in zip(shards, part, strict=True):
                found[name][0, places] = row
        else:
            found[name] = part
        end = start + -(-size // BLOCK) * BLOCK
        assert not rows[:, start + size : end].any(), "padding has no error"
        start = end
    assert not rows[:, start:].any(), "padding has no error"
    return found
