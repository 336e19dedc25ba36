"""The protocol of states: the names that a state tells of itself, and their readers.

A transformation cannot see what stands around it, and a step cannot see which
optimizer it runs. Both read the state: a named tuple that is declared by
`optimizer_state` may tell any of the names below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, keystr

from onebit_jax.workers.worker_local import is_worker_local

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int32

    from onebit_jax.workers.worker_local import WorkerLocal

State = TypeVar("State", bound=type)


class Told:
    """The names that a state may tell, with what is taken where it does not.

    Attributes:
      local_stages: names of the stages that exchange nothing: a program of one of
        them has no collective between workers.
      warmup_stages: names of the stages that end by themselves, so that `refusal` is
        asked before each of their steps and not before the first alone.
      wrapper: name of a transformation that decides what the one inside it sees, as
        `accumulate` does, and keeps its state in the field `inner`; None for others.
      is_opaque: whether what is inside tells nothing of the whole run, as the state
        of `per_worker` does.
    """

    local_stages: tuple[str, ...] = ()
    warmup_stages: tuple[str, ...] = ()
    wrapper: str | None = None
    is_opaque: bool = False

    def steps_by_stage(self) -> dict[str, Int32[Array, ""]]:
        """The steps taken in each stage, by the stages' names in their order."""
        return {}

    def metrics(self) -> dict[str, Array]:
        """Measures of the optimizer: scalars by name, from global arrays."""
        return {}

    def distance(self) -> Any:
        """The distance of each worker's own parameters from the agreed ones.

        A tree like the parameters, a `WorkerLocal` in the place of each leaf; None
        where workers take no steps of their own.
        """
        return None

    def refusal(self, stage: str) -> str | None:
        """The reason why a static stage cannot be the next one; None if it can."""
        del stage
        return None

    def steps_left(self, stage: str) -> int | None:
        """The number of steps of a stage before one that exchanges is due.

        None where none will be; else the state is asked again after these.
        """
        del stage
        return None


_NAMES = tuple(name for name in vars(Told) if not name.startswith("_"))
_DECLARED: set[type] = set()


def optimizer_state(kind: State) -> State:
    """Declares a named tuple as a state that tells of itself, by the names of `Told`.

    Args:
      kind: a class made by `typing.NamedTuple`. Methods and attributes of its own are
        those of `Told`, or begin with an underscore.

    Returns:
      The class.

    Raises:
      TypeError: if it has another public attribute, which nobody would read.

    Example:
      >>> from typing import Any, NamedTuple
      >>> @optimizer_state
      ... class CountedState(NamedTuple):
      ...     taken: Any
      ...     def metrics(self):
      ...         return {'taken': self.taken}
      >>> declared((CountedState(3),))[0].metrics()
      {'taken': 3}
    """
    fields = getattr(kind, "_fields", ())
    for name in vars(kind):
        if not (name.startswith("_") or name in fields or name in _NAMES):
            raise TypeError(
                f"{kind.__name__}.{name} is nothing that a state tells: name it one of "
                f"{', '.join(_NAMES)}, or begin it with an underscore."
            )
    for name in _NAMES:
        if name not in vars(kind):
            setattr(kind, name, vars(Told)[name])
    _DECLARED.add(kind)
    return kind


def is_declared(node: Any) -> bool:
    """True of a state that tells of itself; for `is_leaf`."""
    return type(node) in _DECLARED


def declared(state: Any) -> list[Any]:
    """The nodes of a state that tell of themselves, outer ones before inner ones."""
    return [node for _, node in _declared(state, ())]


def _declared(state: Any, above: Any) -> Iterator[tuple[Any, Any]]:
    """For each node that tells of itself its path, and the node."""
    for below, node in jax.tree.leaves_with_path(state, is_leaf=is_declared):
        if is_declared(node):
            path = (*above, *below)
            yield path, node
            if not node.is_opaque:
                fields = zip(node._fields, node, strict=True)
                for name, inside in fields:
                    key = jax.tree_util.GetAttrKey(name)
                    yield from _declared(inside, (*path, key))


