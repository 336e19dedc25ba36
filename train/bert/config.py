"""The flags of `python -m train.pretrain`, and which of their values make sense."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from models import SIZES
from models.config import Attention, Remat
from train.bert.phases import Phase
from train.core.errors import InputError
from train.core.exchange import Wire
from train.core.mesh import Topology

Optimizer = Literal["onebit_adam", "adam"]
Size = Literal["tiny", "mini", "small", "medium", "base", "large"]
Freeze = int | Literal["auto"]
Preset = Literal["bert-base", "bert-large"]

MIN_LENGTH = 8
"""Tokens of the shortest sequence: two segments and their three special tokens."""

DECAY_RATE = 0.99
"""Factor of an exponential fall of the learning rate, where none is given."""

MAX_SEED = 2**32 - 1
"""The largest seed: JAX looks at its lowest 32 bits alone."""

MAX_COUNT = 2**31 - 1
"""The largest number of anything, which the counters of a state are made for."""

_LEAST = {
    "vocab_size": 1,
    "freeze_step": 1,
    "steps": 1,
    "batch": 1,
    "accumulate": 1,
    "workers": 1,
    "seed": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "clip": 0,
    "dropout": 0,
    "eval_every": 1,
    "checkpoint_every": 1,
    "log_every": 1,
    "decay_every": 1,
    "long_freeze_step": 1,
    "long_steps": 1,
    "long_batch": 1,
    "long_accumulate": 1,
    "long_warmup_steps": 0,
    "long_decay_every": 1,
}

_POSITIVE = ("learning_rate", "decay_rate", "long_learning_rate", "long_decay_rate")

# What a run may change when it goes on.
_CHANGEABLE = frozenset(
    {
        "out",
        "corpus",  # Which may have moved; its contents are compared elsewhere.
        "tokens",
        "resume",
        "steps",
        "long_steps",
        "workers",
        "log_every",
        "eval_every",
        "checkpoint_every",
    }
)


@dataclass(frozen=True)
class PretrainConfig:
    """Pre-trains BERT on text, by workers that exchange one bit a parameter."""

    preset: Preset | None = None
    """Hyperparameters of 1-bit Adam's paper, for the flags that are not given."""
    corpus: tuple[Path, ...] = ()
    """Text files, or folders of them; default: the reference documentation of the
    running Python, two megabytes of English."""
    vocab: Path | None = None
    """A vocab.txt of word pieces; default: one trained on the corpus."""
    vocab_size: int | None = None
    """Word pieces of a vocabulary trained on the corpus; default: 4,096."""
    model: Size = "tiny"
    """Size of the BERT."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; parameters and moments are float32."""
    pre_norm: bool = False
    """Put a LayerNorm before each sublayer instead of after it."""
    attention: Attention = "xla"
    """Who computes attention; cudnn on NVIDIA's GPUs alone, with --dtype bfloat16."""
    remat: Remat = "none"
    """What the backward pass computes again instead of keeping it."""
    optimizer: Optimizer = "onebit_adam"
    """1-bit Adam, or plain Adam on the exact mean of the gradients."""
    freeze_step: Freeze | None = None
    """Steps before 1-bit Adam freezes its variance and compresses; auto: once the
    variance is stable; default: a fifth of the steps, not before the warm-up ends."""
    steps: int = 500
    """Training steps."""
    batch: int = 32
    """Sequences a step, of all workers together."""
    accumulate: int = 1
    """Parts of a worker's share of the batch, computed one after another: memory for
    one; the gradients and the exchange are the whole batch's."""
    seq: int = 64
    """Tokens a sequence."""
    whole_words: bool = False
    """Mask all pieces of a word together."""
    workers: int | None = None
    """Devices to train on, of all processes together; default: all, or 8 virtual ones
    on the CPU of a process that is alone."""
    wire: Wire = "signs"
    """What 1-bit Adam sends: signs there and back, or counts of them in one
    all-reduce."""
    topology: Topology = "auto"
    """Who compresses: each device (flat), or each host for its devices together
    (hierarchical); auto: hierarchical where several processes have several devices
    each. A run that goes on keeps its own."""
    seed: int = 0
    """Decides the parameters, the order of the text, its masks and the dropout."""
    learning_rate: float = 1.5e-3
    """Peak of the learning rate; without --decay-every it falls to a tenth at the
    end."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises to its peak; default: a tenth of them."""
    decay_rate: float | None = None
    """Factor by which the learning rate falls in --decay-every steps; default: 0.99."""
    decay_every: int | None = None
    """Steps in which the learning rate falls by --decay-rate, exponentially; default:
    it falls linearly instead, to a tenth at the end."""
    long_seq: int | None = None
    """Tokens a sequence in a second phase, whose moments, schedule and freeze begin
    anew; default: there is none."""
    long_steps: int | None = None
    """Training steps of the second phase; default: a ninth of the first's."""
    long_batch: int | None = None
    """Sequences a step of the second phase; default: the first's."""
    long_accumulate: int | None = None
    """--accumulate of the second phase; default: the first's."""
    long_learning_rate: float | None = None
    """Peak of the learning rate in the second phase; default: the first's."""
    long_warmup_steps: int | None = None
    """Steps in which it rises there; default: a tenth of them."""
    long_decay_rate: float | None = None
    """Factor by which it falls there; default: the first's."""
    long_decay_every: int | None = None
    """Steps in which it falls by that; default: as in the first."""
    long_freeze_step: Freeze | None = None
    """Steps of the second phase before the variance is frozen; default: as in the
    first, a fifth or auto."""
    weight_decay: float = 0.01
    """Decoupled weight decay, of all parameters but biases and LayerNorms."""
    clip: float = 1.0
    """Norm to which gradients are clipped; 0 for no clipping."""
    dropout: float = 0.1
    """Share of the activations dropped while training."""
    eval_every: int = 50
    """Steps between evaluations on held-out text; there is one at the end."""
    checkpoint_every: int = 100
    """Steps between checkpoints; there is one at the end."""
    log_every: int = 5
    """Steps between lines of metrics.jsonl."""
    out: Path = Path("runs/pretrain")
    """Folder for checkpoints, metrics, vocabulary and picture."""
    tokens: Path | None = None
    """Folder that keeps the corpus as word pieces, for any number of runs; default: one
    in --out."""
    resume: bool = False
    """Go on with the run in --out, exactly, with its own settings; with one that has
    ended for as many steps again, or to --steps."""
    compare: bool = False
    """Train plain Adam as well, on the same samples, and draw it beside."""

    @property
    def model_options(self) -> dict[str, Any]:
        """What they ask of a model beside its size and its vocabulary."""
        names = ("dropout", "dtype", "pre_norm", "attention", "remat")
        return {name: getattr(self, name) for name in names}

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, all defaults put in."""
        first = _phase(
            "--",
            seq=self.seq,
            batch=self.batch,
            accumulate=self.accumulate,
            earlier_steps=0,
            steps=self.steps,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay_rate=_given(self.decay_rate, DECAY_RATE),
            decay_every=self.decay_every,
            freeze_step=self.freeze_step,
        )
        if self.long_seq is None:
            return (first,)
        auto = "auto" if self.freeze_step == "auto" else None
        return first, _phase(
            "--long-",
            seq=self.long_seq,
            batch=_given(self.long_batch, self.batch),
            accumulate=_given(self.long_accumulate, self.accumulate),
            earlier_steps=self.steps,
            steps=_given(self.long_steps, max(1, round(self.steps / 9))),
            learning_rate=_given(self.long_learning_rate, self.learning_rate),
            warmup_steps=self.long_warmup_steps,
            decay_rate=_given(self.long_decay_rate, first.decay_rate),
            decay_every=_given(self.long_decay_every, self.decay_every),
            freeze_step=_given(self.long_freeze_step, auto),
        )

    @property
    def total_steps(self) -> int:
        """The steps of all phases."""
        return self.phases[-1].last


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _phase(
    flags: str,
    *,
    steps: int,
    warmup_steps: int | None,
    freeze_step: Freeze | None,
    **values: Any,
) -> Phase:
    warmup = _given(warmup_steps, round(0.1 * steps))
    freeze = _given(freeze_step, max(warmup, round(0.2 * steps), 1))
    return Phase(flags, steps=steps, warmup=warmup, freeze=freeze, **values)


def check(config: PretrainConfig) -> None:
    """Refuses values that cannot be trained with.

    Raises:
      InputError: A flag's value is out of its range, or contradicts another.
    """
    for name, least in _LEAST.items():
        value = getattr(config, name)
        # Not `value < least`, which a NaN would pass.
        if isinstance(value, int | float) and not value >= least:
            raise InputError(f"{_flag(name)} must be at least {least}, not {value}.")
    for name in (field.name for field in fields(config)):
        value = getattr(config, name)
        most = MAX_SEED if name == "seed" else MAX_COUNT
        if isinstance(value, int) and value > most:
            raise InputError(f"{_flag(name)} must be at most {most}, not {value}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{_flag(name)} must be a finite number, not {value}.")
    for name in _POSITIVE:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise InputError(f"{_flag(name)} must be positive, not {value}.")
    if config.dropout >= 1:
        raise InputError(f"--dropout must be less than 1, not {config.dropout}.")
    try:
        replace(SIZES[config.model], **config.model_options)
    except ValueError as error:
        raise InputError(str(error)) from error
    longest = SIZES[config.model].max_positions
    for phase in config.phases:
        if not MIN_LENGTH <= phase.seq <= longest:
            raise InputError(
                f"{phase.flags}seq must be from {MIN_LENGTH} to {longest}, the "
                f"positions of BERT {config.model}, not {phase.seq}."
            )
    if config.long_seq is None:
        for name in (field.name for field in fields(config)):
            if name.startswith("long_") and getattr(config, name) is not None:
                raise InputError(
                    f"{_flag(name)} is of a second phase, and there is none; give "
                    "--long-seq too."
                )
    phases = config.phases
    # The second phase has the first's rate where it has none of its own.
    rates = (config.decay_rate, phases), (config.long_decay_rate, phases[1:])
    for rate, own in rates:
        if rate is not None and not any(phase.decay_every for phase in own):
            flags = own[0].flags
            raise InputError(
                f"{flags}decay-rate is of an exponential fall, and this one is linear; "
                f"give {flags}decay-every too, or {flags}decay-rate None."
            )
    if config.vocab and config.vocab_size is not None:
        raise InputError(
            "--vocab-size is of a vocabulary trained on the corpus; drop it or --vocab."
        )
    own = {
        "--compare": config.compare,
        "--freeze-step": config.freeze_step,
        "--long-freeze-step": config.long_freeze_step,
        "--wire": config.wire != "signs",
    }
    if config.optimizer == "adam" and any(own.values()):
        flag = next(flag for flag, given in own.items() if given)
        raise InputError(f"{flag} belongs to 1-bit Adam; drop --optimizer adam.")


def to_json(config: PretrainConfig) -> dict[str, Any]:
    """The flags as JSON values, paths made absolute."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values["corpus"] = [str(path.resolve()) for path in config.corpus]
    values["vocab"] = config.vocab and str(config.vocab.resolve())
    values["tokens"] = config.tokens and str(config.tokens.resolve())
    values["out"] = str(config.out.resolve())
    return values


