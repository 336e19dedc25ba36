"""The optimizers that a study compares, from the options of its plan."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import optax

import onebit_jax
from benchmarks.convergence.last_errors import with_last_errors
from benchmarks.convergence.momenta import averaged_momenta, muon_of_momenta
from benchmarks.convergence.top_k import TopK
from train.core.optimizer import INNER, decays, freeze_rule, guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from train.core.optimizer import Plan
    from train.core.task import Task

AxisNames = str | tuple[str, ...]

RUN_OPTIONS = (
    *("own_rate", "rate_of", "b1", "freeze"),
    *("clip", "workers", "batch", "steps"),
)
"""Options that change how an arm is run, and not which optimizer it is."""

GROWTHS = {
    "none": None,
    "leaves": onebit_jax.GrowthByMeanSquares(least=2**31 - 1),
    "lines": onebit_jax.GrowthByMeanSquares(),
}
"""The growths of the frozen variance, by the name of the option."""

_COMMON = ("optimizer", *RUN_OPTIONS)
_SIGNS = ("exchange", "scale")
_OPTIONS = {
    "adam": (*_COMMON, *_SIGNS, "nesterov", "mean_clip"),
    "sgd": (*_COMMON, *_SIGNS),
    "onebit_adam": (
        *_COMMON,
        *_SIGNS,
        "warmup_bits",
        "warmup_block",
        "lead",
        "growth",
        "bounded",
        "bound",
    ),
    "onebit_lamb": (*_COMMON, *_SIGNS),
    "zero_one_adam": (
        *_COMMON,
        *_SIGNS,
        "before_freeze",
        "variance_bits",
        "refresh",
        "sync",
        "sync_every",
        "longest",
    ),
    "muon": (*_COMMON, *_SIGNS, "bits", "send"),
    "local": (
        *_COMMON,
        *_SIGNS,
        "bits",
        "inner",
        "sync_every",
        "sync_by_rate",
        "momentum_bits",
        "last_bits",
        "error_decay",
        "outer_rate",
        "outer_momentum",
    ),
    "binsgdm": (*_COMMON, "exchange"),
    "distributed_lion": (*_COMMON, "exchange"),
}


def make_arm(
    options: Mapping[str, Any],
    schedule: optax.Schedule,
    freeze: onebit_jax.FreezeRule,
    b1: float,
    *,
    weight_decay: float,
    clip: float,
    axes: AxisNames,
    steps: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The optimizer of an arm, clipped and guarded as the product's are.

    Args:
      options: Those of the plan; what is left out is the library's default.
      schedule: The learning rate.
      freeze: When the variance is frozen, where it is.
      b1: Decay of the momentum.
      weight_decay: λ of decoupled weight decay.
      clip: Norm that gradients are clipped to; 0 for no clipping.
      axes: The mesh axes whose members are the workers.
      steps: Those of the run, of which the last synchronises local steps; None for no
        such step.

    Returns:
      A transformation for `onebit_jax.data_parallel`.
    """
    tx = _optimizer(options, schedule, freeze, b1, weight_decay, axes, steps)
    own_steps = options["optimizer"] in ("zero_one_adam", "local")
    return guarded(tx, clip, axes, own_steps=own_steps)


def with_arm(
    task: Task,
    flags: Any,
    options: Mapping[str, Any],
    b1: float,
    axes: tuple[str, ...],
) -> Task:
    """A task of one phase, trained by an arm's optimizer.

    Args:
      task: The task.
      flags: Its flags.
      options: The arm's.
      b1: Decay of the momentum.
      axes: The mesh axes whose members are the workers.

    Returns:
      The task.
    """
    (phase,) = task.phases
    plan: Plan = flags.phases[0]
    tx = make_arm(
        options,
        phase.schedule,
        freeze_rule(plan.freeze, plan.warmup, plan.steps),
        b1,
        weight_decay=flags.weight_decay,
        clip=flags.clip,
        axes=axes,
        steps=plan.last,
    )
    return dataclasses.replace(
        task, phases=[dataclasses.replace(phase, tx=tx, advice="")]
    )


