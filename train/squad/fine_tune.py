"""`python -m train.squad`: fine-tunes a BERT to find answers in texts.

`--help` lists the flags. A run leaves in its folder `config.json` (what was asked
for), `checkpoints`, `metrics.jsonl`, `predictions.json` and its likes for the official
scripts, `scores.json`, and in `model` the weights in Hugging Face's layout.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

import onebit_jax
from models import huggingface
from train.bert.examples import batches, special_pieces, stream
from train.core import metrics_log as record
from train.core import run_folder
from train.core.checkpoint import Checkpoint, Checkpoints, Progress, latest_step
from train.core.command import (
    is_main_process,
    join,
    one_sentence,
    read_flags,
    say,
    say_if_never_compressed,
    say_if_skipped,
    say_if_unknown,
    watched,
)
from train.core.distributed import Cluster, check_agreed, check_shared
from train.core.errors import InputError, writable
from train.core.exchange import make_exchange
from train.core.mesh import check_attention, make_mesh
from train.core.metrics_log import StepMetrics
from train.core.optimizer import freeze_rule, learning_rate_schedule, make_optimizer
from train.core.program import place
from train.core.totals import Sent
from train.data.vocabulary import UNK, tokenizer_of
from train.squad import folder as squad_folder
from train.squad.config import SquadConfig, check, check_resumable, to_json
from train.squad.dataset import read_squad
from train.squad.folder import Remembered, contents_name
from train.squad.initial_weights import (
    MODEL_FOLDER,
    Start,
    read_own_start,
    read_start,
    write_tokenizer,
)
from train.squad.objective import (
    abstract_params,
    examples,
    init_params,
    logits,
    training_loss,
)
from train.squad.predict import answers, predict, write_predictions
from train.squad.scores import best_threshold, evaluate
from train.squad.windows import check_answers, unknown_share, windows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import grain
    import optax
    from jax.sharding import Mesh

    from models import BertConfig, SpanBatch
    from train.core.totals import Stage
    from train.core.watchdog import Watchdog
    from train.squad.dataset import Squad
    from train.squad.predict import Prediction
    from train.squad.scores import Score

SCORES = "scores.json"


class Task(NamedTuple):
    """All that training takes beside the flags."""

    config: SquadConfig
    model: BertConfig
    start: Start
    mesh: Mesh
    batches: grain.MapDataset[SpanBatch]
    steps: int
    contents: str


@dataclass(frozen=True)
class Command:
    """Fine-tunes BERT to find answers in texts, and writes its answers."""

    training: SquadConfig = field(default_factory=SquadConfig)
    cluster: Cluster = field(default_factory=Cluster)


def fine_tune(
    config: SquadConfig, timeout: float = Cluster.timeout
) -> Mapping[str, Score]:
    """Trains what the flags ask for, answers, and scores the answers.

    Args:
      config: The flags, the same in all processes.
      timeout: Seconds that what needs the other processes may take.

    Returns:
      The scores of the answers to `dev`.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone.
    """
    file = check(config)
    mesh = make_mesh(config.workers, "flat")
    if config.batch % mesh.size:
        raise InputError(
            f"--batch {config.batch} cannot be shared equally by {mesh.size} workers; "
            "make it a multiple, or give --workers."
        )
    check_attention(config.attention, mesh)
    training = read_squad(file)
    dev = read_squad(config.dev) if config.dev else training
    if config.null_threshold and not dev.has_null:
        raise InputError(
            f"--null-threshold is of questions that may have no answer, and "
            f"{config.dev or file} has none such; give --null-threshold 0."
        )
    start = read_own_start(config.out) if config.resume else None
    start = start or read_start(config.start, config.vocab, config.model or "tiny")
    if config.seq > start.config.max_positions:
        raise InputError(
            f"--seq {config.seq} is more than the {start.config.max_positions} "
            "positions of this BERT; give fewer."
        )
    tokenizer = tokenizer_of(start.vocabulary, cased=start.cased)
    pieces = special_pieces(start.vocabulary)
    cut, asked = (
        windows(squad.questions, tokenizer, config.seq, stride=config.stride)
        for squad in (training, dev)
    )
    check_answers(training.questions, cut)
    say_if_unknown(unknown_share(cut, start.vocabulary.index(UNK)))
    task = Task(
        config=config,
        model=_model(config, start.config),
        start=start,
        mesh=mesh,
        batches=batches(
            examples(cut, pieces, config.seq, config.seed),
            config.batch,
            process=jax.process_index(),
            num_processes=jax.process_count(),
        ),
        steps=config.num_steps(len(cut)),
        contents=contents_name(file.read_bytes(), *start.vocabulary, str(start.cased)),
    )
    with watched(timeout) as watchdog:
        params = _train(task, watchdog)
        starts, ends = logits(
            task.model,
            params,
            asked,
            pieces,
            config.seq,
            config.batch,
            mesh,
            watchdog.expect,
        )
    if not (np.isfinite(starts).all() and np.isfinite(ends).all()):
        raise InputError(
            "the model's scores are not finite; start a new run in another --out "
            "with a smaller --learning-rate."
        )
    predictions = predict(
        dev.questions,
        asked,
        starts,
        ends,
        num_best=config.num_best,
        max_answer=min(config.max_answer, config.seq),
    )
    limit = config.null_threshold
    scores = evaluate(dev, answers(dev, predictions, limit))
    if not is_main_process():
        return scores
    with writable(config.out):
        write_predictions(config.out, dev, predictions, limit)
        written = {name: score._asdict() for name, score in scores.items()}
        if dev.has_null:
            written["best"] = _best(dev, predictions)
        text = json.dumps(written, indent=2) + "\n"
        (config.out / SCORES).write_text(text, encoding="utf-8")
        if start.config.pre_norm:
            say(
                "Hugging Face's BERT has no Pre-LayerNorm: the weights are in the "
                f"checkpoints of {config.out} alone."
            )
        else:
            folder = config.out / MODEL_FOLDER
            huggingface.write(
                folder, task.model, jax.device_get(params), "BertForQuestionAnswering"
            )
            write_tokenizer(folder, start)
    return scores


def _model(config: SquadConfig, read: BertConfig) -> BertConfig:
    try:
        return replace(read, **config.model_options)
    except ValueError as error:
        raise InputError(str(error)) from error


def _best(dev: Squad, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The score at the null threshold that suits these questions best."""
    threshold, score = best_threshold(
        dev,
        {p.question.id: p.text() for p in predictions},
        {p.question.id: p.null_odds for p in predictions},
    )
    # JSON has no infinity: below all odds nothing is answered.
    return {**score._asdict(), "null_threshold": max(threshold, -1e9)}


