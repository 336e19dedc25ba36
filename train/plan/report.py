"""A prediction as a table, as sentences and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from onebit_jax import Transfer
from train.core.mesh import DEVICE
from train.plan.cluster import GIGABIT
from train.plan.model import BASELINES, arms
from train.plan.transfers import loss_transfer

if TYPE_CHECKING:
    from train.plan.cluster import GpuCluster, LinkLoad
    from train.plan.model import Arm, GpuWork, Model, Step

PAYS = 1.1
"""The least speed-up over a run that is worth an approximation."""

LOCAL_STEPS = 8
"""Steps from one exchange of local steps to the next, with which their losses were
measured."""

_FASTEST = 1e4 * GIGABIT
_SLOWEST = 1e-3 * GIGABIT


class Prediction(NamedTuple):
    """The steps of all optimizers on a cluster, and what they were predicted from.

    Attributes:
      model: The model.
      work: What a GPU computes.
      cluster: Hosts and links.
      warmup_share: Share of the steps before the freeze.
      arms: The optimizers.
    """

    model: Model
    work: GpuWork
    cluster: GpuCluster
    warmup_share: float
    arms: list[Arm]

    @property
    def baselines(self) -> list[Arm]:
        """Plain Adam."""
        return [arm for arm in self.arms if arm.name in BASELINES]

    @property
    def baseline(self) -> Arm:
        """The fastest plain Adam, which compression has to beat."""
        return min(self.baselines, key=lambda arm: arm.seconds(0))

    @property
    def best(self) -> Arm:
        """The fastest 1-bit Adam over a whole run."""
        ours = [arm for arm in self.arms if arm.name not in BASELINES]
        return min(ours, key=lambda arm: arm.seconds(self.warmup_share))

    def speed_up(self, arm: Arm, over: Arm, *, whole_run: bool) -> float:
        """The speed-up over another arm, after the freeze or over a whole run."""
        share = self.warmup_share if whole_run else 0.0
        return over.seconds(share) / arm.seconds(share)

    @property
    def advised(self) -> Arm:
        """The best form where it pays, else the fastest Adam."""
        return self.best if self.pays else self.baseline

    @property
    def pays(self) -> bool:
        """True if the best form is worth it."""
        return self.gain >= PAYS

    @property
    def local_steps_pay(self) -> bool:
        """True if local steps are, and are faster still."""
        least = max(PAYS, self.gain)
        return self.cluster.hosts > 1 and local_gain(self) >= least

    @property
    def gain(self) -> float:
        """The speed-up of the best form over the fastest Adam over a whole run."""
        return self.speed_up(self.best, self.baseline, whole_run=True)


def predict(
    model: Model, work: GpuWork, cluster: GpuCluster, warmup_share: float
) -> Prediction:
    """Predicts the steps of all optimizers, of so large a share before the freeze."""
    every = arms(model, work, cluster)
    return Prediction(model, work, cluster, warmup_share, every)


def break_even_rate(prediction: Prediction) -> float | None:
    """The link rate above which compression does not pay, bytes a second.

    Args:
      prediction: What is asked for; its own link rate does not matter.

    Returns:
      The rate, to a hundredth; None where it pays at none from 1 Mbit/s on.
    """

    def pays(rate: float) -> bool:
        return _at_rate(prediction, rate).pays

    low, high = _SLOWEST, _FASTEST
    if not pays(low):
        return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _at_rate(prediction: Prediction, rate: float) -> Prediction:
    """The prediction at another rate; what is sent stays what it is."""
    cluster = prediction.cluster._replace(rate=rate)
    return prediction._replace(
        cluster=cluster, arms=[arm.over(cluster) for arm in prediction.arms]
    )


def table(prediction: Prediction) -> str:
    """A row for each optimizer, an arrow at the one that is advised."""
    head = ("", "step, ms", "", "sent, MB", "", "network", "x Adam fp32", "", "x bf16")
    under = ",warm-up,after,GPU,host,share,after,whole run,whole run"
    rows = [head, tuple(under.split(","))]
    full, half, *_ = prediction.baselines
    for arm in prediction.arms:
        after = arm.compressed
        warmup = "" if arm in prediction.baselines else milliseconds(arm.warmup.seconds)
        rows.append(
            (
                ("→ " if arm is prediction.advised else "  ") + arm.name,
                warmup,
                milliseconds(after.seconds),
                _megabytes(after.gpu_bytes),
                _megabytes(after.host_bytes),
                f"{after.network_share:.0%}",
                f"{prediction.speed_up(arm, full, whole_run=False):.2f}",
                f"{prediction.speed_up(arm, full, whole_run=True):.2f}",
                f"{prediction.speed_up(arm, half, whole_run=True):.2f}",
            )
        )
    return aligned(rows)


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows as lines, the first column aligned on the left, the others on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def local_gain(prediction: Prediction) -> float:
    """The speed-up of local steps that exchange one bit over the fastest Adam.

    They have no warm-up. A step without an exchange counts as Adam's. It averages
    gradients inside each host, and waits for the mean of the loss, as the trainers' do.
    """
    work, cluster = prediction.work, prediction.cluster
    inside = Transfer("all-reduce", 4 * prediction.model.parameters, (DEVICE,))
    loads = cluster.loads([loss_transfer(cluster.axis_sizes), inside])
    waits = sum(map(cluster.seconds, loads))
    alone = work.accumulate * work.micro_batch + work.adam + waits
    exchanges = prediction.best.compressed.seconds
    seconds = ((LOCAL_STEPS - 1) * alone + exchanges) / LOCAL_STEPS
    return prediction.baseline.seconds(prediction.warmup_share) / seconds


def verdict(prediction: Prediction) -> str:
    """The verdict: if compression pays, why, and up to which link rate, in lines.

    The last is about local steps, where they are the fastest.
    """
    if not prediction.local_steps_pay:
        return _verdict(prediction)
    gain = local_gain(prediction)
    return (
        f"{_verdict(prediction)}\nLocal steps (train.lm --optimizer local --inner muon "
        f"--sync {LOCAL_STEPS}) exchange one bit every {LOCAL_STEPS} steps, without a "
        "warm-up"
        f": {gain:.2f} times as fast as {prediction.baseline.name}. Muon's own "
        "arithmetic is not counted. Losses were measured with 2 to 8 workers only: "
        "docs/frontier.md."
    )


def _verdict(prediction: Prediction) -> str:
    """That on 1-bit Adam alone: if it pays, why, up to which rate; a line or two."""
    best, adam = prediction.best, prediction.baseline
    if prediction.cluster.hosts * prediction.cluster.gpus == 1:
        return "Compression does not pay: one GPU exchanges nothing."
    if prediction.pays:
        first = (
            f"Compression pays: {best.name} is {prediction.gain:.2f} times as fast as "
            f"{adam.name} over a run with {prediction.warmup_share:.0%} warm-up, "
            f"{prediction.speed_up(best, adam, whole_run=False):.2f} times after it."
        )
    else:
        what = "One bit in every step" if prediction.local_steps_pay else "Compression"
        first = (
            f"{what} does not pay: {_why(prediction)}; with "
            f"{prediction.warmup_share:.0%} warm-up {best.name} is "
            f"{prediction.gain:.3f} times as fast as {adam.name} over a run; with an "
            f"exchange that took no time it would be {_ceiling(prediction):.3f} times."
        )
    if prediction.cluster.hosts == 1:
        return first
    rate = break_even_rate(prediction)
    if rate is None:
        second = (
            "It pays at no link rate from 1 Mbit/s on: bytes are not what it waits for."
        )
    elif rate > 0.99 * _FASTEST:
        second = "It pays at every link rate up to 10,000 Gbit/s."
    else:
        second = (
            f"It pays ({PAYS} times and more) while a host's links give less than "
            f"{_rate(rate)} Gbit/s."
        )
    return f"{first}\n{second}"


def _ceiling(prediction: Prediction) -> float:
    """The speed-up over a run with an exchange after the freeze that takes no time."""
    best, share = prediction.best, prediction.warmup_share
    rest = best.compressed.seconds - best.compressed.exchange
    least = share * best.warmup.seconds + (1 - share) * rest
    return prediction.baseline.seconds(share) / least


def _why(prediction: Prediction) -> str:
    """The reason why compression is useless."""
    adam, work = prediction.baseline.compressed, prediction.work
    wait = sum(load.rounds for load in adam.loads) * prediction.cluster.latency
    share = f"{adam.network_share:.0%} of Adam's step"
    if wait > 0.5 * adam.exchange > 0:
        return (
            f"the model is so small that its exchange ({share}) waits for messages, "
            "not for bytes"
        )
    if adam.network_share > 1 / 3:
        return (
            f"the exchange takes {share}, but the warm-up and the compression itself "
            "use up what it saves"
        )
    alone = adam.exchange / (adam.exchange + work.micro_batch + adam.update)
    if work.accumulate > 1 and alone > 2 * adam.network_share:
        return (
            f"{work.accumulate} micro-batches share an exchange, which is {share} "
            f"(without accumulation {alone:.0%})"
        )
    return (
        f"the network is fast enough for this model, {share} "
        f"({milliseconds(adam.exchange)} ms)"
    )


def to_json(prediction: Prediction) -> dict[str, Any]:
    """Model, cluster, work, steps and verdict as JSON values, in seconds and bytes."""
    full, half, *_ = prediction.baselines

    def of_load(load: LinkLoad) -> dict[str, Any]:
        numbers = load._asdict()
        transfer = numbers.pop("transfer")._asdict()
        return transfer | numbers | {"seconds": prediction.cluster.seconds(load)}

    def of_step(step: Step) -> dict[str, Any]:
        numbers = step._asdict()
        loads = numbers.pop("loads")
        return numbers | {
            "seconds": step.seconds,
            "network_share": step.network_share,
            "transfers": [of_load(load) for load in loads],
        }

    return {
        "model": {
            "name": prediction.model.name,
            "parameters": prediction.model.parameters,
            "flops_a_sequence": prediction.model.flops,
        },
        "cluster": prediction.cluster._asdict(),
        "work": prediction.work._asdict(),
        "warmup_share": prediction.warmup_share,
        "arms": [
            {
                "name": arm.name,
                "warmup": of_step(arm.warmup),
                "compressed": of_step(arm.compressed),
                "speed_up": {
                    f"{name}, {when}": prediction.speed_up(arm, over, whole_run=whole)
                    for name, over in (("over float32", full), ("over bfloat16", half))
                    for when, whole in (("after", False), ("whole run", True))
                },
            }
            for arm in prediction.arms
        ],
        "best": prediction.best.name,
        "pays": prediction.pays,
        "break_even_rate": (
            break_even_rate(prediction) if prediction.cluster.hosts > 1 else None
        ),
        "verdict": verdict(prediction),
    }


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, of three digits or so."""
    return f"{1e3 * seconds:,.{0 if seconds > 0.1 else 1}f}"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.{0 if size > 1e8 else 1}f}"


def _rate(rate: float) -> str:
    gigabits = rate / GIGABIT
    return f"{gigabits:,.0f}" if gigabits >= 100 else f"{gigabits:.2g}"
