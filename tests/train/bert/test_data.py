"""Sentence pairs and masks have BERT's statistics and depend on the seed alone."""

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.bert.masked_pairs import (
    MASKED,
    MaskedPairs,
    choose_words,
    examples,
    num_predictions,
    pack_spans,
)
from train.core.batches import batches, element
from train.data.tokenized import TokenizedCorpus
from train.data.vocabulary import SPECIAL, Pieces, special_pieces

PAD, UNK, CLS, SEP, MASK = range(5)
VOCAB = 4000
PIECES = Pieces(vocab_size=VOCAB, pad=PAD, cls=CLS, sep=SEP, mask=MASK)
LENGTH = 64


def make_corpus(sentence_lengths):
    """Every piece is another one, so that its place can be told from its id."""
    lengths = [length for document in sentence_lengths for length in document]
    return TokenizedCorpus(
        pieces=np.arange(5, 5 + sum(lengths), dtype=np.int32),
        sentences=np.cumsum([0, *lengths]),
        documents=np.cumsum([0, *map(len, sentence_lengths)]),
    )


@pytest.fixture(scope="module")
def corpus():
    rng = np.random.default_rng(0)
    return make_corpus([rng.integers(3, 25, size=n) for n in rng.integers(1, 30, 20)])


@pytest.fixture(scope="module")
def sample(corpus):
    """Many sequences, as one batch."""
    source = examples(corpus, PIECES, LENGTH, seed=0)
    return element(batches(source, 2000), 0)


def restored(batch):
    """The token ids before any was masked."""
    tokens = batch.token_ids.copy()
    rows, places = np.nonzero(batch.masked_weights)
    positions = batch.masked_positions[rows, places]
    tokens[rows, positions] = batch.masked_labels[rows, places]
    return tokens


def segments(batch):
    """The two segments of each sequence, unmasked."""
    for tokens, types, length in zip(
        restored(batch), batch.token_types, batch.lengths, strict=True
    ):
        (first_sep,) = np.nonzero(tokens[: length - 1] == SEP)[0]
        assert tokens[0] == CLS
        assert tokens[length - 1] == SEP
        assert not types[: first_sep + 1].any()
        assert types[first_sep + 1 : length].all()
        assert not types[length:].any()
        assert np.all(tokens[length:] == PAD)
        yield tokens[1:first_sep], tokens[first_sep + 1 : length - 1]


def document_of(corpus, pieces):
    sentence = np.searchsorted(corpus.sentences, pieces - 5, side="right") - 1
    return np.searchsorted(corpus.documents, sentence, side="right") - 1


def test_segments_are_consecutive_text_and_half_of_them_follow(corpus, sample):
    is_random = sample.next_sentence_labels.astype(bool)
    assert np.mean(is_random) == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(2000))
    for (first, second), elsewhere in zip(segments(sample), is_random, strict=True):
        assert len(first) >= 1
        assert len(second) >= 1
        assert np.all(np.diff(first) == 1)
        assert np.all(np.diff(second) == 1)
        (one,) = np.unique(document_of(corpus, first))
        (other,) = np.unique(document_of(corpus, second))
        assert (one != other) == elsewhere
        if not elsewhere:
            assert second[0] > first[-1]


def test_a_tenth_of_the_sequences_is_short():
    corpus = make_corpus([[10] * 1000] * 4)
    source = examples(corpus, PIECES, LENGTH, seed=0)
    lengths = element(batches(source, 2000), 0).lengths
    short = lengths[lengths < LENGTH]
    assert len(short) / 2000 == pytest.approx(0.1, abs=5 * np.sqrt(0.09 / 2000))
    assert short.min() < 12
    assert short.mean() == pytest.approx(LENGTH / 2, abs=8)


def test_fifteen_percent_are_predicted(sample):
    counts = sample.masked_weights.sum(axis=1)
    expected = np.clip(np.round(MASKED * sample.lengths), 1, num_predictions(LENGTH))
    np.testing.assert_array_equal(counts, expected)
    # Used places come first and in order, each position once.
    for positions, count in zip(
        sample.masked_positions, counts.astype(int), strict=True
    ):
        assert np.all(np.diff(positions[:count]) > 0)
        assert not positions[count:].any()
    labels = sample.masked_labels[sample.masked_weights > 0]
    assert labels.min() >= 5, "special tokens are never predicted"


def test_predicted_tokens_are_masked_replaced_and_kept_80_10_10(sample):
    rows, places = np.nonzero(sample.masked_weights)
    seen = sample.token_ids[rows, sample.masked_positions[rows, places]]
    labels = sample.masked_labels[rows, places]
    count = len(labels)
    for share, measured in (
        (0.8, np.mean(seen == MASK)),
        (0.1, np.mean(seen == labels)),
        (0.1, np.mean((seen != MASK) & (seen != labels))),
    ):
        deviation = np.sqrt(share * (1 - share) / count)
        assert measured == pytest.approx(share, abs=5 * deviation)
    replaced = seen[(seen != MASK) & (seen != labels)]
    assert replaced.min() < 0.05 * VOCAB
    assert replaced.max() > 0.95 * VOCAB


