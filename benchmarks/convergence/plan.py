"""The plan of a study, as a TOML file says it: tasks, arms and rounds."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from benchmarks.convergence.arms import check_options, describe

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")
Options = Mapping[str, Any]


@dataclass(frozen=True)
class TaskPlan:
    """A training of the product, and the grid that it is tuned on.

    Attributes:
      name: Its name in the study.
      module: What Python runs, such as `train.lm`.
      flags: Its command line, without those of one run.
      learning_rate: The grid of peaks; one alone is not tuned.
      b1: The grid of the baseline's decays of the momentum.
      tuning_seeds: The seeds over which the mean loss of a setting is taken.
      simulated: True, as one device simulates the workers of every run.
    """

    name: str
    module: str
    flags: tuple[str, ...]
    learning_rate: tuple[float, ...]
    b1: tuple[float, ...] = (0.9,)
    tuning_seeds: tuple[int, ...] = (0,)
    simulated: Literal[True] = True


@dataclass(frozen=True)
class Best:
    """The arms whose loss, as a share of the baseline's, was least in an earlier round.

    In the mean of its tasks; neither the baseline nor `beside` is one of them.

    Attributes:
      of: The name of that round.
      count: How many.
      beside: The arm that the rule compares them with, where it is not the baseline.
    """

    of: str
    count: int
    beside: str = ""


@dataclass(frozen=True)
class Round:
    """Arms that are trained with the same seeds.

    Attributes:
      name: Its name.
      seeds: Each decides parameters, data and their order.
      tasks: Names of tasks.
      arms: Names of arms, the baseline and those of the product among them.
      product: The options of each arm that the product of factors has made.
      best: Arms of an earlier round to add, once it is complete.
      hull: Earlier rounds, the arms of whose hulls are added once they are complete.
    """

    name: str
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    arms: tuple[str, ...]
    product: Mapping[str, Options]
    best: Best | None = None
    hull: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """A study's protocol.

    Attributes:
      title: What it is about.
      rule: The rule of decision, in words.
      tasks: By name.
      arms: Options by name, the products' arms last; the first is the baseline.
      rounds: In the order in which they are trained.
      picture: What its losses are drawn over: steps, or bytes sent.
    """

    title: str
    rule: str
    tasks: Mapping[str, TaskPlan]
    arms: Mapping[str, Options]
    rounds: tuple[Round, ...] = field(default=())
    picture: Literal["steps", "bytes"] = "steps"

    @property
    def baseline(self) -> str:
        """The arm that all others are paired with."""
        return next(iter(self.arms))


def read_plan(file: Path) -> Study:
    """Reads a plan, with an arm for each combination of a round's factors.

    Raises:
      SystemExit: The file cannot be read, or says what no study can do.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"The plan {file} cannot be read: {error}.") from error
    tasks = {
        name: _made(TaskPlan, f"The task {name!r}", table, name=name)
        for name, table in tables.pop("tasks", {}).items()
    }
    for name, task in tasks.items():
        if task.simulated is not True:
            raise SystemExit(f"The task {name!r} must be simulated = true.")
    arms = dict(tables.pop("arms", {}))
    if not (tasks and arms):
        raise SystemExit(f"The plan {file} must have at least a task and an arm.")
    for name, options in arms.items():
        check_options(name, options)
    if "b1" in arms[next(iter(arms))]:
        raise SystemExit("The baseline's b1 is that of the tasks' grids: drop its own.")
    rounds: list[Round] = []
    for table in tables.pop("rounds", []):
        rounds.append(_round(table, tasks, arms, rounds))
        arms |= rounds[-1].product
    for name, options in arms.items():
        tuned = arms.get(options.get("rate_of", name))
        if tuned is None or ("rate_of" in options and "rate_of" in tuned):
            raise SystemExit(
                f"The arm {name!r} must have as rate_of an arm with a rate of its own, "
                f"not {options['rate_of']!r}."
            )
    study = _made(
        Study, "The plan", tables, tasks=tasks, arms=arms, rounds=tuple(rounds)
    )
    if study.picture not in ("steps", "bytes"):
        raise SystemExit(f"picture must be 'steps' or 'bytes', not {study.picture!r}.")
    return study


def _round(
    table: dict[str, Any],
    tasks: Mapping[str, TaskPlan],
    arms: Mapping[str, Options],
    earlier: list[Round],
) -> Round:
    where = f"The round {table.get('name')!r}"
    product = _product(where, table.pop("product", {}), arms)
    named = tuple(table.pop("arms", ()))
    values: dict[str, Any] = {"tasks": list(tasks), **table}
    best = values.pop("best", None)
    made = _made(
        Round,
        where,
        values,
        arms=(*named, *(name for name in product if name not in named)),
        product=product,
        best=_made(Best, f"{where}'s best", best) if best else None,
    )
    for kind, names, known in (
        ("task", made.tasks, tasks),
        (
            "arm",
            [*named, *([made.best.beside] if made.best and made.best.beside else [])],
            arms,
        ),
        (
            "earlier round",
            [*made.hull, *([made.best.of] if made.best else [])],
            [r.name for r in earlier],
        ),
    ):
        for name in names:
            if name not in known:
                raise SystemExit(
                    f"{where} names the {kind} {name!r}: choose of {', '.join(known)}."
                )
    for each in earlier:
        if each.name in made.hull and any(
            "workers" not in o for o in each.product.values()
        ):
            raise SystemExit(
                f"{where} needs the factor 'workers' in {each.name!r} for its hull."
            )
    baseline = next(iter(arms))
    if baseline not in made.arms:
        raise SystemExit(f"{where} must name the baseline, {baseline!r}, as an arm.")
    if made.name in (each.name for each in earlier):
        raise SystemExit(f"{where} must have a name of its own.")
    return made


def _product(
    where: str, factors: Mapping[str, list[Any]], arms: Mapping[str, Options]
) -> dict[str, Options]:
    """An arm of 1-bit Adam for each combination of levels."""
    if any(not isinstance(levels, list) for levels in factors.values()):
        raise SystemExit(f"{where} must have a list of levels for each factor.")
    made: dict[str, Options] = {}
    for levels in itertools.product(*factors.values()) if factors else ():
        settings = dict(zip(factors, levels, strict=True))
        name = ", ".join(describe(*setting) for setting in settings.items())
        options = {"optimizer": "onebit_adam", **settings}
        check_options(name, options)
        if arms.get(name, options) != options:
            raise SystemExit(
                f"{where} makes the arm {name!r}, a name that another arm has: rename "
                "the other."
            )
        made[name] = options
    return made


def _made(kind: type[T], where: str, table: Mapping[str, Any], **given: Any) -> T:
    """A dataclass from a table of its fields, but for those that are given."""
    known = {f.name: f for f in fields(kind) if f.name not in given}  # pyright: ignore[reportArgumentType]
    for name, value in table.items():
        if name not in known:
            raise SystemExit(
                f"{where} has the unknown key {name!r}: choose of {', '.join(known)}."
            )
        if str(known[name].type).startswith("tuple") != isinstance(value, list):
            kind_of = "no list" if isinstance(value, list) else "a list"
            raise SystemExit(f"{where} must have {kind_of} as {name}, not {value!r}.")
    for name, key in known.items():
        if name not in table and key.default is MISSING:
            raise SystemExit(f"{where} lacks the key {name!r}.")
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in table.items()}
    return kind(**given, **values)
