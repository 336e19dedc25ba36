"""Questions cut into windows, and their answers: predictions and scores of a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from train.core.errors import InputError, writable
from train.core.output import is_main_process, say
from train.core.processes.distributed import check_agreed
from train.core.run_folder import contents_name
from train.core.text_file import replace_text
from train.data.vocabulary import UNK, say_if_unknown, special_pieces, tokenizer_of
from train.squad.predict import answers, predict, write_answers
from train.squad.scores import evaluate
from train.squad.task import logits
from train.squad.windows import NOWHERE, Questions, windows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Mesh

    from models import BertConfig
    from train.core.task import Params
    from train.squad.config import SquadConfig
    from train.squad.dataset import Squad
    from train.squad.initial_weights import InitialWeights
    from train.squad.predict import Prediction
    from train.squad.scores import Score

SCORES = "scores.json"


def cut(config: SquadConfig, squad: Squad, weights: InitialWeights) -> Questions:
    """Cuts questions into windows; says where word pieces do not fit their texts."""
    tokenizer = tokenizer_of(weights.vocabulary, cased=weights.cased)
    made = windows(squad.questions, tokenizer, config.seq, stride=config.stride)
    texts = [window.tokens[window.text_place : -1] for window in made]
    unk = weights.vocabulary.index(UNK)
    unknown = sum(np.count_nonzero(x == unk) for x in texts)
    share = unknown / max(1, sum(map(len, texts)))
    say_if_unknown(share, "give weights, or a --vocab, of such texts")
    return Questions(squad, made, special_pieces(weights.vocabulary))


def check_answers(questions: Questions) -> None:
    """Warns of answers that cannot be learnt; refuses where none can be."""
    answered = sum(bool(question.answers) for question in questions.squad.questions)
    whole = {w.question for w in questions.windows if w.answer != NOWHERE}
    lost = answered - len(whole)
    advice = "they are longer than half a window, or invisible; give a longer --seq"
    if answered and lost == answered:
        raise InputError(f"no answer is whole in a window: {advice}.")
    if lost:
        say(
            f"{lost:,} of {answered:,} answers are whole in no window, and are learnt "
            f"as none: {advice}."
        )


def answer(
    config: SquadConfig,
    model: BertConfig,
    params: Params,
    questions: Questions,
    mesh: Mesh,
    expect: Callable[[str], None],
) -> list[Prediction]:
    """Answers questions.

    Args:
      config: The flags.
      model: The model's sizes.
      params: Its parameters, on the mesh.
      questions: What to answer.
      mesh: The workers.
      expect: Told of each wait for the other processes.

    Raises:
      InputError: The model has diverged, or processes differ in their questions.
    """
    expect("the questions of all processes")
    tokens = (window.tokens.tobytes() for window in questions.windows)
    check_agreed({"--batch": str(config.batch), "questions": contents_name(*tokens)})
    starts, ends = logits(config, model, params, questions, mesh, expect)
    if not (np.isfinite(starts).all() and np.isfinite(ends).all()):
        raise InputError(
            "the model's scores are not finite; start a new run in another --out "
            "with a smaller --learning-rate."
        )
    return predict(
        questions.squad.questions,
        questions.windows,
        starts,
        ends,
        max_answer=min(config.max_answer, config.seq),
    )


def score(
    config: SquadConfig, squad: Squad, predictions: Sequence[Prediction]
) -> dict[str, Score]:
    """Scores answers, and writes both into the run's folder."""
    threshold = config.null_threshold
    write_answers(config.out, squad, predictions, threshold)
    scores = evaluate(squad, answers(squad, predictions, threshold))
    if is_main_process():
        written = {name: score._asdict() for name, score in scores.items()}
        with writable(config.out):
            replace_text(config.out / SCORES, json.dumps(written, indent=2) + "\n")
    return scores