def test_examples_are_a_function_of_seed_and_index(corpus):
    source = examples(corpus, PIECES, LENGTH, seed=1)
    again = examples(corpus, PIECES, LENGTH, seed=1)
    for index in (700, 3, 41):
        chex.assert_trees_all_equal(source[index], again[index])
    other = examples(corpus, PIECES, LENGTH, seed=2)
    assert any(np.any(source[i].token_ids != other[i].token_ids) for i in range(5))


def test_each_epoch_sees_every_span_once_in_another_order(corpus):
    documents = pack_spans(corpus, LENGTH)[:, 0].tolist()
    source = examples(corpus, PIECES, LENGTH, seed=0)

    def starts(epoch):
        # The first segment is never from elsewhere.
        batch = element(batches(source, len(documents)), epoch)
        return [document_of(corpus, first[:1])[0] for first, _ in segments(batch)]

    assert sorted(starts(0)) == documents
    assert sorted(starts(0)) == sorted(starts(1))
    assert starts(0) != starts(1)


@pytest.mark.parametrize("num_processes", [2, 4, 8])
def test_batches_do_not_depend_on_how_many_share_them(corpus, num_processes):
    source = examples(corpus, PIECES, LENGTH, seed=0)
    whole = batches(source, 16)
    parts = [
        batches(source, 16, process=i, num_processes=num_processes)
        for i in range(num_processes)
    ]
    for step in (0, 5, 1000):
        together = jax.tree.map(
            lambda *x: np.concatenate(x), *(part[step] for part in parts)
        )
        chex.assert_trees_all_equal(together, whole[step])
        assert len(parts[0][step].lengths) == 16 // num_processes


@given(
    st.lists(
        st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=2, max_size=6
    ),
    st.integers(8, 80),
    st.integers(0, 1000),
)
def test_any_corpus_packs_and_masks(sentence_lengths, length, seed):
    corpus = make_corpus(sentence_lengths)
    spans = pack_spans(corpus, length)
    covered = [s for _, first, last in spans for s in range(first, last)]
    alone = set(range(corpus.documents[-1])) - set(covered)
    assert len(covered) == len(set(covered))
    assert all(corpus.sentences[s + 1] - corpus.sentences[s] == 1 for s in alone)
    pieces = Pieces(vocab_size=int(corpus.pieces[-1]) + 1, pad=0, cls=2, sep=3, mask=4)
    build = MaskedPairs(corpus, pieces, length)
    rng = np.random.default_rng(seed)
    for span in spans:
        example = build(span, rng)
        batch = jax.tree.map(lambda x: np.asarray(x)[None], example)
        ((first, second),) = segments(batch)
        assert len(first) + len(second) + 3 == example.lengths <= length
        assert np.all(np.diff(first) == 1)
        assert np.all(np.diff(second) == 1)
        assert example.masked_weights.sum() >= 1


def test_special_tokens_are_found_wherever_they_stand():
    vocabulary = ("a", *reversed(SPECIAL), "b")
    pieces = special_pieces(vocabulary)
    assert (pieces.vocab_size, pieces.pad, pieces.cls) == (7, 5, 3)
    assert (pieces.sep, pieces.mask) == (2, 1)


def words_of(begins):
    """The pieces of each word."""
    return np.split(np.arange(len(begins)), np.flatnonzero(begins)[1:])


@given(
    st.lists(st.booleans(), min_size=1, max_size=60).map(lambda b: [True, *b[1:]]),
    st.integers(1, 20),
    st.integers(0, 1000),
)
def test_words_are_chosen_whole_until_no_other_fits(begins, count, seed):
    begins = np.array(begins)
    chosen = choose_words(begins, count, np.random.default_rng(seed))
    assert np.all(np.diff(chosen) > 0)
    assert len(chosen) <= count
    left = count - len(chosen)
    for word in words_of(begins):
        taken = np.isin(word, chosen)
        assert taken.all() or not taken.any()
        assert taken.all() or len(word) > left


@pytest.fixture(scope="module")
def whole_words(corpus):
    """Sequences of words of one to four pieces, and where words are gone on with."""
    inside = np.random.default_rng(1).random(2 * VOCAB) < 0.4
    source = examples(corpus, PIECES, LENGTH, 0, inside)
    return element(batches(source, 1000), 0), inside


def test_all_pieces_of_a_word_are_predicted_or_none(whole_words, sample):
    batch, inside = whole_words
    # All but the masks is as it is for single pieces.
    np.testing.assert_array_equal(restored(batch), restored(sample)[:1000])
    budget = np.clip(np.round(MASKED * batch.lengths), 1, num_predictions(LENGTH))
    counts = batch.masked_weights.sum(axis=1)
    assert np.all(counts <= budget)
    assert counts.sum() > 0.97 * budget.sum()
    for i, (first, second) in enumerate(segments(batch)):
        chosen = batch.masked_positions[i][batch.masked_weights[i] > 0]
        for segment, offset in ((first, 1), (second, len(first) + 2)):
            begins = ~inside[segment]
            begins[0] = True
            for word in words_of(begins):
                taken = np.isin(word + offset, chosen)
                assert taken.all() or not taken.any()