def stage_bytes(
    options: Mapping[str, Any], params: Any, workers: int, axis: str
) -> dict[str, int]:
    """Bytes that a worker sends in a step of each stage, of gradients or momenta.

    Args:
      options: The arm's.
      params: The parameters.
      workers: How many there are.
      axis: The mesh axis whose members they are.

    Returns:
      The bytes by stage; those of an arm without stages as `train.core.totals.EVERY`.
    """
    freeze = onebit_jax.freeze_at(1)
    constant = optax.schedules.constant_schedule(1.0)
    tx = _optimizer(options, constant, freeze, 0.9, 0.0, axis)
    sizes = {axis: workers}
    return {
        stage: onebit_jax.sent_bytes(transfers, sizes)
        for stage, transfers in onebit_jax.stage_costs(tx, params, sizes).items()
    }


def _optimizer(
    options: Mapping[str, Any],
    schedule: optax.Schedule,
    freeze: onebit_jax.FreezeRule,
    b1: float,
    weight_decay: float,
    axes: AxisNames,
    steps: int | None = None,
) -> optax.GradientTransformation:
    """The optimizer alone."""
    name = options["optimizer"]
    if is_retired(options):
        raise SystemExit(
            "An arm of this plan exchanged gradients, refreshed its variance at "
            "intervals or followed exact lines, which is gone: its runs are kept, and "
            "no more can be made."
        )
    exchange = make_exchange(options.get("exchange", _EXCHANGES[name]), options, axes)
    decay: dict[str, Any] = {"weight_decay": weight_decay, "mask": decays}
    if name == "adam":
        nesterov = options.get("nesterov", False)
        adam = optax.adamw(schedule, b1, nesterov=nesterov, **decay)
        if "mean_clip" in options:
            exchange = optax.chain(
                exchange, optax.clip_by_global_norm(options["mean_clip"])
            )
        return optax.chain(exchange, adam)
    if name == "sgd":
        decayed = optax.add_decayed_weights(weight_decay, decays)
        return optax.chain(exchange, decayed, optax.sgd(schedule, b1))
    if name == "binsgdm":
        return onebit_jax.binsgdm(schedule, exchange, b1, **decay)
    if name == "distributed_lion":
        return onebit_jax.distributed_lion(schedule, exchange, b1, **decay)
    if name == "onebit_lamb":
        return onebit_jax.onebit_lamb(schedule, exchange, freeze, b1, **decay)
    if name == "local":
        return _local(options, schedule, exchange, b1, steps, decay)
    if name == "muon" and options.get("send", "gradient") == "momentum":
        return muon_of_momenta(schedule, exchange, **decay)
    if name == "muon":
        return optax.chain(exchange, INNER["muon"](schedule, **decay))
    if name == "zero_one_adam":
        parts = zero_one_parts(options, axes)
        return onebit_jax.zero_one_adam(
            schedule, exchange, freeze, b1, **decay, **parts
        )
    bits, block = options.get("warmup_bits"), options.get("warmup_block", 1024)
    return onebit_jax.onebit_adamw(
        schedule,
        exchange,
        freeze,
        b1,
        **decay,
        warmup_exchange=_quantized(bits, axes, block) if bits else None,
        compressed=compressed_parts(options),
    )


