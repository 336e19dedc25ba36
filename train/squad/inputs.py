"""Inputs of a SQuAD run: weights to start from, and questions cut into windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.core.errors import InputError
from train.core.output import say
from train.data.pieces import special_pieces
from train.data.vocabulary import UNK, say_if_unknown, tokenizer_of
from train.squad.answer import Questions
from train.squad.dataset import read_squad
from train.squad.initial_weights import read_resumed, read_weights, trained_tokens
from train.squad.windows import check_answers, unknown_share, windows

if TYPE_CHECKING:
    from pathlib import Path

    from train.squad.config import SquadConfig
    from train.squad.dataset import Squad
    from train.squad.initial_weights import InitialWeights
    from train.squad.windows import Window


def starting_weights(config: SquadConfig) -> InitialWeights:
    """The weights to start from; of a run that is resumed, their sizes alone.

    Args:
      config: The flags.

    Returns:
      The weights, or shapes.

    Raises:
      InputError: They cannot be read, or have too few positions.
    """
    weights = read_resumed(config.out) if config.resume else None
    model = config.model or "tiny"
    weights = weights or read_weights(config.start, config.vocab, model)
    check_positions(config, weights)
    known = config.start and not config.resume and trained_tokens(config.start)
    if known and known < config.seq:
        say(
            f"{config.start} was trained on {known} tokens: the positions from there "
            f"to --seq {config.seq} begin as they were drawn."
        )
    return weights


def check_positions(config: SquadConfig, weights: InitialWeights) -> None:
    """Refuses windows that are longer than the positions of a BERT."""
    if config.seq > weights.config.max_positions:
        raise InputError(
            f"--seq {config.seq} is more than the {weights.config.max_positions} "
            "positions of this BERT; give fewer."
        )


def read_questions(
    config: SquadConfig, file: Path, weights: InitialWeights
) -> tuple[list[Window], Questions]:
    """The windows to learn from, and the questions to answer.

    Args:
      config: The flags.
      file: The file to learn from.
      weights: Those whose word pieces the texts are cut into.

    Returns:
      Windows of `file`, and the questions of `dev`, or of `file` without it.

    Raises:
      InputError: A file cannot be read, or is none that can be learnt from.
    """
    training = read_squad(file)
    dev = read_squad(config.dev) if config.dev else training
    check_threshold(config, dev, config.dev or file)
    learnt, asked = (windows_of(config, squad, weights) for squad in (training, dev))
    check_answers(training.questions, learnt)
    return learnt, Questions(dev, asked, special_pieces(weights.vocabulary))


def check_threshold(config: SquadConfig, squad: Squad, file: Path) -> None:
    """Refuses a threshold for having no answer where all questions have one.

    Raises:
      InputError: The file says of no question that it may have none.
    """
    if config.null_threshold and not squad.has_null:
        raise InputError(
            f"--null-threshold is of questions that may have no answer, and {file} has "
            'none such; give --null-threshold 0, or a file of "version": "v2.0".'
        )


def windows_of(
    config: SquadConfig, squad: Squad, weights: InitialWeights
) -> list[Window]:
    """The windows of a file's questions; says where word pieces do not fit them."""
    tokenizer = tokenizer_of(weights.vocabulary, cased=weights.cased)
    cut = windows(squad.questions, tokenizer, config.seq, stride=config.stride)
    share = unknown_share(cut, weights.vocabulary.index(UNK))
    say_if_unknown(share, "give weights, or a --vocab, of such texts")
    return cut
