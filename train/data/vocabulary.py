"""WordPiece vocabularies: trained on the corpus, or read from a `vocab.txt`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from train.core.errors import InputError
from train.core.output import say
from train.core.text_file import replace_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from train.data.corpus import Document

PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNK, CLS, SEP, MASK)

MUCH_UNKNOWN = 0.1
"""Share of [UNK] in a text above which it is told."""

_SPECIAL_FORM = re.compile(r"\[.+\]|<.+>")

_BATCH = 10_000  # times that the trainer is handed a word at once

Vocabulary = tuple[str, ...]
"""A vocabulary is its word pieces in the order of their ids."""


@dataclass(frozen=True)
class Pieces:
    """The size of a vocabulary, and the ids of its special tokens."""

    vocab_size: int
    pad: int
    cls: int
    sep: int
    mask: int


def special_pieces(vocabulary: Vocabulary) -> Pieces:
    """The ids of the special tokens of a vocabulary."""
    pad, cls, sep, mask = (vocabulary.index(token) for token in (PAD, CLS, SEP, MASK))
    return Pieces(len(vocabulary), pad=pad, cls=cls, sep=sep, mask=mask)


def train_vocabulary(documents: Iterable[Document], size: int) -> Vocabulary:
    """Finds the word pieces of a text, lower-cased, after the special tokens.

    A small text may not have as many as the size that is wanted.

    Raises:
      InputError: The size leaves no room for word pieces beside the special tokens.
    """
    if size <= len(SPECIAL):
        raise InputError(
            f"a vocabulary of {size} leaves no room beside the {len(SPECIAL)} special "
            "tokens; give a larger --vocab-size, thousands for real text."
        )
    tokenizer = Tokenizer(WordPiece(unk_token=UNK))
    _split_as_bert(tokenizer, lowercase=True)
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(_words(tokenizer, document))
    letters: Counter[str] = Counter()
    for word, times in counts.items():
        for letter in word:
            letters[letter] += times
    # A letter is two pieces, at the start of a word and inside: at most half of all.
    alphabet = {letter for letter, _ in letters.most_common(size // 4)}
    words = [word for word in counts if alphabet.issuperset(word)]
    first = sorted({word[0] for word in words})
    inside = sorted({f"##{letter}" for word in words for letter in word[1:]})
    trainer = WordPieceTrainer(
        vocab_size=size,
        # The trainer numbers letters in the order of a hash table and breaks ties by
        # number; letters that it is given keep their places, so that the result
        # depends on the text alone.
        special_tokens=[*SPECIAL, *first, *inside],
        show_progress=False,
    )
    repeated = (
        [word] * min(_BATCH, counts[word] - done)
        for word in words
        for done in range(0, counts[word], _BATCH)
    )
    tokenizer.train_from_iterator(repeated, trainer)
    ids = tokenizer.get_vocab()
    return tuple(sorted(ids, key=ids.__getitem__))


def read_vocabulary(path: Path) -> Vocabulary:
    """Reads a `vocab.txt`: a word piece a line, its id the number of the line.

    Raises:
      InputError: The file cannot be read, lacks a special token, or repeats a piece.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the vocabulary {path} cannot be read ({error}); give the path of a "
            "vocab.txt with a word piece a line, or restore that of a run that goes on."
        ) from error
    pieces = tuple(line.removesuffix("\r") for line in lines)
    if pieces[-1] == "":
        pieces = pieces[:-1]
    missing = [token for token in SPECIAL if token not in pieces]
    if missing:
        raise InputError(
            f"the vocabulary {path} has no {', '.join(missing)}; give one of a BERT, "
            "which has all five."
        )
    piece, times = Counter(pieces).most_common(1)[0]
    if times > 1:
        raise InputError(
            f"the vocabulary {path} has the line {piece!r} {times} times; a word piece "
            "has one id, so remove the others."
        )
    return pieces


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> None:
    """Writes what `read_vocabulary` reads."""
    replace_text(path, "".join(f"{piece}\n" for piece in vocabulary))


def is_cased(vocabulary: Sequence[str]) -> bool:
    """True if word pieces have capitals, but for special ones: [MASK], <S>."""
    words = (piece for piece in vocabulary if not _SPECIAL_FORM.fullmatch(piece))
    return any(piece != piece.lower() for piece in words)


def say_if_unknown(share: float, advice: str) -> None:
    """Tells that much of a text, a share of it, is [UNK] to a vocabulary."""
    if share > MUCH_UNKNOWN:
        say(f"{share:.0%} of the text is unknown to this vocabulary; {advice}.")


def tokenizer_of(vocabulary: Sequence[str], *, cased: bool | None = None) -> Tokenizer:
    """BERT's tokenizer with a vocabulary, which adds no special tokens.

    It keeps capitals and accents if `cased`, which is `is_cased` where it is None.

    Example:
      >>> from train.data.vocabulary import SPECIAL, tokenizer_of
      >>> tokenizer_of((*SPECIAL, "bit", "##s")).encode("Bits!").ids
      [5, 6, 1]
    """
    ids = {piece: index for index, piece in enumerate(vocabulary)}
    if cased is None:
        cased = is_cased(vocabulary)
    tokenizer = Tokenizer(WordPiece(ids, unk_token=UNK))
    _split_as_bert(tokenizer, lowercase=not cased)
    return tokenizer


def _split_as_bert(tokenizer: Tokenizer, *, lowercase: bool) -> None:
    tokenizer.normalizer = BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = BertPreTokenizer()


def _words(tokenizer: Tokenizer, document: Document) -> list[str]:
    """Every word in order, as it is before it is cut into pieces."""
    text = tokenizer.normalizer.normalize_str(" ".join(document))
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
