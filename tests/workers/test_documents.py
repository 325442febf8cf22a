"""Evaluation documents: whole ones above a length, and the same texts under another tokenizer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workers.tiny_evaluation import byte_tokenizer, named_values, repeating_corpus
from workers.corpus import Corpus
from workers.documents import evaluation_windows, retokenized
from workers.errors import CorpusError
from workers.spec import EvaluationDocuments, content_hash


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return repeating_corpus(tmp_path_factory.mktemp("store"))


def test_documents_above_a_length_are_taken_in_order_and_cut(corpus: Corpus) -> None:
    sizes = sorted(len(document.tokens) for document in corpus.held_out)
    least, length = sizes[1], sizes[-2]
    documents = EvaluationDocuments(corpus=corpus.hash, count=len(sizes) - 1, length=length, min_length=least)
    windows = evaluation_windows(corpus, documents)
    enough = [document for document in corpus.held_out if len(document.tokens) >= least]
    assert [window.document for window in windows] == [document.id for document in enough]
    assert [len(window.tokens) for window in windows] == [min(len(document.tokens), length) for document in enough]
    assert len({len(window.tokens) for window in windows}) > 1
    for window, document in zip(windows, enough, strict=True):
        assert document.text.startswith(window.text)
    fewer = evaluation_windows(corpus, replace(documents, count=2))
    assert [window.document for window in fewer] == [document.id for document in enough[:2]]


def test_too_few_long_documents_are_refused_with_their_number(corpus: Corpus) -> None:
    documents = EvaluationDocuments(corpus=corpus.hash, count=99, length=400, min_length=2)
    with pytest.raises(CorpusError, match=f"has {len(corpus.held_out)} held-out windows of 2 tokens, 99 are asked for"):
        evaluation_windows(corpus, documents)
    with pytest.raises(CorpusError, match="min_length 1: a document of fewer than 2 tokens"):
        evaluation_windows(corpus, replace(documents, min_length=1))


def test_a_least_length_may_exceed_the_length(corpus: Corpus) -> None:
    longest = max(len(document.tokens) for document in corpus.held_out)
    documents = EvaluationDocuments(corpus=corpus.hash, count=1, length=50, min_length=longest)
    (window,) = evaluation_windows(corpus, documents)
    assert len(window.tokens) == 50
    with pytest.raises(CorpusError, match="has 0 held-out windows"):
        evaluation_windows(corpus, replace(documents, min_length=longest + 1))


def test_a_least_length_is_part_of_the_identity_and_its_absence_is_not() -> None:
    plain = EvaluationDocuments(corpus="c", count=3, length=96)
    assert content_hash(plain) == content_hash({"corpus": "c", "count": 3, "length": 96})
    assert content_hash(replace(plain, min_length=96)) != content_hash(plain)


def test_another_tokenizer_covers_the_same_text(corpus: Corpus) -> None:
    windows = evaluation_windows(corpus, EvaluationDocuments(corpus=corpus.hash, count=3, length=96))
    tokenizer = byte_tokenizer([named_values(1, names=4, lines=20)], 290, adds_beginning=True)
    for window, other in zip(windows, retokenized(windows, tokenizer), strict=True):
        assert other.text == window.text
        assert tokenizer.decode(other.tokens.tolist()) == window.text
        assert other.tokens.tolist() != window.tokens.tolist()
        assert 1 not in other.tokens.tolist()
        assert other.spans.shape == (len(other.tokens), 2)
        covered = {at for start, end in other.spans for at in range(start, end)}
        assert covered == set(range(len(window.text)))