def _train(task: Task, watchdog: Watchdog) -> Any:
    """Trains from the newest checkpoint, and returns the parameters."""
    config, mesh = task.config, task.mesh
    folder = config.out
    own = Remembered(config, task.contents)
    if config.resume:
        squad_folder.check_own(own)
    else:
        run_folder.check_free(folder)
    watchdog.expect("the start of all processes")
    # Nothing is written before all have seen the folder as it was.
    check_agreed(
        {
            "training file or vocabulary": task.contents,
            "set of flags": json.dumps(to_json(config)),
            "newest checkpoint in --out": str(latest_step(folder)),
            "JAX": jax.__version__,
        }
    )
    if is_main_process() and not config.resume:
        with writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_tokenizer(folder, task.start)
        # A folder with a checkpoint in it must say whose it is.
        squad_folder.remember(own)
    check_shared(folder / run_folder.FILE)
    if config.optimizer == "onebit_adam":
        freeze = config.freeze(task.steps)
        say_if_never_compressed("--freeze-step", freeze, task.steps)
    warmup = config.warmup(task.steps)
    schedule = learning_rate_schedule(config.learning_rate, warmup, task.steps)
    tx = make_optimizer(
        config.optimizer,
        schedule,
        freeze_rule(config.freeze(task.steps), warmup, task.steps),
        make_exchange(mesh, config.wire, "flat"),
        weight_decay=config.weight_decay,
        clip=config.clip,
    )
    run = onebit_jax.data_parallel(training_loss(task.model, config.seed), tx, mesh)
    with (
        closing(Checkpoints(folder, task.model, config.optimizer)) as checkpoints,
        closing(stream(task.batches)) as feed,
    ):
        watchdog.expect("the start from a checkpoint")
        if checkpoints.exist() or record.read(folder):
            begun, _ = checkpoints.restore(tx, abstract_params(task.model), mesh)
            feed.set_state(begun.progress.data)
            if is_main_process():
                with writable(folder):
                    record.truncate(folder, begun.progress.sent.steps)
        else:
            params = init_params(task.model, config.seed, task.start.params)
            params, state = run.init(params)
            begun = Checkpoint(params, state, Progress(Sent(), feed.get_state()))
            watchdog.expect("the checkpoint of step 0")
            checkpoints.save(begun, mesh)
        watchdog.expect("")  # a compilation waits for nobody
        return _loop(task, run, schedule, begun, feed, checkpoints, watchdog)


