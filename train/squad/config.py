"""The flags of `python -m train.squad`, and which of their values make sense."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from models.config import Attention, Remat
from train.bert.config import MAX_COUNT, MAX_SEED, Optimizer, Size
from train.core.errors import InputError
from train.core.exchange import Wire
from train.squad.predict import MAX_ANSWER, NUM_BEST
from train.squad.windows import STRIDE

if TYPE_CHECKING:
    from collections.abc import Mapping

EPOCHS = 2.0
"""Times that every window is learnt from, where nothing else is asked for."""

FREEZE = 0.25
"""Share of the steps after which 1-bit Adam freezes its variance by default."""

_LEAST = {
    "freeze_step": 1,
    "steps": 1,
    "batch": 1,
    "seq": 8,
    "stride": 1,
    "workers": 1,
    "seed": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "clip": 0,
    "dropout": 0,
    "num_best": 1,
    "max_answer": 1,
    "checkpoint_every": 1,
    "log_every": 1,
}
_PATHS = ("train", "dev", "start", "vocab", "out")

# What a run may change when it goes on.
_CHANGEABLE = frozenset(
    {"train", "dev", "out", "resume", "workers", "log_every"}
    | {"checkpoint_every", "num_best", "max_answer", "null_threshold"}
)


@dataclass(frozen=True)
class SquadConfig:
    """Fine-tunes BERT to find answers in texts, and writes its answers."""

    train: Path | None = None
    """A SQuAD file, v1.1 or v2.0, to learn from; a run that goes on has its own."""
    dev: Path | None = None
    """A SQuAD file to answer and to be scored on; default: the one learnt from."""
    start: Path | None = None
    """Where the weights come from: a folder of Hugging Face's config.json and
    model.safetensors, whose head for spans is taken too if it has one, or one of
    train.pretrain's runs; default: random ones."""
    vocab: Path | None = None
    """A vocab.txt; default: the one in --start."""
    model: Size | None = None
    """Size of a BERT that starts with random weights; default: tiny."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; parameters and moments are float32."""
    attention: Attention = "xla"
    """Who computes attention; cudnn on NVIDIA's GPUs alone, with --dtype bfloat16."""
    remat: Remat = "none"
    """What the backward pass computes again instead of keeping it."""
    optimizer: Optimizer = "onebit_adam"
    """1-bit Adam, or plain Adam on the exact mean of the gradients."""
    freeze_step: int | None = None
    """Steps before 1-bit Adam freezes its variance and compresses; default: a quarter
    of the steps, not before the warm-up ends."""
    epochs: float | None = None
    """Times that every window is learnt from; default: 2."""
    steps: int | None = None
    """Training steps, in place of --epochs."""
    batch: int = 96
    """Windows a step, of all workers together."""
    seq: int = 384
    """Tokens a window, the question included."""
    stride: int = STRIDE
    """Word pieces between the starts of two windows over a text, at most half of those
    that a window has room for, so that no answer is cut in all of them."""
    workers: int | None = None
    """Devices to train on; default: all, or 8 virtual ones where there is only a
    CPU."""
    wire: Wire = "signs"
    """What 1-bit Adam sends: signs there and back, or counts of them in one
    all-reduce."""
    seed: int = 0
    """Decides the new parameters, the order of the windows and the dropout."""
    learning_rate: float = 3e-5
    """Peak of the learning rate; it falls to a tenth at the end."""
    warmup_steps: int | None = None
    """Steps in which the learning rate rises to its peak; default: a tenth of them."""
    weight_decay: float = 0.0
    """Decoupled weight decay, of all parameters but biases and LayerNorms."""
    clip: float = 1.0
    """Norm to which gradients are clipped; 0 for no clipping."""
    dropout: float = 0.1
    """Share of the activations dropped while training."""
    num_best: int = NUM_BEST
    """Answers kept a question in nbest_predictions.json."""
    max_answer: int = MAX_ANSWER
    """Word pieces of the longest answer."""
    null_threshold: float = 0.0
    """Score by which no answer must be better than the best to be given, in v2.0."""
    checkpoint_every: int = 100
    """Steps between checkpoints; there is one at the end."""
    log_every: int = 5
    """Steps between lines of metrics.jsonl."""
    out: Path = Path("runs/squad")
    """Folder for checkpoints, metrics, predictions and the model."""
    resume: bool = False
    """Go on with the run in --out, exactly, with its own settings."""

    @property
    def model_options(self) -> dict[str, Any]:
        """What they ask of a model beside its weights."""
        names = ("dropout", "dtype", "attention", "remat")
        return {name: getattr(self, name) for name in names}

    def num_steps(self, windows: int) -> int:
        """The steps to train, of so many windows.

        Raises:
          InputError: They are more than can be counted.
        """
        if self.steps:
            return self.steps
        epochs = EPOCHS if self.epochs is None else self.epochs
        steps = epochs * windows / self.batch
        if steps > MAX_COUNT:
            raise InputError(
                f"--epochs {epochs} make more than {MAX_COUNT:,} steps; give fewer."
            )
        return max(1, round(steps))

    def warmup(self, steps: int) -> int:
        """The steps of the learning rate's warm-up."""
        return round(0.1 * steps) if self.warmup_steps is None else self.warmup_steps

    def freeze(self, steps: int) -> int:
        """The freeze step."""
        default = max(self.warmup(steps), round(FREEZE * steps), 1)
        return self.freeze_step or default