def _telling_parts(state: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The nodes that tell stages: for each a name, its path, and steps by stage.

    The name of the only one is empty; others have their labels of `optax.partition`, or
    their paths where these do not tell them apart.
    """
    told = [(path, node.steps_by_stage()) for path, node in _declared(state, ())]
    told = [(path, steps) for path, steps in told if steps]
    if len(told) < 2:
        return {"": told[0]} if told else {}
    labels = [tuple(k for k in path if isinstance(k, DictKey)) for path, _ in told]
    if len(set(map(keystr, labels))) < len(told):
        labels = [path for path, _ in told]
    names = (keystr(label, simple=True, separator=".") for label in labels)
    return dict(zip(names, told, strict=True))


def steps_by_stage(state: Any) -> dict[str, Int32[Array, ""]]:
    """The steps taken in each stage, told by the optimizer's state.

    Args:
      state: an optimizer's state.

    Returns:
      Steps by the stage's name, each counted once: those of a nested stage, such as
      'compressed/measuring', are not counted in the outer one too. Where several states
      tell, as in `optax.partition`, each counts its own, by its label or its place:
      'embeddings:warmup'. Empty where no state tells. Steps that `skip_nonfinite` has
      skipped are in no stage.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.onebit_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(10))
      >>> list(steps_by_stage(onebit_jax.init(tx, jnp.zeros(3), mesh)))
      ['warmup', 'compressed/measuring', 'compressed']
    """
    return {
        name_in(part, stage): taken
        for part, (_, steps) in _telling_parts(state).items()
        for stage, taken in steps.items()
    }


def stages_by_part(state: Any) -> dict[str, tuple[Any, list[str]]]:
    """For each part of a state that tells stages its path, and their names in order."""
    parts: dict[str, tuple[Any, list[str]]] = {}

    # A dictionary that a traced function returns has lost its order.
    def look(state: Any) -> None:
        found = _telling_parts(state).items()
        parts.update({part: (path, [*steps]) for part, (path, steps) in found})

    jax.eval_shape(look, state)
    return parts


def name_in(part: str, stage: str) -> str:
    """The name of a stage of one of several parts that tell, or of the only one."""
    return f"{part}:{stage}" if part else stage


def is_local_stage(state: Any, stage: str | None) -> bool:
    """True of the name of a stage in which no part of an optimizer exchanges."""
    telling = [node for node in declared(state) if node.steps_by_stage()]
    return bool(telling) and all(stage in node.local_stages for node in telling)


def distances(state: Any) -> list[Any]:
    """Each state's distance of workers' own parameters from the agreed ones."""
    told = (node.distance() for node in declared(state))
    return [distance for distance in told if distance is not None]


def own_params(params: Any, state: Any) -> Any:
    r"""The parameters at which a worker computes its loss.

    .. math:: p^{(i)} = p + d^{(i)}

    Parameters are the same on all workers. An optimizer whose workers take steps of
    their own between exchanges keeps what they add, :math:`d^{(i)}`, in its state.

    Args:
      params: the agreed parameters.
      state: the optimizer's state, inside `shard_map`, where it is one worker's.

    Returns:
      A tree like the parameters, each worker's own.

    Raises:
      ValueError: outside of `shard_map`, where the state has the arrays of all workers.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.zero_one_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(10))
      >>> state = onebit_jax.init(tx, jnp.ones(3), mesh)
      >>> own = jax.shard_map(
      ...     lambda p, s: own_params(p, s)[None], mesh=mesh, out_specs=P('data'),
      ...     in_specs=(P(), onebit_jax.state_specs(state)))
      >>> print(own(jnp.ones(3), state))
      [[1. 1. 1.]]
    """
    for distance in distances(state):
        if any(x.shape[0] != 1 for x in jax.tree.leaves(distance)):
            raise ValueError(
                "own_params gives one worker's parameters, and this state has those of "
                "all: call it inside jax.shard_map, evaluate the agreed parameters as "
                "they are, or take onebit_jax.mean_params."
            )
        params = _added(params, distance)
    return params


def mean_params(params: Any, state: Any) -> Any:
    r"""The mean of all workers' own parameters, by an exchange in full precision.

    .. math:: p + \tfrac1n \textstyle\sum_i d^{(i)}

    It costs as much as an exact exchange of all parameters. Evaluations and
    checkpoints of the agreed parameters cost none.

    Args:
      params: the agreed parameters.
      state: the optimizer's state with the arrays of all workers, outside `shard_map`.

    Returns:
      A tree like the parameters.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
      >>> tx = onebit_jax.zero_one_adam(
      ...     1e-3, onebit_jax.sign_mean('data'), onebit_jax.freeze_at(10))
      >>> print(mean_params(jnp.ones(3), onebit_jax.init(tx, jnp.ones(3), mesh)))
      [1. 1. 1.]
    """
    for distance in distances(state):
        params = _added(params, distance)
    return params


def _added(params: Any, distance: Any) -> Any:
    """Parameters plus the mean of the distances that are here."""

    def add(own: WorkerLocal, p: Any) -> Any:
        # Leaves that `optax.masked` leaves out stay.
        if isinstance(own, optax.MaskedNode):
            return p
        dtype = p.dtype if jnp.finfo(p.dtype).bits > 32 else jnp.float32
        mean = jnp.mean(own.value, axis=0)
        return (p.astype(dtype) + mean.astype(dtype)).astype(p.dtype)

    def is_place(node: Any) -> bool:
        return is_worker_local(node) or isinstance(node, optax.MaskedNode)

    return jax.tree.map(add, distance, params, is_leaf=is_place)


def check_stage(state: Any, stage: str) -> float:
    """Refuses a static stage that cannot be the next one, by what the state holds.

    Args:
      state: the optimizer's state, whose counters are read: this waits for the step
        that returns it.
      stage: the name.

    Returns:
      For how many steps of the stage, this one included, the answer holds.

    Raises:
      ValueError: if a state says why not.
    """
    left, told = math.inf, declared(state)
    # How many steps are one of what is inside `accumulate`, its state does not tell.
    gathered = {
        id(inside)
        for node in told
        if node.wrapper == "accumulate"
        for inside in declared(node.inner)
    }
    for node in told:
        if reason := node.refusal(stage):
            raise ValueError(reason)
        if stage in node.warmup_stages:
            left = 1
        elif id(node) not in gathered and (n := node.steps_left(stage)) is not None:
            left = min(left, n)
    if not left:
        raise ValueError(
            f"an exchange is due, and {stage!r} has none: name the stage that has it, "
            "which may come earlier, too, or leave the stage out."
        )
    return left
