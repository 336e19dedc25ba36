"""The flags that tasks have in common, the ranges of flags, and flags as JSON."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from models.config import Attention, Remat, TransformerConfig
from train.core.errors import InputError
from train.core.exchange import WARMUP_BITS, ExchangeName, WarmupBits
from train.core.mesh import Topology
from train.core.optimizer import (
    OPTIMIZERS,
    InnerName,
    OptimizerName,
    Plan,
    check_plan,
    warmup_and_freeze,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")
Flags = TypeVar("Flags", bound="TrainingFlags")
Size = TypeVar("Size", bound=TransformerConfig)

MAX_COUNT = 2**31 - 1
"""The largest count: a state counts in int32."""


@dataclass(frozen=True)
class Range:
    """Values that a number may have, as the metadata of a flag's type.

    Attributes:
      least: The smallest.
      above: A bound that is too small itself.
      below: A bound that is too large itself.
      most: The largest; of whole numbers no more than `MAX_COUNT` by default.

    Example:
      >>> from train.core.flags import Range
      >>> Range(least=1).refusal(0)
      'at least 1'
    """

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None

    def refusal(self, value: float) -> str | None:
        """The range as words for a value outside; None for one in it."""
        # Not `value < least`, which a NaN would pass.
        if self.least is not None and not value >= self.least:
            return f"at least {self.least}"
        if self.above is not None and not value > self.above:
            return f"more than {self.above}" if self.above else "positive"
        if self.below is not None and not value < self.below:
            return f"less than {self.below}"
        most = self.most or (MAX_COUNT if isinstance(value, int) else math.inf)
        if value > most:
            return f"at most {most}"
        return None if math.isfinite(value) else "a finite number"


_CHANGEABLE = "changeable"

Changeable = Annotated[T, _CHANGEABLE]
"""The type of a flag that a run may change when it goes on."""

Count = Annotated[int, Range(least=1)]
Natural = Annotated[int, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Factor = Annotated[float, Range(above=0, most=1)]
NotNegative = Annotated[float, Range(least=0)]
# JAX looks at a seed's lowest 32 bits alone.
Seed = Annotated[int, Range(least=0, most=2**32 - 1)]
Freeze = Count | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class TrainingFlags:
    """Flags of every task."""

    optimizer: OptimizerName = "onebit_adam"
    """The optimizer, by its name in the registry; binsgdm and distributed_lion have
    workers vote; adam is plain Adam on the exact mean of the gradients. Each has a
    --learning-rate of its own: beside Adam's a thirtieth to a third for
    distributed_lion; for onebit_lamb 4 to 8 times on texts, a third on images
    (docs/choosing.md)."""
    exchange: ExchangeName = "sign_mean"
    """The exchange of an optimizer that compresses: sign_mean, signs there and back;
    count_mean, counts of them in one all-reduce."""
    freeze_step: Freeze | None = None
    """Steps before 1-bit Adam, LAMB or 0/1 Adam freezes its variance; auto: once it is
    stable; default: 14 % of 1-bit Adam's steps, a fifth of the others', not before the
    learning rate has risen."""
    warmup_bits: WarmupBits = WARMUP_BITS
    """Bits a value of the gradients that 1-bit Adam exchanges before the freeze; 32 for
    the exact mean."""
    inner: InnerName = "adamw"
    """The optimizer that each worker steps by on its own with --optimizer local; muon
    has an eighth of its matrices' rate for --learning-rate, and Adam for the rest."""
    sync: Count = 8
    """Steps of --optimizer local from one exchange to the next; the last exchanges."""
    batch: Count = 32
    """Examples a step, of all workers together."""
    workers: Changeable[Count | None] = None
    """Devices to train on, of all processes together; default: all, or 8 virtual ones
    on the CPU of a process that is alone."""
    topology: Topology = "auto"
    """Compression by each device (flat), or by each host for its devices together
    (hierarchical); auto: hierarchical where several processes have several devices
    each. A run that goes on keeps its own."""
    seed: Seed = 0
    """Decides the new parameters, the order of the examples and the dropout."""
    learning_rate: Positive = 1e-3
    """Peak of the learning rate; it falls to a tenth at the end."""
    warmup_steps: Natural | None = None
    """Steps in which the learning rate rises to its peak; default: a tenth of all."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, of all but biases and the scales of norms."""
    clip: NotNegative = 1.0
    """Norm to which gradients are clipped; 0 for no clipping."""
    checkpoint_every: Changeable[Count] = 100
    """Steps between checkpoints; there is one at the end."""
    log_every: Changeable[Count] = 5
    """Steps between lines of metrics.jsonl."""
    out: Changeable[Path] = Path("runs/train")
    """Folder for all that the run leaves."""
    resume: Changeable[bool] = False
    """Go on with the run in --out, exactly, with its own settings."""

    @property
    def fixed(self) -> dict[str, str]:
        """Changeable flags that this run must keep, and what to give instead."""
        return {}

    def planned(self, steps: int, share: float | None = None) -> Plan:
        """Schedule and freeze, all defaults put in.

        The freeze comes after a share of the steps, by default the optimizer's.
        """
        share = OPTIMIZERS[self.optimizer].freeze if share is None else share
        warmup, freeze = warmup_and_freeze(
            steps, self.warmup_steps, self.freeze_step, share
        )
        return Plan(
            steps=steps,
            batch=self.batch,
            learning_rate=self.learning_rate,
            warmup=warmup,
            freeze=freeze,
        )