def _local(
    options: Mapping[str, Any],
    schedule: optax.Schedule,
    exchange: onebit_jax.Exchange,
    b1: float,
    steps: int | None,
    decay: dict[str, Any],
) -> optax.GradientTransformation:
    """Local steps, with an outer Nesterov momentum where its options are given."""
    sync = onebit_jax.every(options.get("sync_every", 8))
    if "sync_by_rate" in options:
        by_rate = options["sync_by_rate"]
        sync = onebit_jax.intervals_by_learning_rate(schedule, **by_rate)
    inner = options.get("inner", "adamw")
    own = INNER[inner](schedule, **decay, **({"b1": b1} if inner == "adamw" else {}))
    if "error_decay" in options:
        exchange = DecayedErrors(exchange, exchange.axes, options["error_decay"])
    outer = None
    if "outer_rate" in options or "outer_momentum" in options:
        momentum = options.get("outer_momentum", 0.0)
        outer = optax.sgd(options.get("outer_rate", 1.0), momentum, nesterov=True)
    local = onebit_jax.local_steps(
        own, exchange, sync.ending_at(steps) if steps else sync, outer
    )
    axes = exchange.axes
    if "last_bits" in options:
        # Small leaves are exact where those of one bit are.
        last = onebit_jax.quantized_mean(axes, options["last_bits"], exact_below=34)
        return with_last_errors(local, last, steps)
    if "momentum_bits" in options:
        bits = options["momentum_bits"]
        if bits == 32:
            return averaged_momenta(local, onebit_jax.exact_mean(axes))
        signs = onebit_jax.sign_mean(axes, scale="mean_abs")
        return averaged_momenta(local, signs if bits == 1 else _quantized(bits, axes))
    return local


_EXCHANGES = {
    "adam": "exact_mean",
    "sgd": "exact_mean",
    "onebit_adam": "sign_mean",
    "onebit_lamb": "sign_mean",
    "zero_one_adam": "sign_mean",
    "muon": "exact_mean",
    "local": "sign_mean",
    "binsgdm": "random_vote_mean",
    "distributed_lion": "vote_mean",
}


def make_exchange(
    name: str, options: Mapping[str, Any], axes: AxisNames
) -> onebit_jax.Exchange:
    """The exchange of a name.

    Args:
      name: That of the option.
      options: Those of the arm, the scale among them where it is given.
      axes: The mesh axes whose members are the workers.

    Returns:
      The exchange.

    Raises:
      SystemExit: There is no such exchange, or it has no scale.
    """
    scale = {"scale": options["scale"]} if "scale" in options else {}
    made: dict[str, Callable[..., onebit_jax.Exchange]] = {
        "exact_mean": onebit_jax.exact_mean,
        "sign_mean": onebit_jax.sign_mean,
        "quantized_mean": functools.partial(
            onebit_jax.quantized_mean, bits=options.get("bits", 4)
        ),
        "sign_mean, mean_abs": functools.partial(
            onebit_jax.sign_mean, scale="mean_abs"
        ),
        "sign_mean, exact_1d": functools.partial(onebit_jax.sign_mean, exact_1d=True),
        "no_feedback": _no_feedback,
        "top_k_mean": functools.partial(onebit_jax.two_phase, codec=TopK()),
        "vote_mean": onebit_jax.vote_mean,
        "vote_mean, mean back": functools.partial(onebit_jax.vote_mean, back="mean"),
        "random_vote_mean": onebit_jax.random_vote_mean,
        "random_vote_mean, vote back": functools.partial(
            onebit_jax.random_vote_mean, back="vote"
        ),
    }
    if name not in made:
        raise SystemExit(f"There is no exchange {name!r}: choose of {', '.join(made)}.")
    if scale and name not in ("sign_mean", "no_feedback"):
        raise SystemExit(f"The exchange {name!r} has no choice of a scale: drop it.")
    return made[name](axes, **scale)


def _no_feedback(axes: AxisNames, **scale: Any) -> onebit_jax.Exchange:
    exchange = onebit_jax.sign_mean(axes, **scale)
    return DecayedErrors(exchange, exchange.axes, 0)


def _quantized(bits: Any, axes: AxisNames, block: int = 1024) -> onebit_jax.Exchange:
    return onebit_jax.quantized_mean(axes, bits, block_size=block)


