"""`python -m train.squad`: fine-tunes a BERT to find answers in texts.

`--help` lists the flags. With `--predict` it answers, and does not train. A run leaves
in its folder `config.json` (what was asked for), `vocab.txt`, `checkpoints`,
`metrics.jsonl`, `training.png`, `predictions.json` and its likes for the official
scripts, `scores.json`, and in `model` the weights in Hugging Face's layout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import jax
from jax.sharding import NamedSharding, PartitionSpec

from train.core import run_folder
from train.core.commands import Command, parse_flags, run_command
from train.core.errors import InputError
from train.core.flags import places
from train.core.loop import train
from train.core.mesh import check_attention, check_divisible, kept_topology, make_mesh
from train.core.optimizer import check_plan
from train.core.output import say
from train.core.processes.distributed import Cluster
from train.core.processes.session import watched
from train.core.run_folder import contents_name
from train.data.model_folder import write_model, write_tokenizer
from train.squad.answer import answer, check_answers, cut, score
from train.squad.config import FREEZE, MODULE, SquadConfig, check
from train.squad.dataset import read_squad
from train.squad.initial_weights import (
    random_weights,
    read_resumed,
    read_weights,
    trained_tokens,
)
from train.squad.predict import write_answers
from train.squad.task import make_task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jax.sharding import Mesh

    from train.core.task import Params
    from train.squad.dataset import Squad
    from train.squad.initial_weights import InitialWeights
    from train.squad.scores import Score
    from train.squad.windows import Questions


def parse(arguments: Sequence[str]) -> Command[SquadConfig]:
    """Reads the flags.

    A run that goes on has its own for those not given. `--predict` takes --seq and
    --stride from the run in `--start`.
    """
    command = parse_flags(SquadConfig(), arguments, MODULE)
    start = command.training.start
    if command.training.predict and start and run_folder.is_of(start, MODULE):
        flags = run_folder.flags_of(start)
        like_run = SquadConfig(seq=flags["seq"], stride=flags["stride"])
        return parse_flags(like_run, arguments, MODULE)
    return command


def fine_tune(
    config: SquadConfig,
    timeout: float = Cluster.timeout,
) -> Mapping[str, Score]:
    """Trains what the flags ask for, answers, and returns the scores of the answers.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone, or takes longer than `timeout` seconds.
    """
    mesh = _workers(config)
    topology = kept_topology(mesh, config.out, goes_on=config.resume)
    config = replace(config, topology=topology)
    if not config.resume:
        run_folder.check_free(config.out)  # not only when all questions are cut
    weights = _starting_weights(config)
    assert config.train, "checked"
    learnt, questions = _questions(config, config.train, weights)
    steps = config.num_steps(len(learnt.windows))
    check_plan(config.planned(steps, FREEZE))
    pieces = (*weights.vocabulary, str(weights.cased))
    contents = {
        "training file": contents_name(config.train.read_bytes()),
        "vocabulary": contents_name(*pieces),
    }
    run = run_folder.run_of(config, MODULE, contents, steps)

    def keep_tokenizer(folder: Path) -> None:
        if not config.resume:
            write_tokenizer(folder, weights.vocabulary, cased=weights.cased)

    scores: dict[str, Score] = {}
    with (
        watched(timeout) as watchdog,
        run_folder.begun([run], config, keep_tokenizer, watchdog),
    ):

        def finish(params: Params) -> None:
            predictions = answer(
                config, model, params, questions, mesh, watchdog.expect
            )
            scores.update(score(config, questions.squad, predictions))
            write_model(
                config.out,
                model,
                params,
                "BertForQuestionAnswering",
                weights.vocabulary,
                cased=weights.cased,
            )

        model = config.model_of(weights.config)
        say(
            f"{config.out}: BERT of {model.num_layers} layers of {model.hidden_size}, "
            f"{len(learnt.squad.questions):,} questions in {len(learnt.windows):,} "
            f"windows, {mesh.size} workers ({mesh.devices.flat[0].platform}), to step "
            f"{steps:,}"
        )
        task = make_task(config, model, weights.params, learnt, steps, mesh, finish)
        flags = replace(run.flags, **places(config))  # files may have moved
        begin = partial(run_folder.write, replace(run, flags=flags))
        train(task, config, steps, mesh, watchdog, begin)
    return scores


def answer_alone(config: SquadConfig, timeout: float = Cluster.timeout) -> None:
    """Answers the questions of `predict`, without training and without scores.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone, or takes longer than `timeout` seconds.
    """
    mesh = _workers(config)
    source, vocab = (
        (config.out, None) if config.resume else (config.start, config.vocab)
    )
    assert config.predict, "asked for"
    assert source, "checked"
    if run_folder.exists(config.out) and not run_folder.is_of(config.out, MODULE):
        raise InputError(
            f"{config.out} has a config.json that is not of a run of {MODULE}; give "
            "another --out for the answers."
        )
    weights = read_weights(source, vocab)
    _check_positions(config, weights)
    if "span" not in weights.params:
        raise InputError(
            f"the weights in {source} have not learnt to answer; give those of a "
            "run of train.squad."
        )
    squad = read_squad(config.predict, with_answers=False)
    _check_threshold(config, squad, config.predict)
    questions = cut(config, squad, weights)
    say(
        f"{config.predict}: {len(squad.questions):,} questions in "
        f"{len(questions.windows):,} windows of {config.seq} tokens, at most "
        f"{config.stride} word pieces apart"
    )
    params = jax.device_put(weights.params, NamedSharding(mesh, PartitionSpec()))
    with watched(timeout) as watchdog:
        model = config.model_of(weights.config)
        predictions = answer(config, model, params, questions, mesh, watchdog.expect)
    suffix, threshold = f"_{config.predict.stem}", config.null_threshold
    write_answers(config.out, squad, predictions, threshold, suffix)


def _workers(config: SquadConfig) -> Mesh:
    """The workers, that can do what the flags ask for."""
    check(config)
    mesh = make_mesh(config.workers, config.topology)
    check_divisible(config.batch, mesh)
    check_attention(config.attention, mesh)
    return mesh


def _questions(
    config: SquadConfig, train: Path, weights: InitialWeights
) -> tuple[Questions, Questions]:
    """The questions to learn from, and those to be scored on."""
    training = read_squad(train)
    dev = read_squad(config.dev) if config.dev else training
    _check_threshold(config, dev, config.dev or train)
    learnt = cut(config, training, weights)
    check_answers(learnt)
    return learnt, cut(config, dev, weights) if config.dev else learnt


def _starting_weights(config: SquadConfig) -> InitialWeights:
    """The weights to start from; of a run that is resumed, their sizes alone."""
    weights = read_resumed(config.out) if config.resume else None
    if weights is None and config.start:
        weights = read_weights(config.start, config.vocab)
    if weights is None:
        assert config.vocab, "checked"
        weights = random_weights(config.vocab, config.model or "tiny")
    _check_positions(config, weights)
    known = config.start and not config.resume and trained_tokens(config.start)
    if known and known < config.seq:
        say(
            f"{config.start} was trained on {known} tokens: the positions from there "
            f"to --seq {config.seq} begin as they were drawn."
        )
    return weights


def _check_positions(config: SquadConfig, weights: InitialWeights) -> None:
    if config.seq > weights.config.max_positions:
        raise InputError(
            f"--seq {config.seq} is more than the {weights.config.max_positions} "
            "positions of this BERT; give fewer."
        )


def _check_threshold(config: SquadConfig, squad: Squad, file: Path) -> None:
    """Refuses a threshold for having no answer where all questions have one."""
    if config.null_threshold and not squad.has_null:
        raise InputError(
            f"--null-threshold is of questions that may have no answer, and {file} has "
            'none such; give --null-threshold 0, or a file of "version": "v2.0".'
        )


def main() -> None:
    """Runs the command line; a mistake in it ends in one sentence."""

    def run(config: SquadConfig, timeout: float) -> None:
        if config.predict:
            answer_alone(config, timeout)
            return
        for name, reached in fine_tune(config, timeout).items():
            say(
                f"{name}: exact match {reached.exact:.2f}, F1 {reached.f1:.2f} "
                f"({reached.total:,} questions)"
            )

    run_command(parse, check, run)
