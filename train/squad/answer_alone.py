"""`python -m train.squad --predict`: answers questions whose answers nobody knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.sharding import NamedSharding, PartitionSpec

from train.core import run_folder
from train.core.errors import InputError
from train.core.mesh import check_attention, check_divisible, make_mesh
from train.core.output import say
from train.core.processes.distributed import Cluster
from train.core.processes.session import watched
from train.data.pieces import special_pieces
from train.squad.answer import Questions, answer, write_answers
from train.squad.config import MODULE, check
from train.squad.dataset import read_squad
from train.squad.initial_weights import read_weights
from train.squad.inputs import check_positions, check_threshold, windows_of

if TYPE_CHECKING:
    from train.squad.config import SquadConfig


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
    if run_folder.exists(config.out) and not run_folder.is_of(config.out, MODULE):
        raise InputError(
            f"{config.out} has a config.json that is not of a run of {MODULE}; give "
            "another --out for the answers."
        )
    mesh = make_mesh(config.workers, config.topology)
    check_divisible(config.batch, mesh)
    check_attention(config.attention, mesh)
    source = (config.out, None) if config.resume else (config.start, config.vocab)
    weights = read_weights(*source, "tiny")
    check_positions(config, weights)
    if "span" not in weights.params:
        raise InputError(
            f"the weights in {source[0]} have not learnt to answer; give those of a "
            "run of train.squad."
        )
    squad = read_squad(config.predict, with_answers=False)
    check_threshold(config, squad, config.predict)
    asked = windows_of(config, squad, weights)
    say(
        f"{config.predict}: {len(squad.questions):,} questions in {len(asked):,} "
        f"windows of {config.seq} tokens, at most {config.stride} word pieces apart"
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = jax.device_put(weights.params, everywhere)
    questions = Questions(squad, asked, special_pieces(weights.vocabulary))
    with watched(timeout) as watchdog:
        model = config.model_of(weights.config)
        predictions = answer(config, model, params, questions, mesh, watchdog.expect)
    write_answers(config, squad, predictions, f"_{config.predict.stem}")