def check(config: SquadConfig) -> Path:
    """Refuses values that cannot be trained with.

    Args:
      config: The flags.

    Returns:
      The file to learn from.

    Raises:
      InputError: A flag's value is out of its range, contradicts another, or is
        missing.
    """
    if config.train is None:
        raise InputError("there is nothing to learn from; give --train FILE.")
    for field in fields(config):
        value, least = getattr(config, field.name), _LEAST.get(field.name)
        # Not `value < least`, which a NaN would pass.
        if value is not None and least is not None and not value >= least:
            raise InputError(
                f"{_flag(field.name)} must be at least {least}, not {value}."
            )
        most = MAX_SEED if field.name == "seed" else MAX_COUNT
        if isinstance(value, int) and value > most:
            raise InputError(
                f"{_flag(field.name)} must be at most {most}, not {value}."
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{_flag(field.name)} must be finite, not {value}.")
    for name in ("epochs", "learning_rate"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise InputError(f"{_flag(name)} must be positive, not {value}.")
    if config.steps and config.epochs:
        raise InputError("--steps and --epochs say the same; drop either.")
    if config.start and config.model:
        raise InputError("--model is of random weights; drop it or --start.")
    if config.dropout >= 1:
        raise InputError(f"--dropout must be less than 1, not {config.dropout}.")
    if config.optimizer == "adam" and (config.freeze_step or config.wire != "signs"):
        flag = "--freeze-step" if config.freeze_step else "--wire"
        raise InputError(f"{flag} belongs to 1-bit Adam; drop --optimizer adam.")
    if config.start is None and config.vocab is None:
        raise InputError(
            "a BERT that starts with random weights has no word pieces; give --vocab, "
            "or --start."
        )
    return config.train


def to_json(config: SquadConfig) -> dict[str, Any]:
    """The flags as JSON values, paths made absolute."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return values | {
        name: values[name] and str(values[name].resolve()) for name in _PATHS
    }


def from_json(values: Mapping[str, Any]) -> SquadConfig:
    """The inverse of `to_json`."""
    paths = {name: values[name] and Path(values[name]) for name in _PATHS}
    return SquadConfig(**{**values, **paths})


def check_resumable(stored: SquadConfig, given: SquadConfig) -> None:
    """Refuses flags that a run cannot take on when it goes on.

    Args:
      stored: The run's flags.
      given: The flags it is to go on with.

    Raises:
      InputError: A flag differs that decides what is trained. The SQuAD files may
        have moved; their contents are compared elsewhere.
    """
    before, now = to_json(stored), to_json(given)
    differing = [n for n in now.keys() - _CHANGEABLE if before[n] != now[n]]
    if differing:
        name = min(differing)
        raise InputError(
            f"the run in {given.out} was started with {_flag(name)} {before[name]}, "
            f"not {now[name]}; leave {_flag(name)} out to go on, or start a new run in "
            "another --out."
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