def _loop(
    task: Task,
    run: onebit_jax.DataParallel,
    schedule: optax.Schedule,
    begun: Checkpoint,
    feed: Any,
    checkpoints: Checkpoints,
    watchdog: Watchdog,
) -> Any:
    config, mesh = task.config, task.mesh
    params, state, progress = begun
    sent = progress.sent
    if sent.steps >= task.steps:
        return params
    example = place(next(iter(task.batches)), mesh)
    step_fn = run.step.lower(params, state, example, np.uint32(0)).compile()
    traffic = onebit_jax.traffic(step_fn, mesh)
    rates: dict[Stage, int] = {
        "warmup": traffic.sent_bytes("warmup"),
        "compressed": traffic.sent_bytes("compressed"),
    }
    logged, since = sent.steps, time.perf_counter()
    for step in tqdm(
        range(sent.steps + 1, task.steps + 1),
        desc=config.optimizer,
        total=task.steps,
        initial=sent.steps,
        mininterval=0.5,
        disable=not is_main_process(),
    ):
        watchdog.expect(f"step {step}")
        params, state, loss = step_fn(
            params, state, place(next(feed), mesh), np.uint32(step - 1)
        )
        # Virtual workers share one CPU, where steps in flight can block each other.
        loss.block_until_ready()
        log, save = (
            step % every == 0 or step == task.steps
            for every in (config.log_every, config.checkpoint_every)
        )
        if not (log or save):
            continue
        measured = jax.device_get(onebit_jax.metrics(state))
        sent = sent.after(
            step,
            frozen_at=int(measured.get("frozen_at", 0)),
            skipped=int(measured["skipped"]),
            rates=rates,
        )
        if log:
            metrics = StepMetrics(
                step=step,
                loss=float(loss),
                stage=sent.stage,
                sent_bytes=rates[sent.stage],
                total_sent_bytes=sent.total_bytes,
                skipped=sent.skipped,
                learning_rate=np.asarray(schedule(step - 1 - sent.skipped)).item(),
                examples_per_second=(step - logged)
                * config.batch
                / (time.perf_counter() - since),
            )
            logged, since = step, time.perf_counter()
            if is_main_process():
                with writable(config.out):
                    record.append(config.out, metrics)
        if save:
            progress = Progress(sent, feed.get_state())
            checkpoints.save(Checkpoint(params, state, progress), mesh)
    say_if_skipped(sent)
    return params


def parse(arguments: Sequence[str]) -> Command:
    """Reads the flags; a run that goes on has its own for those not given."""
    given = read_flags(Command(), arguments, "train.squad")
    if not given.training.resume:
        return given
    folder = given.training.out
    stored = squad_folder.read(folder).config
    own = replace(stored, out=folder, resume=True)
    given = read_flags(Command(own), arguments, "train.squad")
    check_resumable(stored, given.training)
    return given


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""
    with one_sentence():
        command = parse(sys.argv[1:])
        check(command.training)
        join(command.cluster, command.training.workers)
        scores = fine_tune(command.training, command.cluster.timeout)
        if is_main_process():
            for name, score in scores.items():
                print(
                    f"{name}: exact match {score.exact:.2f}, F1 {score.f1:.2f} "
                    f"({score.total:,} questions)"
                )