@dataclass(frozen=True, kw_only=True)
class FromScratchFlags(TrainingFlags):
    """Flags of every task that trains a model from scratch."""

    steps: Changeable[Count] = 500
    """Training steps."""
    accumulate: Count = 1
    """Parts that a worker's share of the batch is divided into, computed one after
    another in the memory of one; the step stays that of the whole batch."""
    eval_every: Changeable[Count] = 50
    """Steps between evaluations on held-out examples; there is one at the end."""
    resume: Changeable[bool] = False
    """Go on with the run in --out, exactly, with its own settings. A run that has ended
    goes on if --steps is more than it has."""
    compare: bool = False
    """Train plain Adam as well, on the same samples, and draw it beside."""

    @property
    def compared(self) -> Mapping[str, Mapping[str, Any]]:
        """The optimizers that --compare trains beside, each with flags of its own."""
        return {"adam": {}}

    @property
    def phases(self) -> Sequence[Plan]:
        """The stretches of steps with an optimizer each, all defaults put in."""
        return (replace(self.planned(self.steps), accumulate=self.accumulate),)

    @property
    def total_steps(self) -> int:
        """The steps of all phases."""
        return self.phases[-1].last

    @property
    def lengths(self) -> dict[str, Any]:
        """The step counts; a longer run keeps the schedule of its first ones."""
        return {"steps": self.steps}


@dataclass(frozen=True, kw_only=True)
class TransformerFlags:
    """Flags of every task that trains a transformer."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the computations; parameters and moments are float32."""
    attention: Attention = "xla"
    """Code of the attention; cudnn on NVIDIA's GPUs alone, with --dtype bfloat16."""
    remat: Changeable[Remat] = "none"
    """Activations that the backward pass computes again and does not keep."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.1
    """Share of the activations dropped while training."""

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of a model beside its size."""
        return {f.name: getattr(self, f.name) for f in fields(TransformerFlags)}

    def model_of(self, size: Size, **values: Any) -> Size:
        """The model of a size that the flags ask for, if it can be computed."""
        try:
            return replace(size, **values, **self.model_options)
        except ValueError as error:
            # A model is told of its options as Python has them.
            text = re.sub(r'(\w+)="(\w+)"', r"--\1 \2", str(error))
            raise InputError(text) from error


def spelling(name: str) -> str:
    """A field's name as it is given on the command line."""
    return "--" + name.replace("_", "-")