def zero_one_parts(options: Mapping[str, Any], axes: AxisNames) -> dict[str, Any]:
    """The arguments of 0/1 Adam that the options give; the others are left out.

    `refresh` and `sync` are the numbers of due steps after which an interval doubles,
    `sync_every` is an interval that stays.
    """
    parts = {n: options[n] for n in ("before_freeze",) if n in options}
    if "variance_bits" in options:
        parts["variance_exchange"] = _quantized(options["variance_bits"], axes)
    longest = options.get("longest")
    if "refresh" in options:
        parts["refresh"] = onebit_jax.growing_intervals(options["refresh"])
    if "sync" in options:
        parts["sync"] = onebit_jax.growing_intervals(options["sync"], longest=longest)
    if "sync_every" in options:
        parts["sync"] = onebit_jax.every(options["sync_every"])
    return parts


def compressed_parts(options: Mapping[str, Any]) -> onebit_jax.Compressed:
    """The parts of 1-bit Adam that the options give; the others are the default's."""
    parts: dict[str, Any] = {}
    if "lead" in options:
        parts["lead"] = options["lead"] or None
    if "growth" in options:
        parts["growth"] = GROWTHS[options["growth"]]
    if not options.get("bounded", True):
        parts |= {"floor": None, "bound": None}
    if "bound" in options:
        parts["bound"] = options["bound"]
    return onebit_jax.Compressed(**parts)


def is_retired(options: Mapping[str, Any]) -> bool:
    """True of an arm whose runs are kept, and which the library can no longer make."""
    if options.get("optimizer") != "onebit_adam":
        return False
    gone = options.get("send", "momentum") != "momentum" or "refresh" in options
    return gone or options.get("growth") == "exact lines"


def check_options(arm: str, options: Mapping[str, Any]) -> None:
    """Refuses options of which no optimizer can be made.

    Args:
      arm: Its name.
      options: Those of the plan.

    Raises:
      SystemExit: An option or a value is unknown.
    """
    if is_retired(options):
        return
    optimizer = options.get("optimizer")
    if optimizer not in _OPTIONS:
        raise SystemExit(
            f"The arm {arm!r} must have an optimizer of {', '.join(_OPTIONS)}, not "
            f"{optimizer!r}."
        )
    for name in options:
        # All momenta are exchanged now.
        if name not in (*_OPTIONS[optimizer], "send"):
            raise SystemExit(
                f"The arm {arm!r} has the unknown option {name!r}: choose of "
                f"{', '.join(_OPTIONS[optimizer])}."
            )
    if options.get("growth", "none") not in GROWTHS:
        raise SystemExit(
            f"The arm {arm!r} must have a growth of {', '.join(GROWTHS)}, not "
            f"{options['growth']!r}."
        )
    try:
        make_arm(
            options,
            optax.schedules.constant_schedule(1.0),
            onebit_jax.freeze_at(1),
            options.get("b1", 0.9),
            weight_decay=0.0,
            clip=options.get("clip", 0.0),
            axes="data",
        )
    except (TypeError, ValueError) as error:
        raise SystemExit(f"The arm {arm!r} cannot be made: {error}") from error


def describe(option: str, value: Any) -> str:
    """The words for a level of a factor.

    Example:
      >>> from benchmarks.convergence.arms import describe
      >>> describe("lead", 0.5), describe("growth", "none"), describe("scale", "rms")
      ('lead 0.5', 'no growth', 'rms')
    """
    if option in ("send", "scale", "exchange", "optimizer"):
        return str(value)
    if option == "growth":
        return "no growth" if value == "none" else f"growth by {value}"
    if option == "bounded":
        return "bounded" if value else "not bounded"
    return f"{option.replace('_', ' ')} {value}"


@dataclasses.dataclass(frozen=True)
class DecayedErrors(onebit_jax.Exchange):
    """An exchange of whose errors, the workers' and the servers', a part is sent later.

    Attributes:
      exchange: With errors.
      axes: Its own.
      decay: What its errors are multiplied by; 0 for none that is sent later.
    """

    exchange: onebit_jax.Exchange
    axes: tuple[str, ...]
    decay: float

    def init(self, params: Any) -> Any:
        """The exchange's state."""
        return self.exchange.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """The exchange's update, with the errors decayed."""
        agreed, errors = self.exchange.update(updates, state, params)
        return agreed, jax.tree.map(lambda e: e * self.decay, errors)
