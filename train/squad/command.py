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

from train.core import run_folder
from train.core.commands import Command, parse_flags, run_command
from train.core.flags import places
from train.core.loop import train
from train.core.mesh import check_attention, check_divisible, kept_topology, make_mesh
from train.core.optimizer import check_plan
from train.core.output import say
from train.core.processes.distributed import Cluster
from train.core.processes.session import watched
from train.core.run_folder import contents_name
from train.data.model_folder import write_model, write_tokenizer
from train.squad.answer import answer, score
from train.squad.answer_alone import answer_alone
from train.squad.config import FREEZE, MODULE, SquadConfig, check
from train.squad.inputs import read_questions, starting_weights
from train.squad.task import make_task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from train.core.task import Params
    from train.squad.initial_weights import InitialWeights
    from train.squad.scores import Score


def parse(arguments: Sequence[str]) -> Command[SquadConfig]:
    """Reads the flags.

    A run that goes on has its own for those not given. `--predict` takes --seq and
    --stride from the run in `--start`.
    """
    command = parse_flags(SquadConfig(), arguments, MODULE)
    start = command.training.start
    if command.training.predict and start and run_folder.is_of(start, MODULE):
        flags = run_folder.flags_of(start)
        cut = SquadConfig(seq=flags["seq"], stride=flags["stride"])
        return parse_flags(cut, arguments, MODULE)
    return command


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
    if not config.resume:
        run_folder.check_free(config.out)  # not only when all questions are cut
    weights = starting_weights(config)
    assert config.train, "checked"
    learnt, questions = read_questions(config, config.train, weights)
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
        flags = replace(run.flags, **places(config))  # files may have moved
        begin = partial(run_folder.write, replace(run, flags=flags))
        train(task, config, steps, mesh, watchdog, begin)
    return scores


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