def check_ranges(config: Any) -> None:
    """Refuses values of a dataclass of flags that are out of their range."""
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        ranges = [x for x in _parts(hint) if isinstance(x, Range)] or [Range()]
        if refusal := ranges[0].refusal(value):
            raise InputError(f"{spelling(name)} must be {refusal}, not {value}.")


def check_flags(config: TrainingFlags) -> None:
    """Refuses values out of their range, and flags of another optimizer."""
    check_ranges(config)
    allowed = with_optimizer(config, config.optimizer)
    for field in fields(config):
        if getattr(config, field.name) != getattr(allowed, field.name):
            flag = spelling(field.name)
            raise InputError(
                f"{flag} is not a flag of --optimizer {config.optimizer}; drop either."
            )


def check_from_scratch(config: FromScratchFlags) -> None:
    """Refuses what `check_flags` does, and values that no task can be trained with."""
    check_flags(config)
    if config.compare and config.optimizer == "adam":
        raise InputError("--compare trains plain Adam beside; drop --optimizer adam.")
    for plan in config.phases:
        check_plan(plan)


def with_optimizer(config: Flags, optimizer: str) -> Flags:
    """The flags for another optimizer, those that it does not have at defaults."""
    others = frozenset().union(*(o.flags for o in OPTIMIZERS.values()))
    foreign = others - OPTIMIZERS[optimizer].flags
    defaults = {
        field.name: field.default
        for field in fields(config)
        if field.name.removeprefix("long_") in foreign
    }
    return replace(config, **{**defaults, "optimizer": optimizer})


def to_json(config: Any) -> dict[str, Any]:
    """Flags as JSON values by their names, paths made absolute."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return str(value.resolve()) if isinstance(value, Path) else value

    return {field.name: plain(getattr(config, field.name)) for field in fields(config)}


def from_json(kind: type[Flags], values: dict[str, Any]) -> Flags:
    """The flags, a dataclass of a kind, of which `to_json` made the values."""
    hints = _hints(kind)

    def made(name: str, value: Any) -> Any:
        hint = hints.get(name)
        if get_origin(hint) is Literal and value not in get_args(hint):
            raise TypeError(f"{name} cannot be {value!r}")
        if isinstance(value, list):
            return tuple(made(name, item) for item in value)
        is_path = isinstance(value, str) and Path in _parts(hint)
        return Path(value) if is_path else value

    return kind(**{name: made(name, value) for name, value in values.items()})


def places(config: TrainingFlags) -> dict[str, Any]:
    """The changeable flags that are paths, by name."""
    return {
        name: getattr(config, name)
        for name, hint in _hints(type(config)).items()
        if {Path, _CHANGEABLE} <= set(_parts(hint))
    }


def changeable(kind: type[TrainingFlags]) -> set[str]:
    """The fields that a run may change when it goes on."""
    return {name for name, hint in _hints(kind).items() if _CHANGEABLE in _parts(hint)}


def check_resumable(earlier: TrainingFlags, given: TrainingFlags) -> None:
    """Refuses flags that a run with earlier ones cannot take on when it goes on."""
    fixed, before, now = earlier.fixed, to_json(earlier), to_json(given)
    for name in sorted(before.keys() - (changeable(type(earlier)) - fixed.keys())):
        if before[name] == now[name]:
            continue
        flag = spelling(name)
        given_then = f"with {flag} {before[name]}, not {now[name]}"
        started = f"without {flag}" if before[name] is None else given_then
        instead = f" or give {fixed[name]}" if name in fixed else ""
        raise InputError(
            f"the run in {given.out} was started {started}; leave {flag} out{instead} "
            "to go on, or start a new run in another --out."
        )


def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _parts(hint: Any) -> list[Any]:
    """A type, the types that it is made of, and the metadata of all."""
    return [hint, *(x for part in get_args(hint) for x in _parts(part))]
