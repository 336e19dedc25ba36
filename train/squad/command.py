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
from train.core.commands.line import Command, parse_flags, run_command
from train.core.errors import InputError
from train.core.loop import train
from train.core.mesh import check_attention, check_divisible, kept_topology, make_mesh
from train.core.optimizer import check_plan
from train.core.output import say
from train.core.processes.distributed import Cluster
from train.core.processes.session import watched
from train.core.run_folder import contents_name
from train.data.model_folder import write_model, write_tokenizer
from train.data.pieces import special_pieces
from train.data.vocabulary import UNK, say_if_unknown, tokenizer_of
from train.squad.answer import Questions, answer, score, write_answers
from train.squad.config import FREEZE, SquadConfig, check
from train.squad.dataset import read_squad
from train.squad.initial_weights import read_resumed, read_weights
from train.squad.task import make_task
from train.squad.windows import check_answers, unknown_share, windows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from train.core.task import Params
    from train.squad.dataset import Squad
    from train.squad.initial_weights import InitialWeights
    from train.squad.scores import Score
    from train.squad.windows import Window

MODULE = "train.squad"


def parse(arguments: Sequence[str]) -> Command[SquadConfig]:
    """Reads the flags; a run that goes on has its own for those not given."""
    return parse_flags(SquadConfig(), arguments, MODULE)


def fine_tune(
    config: SquadConfig,
    timeout: float = Cluster.timeout,
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
    check(config)
    mesh = make_mesh(config.workers, config.topology)
    check_divisible(config.batch, mesh)
    check_attention(config.attention, mesh)
    topology = kept_topology(mesh, config.out, goes_on=config.resume)
    config = replace(config, topology=topology)
    weights = _weights(config)
    assert config.train, "checked"
    learnt, questions = _read(config, config.train, weights)
    steps = config.num_steps(len(learnt))
    check_plan(config.planned(steps, FREEZE))
    pieces = (*weights.vocabulary, str(weights.cased))
    contents = {
        "training file": contents_name(config.train.read_bytes()),
        "vocabulary": contents_name(*pieces),
    }
    run = run_folder.run_of(config, MODULE, contents, steps)
    keep_tokenizer = partial(_keep_tokenizer, config, weights)
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
            f"{len({w.question for w in learnt}):,} questions in {len(learnt):,} "
            f"windows, {mesh.size} workers ({mesh.devices.flat[0].platform}), to step "
            f"{steps:,}"
        )
        task = make_task(config, model, weights, learnt, steps, mesh, finish)
        train(task, config, steps, mesh, watchdog)
    return scores


def answer_alone(config: SquadConfig, timeout: float = Cluster.timeout) -> None:
    """Answers the questions of `predict`, without training and without scores.

    Args:
      config: The flags, the same in all processes.
      timeout: Seconds that what needs the other processes may take.

    Raises:
      InputError: The flags, or what they name, cannot be used.
      LostError: Another process is gone.
    """
    check(config)
    assert config.predict, "asked for"
    mesh = make_mesh(config.workers, config.topology)
    check_divisible(config.batch, mesh)
    check_attention(config.attention, mesh)
    source = (config.out, None) if config.resume else (config.start, config.vocab)
    weights = read_weights(*source, "tiny")
    _check_positions(config, weights)
    if "span" not in weights.params:
        raise InputError(
            f"the weights in {source[0]} have not learnt to answer; give those of a "
            "run of train.squad."
        )
    squad = read_squad(config.predict, with_answers=False)
    asked = _windows(config, squad, weights)
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(weights.params, everywhere)
    questions = Questions(squad, asked, special_pieces(weights.vocabulary))
    with watched(timeout) as watchdog:
        model = config.model_of(weights.config)
        predictions = answer(config, model, params, questions, mesh, watchdog.expect)
    write_answers(config, squad, predictions, f"_{config.predict.stem}")


def _weights(config: SquadConfig) -> InitialWeights:
    """The weights to start from; of a run that is resumed, their sizes alone."""
    weights = read_resumed(config.out) if config.resume else None
    model = config.model or "tiny"
    weights = weights or read_weights(config.start, config.vocab, model)
    _check_positions(config, weights)
    return weights


def _check_positions(config: SquadConfig, weights: InitialWeights) -> None:
    if config.seq > weights.config.max_positions:
        raise InputError(
            f"--seq {config.seq} is more than the {weights.config.max_positions} "
            "positions of this BERT; give fewer."
        )


def _read(
    config: SquadConfig, file: Path, weights: InitialWeights
) -> tuple[list[Window], Questions]:
    """The windows to learn from, and the questions to answer."""
    training = read_squad(file)
    dev = read_squad(config.dev) if config.dev else training
    if config.null_threshold and not dev.has_null:
        raise InputError(
            f"--null-threshold is of questions that may have no answer, and "
            f"{config.dev or file} has none such; give --null-threshold 0."
        )
    learnt, asked = (_windows(config, squad, weights) for squad in (training, dev))
    check_answers(training.questions, learnt)
    return learnt, Questions(dev, asked, special_pieces(weights.vocabulary))


def _windows(
    config: SquadConfig, squad: Squad, weights: InitialWeights
) -> list[Window]:
    tokenizer = tokenizer_of(weights.vocabulary, cased=weights.cased)
    cut = windows(squad.questions, tokenizer, config.seq, stride=config.stride)
    share = unknown_share(cut, weights.vocabulary.index(UNK))
    say_if_unknown(share, "give weights, or a --vocab, of such texts")
    return cut


def _keep_tokenizer(config: SquadConfig, weights: InitialWeights, folder: Path) -> None:
    if not config.resume:
        write_tokenizer(folder, weights.vocabulary, cased=weights.cased)


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