def from_json(values: dict[str, Any]) -> PretrainConfig:
    """The inverse of `to_json`."""
    paths = {
        "corpus": tuple(map(Path, values["corpus"])),
        "vocab": values["vocab"] and Path(values["vocab"]),
        "tokens": values.get("tokens") and Path(values["tokens"]),
        "out": Path(values["out"]),
    }
    return PretrainConfig(**values | paths)


def check_resumable(stored: PretrainConfig, given: PretrainConfig) -> None:
    """Refuses flags that a run cannot take on when it goes on.

    Args:
      stored: The run's flags.
      given: The flags it is to go on with.

    Raises:
      InputError: A flag differs that decides what is trained.
    """
    before, now = to_json(stored), to_json(given)
    # The first phase of two is over, or ends where the second begins.
    changeable = _CHANGEABLE - ({"steps"} if stored.long_seq else set())
    differing = [
        name for name in before.keys() - changeable if before[name] != now[name]
    ]
    if differing:
        name = min(differing)
        flag = _flag(name)
        raise InputError(
            f"the run in {given.out} was started with {flag} {_spell(before[name])}, "
            f"not {_spell(now[name])}; leave {flag} out to go on, or start a new "
            "run in another --out."
        )


def without_freeze(config: PretrainConfig) -> PretrainConfig:
    """The flags without those of a freeze, which plain Adam has none of."""
    return replace(config, freeze_step=None, long_freeze_step=None)


def without_second_phase(config: PretrainConfig) -> PretrainConfig:
    """The flags without those of a second phase."""
    return replace(
        config, **{f.name: None for f in fields(config) if f.name.startswith("long_")}
    )


def train_the_same(one: PretrainConfig, other: PretrainConfig) -> bool:
    """Whether two runs' flags make the same training of the same text."""
    first, second = to_json(one), to_json(other)
    # The schedules are made for a number of steps.
    deciding = first.keys() - (_CHANGEABLE - {"steps", "long_steps"})
    return all(first[name] == second[name] for name in deciding)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spell(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
